//! The arrangement that a search's numbers stand for, and its name.

use std::collections::BTreeSet;

use ir::dag::Node;
use ir::id::{DeviceId, NodeId, Table};
use ir::op::Op;
use ir::tensor::DType;

use super::{Fetching, Frame, Kept, Member, Search};
use crate::explain::bytes;
use crate::part::WeightKey;
use crate::place::arrangement::Arrangement;
use crate::place::group::Group;
use crate::place::hosted::{ALIKE, Hosted, Hosting, fillable_bytes};
use crate::task::Task;

impl Search<'_> {
    /// So many blocks of each stage stay within a frame, and decode fetches as much of them.
    pub(super) fn arrange(
        &self,
        counts: &[usize],
        frame: &Frame,
        fetching: Fetching,
    ) -> Arrangement {
        let mut nodes: Table<NodeId, Option<Hosting>> =
            self.task.model.layers.nodes().map(|_| None).collect();
        let mut free = self.free.clone();
        if frame.head_stays {
            self.host_head(&mut free, |node, hosting| nodes[node] = Some(hosting));
        }
        for &(lookup, table) in &self.lookups {
            let bytes = |home| WeightKey::whole(self.task, table, home).bytes(self.task);
            let host = self.host_for(&free, 0, bytes(self.hosts[0]));
            let home = self.hosts[host];
            free[host] = free[host].saturating_sub(bytes(home));
            nodes[lookup] =
                Some(Hosting { home, is_fetched_in_prefill: false, is_fetched_in_decode: false });
        }
        let (mut bytes, mut fetched_bytes) = (0, 0);
        // What is to be fetched so far and was not: it decides about the next block or node.
        let mut owed = 0.0;
        let mut decide = |bytes: u64| {
            owed += bytes as f64 * fetching.share;
            let is_fetched = bytes > 0 && owed >= bytes as f64 / 2.0;
            if is_fetched {
                owed -= bytes as f64;
                fetched_bytes += bytes;
            }
            is_fetched
        };
        for block in self.staying(counts) {
            let host_of_block = self.host_for(&free, block.stage, block.bytes);
            let window = frame.windows[block.stage];
            let fits = |member: &Member| member.window_bytes <= window;
            let mut matrices = block.nodes.iter().filter(|member| member.window_bytes > 0);
            // What lies before the first matrix goes with it.
            let mut is_fetched_in_prefill = matrices.next().is_some_and(fits);
            let fitting = block.nodes.iter().filter(|member| fits(member));
            let fitting_bytes = fitting.map(|member| member.bytes).sum();
            bytes += block.bytes;
            let whole = fetching.in_blocks && decide(fitting_bytes);
            let mut is_fetched_in_decode = whole && is_fetched_in_prefill;
            for member in &block.nodes {
                if member.window_bytes > 0 {
                    is_fetched_in_prefill = fits(member);
                    is_fetched_in_decode = is_fetched_in_prefill
                        && (whole || !fetching.in_blocks && decide(member.window_bytes));
                }
                let host = member.host.unwrap_or(host_of_block);
                free[host] = free[host].saturating_sub(member.bytes);
                let home = self.hosts[host];
                nodes[member.node] =
                    Some(Hosting { home, is_fetched_in_prefill, is_fetched_in_decode });
            }
        }
        for block in self.caching(counts, &frame.caches) {
            let mut homes: Vec<DeviceId> = block
                .nodes
                .iter()
                .filter_map(|member| nodes[member.node].map(|hosting| hosting.home))
                .collect();
            homes.dedup();
            // Shards are on several.
            let home = match homes.as_slice() {
                [only] => *only,
                _ => self.hosts[self.host_for(&free, block.stage, frame.cache_bytes[block.stage])],
            };
            if let Some(host) = self.hosts.iter().position(|&host| host == home) {
                free[host] = free[host].saturating_sub(frame.cache_bytes[block.stage]);
            }
            // GPUs borrow floats.
            let is_fetched_in_prefill = self.task.target.kv_types[home] != DType::I8;
            for &node in &block.attentions {
                let is_fetched_in_decode = false;
                nodes[node] = Some(Hosting { home, is_fetched_in_prefill, is_fetched_in_decode });
            }
        }
        let percent = 100.0 * fetched_bytes as f64 / bytes.max(1) as f64;
        let name = self.name(counts.iter().sum(), frame, percent);
        let mut window_bytes = self.task.per_device(0);
        for ((gpu, _), &bytes) in self.stages.iter().zip(&frame.windows) {
            window_bytes[*gpu] = bytes;
        }
        let hosted = Hosted { nodes, window_bytes, name };
        let stages = self.stages.iter().map(|(gpu, units)| (Group::one(*gpu), units.clone()));
        Arrangement { stages: stages.collect(), has_fixed_shares: false, hosted: Some(hosted) }
    }

    /// The host for that many bytes beside a stage's GPU: of those with room the one that is best for it, or of several
    /// that are about as good the one with the most room. The first of those with the most where none has enough.
    pub(super) fn host_for(&self, free: &[u64], stage: usize, bytes: u64) -> usize {
        let costs = &self.costs[stage];
        let spared = |host: usize| {
            let device = &self.task.target.machine.devices[self.hosts[host]];
            device.memory_bytes - fillable_bytes(device)
        };
        let has_room = |&host: &usize| free[host] >= bytes.saturating_add(spared(host));
        let least = (0..free.len()).filter(has_room).map(|host| costs[host]).min();
        let is_good = |&host: &usize| {
            least.is_none_or(|least| has_room(&host) && costs[host] - least <= least / ALIKE)
        };
        let good = (0..free.len()).filter(is_good);
        good.rev().max_by_key(|&host| free[host]).unwrap_or(0)
    }

    /// Whether the most used experts are nodes of their own.
    fn is_split(&self) -> bool {
        let mut members = self.blocks.iter().flat_map(|block| &block.nodes);
        members.any(|member| {
            let op = &self.task.model.layers.node(member.node).work;
            matches!(op, Op::Experts(experts) if experts.part.is_some())
        })
    }

    /// Blocks with what is kept, in shards or not.
    fn blocks_of_kind(&self) -> usize {
        let has_kind = |node: &Node<Op>| match self.kept {
            Kept::Experts => matches!(node.work, Op::Experts(_)),
            Kept::Mlps | Kept::Matrices => node.work.takes_fetched(),
        };
        let nodes = self.task.model.layers.nodes().filter(|(_, node)| has_kind(node));
        nodes.filter_map(|(_, node)| Task::block(&node.name)).collect::<BTreeSet<u32>>().len()
    }

    fn name(&self, count: usize, frame: &Frame, decode_percent: f64) -> String {
        let what = match self.kept {
            Kept::Experts if self.is_split() => "least used experts",
            Kept::Experts => "experts",
            Kept::Mlps => "MLPs",
            Kept::Matrices => "matrices",
        };
        let name = |device: &DeviceId| self.task.target.name(*device);
        let hosts: Vec<&str> = self.hosts.iter().map(name).collect();
        let gpus: Vec<&str> = self.stages.iter().map(|(gpu, _)| name(gpu)).collect();
        let caches: usize = frame.caches.iter().sum();
        let all = self.blocks_of_kind();
        let stays = match (count, caches) {
            (0, 0) => "head".to_owned(),
            (0, caches) => format!("caches of {caches} of {all} blocks"),
            (count, _) => format!("{what} of {count} of {all} blocks"),
        };
        let mut name = format!("{stays} on {} beside {}", hosts.join("+"), gpus.join(" → "));
        if count > 0 && caches > 0 {
            name += &format!(", {caches} caches there");
        }
        if count + caches > 0 && frame.head_stays {
            name += ", the head there";
        }
        let mut windows = frame.windows.clone();
        windows.retain(|&bytes| bytes > 0);
        windows.dedup();
        if !windows.is_empty() {
            let windows: Vec<String> = windows.into_iter().map(bytes).collect();
            name += &format!(", fetching {} ahead", windows.join(" and "));
        }
        if decode_percent > 0.0 {
            name += &format!(", {decode_percent:.0} % in decode");
        }
        name
    }
}
