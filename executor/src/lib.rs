//! The executor: runs a plan on the devices it names.

pub mod kernels;
pub mod memory;
pub mod team;

pub mod generation;
pub mod sample;
pub mod text;
