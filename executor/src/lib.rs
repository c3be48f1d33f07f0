//! Runs a plan: loads it, binds its devices, and works through its schedule for each batch of tokens.
//!
//! It makes no choice about placement: where it would have to choose, the plan lacks a field.

pub mod generation;
pub mod sample;
pub mod text;

pub mod batch;
mod bell;
mod bind;
mod checkpoint;
pub mod counting;
mod cpus;
pub mod engine;
pub mod executor;
mod fetch;
mod home_caches;
mod known_graphs;
mod lane;
pub mod load;
mod moves;
mod ops;
mod peers;
mod pinned;
mod ranks;
pub mod run;
mod slots;
pub mod trace;

pub mod kernels;
pub mod memory;
pub mod team;
mod waiting;

pub mod calibrate;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, also after a thread has panicked with it: that panic has ended its run, and need not end what
/// follows.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
