//! Sums over unlike devices, in one crossing or by groups: GPUs among themselves and NUMA nodes among themselves, then
//! each device adds the sums of the other groups, which one member of each speaks for.

use anyhow::Result;
use ir::id::DeviceId;
use ir::layout::Move;

use crate::cost::{Way, move_nanos};
use crate::target::Target;

/// The members of a sum over `devices` by kind, as indices, where summing by groups is predicted faster; `None` where
/// one crossing is, or there is nothing to group. Every member holds a term of `bytes` bytes, which crosses as letters
/// alone do if it does so `by_letters`.
///
/// # Errors
/// When no link leads from one of them to another.
pub(crate) fn groups(
    target: &Target,
    devices: &[DeviceId],
    bytes: u64,
    by_letters: bool,
) -> Result<Option<Vec<Vec<usize>>>> {
    let is_gpu = |device: DeviceId| target.machine.devices[device].kind.is_gpu();
    let (gpus, nodes): (Vec<usize>, Vec<usize>) =
        (0..devices.len()).partition(|&member| is_gpu(devices[member]));
    if gpus.is_empty() || nodes.is_empty() || devices.len() == 2 {
        return Ok(None);
    }
    let groups = vec![gpus, nodes];
    let way = Way::alone(by_letters);
    let sum = |device: DeviceId, terms: &mut dyn Iterator<Item = usize>| {
        let incoming: Vec<(DeviceId, u64)> = terms.map(|term| (devices[term], bytes)).collect();
        move_nanos(target, device, &Move::AllReduce, &incoming, bytes, way)
    };
    let slowest = |nanos: Vec<f64>| nanos.into_iter().fold(0.0, f64::max);
    let at_once: Vec<f64> = devices
        .iter()
        .map(|&device| sum(device, &mut (0..devices.len())))
        .collect::<Result<_>>()?;
    let mut within = Vec::new();
    let mut across = Vec::new();
    for (index, group) in groups.iter().enumerate() {
        for &member in group {
            if group.len() > 1 {
                within.push(sum(devices[member], &mut group.iter().copied())?);
            }
            let mut terms = terms(&groups, index, member).into_iter();
            across.push(sum(devices[member], &mut terms)?);
        }
    }
    let by_groups = slowest(within) + slowest(across);
    Ok((by_groups < slowest(at_once)).then_some(groups))
}

/// Whose sums a member of group number `own` adds up, one for each group: its own, and the first member's of each
/// other.
pub(crate) fn terms(groups: &[Vec<usize>], own: usize, member: usize) -> Vec<usize> {
    let speaker =
        |(index, group): (usize, &Vec<usize>)| if index == own { member } else { group[0] };
    groups.iter().enumerate().map(speaker).collect()
}
