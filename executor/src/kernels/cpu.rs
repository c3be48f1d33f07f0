//! CPU kernels: free functions on slices, done by a team at one level of the instruction set.

pub mod isa;
