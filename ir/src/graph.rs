//! The two graphs of the compiler: layers, then the same layers placed.

use serde::{Deserialize, Serialize};

use crate::dag::Dag;
use crate::id::{DeviceId, Few};
use crate::layout::{Layout, Move};
use crate::op::Op;

/// What the model computes; knows no device.
pub type LayerGraph = Dag<Op>;

/// What each device does; movement is explicit.
pub type PlacedGraph = Dag<Placed>;

/// Work and who does it.
#[derive(Clone, Debug, PartialEq)]
pub struct Placed {
    /// What is done.
    pub work: Work,
    /// How each input must be held when the work starts.
    pub needs: Vec<Layout>,
    /// How each output is held when it is done. All of them name the same devices: those that take part.
    pub layouts: Vec<Layout>,
    /// For experts that are split: the part of the intermediate features each device works on. Empty otherwise.
    pub inner: Few<u32>,
    /// Where its matrices are held when the one device that computes fetches them, or the cache when that borrows it, or
    /// the table when GPUs reach it. Vectors are always its own.
    pub home: Option<DeviceId>,
    /// Why it is here.
    pub cause: Cause,
}

/// Computation or movement.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// An operation of the model.
    Compute(Op),
    /// Movement between devices.
    Move(Move),
}

/// Why something is where it is, and what was the next best.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cause {
    /// What decided.
    pub reason: Reason,
    /// The best place that was not chosen.
    #[serde(deserialize_with = "crate::ron_text::written")]
    pub runner_up: Option<RunnerUp>,
}

/// What decided about a place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Reason {
    /// The whole plan was predicted fastest with it here.
    Fastest,
    /// The user's pin.
    Pinned {
        /// The pattern of the pin.
        pattern: String,
    },
    /// The user asked for these stages or this split.
    Requested,
    /// The faster place lacks memory.
    Memory {
        /// The device that would have been faster.
        device: DeviceId,
        /// What it lacks for it.
        missing_bytes: u64,
    },
    /// It has no weights and follows what it reads.
    FollowsInput,
    /// Its input is held otherwise than it is needed.
    Mismatch,
}

/// A place that was not chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunnerUp {
    /// Its devices.
    pub devices: Vec<DeviceId>,
    /// What one run of the objective's program would take longer there. Negative where it would be faster
    /// but a limit forbids it.
    pub gap_nanos: i64,
}
