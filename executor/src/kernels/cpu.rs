//! CPU kernels: free functions on slices, done by a team at one level of the instruction set.

pub mod arithmetic;
pub mod describe;
mod disjoint;
pub mod isa;

pub mod pack;
mod quantize;
mod unpack;

mod encode;
mod epilogue;
mod product;
#[cfg_attr(
    not(target_arch = "x86_64"),
    expect(dead_code, reason = "kernels of x86-64 use what portable ones do not")
)]
mod tile;

pub mod experts;
pub mod linear;

pub mod extension;

mod lanes;
mod math;

pub mod activation;
pub mod attention;
#[cfg_attr(
    not(target_arch = "x86_64"),
    expect(dead_code, reason = "kernels of x86-64 use what portable ones do not")
)]
pub(super) mod bf12;
pub mod cache;
pub mod norm;
pub mod rope;
pub mod router;
pub mod rows;
pub mod table;

#[cfg(test)]
pub(crate) mod testing;
