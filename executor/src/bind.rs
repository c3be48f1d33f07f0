//! Binding a plan's device to hardware: its threads, its weights, its caches.
//!
//! - It is done by the device's own lane thread, so that memory is touched first where it is used.
//! - What is bound belongs to that thread alone; other devices see only the buffers of a run.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use burn::tensor::{Device as BurnDevice, Tensor, TensorData};
use half::{bf16, f16};
use hwlocality::Topology;
use ir::id::{CacheId, DeviceId, Table, WeightId};
use ir::machine::DeviceKind;
use ir::plan::{Plan, Weight};
use ir::tensor::Format;
use ir::weight::{Slice, Source};

use crate::checkpoint::Checkpoint;
use crate::load::{CpuBackend, Kernels, Options};
use crate::ops::plain;
use crate::team::{self, Team};

/// One device, ready to compute.
pub(crate) struct Device {
    pub(crate) name: String,
    /// Where Burn makes tensors for it.
    pub(crate) burn: BurnDevice,
    pub(crate) team: Team,
    /// Threads on the same processors for Burn's own operations, where they are used.
    pub(crate) pool: Option<Arc<rayon::ThreadPool>>,
    /// One matrix each, or one for each expert of a stack; vectors are `[1, features]`.
    plain_weights: Table<WeightId, Vec<Tensor<2>>>,
    /// `None` while one is being written.
    pub(crate) plain_caches: BTreeMap<CacheId, Option<plain::Cache>>,
}

impl Device {
    /// Binds the calling thread and its team to the device, reads its weights and makes its caches.
    /// `progress` is told the bytes of every weight that is there, and says whether to go on.
    ///
    /// # Errors
    /// When the device is not one of this host, a weight cannot be read, or `progress` says no.
    pub(crate) fn bind(
        plan: &Plan,
        id: DeviceId,
        checkpoint: &Checkpoint,
        options: &Options,
        progress: impl Fn(u64) -> bool,
    ) -> Result<Self> {
        let spec = &plan.machine.devices[id];
        let name = spec.name.clone();
        let cpus = match &spec.kind {
            DeviceKind::Numa { cpus, .. } => cpus,
            DeviceKind::Gpu { .. } => bail!("{name} is a GPU, and this build computes on none"),
        };
        let team = Team::new(cpus).with_context(|| format!("starting the threads of {name}"))?;
        let burn = match options.backend {
            CpuBackend::Flex => BurnDevice::flex(),
            CpuBackend::NdArray => ndarray(),
        };
        let pool = match options.kernels() {
            Kernels::Own => None,
            Kernels::Plain => Some(Arc::new(pool(cpus)?)),
        };
        let mut plain_weights = Table::default();
        for weight in plan.weights.rows() {
            let mut held = Vec::new();
            if weight.device == id {
                held = read(weight, checkpoint, &burn)
                    .with_context(|| format!("reading {} for {name}", weight.name))?;
                ensure!(progress(weight.bytes()), "another device could not be loaded");
            }
            plain_weights.push(held);
        }
        let mut plain_caches = BTreeMap::new();
        for (cache_id, cache) in plan.caches.iter().filter(|(_, cache)| cache.device == id) {
            let cache = plain::Cache::new(
                plan.model.blocks as usize,
                cache.kv_heads as usize,
                plan.model.block_tokens as usize,
                cache.head_dim as usize,
                &burn,
            );
            plain_caches.insert(cache_id, Some(cache));
        }
        Ok(Self { name, burn, team, pool, plain_weights, plain_caches })
    }

    /// A matrix `[outputs, inputs]`, or a vector `[1, features]`.
    pub(crate) fn plain(&self, weight: WeightId) -> Result<Tensor<2>> {
        match self.plain_stack(weight)? {
            [tensor] => Ok(tensor.clone()),
            stack => bail!("{weight} is a stack of {} matrices", stack.len()),
        }
    }

    /// The matrices of a stack.
    pub(crate) fn plain_stack(&self, weight: WeightId) -> Result<&[Tensor<2>]> {
        match self.plain_weights.get(weight) {
            Some(stack) if !stack.is_empty() => Ok(stack),
            _ => bail!("{weight} is not on {}", self.name),
        }
    }
}

/// One thread a processor.
fn pool(cpus: &[u32]) -> Result<rayon::ThreadPool> {
    let bound = cpus.to_vec();
    let topology = Topology::new().context("reading the machine's topology")?;
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(cpus.len())
        // The team has bound threads to these processors before, so this cannot fail; a thread that
        // is bound to none computes the same.
        .start_handler(move |thread| drop(team::bind(&topology, bound[thread])))
        .build()?;
    Ok(pool)
}

#[expect(deprecated, reason = "burn-ndarray stays selectable for comparison")]
fn ndarray() -> BurnDevice {
    BurnDevice::ndarray()
}

/// The matrices of a weight as views of the checkpoint: one, or one for each expert of a stack.
pub(crate) fn matrices(weight: &Weight) -> Result<Vec<Source>> {
    if weight.shape.len() < 3 || weight.sources.len() > 1 {
        return Ok(weight.sources.clone());
    }
    let source = weight.sources.first().context("it has no source")?;
    (0..weight.shape[0])
        .map(|start| {
            let mut matrix = source.sliced(Slice { axis: 0, start, size: 1 })?;
            matrix.axes.remove(0);
            Ok(matrix)
        })
        .collect()
}

fn read(weight: &Weight, checkpoint: &Checkpoint, device: &BurnDevice) -> Result<Vec<Tensor<2>>> {
    let columns = weight.shape.last().copied().unwrap_or(1) as usize;
    let rows =
        if weight.shape.len() < 2 { 1 } else { weight.shape[weight.shape.len() - 2] } as usize;
    let matrices = matrices(weight)?;
    ensure!(!matrices.is_empty(), "it has no source");
    matrices
        .iter()
        .map(|source| {
            let mut values = vec![0.0; rows * columns];
            checkpoint.read(source, 0..rows, &mut values)?;
            checkpoint.forget(source);
            values.chunks_exact_mut(columns).for_each(|row| round(weight.format, row));
            Ok(Tensor::from_data(TensorData::new(values, [rows, columns]), device))
        })
        .collect()
}

/// Rounds a row as its format does.
fn round(format: Format, row: &mut [f32]) {
    let blocks = |row: &mut [f32], largest: f32| {
        for block in row.chunks_mut(format.block() as usize) {
            let peak = block.iter().fold(0.0, |peak: f32, value| peak.max(value.abs()));
            let scale = f16::from_f32(peak / largest).to_f32();
            for value in block.iter_mut().filter(|_| scale > 0.0) {
                *value = (*value / scale).round().clamp(-largest, largest) * scale;
            }
        }
    };
    match format {
        Format::F32 => (),
        Format::F16 => row.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32()),
        Format::Bf16 => row.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32()),
        Format::Q8 => blocks(row, 127.0),
        Format::Q4 => blocks(row, 7.0),
    }
}
