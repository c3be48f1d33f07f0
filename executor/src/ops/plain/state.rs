//! What Burn's own operations need of a device between runs.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use burn::tensor::{Device as BurnDevice, Tensor, TensorData};
use hwlocality::Topology;
use ir::id::{CacheId, DeviceId, Table, WeightId};
use ir::plan::{Plan, Weight};

use super::Cache;
use crate::checkpoint::Checkpoint;
use crate::ops::own::{Weights, weight_dims};
use crate::team::{Team, bind};

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

    /// Adds the plan's next weight: what the kernels multiply with, unpacked again.
    pub(crate) fn hold(
        &mut self,
        weight: &Weight,
        checkpoint: &Checkpoint,
        team: &Team,
    ) -> Result<()> {
        let mut held = Weights::default();
        held.hold(weight, checkpoint, team)?;
        let (rows, columns) = weight_dims(weight);
        let tensor =
            |values| Tensor::from_data(TensorData::new(values, [rows, columns]), &self.burn);
        self.weights.push(held.unpacked().into_iter().map(tensor).collect());
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
        .start_handler(move |thread| drop(bind(&topology, &bound[thread..=thread])))
        .build()?;
    Ok(pool)
}
