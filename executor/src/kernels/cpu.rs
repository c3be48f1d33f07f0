//! CPU kernels: free functions on slices, done by a team at one level of the instruction set.

pub mod isa;

pub mod pack;
mod quantize;

mod encode;
mod epilogue;
mod tile;

pub mod experts;
pub mod linear;
