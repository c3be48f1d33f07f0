//! What the user asked of a compilation beside the model, the machine and the limits of [`crate::plan::ModelInfo`].

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::bail;
use serde::{Deserialize, Serialize};

use crate::tensor::DType;

/// Enough to compile again with one wish changed; the default asks for nothing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asked {
    /// What is minimised.
    pub objective: Objective,
    /// The shape of the placement.
    pub request: Request,
    /// Pins as `hybridc` takes them, `PATTERN=DEVICE`; of those that match a node the last holds.
    pub pins: Vec<String>,
    /// Compute formats as `hybridc` takes them, `DEVICES=FORMAT`; of those that match a device the last holds.
    pub formats: Vec<String>,
    /// Whether bfloat16 is held in 16 bits everywhere.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub plain_bf16: bool,
    /// Tokens of a prefill run; `None` leaves them to the compiler.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill_tokens: Option<u32>,
    /// Element type of the KV caches; `None` follows the weights.
    #[serde(deserialize_with = "crate::ron_text::written")]
    pub kv_type: Option<DType>,
    /// Bytes of all KV caches together; `None` is what context and sequences need.
    #[serde(deserialize_with = "crate::ron_text::written")]
    pub kv_cache_bytes: Option<u64>,
    /// The file that counts how often a mixture's experts are chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_counts: Option<PathBuf>,
}

/// What a placement minimises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Objective {
    /// Time from a full prompt to the end of an answer, for one sequence alone.
    #[default]
    Latency,
    /// Work of the busiest device for one prompt and answer, at the largest batch.
    Throughput,
}

/// The shape a placement must have.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum Request {
    /// Whatever is predicted best.
    #[default]
    Any,
    /// Stages on the devices of these names, in this order.
    Pipeline(Vec<String>),
    /// All layers shared by the devices of these names, in these proportions, or by their speed.
    TensorParallel(Vec<(String, Option<f64>)>),
    /// Stages on this number of devices: GPUs first, then NUMA nodes, each in the machine's order.
    PipelineRanks(usize),
    /// All layers shared by this number of devices, chosen in the same way.
    TensorParallelRanks(usize),
}

impl Objective {
    /// All of them.
    pub const ALL: [Objective; 2] = [Objective::Latency, Objective::Throughput];
}

impl fmt::Display for Objective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Objective::Latency => "latency",
            Objective::Throughput => "throughput",
        })
    }
}

impl FromStr for Objective {
    type Err = anyhow::Error;
    fn from_str(text: &str) -> anyhow::Result<Self> {
        match Self::ALL.into_iter().find(|objective| objective.to_string() == text) {
            Some(objective) => Ok(objective),
            None => bail!("unknown objective {text:?}: latency and throughput exist"),
        }
    }
}
