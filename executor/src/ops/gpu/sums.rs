//! Sums over GPUs, made without the host.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use ir::id::DeviceId;
use ir::machine::Machine;
use ir::plan::Plan;
use ir::workspace::{Exchange, Workspace};

use super::memory::Memory;
use crate::kernels::gpu::device::{Gpu, Span};
use crate::kernels::gpu::peers::{Exchanges, Group};
use crate::peers::Peers;

/// One GPU's place to meet others.
pub(super) struct Sums {
    pub(super) peers: Arc<Peers>,
    device: DeviceId,
    /// `None` where it makes no sums.
    exchange: Option<Span>,
    /// How terms lie in the exchanges of all members.
    layout: Exchange,
    /// Where the exchanges of the groups lie that this GPU has met.
    groups: BTreeMap<Vec<DeviceId>, Exchanges>,
    /// Sums that the run has made in exchanges so far.
    made: u32,
    /// Sums that the vendor's library makes in the run so far.
    by_library: usize,
}

impl Sums {
    pub(super) fn new(
        peers: Arc<Peers>,
        plan: &Plan,
        (device, gpu): (DeviceId, &Gpu),
        space: &Workspace,
        memory: &mut Memory,
    ) -> Result<Self> {
        let bytes = space.exchange_bytes as usize;
        let exchange = (bytes > 0).then(|| memory.take(bytes)).transpose()?;
        if let (Some(exchange), Some(ordinal)) = (&exchange, gpu.ordinal()) {
            gpu.clear_exchange(exchange).context("clearing the exchange")?;
            peers.register_exchange(device, ordinal, exchange.address()?);
        }
        Ok(Self {
            peers,
            device,
            exchange,
            layout: Exchange::of(plan),
            groups: BTreeMap::new(),
            made: 0,
            by_library: 0,
        })
    }

    /// Queues the preparation for a run.
    pub(super) fn queue_start(&mut self, gpu: &Gpu) -> Result<()> {
        self.made = 0;
        match &self.exchange {
            Some(exchange) if gpu.is_cuda() => gpu.start_sums(exchange),
            Some(_) | None => Ok(()),
        }
    }

    /// The run's next sum, of terms of `members`.
    ///
    /// # Errors
    /// When this GPU is none of them, or cannot reach them.
    pub(super) fn next(&mut self, gpu: &Gpu, members: &[DeviceId], turn: Span) -> Result<Group> {
        let rank = members.iter().position(|member| *member == self.device);
        let (number, exchange) = (self.made, self.layout);
        self.made += 1;
        Ok(Group {
            exchanges: self.group(gpu, members)?,
            rank: rank.context("a GPU sums terms of others")? as u32,
            exchange,
            turn,
            number,
        })
    }

    /// Notes that a run begins.
    pub(super) fn start(&mut self) {
        self.by_library = 0;
    }

    /// Queues a sum of `count` numbers by the vendor's library.
    pub(super) fn sum_by_library(
        &mut self,
        gpu: &Gpu,
        ordinals: &[usize],
        term: &Span,
        out: &Span,
        count: usize,
    ) -> Result<()> {
        self.by_library += 1;
        gpu.sum_by_library(ordinals, term, out, count)
    }

    /// Sums that the vendor's library makes in the run so far.
    pub(super) fn by_library(&self) -> usize {
        self.by_library
    }

    /// Queues telling the members of a sum that this GPU does no more of a run than it has queued.
    pub(super) fn leave(&mut self, gpu: &Gpu, members: &[DeviceId], turn: u32) -> Result<()> {
        gpu.leave_sums(&self.group(gpu, members)?, turn);
        gpu.flush()
    }

    /// Whether a device is a member of one of the groups that this GPU sums with.
    pub(super) fn has_met(&self, device: DeviceId) -> bool {
        self.groups.keys().any(|members| members.contains(&device))
    }

    /// Fails when a member never came in a run.
    pub(super) fn check(&self, gpu: &Gpu, machine: &Machine, turn: u32) -> Result<()> {
        let Some(exchange) = self.exchange.as_ref().filter(|_| gpu.is_cuda()) else {
            return Ok(());
        };
        let Some(rank) = gpu.lost_member(exchange, turn)? else { return Ok(()) };
        // The device notes a rank, which is another GPU in each group that has as many.
        let of_group = |members: &Vec<DeviceId>| members.get(rank as usize).copied();
        let lost: BTreeSet<DeviceId> = self.groups.keys().filter_map(of_group).collect();
        let names: Vec<&str> =
            lost.iter().map(|&device| machine.devices[device].name.as_str()).collect();
        let names = names.join(" or ");
        bail!(
            "{names} did not come in time to a sum over GPUs: run it again, which will do if the program was suspended \
             meanwhile, or compile the plan --without {names}"
        )
    }

    /// Where the exchanges of a group lie.
    fn group(&mut self, gpu: &Gpu, members: &[DeviceId]) -> Result<Exchanges> {
        if let Some(exchanges) = self.groups.get(members) {
            return Ok(exchanges.clone());
        }
        ensure!(self.exchange.is_some(), "the plan counts no exchange");
        let exchanges = self.peers.exchanges(self.device, members)?;
        // Leaving no run compiles the launch, which could not be done while a sum waits.
        gpu.leave_sums(&exchanges, 0);
        self.groups.insert(members.to_vec(), exchanges.clone());
        Ok(exchanges)
    }
}
