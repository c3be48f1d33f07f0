//! What the user asks of a compilation.

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use ir::asked::Asked;
pub use ir::asked::{Objective, Request};
use ir::counts::ExpertCounts;
use ir::tensor::{DType, Format};
use regex::Regex;

/// Requests and limits; the default asks for nothing.
#[derive(Clone, Debug)]
pub struct Options {
    /// The most tokens of one sequence; `None` is the model's own limit, at most [`DEFAULT_CONTEXT`].
    pub context: Option<u32>,
    /// Sequences at once.
    pub max_sequences: u32,
    /// The most tokens of one prefill run; `None` is 512, with GPUs more, such as 1024 or 2048, where that is
    /// predicted to be better.
    pub prefill_tokens: Option<u32>,
    /// The most bytes of all KV caches together, those that several devices hold counted once; `None` is what context
    /// and sequences need.
    pub kv_cache_bytes: Option<u64>,
    /// Element type of the KV caches; `None` follows the weights.
    pub kv_type: Option<DType>,
    /// Compute formats of devices; the last that matches a device holds.
    pub formats: Vec<FormatRule>,
    /// Hold bfloat16 in 16 bits everywhere, also where 12 are faster.
    pub plain_bf16: bool,
    /// What is minimised.
    pub objective: Objective,
    /// The shape of the placement.
    pub request: Request,
    /// Nodes that must run on a device.
    pub pins: Vec<Pin>,
    /// Names of devices that must not be used.
    pub without: Vec<String>,
    /// The most memory of each GPU that may be used.
    pub gpu_memory_bytes: Option<u64>,
    /// How often a mixture's experts are chosen; `None` is alike.
    pub expert_counts: Option<CountedExperts>,
    /// Where the machine was read from, for what is wrong with it.
    pub machine_file: Option<PathBuf>,
    /// Where the plan will lie: paths inside this folder's project become relative to it.
    pub plan_folder: Option<PathBuf>,
}

/// Longer contexts are asked for, not assumed: their caches take as much memory as weights do.
pub const DEFAULT_CONTEXT: u32 = 8192;

/// The least share of a tensor split that layers can be divided in: large ones have a few hundred blocks of features.
const LEAST_SHARE: f64 = 1e-3;

/// How often experts are chosen, as counted.
#[derive(Clone, Debug)]
pub struct CountedExperts {
    /// Where it was read from.
    pub file: PathBuf,
    /// What it says.
    pub counts: ExpertCounts,
}

/// Nodes whose names match a pattern run on a device.
#[derive(Clone, Debug)]
pub struct Pin {
    /// Searched for in the names of nodes.
    pub pattern: Regex,
    /// Name of the device.
    pub device: String,
}

/// A compute format for the devices whose names match.
#[derive(Clone, Debug)]
pub struct FormatRule {
    /// As it was written.
    pub text: String,
    /// Matches the whole name of a device.
    pub devices: Regex,
    /// Format of the matrices there.
    pub format: Format,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            context: None,
            max_sequences: 1,
            prefill_tokens: None,
            kv_cache_bytes: None,
            kv_type: None,
            formats: Vec::new(),
            plain_bf16: false,
            objective: Objective::Latency,
            request: Request::Any,
            pins: Vec::new(),
            without: Vec::new(),
            gpu_memory_bytes: None,
            expert_counts: None,
            machine_file: None,
            plan_folder: None,
        }
    }
}

impl Options {
    /// Whether they go together.
    ///
    /// # Errors
    /// When a device is asked for that is left out.
    pub(crate) fn check(&self) -> Result<()> {
        let pinned = self.pins.iter().map(|pin| pin.device.as_str());
        let requested: Vec<&str> = match &self.request {
            Request::Pipeline(names) => names.iter().map(String::as_str).collect(),
            Request::TensorParallel(all) => all.iter().map(|(name, _)| name.as_str()).collect(),
            Request::Any | Request::PipelineRanks(_) | Request::TensorParallelRanks(_) => {
                Vec::new()
            }
        };
        for name in requested.into_iter().chain(pinned) {
            let is_left_out = self.without.iter().any(|without| without == name);
            ensure!(
                !is_left_out,
                "{name} is asked for, and --without leaves it out: leave one of the two away"
            );
        }
        Ok(())
    }

    /// What of them is not in a plan anyway.
    pub(crate) fn asked(&self) -> Asked {
        let pin = |pin: &Pin| format!("{}={}", pin.pattern, pin.device);
        Asked {
            objective: self.objective,
            request: self.request.clone(),
            pins: self.pins.iter().map(pin).collect(),
            formats: self.formats.iter().map(|rule| rule.text.clone()).collect(),
            plain_bf16: self.plain_bf16,
            prefill_tokens: self.prefill_tokens,
            kv_type: self.kv_type,
            kv_cache_bytes: self.kv_cache_bytes,
            expert_counts: self.expert_counts.as_ref().map(|counted| counted.file.clone()),
        }
    }
}

/// A regular expression and a device: `layers\.[0-9]\.=numa0`.
impl FromStr for Pin {
    type Err = anyhow::Error;
    fn from_str(text: &str) -> Result<Self> {
        let (pattern, device) = text.rsplit_once('=').context("a pin is written PATTERN=DEVICE")?;
        let pattern = Regex::new(pattern).map_err(|error| {
            // The last line of a regex error says what is wrong; those before draw the place.
            let error = error.to_string();
            let cause = error.lines().last().unwrap_or_default().trim_start_matches("error: ");
            anyhow!("the pattern {pattern:?} is no regular expression: {cause}")
        })?;
        Ok(Self { pattern, device: device.to_owned() })
    }
}

/// `q8` for all devices, `numa*=q8` for those whose names match.
impl FromStr for FormatRule {
    type Err = anyhow::Error;
    fn from_str(text: &str) -> Result<Self> {
        let (devices, format) = text.rsplit_once('=').unwrap_or(("*", text));
        ensure!(
            !text.contains(','),
            "{text:?} is more than one rule: repeat --format, as in --format numa0=q8 --format numa1=q4"
        );
        let format = format.parse()?;
        let pattern = regex::escape(devices).replace(r"\*", ".*");
        let devices = Regex::new(&format!("^{pattern}$"))
            .with_context(|| format!("in the format {text:?}"))?;
        Ok(Self { text: text.to_owned(), devices, format })
    }
}

/// `numa0,numa1`, or a number of ranks.
pub fn parse_pipeline(text: &str) -> Result<Request> {
    if let Some(ranks) = parse_ranks(text)? {
        return Ok(Request::PipelineRanks(ranks));
    }
    Ok(Request::Pipeline(text.split(',').map(|name| name.trim().to_owned()).collect()))
}

/// `numa0,numa1`, `numa0:3,numa1:1`, or a number of ranks.
pub fn parse_tensor_parallel(text: &str) -> Result<Request> {
    if let Some(ranks) = parse_ranks(text)? {
        return Ok(Request::TensorParallelRanks(ranks));
    }
    let members = text.split(',').map(|member| {
        let Some((name, share)) = member.split_once(':') else {
            return Ok((member.trim().to_owned(), None));
        };
        let share: f64 =
            share.trim().parse().with_context(|| format!("{share:?} is not a share"))?;
        let name = name.trim();
        ensure!(
            share.is_finite() && share > 0.0,
            "the share of {name} is {share}, which is not positive: leave {name} out or give it more"
        );
        Ok((name.to_owned(), Some(share)))
    });
    let members: Vec<(String, Option<f64>)> = members.collect::<Result<_>>()?;
    let weighted = members.iter().filter(|(_, share)| share.is_some()).count();
    ensure!(
        weighted == 0 || weighted == members.len(),
        "either all devices of a tensor split have a share or none has"
    );
    let all: f64 = members.iter().filter_map(|(_, share)| *share).sum();
    let is_nothing = |share: &Option<f64>| share.is_some_and(|share| share < LEAST_SHARE * all);
    if let Some((name, _)) = members.iter().find(|(_, share)| is_nothing(share)) {
        bail!(
            "the share of {name} is below a thousandth, and a device that takes part computes a head and \
             a block of every layer: leave {name} out or give it more"
        );
    }
    Ok(Request::TensorParallel(members))
}

/// A number of ranks, where the text is a number.
fn parse_ranks(text: &str) -> Result<Option<usize>> {
    if !text.trim().chars().all(|c| c.is_ascii_digit()) || text.trim().is_empty() {
        return Ok(None);
    }
    let ranks = text.trim().parse().with_context(|| format!("{text} ranks are too many"))?;
    ensure!(ranks > 0, "0 ranks run nothing");
    Ok(Some(ranks))
}

/// `4GiB`, `512MB`, `1.5G`, plain bytes.
pub fn parse_bytes(text: &str) -> Result<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let expected = || format!("{text:?} is not a size: write 4GiB, 512MiB or bytes");
    let number: f64 = number.parse().map_err(|_| anyhow!(expected()))?;
    let unit = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1u64,
        "kb" => 1000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        _ => bail!(expected()),
    };
    let bytes = number * unit as f64;
    ensure!(bytes >= 1.0, "{text:?} is less than a byte");
    ensure!(bytes < 2f64.powi(63), "{text:?} is more bytes than can be counted");
    Ok(bytes as u64)
}

/// [`parse_bytes`] of what a GPU may use, where a number without its unit is a slip.
pub fn parse_gpu_memory(text: &str) -> Result<u64> {
    /// Less than any GPU has or any model takes.
    const LEAST_BYTES: u64 = 1 << 20;
    let bytes = parse_bytes(text)?;
    let number = text.trim();
    ensure!(
        bytes >= LEAST_BYTES,
        "{number:?} is {bytes} bytes, too few for any model: give a unit, as in 24GiB"
    );
    Ok(bytes)
}

/// `f32`, `f16`, `bf16`, `i8`.
pub fn parse_kv_type(text: &str) -> Result<DType> {
    match text {
        "f32" => Ok(DType::F32),
        "f16" => Ok(DType::F16),
        "bf16" => Ok(DType::Bf16),
        "i8" => Ok(DType::I8),
        _ => bail!("unknown cache type {text:?}: f32, f16, bf16 and i8 exist"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_binary_and_decimal_units() {
        assert_eq!(parse_bytes("4GiB").unwrap(), 4 << 30);
        assert_eq!(parse_bytes("1.5k").unwrap(), 1536);
        assert_eq!(parse_bytes("512 MB").unwrap(), 512_000_000);
        assert!(parse_bytes("four").is_err());
        assert!(parse_bytes("-1").is_err());
    }

    #[test]
    fn a_format_rule_matches_whole_names() {
        let rule: FormatRule = "numa*=q8".parse().unwrap();
        assert!(rule.devices.is_match("numa12"));
        assert!(!rule.devices.is_match("xnuma1"));
        let all: FormatRule = "bf16".parse().unwrap();
        assert!(all.devices.is_match("gpu0"));
    }

    #[test]
    fn a_number_asks_for_ranks() {
        assert_eq!(parse_tensor_parallel("4").unwrap(), Request::TensorParallelRanks(4));
        assert_eq!(parse_pipeline(" 2 ").unwrap(), Request::PipelineRanks(2));
        assert!(parse_pipeline("0").is_err());
        assert_eq!(parse_pipeline("2a").unwrap(), Request::Pipeline(vec!["2a".into()]));
    }

    #[test]
    fn shares_are_for_all_members_or_none() {
        assert!(parse_tensor_parallel("a:3,b:1").is_ok());
        assert!(parse_tensor_parallel("a:3,b").is_err());
        assert!(parse_tensor_parallel("a:0,b:1").is_err());
    }
}
