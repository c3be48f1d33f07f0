//! What machines can be.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail, ensure};

use super::{CacheRate, Device, DeviceKind, LinearRate, Machine, Rates};
use crate::id::Id as _;
use crate::tensor::DType;

/// The least rate a second of anything: what is smaller was meant in larger units, and times by it are beyond 64 bits.
const LEAST_RATE: f64 = 1e3;

/// The most nanoseconds of anything, a quarter of an hour: sums of many are within 64 bits.
const MOST_NANOS: f64 = 1e12;

impl Machine {
    /// Whether it can be: a machine file is written by hand at times.
    ///
    /// # Errors
    /// When it has no devices, two that are one, or a rate or link that none has.
    pub fn check(&self) -> Result<()> {
        let devices = self.devices.len();
        ensure!(devices > 0, "there are no devices");
        for (id, device) in self.devices.iter() {
            let name = &device.name;
            // Options list devices between commas, and give them shares and formats.
            ensure!(
                !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || "-_.".contains(c)),
                "a device is named {name:?}; letters, digits, hyphens, underscores and points are meant, one at least"
            );
            ensure!(self.device(name) == Some(id), "two devices are named {name}");
            if let DeviceKind::Numa { cpus, .. } = &device.kind {
                ensure!(
                    !cpus.is_empty(),
                    "cpus of {name} is empty; one processor at least is meant"
                );
            }
            check_rates(name, &device.rates)?;
        }
        if let Some(problem) = named_twice(self.devices.rows()).first() {
            bail!("{problem}; each is named once");
        }
        for (index, link) in self.links.iter().enumerate() {
            let (from, to) = (link.from.index(), link.to.index());
            let link_name = format!("link {index} (from {from} to {to})");
            let last = devices - 1;
            ensure!(from <= last && to <= last, "{link_name}: there are devices 0 to {last}");
            ensure!(from != to, "{link_name}: a device needs none to itself");
            check_rate("bytes_per_sec", &link_name, link.bytes_per_sec)?;
            check_nanos("latency_nanos", &link_name, link.latency_nanos)?;
            if let Some(nanos) = link.letter_nanos {
                check_nanos("letter_nanos", &link_name, nanos)?;
            }
            if let Some(part) = link.beside_reads {
                check_part("beside_reads", &link_name, part)?;
            }
            let others = &self.links[..index];
            ensure!(
                others.iter().all(|other| (other.from, other.to) != (link.from, link.to)),
                "{link_name}: another leads there, too; one each way is meant"
            );
        }
        if let Some(collectives) = &self.collectives {
            check_rate("bytes_per_sec", "collectives", collectives.bytes_per_sec)?;
            check_nanos("latency_nanos", "collectives", collectives.latency_nanos)?;
        }
        Ok(())
    }
}

/// The rates of attention of that name.
fn check_cache_rate(name: &str, rate: &CacheRate) -> Result<()> {
    check_rate("attention_flops_per_sec", name, rate.attention_flops_per_sec)?;
    check_nanos("prompt_score_nanos", name, rate.prompt_score_nanos)?;
    check_rate("cache_bytes_per_sec", name, rate.cache_bytes_per_sec)?;
    check_nanos("score_nanos", name, rate.score_nanos)
}

/// The rates of the device of that name.
fn check_rates(name: &str, rates: &Rates) -> Result<()> {
    check_rate("read_bytes_per_sec", name, rates.read_bytes_per_sec)?;
    check_cache_rate(name, &rates.usual_attention())?;
    let mut known = BTreeSet::from([DType::Bf16]);
    for rate in &rates.other_caches {
        ensure!(
            known.insert(rate.kv_type),
            "other_caches of {name} has rates for {} caches, which are given already; one is meant",
            rate.kv_type
        );
        check_cache_rate(&format!("{} caches of {name}", rate.kv_type), rate)?;
    }
    check_nanos("step_nanos", name, rates.step_nanos)?;
    check_nanos("attention_nanos", name, rates.attention_nanos)?;
    check_part("beside_fetch", name, rates.beside_fetch)?;
    let linear = rates.linear.iter().map(|rate| ("linear", rate));
    let experts = rates.experts.iter().map(|rate| ("experts", rate));
    let shared = rates.shared_experts.iter().map(|rate| ("shared_experts", rate));
    let mut seen = BTreeSet::new();
    for (field, LinearRate { format, points }) in linear.chain(experts).chain(shared) {
        let curve = format!("{format} in {field} of {name}");
        ensure!(seen.insert((field, *format)), "{curve} has two curves; one is meant");
        ensure!(
            !points.is_empty() && points[0].tokens > 0,
            "points of {curve}: one at least is meant, of one token or more"
        );
        ensure!(
            points.is_sorted_by(|a, b| a.tokens < b.tokens),
            "points of {curve}: each is of more tokens than the one before"
        );
        for point in points {
            let point_name = format!("{format} (tokens: {}) in {field} of {name}", point.tokens);
            check_rate("weights_per_sec", &point_name, point.weights_per_sec)?;
            check_nanos("nanos", &point_name, point.nanos)?;
        }
    }
    Ok(())
}

fn check_rate(field: &str, name: &str, rate: f64) -> Result<()> {
    ensure!(
        rate.is_finite() && rate >= LEAST_RATE,
        "{field} of {name} is {rate:?}; at least {LEAST_RATE} is meant"
    );
    Ok(())
}

fn check_nanos(field: &str, name: &str, nanos: f64) -> Result<()> {
    ensure!(
        (0.0..=MOST_NANOS).contains(&nanos),
        "{field} of {name} is {nanos:?}; 0 to {MOST_NANOS} is meant"
    );
    Ok(())
}

fn check_part(field: &str, name: &str, part: f64) -> Result<()> {
    ensure!(
        part > 0.0 && part <= 1.0,
        "{field} of {name} is {part}; a part above 0, at most 1, is meant"
    );
    Ok(())
}

/// GPUs and processors that are named twice. Parts of a NUMA node that has fewer cores share them.
pub(crate) fn named_twice(devices: &[Device]) -> Vec<String> {
    let mut problems = Vec::new();
    let mut ordinals: BTreeMap<u32, &str> = BTreeMap::new();
    for Device { name, kind, .. } in devices {
        match kind {
            DeviceKind::Gpu { ordinal, .. } => {
                if let Some(other) = ordinals.insert(*ordinal, name.as_str()) {
                    problems.push(format!("{other} and {name} have the same ordinal {ordinal}"));
                }
            }
            DeviceKind::Numa { cpus, .. } => {
                let mut seen = BTreeSet::new();
                if let Some(cpu) = cpus.iter().find(|&cpu| !seen.insert(cpu)) {
                    problems.push(format!("cpus of {name} has processor {cpu} twice"));
                }
            }
        }
    }
    problems
}
