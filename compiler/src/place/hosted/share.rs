//! Each GPU's share of the layers, where matrices stay beside several.

use std::ops::Range;

use ir::id::DeviceId;

use crate::place::units::Units;
use crate::task::Task;

/// Units for each GPU in turn: its share of the weights is like its share of the memory. `None` where there are too
/// few.
pub(super) fn share(
    task: &Task<'_>,
    units: &Units,
    gpus: &[DeviceId],
) -> Option<Vec<(DeviceId, Range<usize>)>> {
    let mut elements = vec![0; units.len()];
    for (id, node) in task.model.layers.nodes() {
        let weights = node.work.weights().into_iter();
        let of_node = weights.map(|weight| {
            let shape = &task.model.weights[weight].shape;
            shape.iter().map(|&size| u64::from(size)).product::<u64>()
        });
        let is_lookup = node.work.table().is_some();
        elements[units.of[id]] += if is_lookup { 0 } else { of_node.sum() };
    }
    let memory = |gpu: &DeviceId| task.target.machine.devices[*gpu].memory_bytes as f64;
    let all_memory: f64 = gpus.iter().map(memory).sum();
    let all_elements = elements.iter().sum::<u64>() as f64;
    let (mut start, mut taken, mut share) = (0, 0.0, 0.0);
    let mut stages = Vec::new();
    for (index, gpu) in gpus.iter().enumerate() {
        share += memory(gpu) / all_memory;
        let after = gpus.len() - 1 - index;
        let mut end = start;
        while end + after < units.len() {
            let next = elements[end] as f64;
            // Where the limit cuts a unit, whoever has more of it takes it.
            if after > 0 && end > start && taken + next / 2.0 > share * all_elements {
                break;
            }
            taken += next;
            end += 1;
        }
        if end == start {
            return None;
        }
        stages.push((*gpu, start..end));
        start = end;
    }
    Some(stages)
}
