//! Runs a plan: loads it, binds its devices, and works through its schedule for each batch of tokens.
//!
//! It makes no choice about placement: where it would have to choose, the plan lacks a field.

pub mod generation;
pub mod sample;
pub mod text;

pub mod engine;
pub mod load;
mod checkpoint;
mod bind;
pub mod executor;
pub mod batch;
pub mod run;
mod lane;
mod slots;
mod bell;
mod ops;
mod moves;
pub mod trace;

pub mod kernels;
pub mod memory;
pub mod team;
