//! The machine as data: its devices, what lies between them and how fast they are.

mod check;

use anyhow::{Context as _, Result};
use ron::extensions::Extensions;
use serde::{Deserialize, Serialize};

use crate::id::{DeviceId, Table};
use crate::ron_text;
use crate::tensor::{DType, Format};

pub(crate) use self::check::named_twice;

/// Everything the compiler knows of the hardware: `machine.ron`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// What identifies the host, for refusing a plan made for another.
    pub host: Host,
    /// GPUs and NUMA nodes, as equals.
    pub devices: Table<DeviceId, Device>,
    /// One-way paths; a pair of devices without one cannot exchange tensors.
    pub links: Vec<Link>,
    /// The vendor's library of collectives, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collectives: Option<Collectives>,
}

/// How fast the vendor's library (NCCL) sums over GPUs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Collectives {
    /// What each GPU sends, and receives, per second: of a sum over n GPUs that is 2·(n − 1)/n of a term's bytes (the
    /// "bus bandwidth" of NCCL's own tests).
    pub bytes_per_sec: f64,
    /// Time of a sum of 4,096 numbers, few enough that their bytes hardly matter.
    pub latency_nanos: f64,
    /// What the library takes of each GPU's memory.
    pub reserved_bytes: u64,
}

/// Facts of a host that do not change between two boots.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Processor model name.
    pub cpu: String,
    /// Logical processors.
    pub cpus: u32,
    /// NUMA nodes.
    pub nodes: u32,
    /// Names of the GPUs by ordinal.
    pub gpus: Vec<String>,
}

/// One GPU, or some cores of one NUMA node with some of its memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Unique name: `gpu0`, `numa1`.
    pub name: String,
    /// What it is.
    pub kind: DeviceKind,
    /// Memory that plans may fill.
    pub memory_bytes: u64,
    /// Data caches of its processors, the nearest first; none for a GPU. For people: no price depends on them.
    #[serde(default)]
    pub cpu_caches: Vec<CpuCache>,
    /// How fast it is.
    pub rates: Rates,
}

/// One level of a NUMA device's data caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuCache {
    /// 1 is the nearest to a core.
    pub level: u32,
    /// Bytes of each cache of this level.
    pub bytes: u64,
    /// Caches of this level that the device's processors use, be it together with those of other devices.
    pub count: u32,
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum DeviceKind {
    /// A GPU, by the driver's ordinal.
    Gpu {
        /// The driver's number for it.
        ordinal: u32,
        /// What the driver's context and the libraries' code take of the memory that plans may fill.
        reserved_bytes: u64,
        /// Scratch memory that the vendor library wants for products of many rows; 0 where it is not used.
        library_bytes: u64,
        /// What the driver takes of them for each launch that it has captured.
        launch_bytes: u64,
        /// Whether it has the matrix instructions of warpgroups, as Hopper has: then its own kernels multiply more rows
        /// (see [`crate::workspace::most_fused_rows()`]).
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        has_warpgroups: bool,
    },
    /// Cores of one NUMA node.
    Numa {
        /// The operating system's number of the node.
        node: u32,
        /// Logical processors to run on, one a core.
        cpus: Vec<u32>,
    },
}

impl DeviceKind {
    /// Whether it is a GPU.
    pub fn is_gpu(&self) -> bool {
        matches!(self, Self::Gpu { .. })
    }

    /// Whether it is a GPU with the matrix instructions of warpgroups.
    pub fn has_warpgroups(&self) -> bool {
        matches!(self, Self::Gpu { has_warpgroups: true, .. })
    }

    /// Whether it is a GPU with the vendor's library of products.
    pub fn has_library(&self) -> bool {
        matches!(self, Self::Gpu { library_bytes: 1.., .. })
    }
}

/// Speeds of one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// Whether a calibration measured them.
    pub source: RateSource,
    /// Memory read by a streaming kernel.
    pub read_bytes_per_sec: f64,
    /// Fixed cost of one step: launch, wake-up and barrier.
    pub step_nanos: f64,
    /// Linears, one curve for each format. A missing format is not computed on this device.
    pub linear: Vec<LinearRate>,
    /// The chosen experts of a mixture for few tokens, which read them one by one; one curve for each format. Their
    /// weights are those of one token's experts, `tokens` those of a run. Where there is no curve, they are as for
    /// many.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub experts: Vec<LinearRate>,
    /// The same for many tokens, which share what is read: weights of all experts that any of them chose, and as
    /// `tokens` those that share one. Where there is no curve, they are linears of as many rows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shared_experts: Vec<LinearRate>,
    /// Time of one token's attention beside the cache that it reads, and beyond that of a step.
    #[serde(default)]
    pub attention_nanos: f64,
    /// Time of one score, of one query head and one token that it sees, beside arithmetic when many tokens are fed,
    /// with caches in bf16.
    #[serde(default)]
    pub prompt_score_nanos: f64,
    /// The same beside the cache that is read when one token a sequence is fed.
    #[serde(default)]
    pub score_nanos: f64,
    /// Attention arithmetic when many tokens are fed, with caches in bf16.
    pub attention_flops_per_sec: f64,
    /// KV cache read when one token a sequence is fed, with caches in bf16.
    pub cache_bytes_per_sec: f64,
    /// The same with caches of other types. Where a type is missing, it is as bf16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_caches: Vec<CacheRate>,
    /// What a NUMA node's cores keep of their read rate while a GPU fetches from the same memory: more than 0, at
    /// most 1.
    pub beside_fetch: f64,
}

/// Where rates come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RateSource {
    /// From data sheets: forecasts are guesses.
    Nominal,
    /// Measured on this machine with the executor's kernels.
    Calibrated,
}

/// Speed of linears with weights of one format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearRate {
    /// The weights' format.
    pub format: Format,
    /// Points in order of rising tokens, at least one.
    pub points: Vec<RatePoint>,
}

/// Weights worked through per second when `tokens` rows are multiplied at once.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RatePoint {
    /// Rows of the activation.
    pub tokens: u32,
    /// Elements of the weight matrix per second.
    pub weights_per_sec: f64,
    /// Time beside those, and beyond that of a step: what a matrix of no rows would take.
    #[serde(default)]
    pub nanos: f64,
}

/// Speed of attention with caches of one type.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheRate {
    /// The type of cached keys and values.
    pub kv_type: DType,
    /// Arithmetic when many tokens are fed.
    pub attention_flops_per_sec: f64,
    /// Time of one score beside that.
    #[serde(default)]
    pub prompt_score_nanos: f64,
    /// Cache read when one token a sequence is fed.
    pub cache_bytes_per_sec: f64,
    /// Time of one score beside that.
    #[serde(default)]
    pub score_nanos: f64,
}

/// A one-way path between two devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Sender.
    pub from: DeviceId,
    /// Receiver.
    pub to: DeviceId,
    /// Sustained rate.
    pub bytes_per_sec: f64,
    /// Time of an empty transfer.
    pub latency_nanos: f64,
    /// The same between a NUMA node and a GPU that replays captured launches and fetches nothing: the launches that take
    /// and send letters are queued then, and nothing is in these letters' way. Where it is missing, as any transfer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub letter_nanos: Option<f64>,
    /// What a link from a NUMA node to a GPU keeps of its rate while the node's cores read their memory: more than 0,
    /// at most 1. Where it is missing, as much as they keep of theirs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside_reads: Option<f64>,
}

impl Link {
    /// A path of which no more is known.
    pub fn new(from: DeviceId, to: DeviceId, bytes_per_sec: f64, latency_nanos: f64) -> Self {
        Self { from, to, bytes_per_sec, latency_nanos, letter_nanos: None, beside_reads: None }
    }
}

impl Machine {
    /// Reads a machine file, in which what is optional may stand as it is or in `Some(…)`: people write it, too.
    pub fn from_ron(text: &str) -> Result<Self> {
        let options = ron::Options::default().with_default_extension(Extensions::IMPLICIT_SOME);
        let read = options.from_str(text);
        if read.is_err() {
            ron_text::refuse_other_kinds(text, "a machine")?;
        }
        read.context("not a machine of this version, as `hybrid-exec calibrate` and `hybridc probe` write it")
    }

    /// Writes a machine file; the same machine gives the same bytes.
    pub fn to_ron(&self) -> Result<String> {
        ron_text::write(self, 6)
    }

    /// The device of that name.
    pub fn device(&self, name: &str) -> Option<DeviceId> {
        self.devices.iter().find(|(_, device)| device.name == name).map(|(id, _)| id)
    }

    /// Whether any device is a GPU.
    pub fn has_gpus(&self) -> bool {
        self.devices.rows().iter().any(|device| device.kind.is_gpu())
    }

    /// The names of all devices: `gpu0, numa0`.
    pub fn listed_devices(&self) -> String {
        let names = self.devices.rows().iter().map(|device| device.name.as_str());
        names.collect::<Vec<_>>().join(", ")
    }

    /// The path from one device to another.
    pub fn link(&self, from: DeviceId, to: DeviceId) -> Option<&Link> {
        self.links.iter().find(|link| link.from == from && link.to == to)
    }

    /// The same.
    ///
    /// # Errors
    /// When there is none.
    pub fn need_link(&self, from: DeviceId, to: DeviceId) -> Result<&Link> {
        let name = |id: DeviceId| &self.devices[id].name;
        self.link(from, to).with_context(|| {
            format!(
                "no link leads from {} to {}: add one to the machine's links, or ask for devices that have them",
                name(from),
                name(to)
            )
        })
    }
}

impl LinearRate {
    /// Elements per second at `tokens` rows: between points on a straight line of logarithms; beyond the last
    /// point the time grows with the rows, so the rate falls with them.
    pub fn weights_per_sec(&self, tokens: u32) -> f64 {
        let (low, high, along) = self.between(tokens);
        if tokens > high.tokens {
            return high.weights_per_sec * f64::from(high.tokens) / f64::from(tokens);
        }
        (low.weights_per_sec.ln() * (1.0 - along) + high.weights_per_sec.ln() * along).exp()
    }

    /// Time beside the weights at `tokens` rows: between points on a straight line over the logarithm of rows; before
    /// the first and beyond the last what it is there.
    pub fn nanos(&self, tokens: u32) -> f64 {
        let (low, high, along) = self.between(tokens);
        low.nanos * (1.0 - along) + high.nanos * along
    }

    /// The points on either side of `tokens` rows, twice the same one beyond an end; and how far `tokens` lies from the
    /// first to the second, in logarithms.
    fn between(&self, tokens: u32) -> (RatePoint, RatePoint, f64) {
        let after = self.points.iter().position(|point| point.tokens > tokens);
        let after = after.unwrap_or(self.points.len());
        let high = self.points[after.min(self.points.len() - 1)];
        let low = self.points[after.saturating_sub(1)];
        if low.tokens == high.tokens {
            return (low, high, 0.0);
        }
        let log = |tokens: u32| f64::from(tokens).ln();
        let along = (log(tokens) - log(low.tokens)) / (log(high.tokens) - log(low.tokens));
        (low, high, along)
    }
}

impl Rates {
    /// The curve of a format, where the device computes it.
    pub fn linear(&self, format: Format) -> Option<&LinearRate> {
        of_format(&self.linear, format)
    }

    /// The speed of attention with caches of a type.
    pub fn attention(&self, kv_type: DType) -> CacheRate {
        let other = self.other_caches.iter().find(|rate| rate.kv_type == kv_type);
        other.copied().unwrap_or(CacheRate { kv_type, ..self.usual_attention() })
    }

    /// The speed of attention with caches in bf16.
    pub(crate) fn usual_attention(&self) -> CacheRate {
        CacheRate {
            kv_type: DType::Bf16,
            attention_flops_per_sec: self.attention_flops_per_sec,
            prompt_score_nanos: self.prompt_score_nanos,
            cache_bytes_per_sec: self.cache_bytes_per_sec,
            score_nanos: self.score_nanos,
        }
    }

    /// The curve of a mixture's experts for few tokens in a format, where there is one.
    pub fn experts(&self, format: Format) -> Option<&LinearRate> {
        of_format(&self.experts, format)
    }

    /// The curve of a mixture's experts for many tokens in a format, where there is one.
    pub fn shared_experts(&self, format: Format) -> Option<&LinearRate> {
        of_format(&self.shared_experts, format)
    }
}

/// The first of some curves that is of that format.
fn of_format(curves: &[LinearRate], format: Format) -> Option<&LinearRate> {
    curves.iter().find(|rate| rate.format == format)
}
