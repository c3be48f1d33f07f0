//! What each rank of a plan is.

use std::collections::BTreeSet;

use ir::asked::Request;
use ir::id::DeviceId;
use ir::machine::DeviceKind;
use ir::plan::Plan;

use crate::cpus::{lanes, team_cpus};
use crate::load::Options;

/// What each rank of a plan is, in their order: the devices that compute, with the GPU or the NUMA node and processors
/// that they are bound to.
pub(crate) fn ranks(plan: &Plan, options: &Options) -> Vec<String> {
    let devices = in_order(plan);
    let describe = |(rank, &id): (usize, &DeviceId)| {
        let device = &plan.machine.devices[id];
        let place = match &device.kind {
            DeviceKind::Gpu { ordinal, .. } => {
                let model = plan.machine.host.gpus.get(*ordinal as usize);
                format!("GPU {ordinal}, {}", model.map_or("of unknown model", String::as_str))
            }
            DeviceKind::Numa { node, cpus } => {
                let cpus: Vec<String> =
                    team_cpus(plan, cpus, options).iter().map(u32::to_string).collect();
                format!("bound to NUMA node {node}, a thread on each of cpus {}", cpus.join(" "))
            }
        };
        format!("rank {rank} of {}: {}, {place}", devices.len(), device.name)
    };
    devices.iter().enumerate().map(describe).collect()
}

/// The devices that compute: in the order in which they were asked for, others behind them, GPUs first.
fn in_order(plan: &Plan) -> Vec<DeviceId> {
    let asked: Vec<&str> = match &plan.asked.request {
        Request::Pipeline(names) => names.iter().map(String::as_str).collect(),
        Request::TensorParallel(members) => members.iter().map(|(name, _)| name.as_str()).collect(),
        Request::Any | Request::PipelineRanks(_) | Request::TensorParallelRanks(_) => Vec::new(),
    };
    let computing: BTreeSet<DeviceId> = lanes(plan).map(|lane| lane.device).collect();
    let mut devices: Vec<DeviceId> = computing.into_iter().collect();
    devices.sort_by_key(|&id| {
        let device = &plan.machine.devices[id];
        let place = asked.iter().position(|&name| name == device.name).unwrap_or(asked.len());
        (place, !device.kind.is_gpu())
    });
    devices
}

#[cfg(test)]
mod tests {
    use ::tests::machines::{gpu, linked, numa};
    use ::tests::toys::Toy;

    use super::*;

    #[test]
    fn ranks_are_in_the_order_in_which_devices_were_asked_for() {
        let machine = linked(vec![numa(0, 1 << 30), numa(1, 1 << 30), gpu(0, 1 << 30)]);
        let model = Toy::llama().model().unwrap();
        let names = |request: Request| -> Vec<String> {
            let options = compiler::Options { request, ..compiler::Options::default() };
            let plan = compiler::compile(&model, &machine, &options, &mut |_, _| ()).unwrap();
            let ranks = ranks(&plan, &Options::default()).into_iter().enumerate();
            let name = |(rank, line): (usize, String)| {
                let (start, rest) = line.split_once(": ").unwrap();
                assert_eq!(start, format!("rank {rank} of 3"));
                rest.split_once(", ").unwrap().0.to_owned()
            };
            ranks.map(name).collect()
        };
        let listed = ["numa1", "gpu0", "numa0"].map(str::to_owned);
        assert_eq!(names(Request::Pipeline(listed.to_vec())), listed);
        let shared = listed.iter().map(|name| (name.clone(), None)).collect();
        assert_eq!(names(Request::TensorParallel(shared)), listed);
        assert_eq!(names(Request::TensorParallelRanks(3)), ["gpu0", "numa0", "numa1"]);
    }
}
