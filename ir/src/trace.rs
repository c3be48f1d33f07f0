//! What happened: `trace.ron`, joined with a plan by step.

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::id::StepId;
use crate::ron_text::{self, Version};

/// Raised whenever a field changes meaning.
pub const VERSION: u32 = 1;

/// Measured times of the runs of one plan. All times are nanoseconds since the trace began.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trace {
    /// [`VERSION`] of the executor that wrote it.
    pub version: u32,
    /// [`crate::fingerprint()`] of the plan file that was run.
    pub plan: u64,
    /// Runs in the order they were started.
    pub runs: Vec<TracedRun>,
    /// Finished steps, in no particular order.
    pub spans: Vec<Span>,
}

/// One run of one program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TracedRun {
    /// Index into the plan's programs.
    pub program: u32,
    /// Tokens fed.
    pub tokens: u32,
    /// Sequences fed.
    pub sequences: u32,
    /// Tokens already cached, over all sequences.
    pub past: u32,
    /// When its first step began; of a run without a step, when it was asked for.
    pub start: u64,
    /// When its logits were there.
    pub end: u64,
}

/// One finished step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Span {
    /// Index into `runs`.
    pub run: u32,
    /// Step of that run's program.
    pub step: StepId,
    /// Index into that program's lanes.
    pub lane: u32,
    /// When the lane came to the step; from here to `start` it waited.
    pub ready: u64,
    /// When work began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
}

impl Trace {
    /// Reads a trace of this version.
    pub fn from_ron(text: &str) -> Result<Self> {
        ron_text::read(
            text,
            &Version {
                number: VERSION,
                subject: "the trace has",
                otherwise: "not a trace",
                remedy: "record it again",
            },
            |trace: &Self| trace.version,
        )
    }

    /// Writes a trace, one span a line.
    pub fn to_ron(&self) -> Result<String> {
        ron_text::write(self, 2)
    }
}
