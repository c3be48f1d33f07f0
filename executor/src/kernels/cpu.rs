//! CPU kernels: free functions on slices, done by a team at one level of the instruction set.

pub mod isa;

mod lanes;
mod math;

pub mod pack;
mod quantize;
mod unpack;

mod encode;
mod epilogue;
mod tile;

pub mod experts;
pub mod linear;

pub mod activation;
pub mod cache;
pub mod norm;
pub mod rope;

pub mod attention;
pub mod router;
pub mod rows;

#[cfg(test)]
mod testing;
