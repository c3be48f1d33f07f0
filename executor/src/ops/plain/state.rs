//! What Burn's own operations need of a device between runs.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use burn::tensor::{Device as BurnDevice, Tensor, TensorData};
use half::{bf16, f16};
use hwlocality::Topology;
use ir::id::{CacheId, DeviceId, Table, WeightId};
use ir::plan::{Plan, Weight};
use ir::tensor::Format;

use super::Cache;
use crate::checkpoint::{Checkpoint, matrices};
use crate::ops::own::weight_dims;
use crate::team;

/// One device's weights and caches, as tensors of one of Burn's backends.
pub(crate) struct State {
    /// Where Burn makes tensors for it.
    pub(crate) burn: BurnDevice,
    /// Threads on the device's processors.
    pub(crate) pool: Arc<rayon::ThreadPool>,
    /// One matrix each, or one for each expert of a stack; vectors are `[1, features]`.
    weights: Table<WeightId, Vec<Tensor<2>>>,
    /// `None` while one is being written.
    caches: BTreeMap<CacheId, Option<Cache>>,
}

impl State {
    /// Makes the caches of a device. Weights are added one by one.
    pub(crate) fn new(
        plan: &Plan,
        device: DeviceId,
        burn: BurnDevice,
        cpus: &[u32],
    ) -> Result<Self> {
        let mut caches = BTreeMap::new();
        for (id, cache) in plan.caches.iter().filter(|(_, cache)| cache.device == device) {
            let cache = Cache::new(
                plan.model.blocks as usize,
                cache.kv_heads as usize,
                plan.model.block_tokens as usize,
                cache.head_dim as usize,
                &burn,
            );
            caches.insert(id, Some(cache));
        }
        Ok(Self { burn, pool: Arc::new(pool(cpus)?), weights: Table::default(), caches })
    }

    /// Adds the plan's next weight, which is on another device.
    pub(crate) fn skip(&mut self) {
        self.weights.push(Vec::new());
    }

    /// Adds the plan's next weight.
    pub(crate) fn hold(&mut self, weight: &Weight, checkpoint: &Checkpoint) -> Result<()> {
        let (rows, columns) = weight_dims(weight);
        let mut stack = Vec::new();
        for source in &matrices(weight)? {
            let mut values = vec![0.0; rows * columns];
            checkpoint.read(source, 0..rows, &mut values)?;
            checkpoint.forget(source);
            values.chunks_exact_mut(columns).for_each(|row| round(weight.format, row));
            stack.push(Tensor::from_data(TensorData::new(values, [rows, columns]), &self.burn));
        }
        self.weights.push(stack);
        Ok(())
    }

    /// A matrix `[outputs, inputs]`, or a vector `[1, features]`.
    pub(super) fn tensor(&self, weight: WeightId) -> Result<Tensor<2>> {
        match self.stack(weight)? {
            [tensor] => Ok(tensor.clone()),
            stack => bail!("{weight} is a stack of {} matrices", stack.len()),
        }
    }

    /// The matrices of a stack.
    pub(super) fn stack(&self, weight: WeightId) -> Result<&[Tensor<2>]> {
        match self.weights.get(weight) {
            Some(stack) if !stack.is_empty() => Ok(stack),
            _ => bail!("{weight} is not on this device"),
        }
    }

    /// A cache, taken out so that its tensors have one owner while they are written.
    pub(super) fn take_cache(&mut self, id: CacheId) -> Result<Cache> {
        let cache = self.caches.get_mut(&id).and_then(Option::take);
        cache.with_context(|| {
            format!("{id} is not on this device, or an earlier failure has left it unusable")
        })
    }

    /// Puts a cache back.
    pub(super) fn put_cache(&mut self, id: CacheId, cache: Cache) {
        self.caches.insert(id, Some(cache));
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
        .start_handler(move |thread| drop(team::bind(&topology, &bound[thread..=thread])))
        .build()?;
    Ok(pool)
}

/// Rounds a row about as its format does; blocks of four bits are packed with more care.
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
        Format::Bf16 | Format::Bf12 => {
            row.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32())
        }
        Format::Q8 => blocks(row, 127.0),
        Format::Q4 => blocks(row, 7.0),
    }
}
