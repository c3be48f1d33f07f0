//! Kernels of our own, by kind of device.

pub mod cpu;
pub mod gpu;
