//! GPU kernels in CubeCL's language, a file for each; methods of [`device::Gpu`] queue them on pieces of device memory.
//!
//! - Activations are f32, row after row. Weights and caches are in their formats; sums are f32.
//! - A launch neither allocates nor waits, so that a run of launches can be captured and replayed.
//! - What changes from run to run (tokens, positions, lengths, blocks) is read from device memory.
//! - The same kernels run on CUDA and, for tests without a GPU, on a Vulkan device in software.
//! - Words are CubeCL's: a *cube* is a thread block, a *plane* a warp, a *unit* a thread.

pub mod device;
pub mod matrix;

mod activation;
mod addressed;
pub mod ahead;
mod bf12;
mod given;
mod instructions;
mod order;
mod overlap;
mod panel;
mod panics;
mod portion;
mod registers;
mod spread;
mod staged;
mod stream;
pub mod warpgroup;
mod words;

pub mod experts;
pub mod linear;

pub mod cast;
pub mod epilogue;
pub mod gemm;
pub mod unpack;
pub mod vendor;

pub mod attention;
pub mod collectives;
mod elementwise;
pub mod mail;
pub mod peers;
mod repeat;
mod router;
pub mod rows;
pub mod shortlist;

pub mod extension;

#[cfg(test)]
pub(crate) mod testing;
