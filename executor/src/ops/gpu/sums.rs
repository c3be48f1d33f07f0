//! Sums over GPUs, made without the host.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use ir::id::DeviceId;
use ir::plan::Plan;
use ir::workspace::{Workspace, exchange_piece_bytes};

use super::memory::Memory;
use crate::kernels::gpu::device::{Gpu, Span};
use crate::kernels::gpu::peers::{Group, TABLE_BYTES, TABLES, TABLES_START};
use crate::peers::Peers;

/// One GPU's place to meet others.
pub(super) struct Sums {
    pub(super) peers: Arc<Peers>,
    device: DeviceId,
    /// `None` where it makes no sums.
    exchange: Option<Span>,
    /// Bytes that members pass each other at a time.
    piece_bytes: usize,
    /// Tables of addresses that are on the device.
    tables: BTreeMap<Vec<DeviceId>, Span>,
    /// Sums that the run has made so far.
    made: u32,
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
        let piece_bytes = exchange_piece_bytes(plan) as usize;
        Ok(Self { peers, device, exchange, piece_bytes, tables: BTreeMap::new(), made: 0 })
    }

    /// Queues the preparation for a run.
    pub(super) fn queue_start(&mut self, gpu: &Gpu) -> Result<()> {
        self.made = 0;
        match &self.exchange {
            Some(exchange) if gpu.is_cuda() => gpu.start_sums(exchange),
            Some(_) | None => Ok(()),
        }
    }

    /// Queues `out = ` the sum of the members' terms, of which `term` is this device's.
    pub(super) fn sum(
        &mut self,
        gpu: &Gpu,
        members: &[DeviceId],
        term: &Span,
        out: &Span,
        count: usize,
        turn: &Span,
    ) -> Result<()> {
        let table = self.table(gpu, members)?;
        let rank = members.iter().position(|member| *member == self.device);
        let group = Group {
            addresses: &table,
            members: members.len() as u32,
            rank: rank.context("a GPU sums terms of others")? as u32,
            piece_bytes: self.piece_bytes,
            turn,
            number: self.made,
        };
        self.made += 1;
        gpu.sum_over_peers(&group, term, out, count)
    }

    /// Queues telling the members of a sum that this GPU does no more of a run than it has queued.
    pub(super) fn leave(&mut self, gpu: &Gpu, members: &[DeviceId], turn: u32) -> Result<()> {
        let table = self.table(gpu, members)?;
        gpu.leave_sums(&table, members.len() as u32, turn);
        gpu.flush()
    }

    /// Fails when a member never came in a run.
    pub(super) fn check(&self, gpu: &Gpu, turn: u32) -> Result<()> {
        let Some(exchange) = self.exchange.as_ref().filter(|_| gpu.is_cuda()) else {
            return Ok(());
        };
        match gpu.lost_member(exchange, turn)? {
            Some(member) => bail!("GPU {member} of a sum over GPUs did not come in time"),
            None => Ok(()),
        }
    }

    /// Where the addresses of the members' exchanges lie on the device.
    fn table(&mut self, gpu: &Gpu, members: &[DeviceId]) -> Result<Span> {
        if let Some(table) = self.tables.get(members) {
            return Ok(table.clone());
        }
        let (exchange, number) = (self.exchange.as_ref(), self.tables.len());
        let exchange = exchange.context("the plan counts no exchange")?;
        ensure!(number < TABLES, "a GPU sums with more than {TABLES} groups of GPUs");
        let addresses = self.peers.exchanges(self.device, members)?;
        let table = exchange.part(TABLES_START + number * TABLE_BYTES, TABLE_BYTES);
        gpu.write(&table, bytemuck::cast_slice(&addresses))?;
        // Leaving no run compiles the launch, which could not be done while a sum waits.
        gpu.leave_sums(&table, members.len() as u32, 0);
        self.tables.insert(members.to_vec(), table.clone());
        Ok(table)
    }
}
