//! Where a value lives, and the moves that bring it where it is needed.

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::id::{DeviceId, Few};

/// Which devices hold a value, and what each of them holds.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layout {
    /// Distinct devices. Their order is the order of parts, and of sums.
    pub devices: Few<DeviceId>,
    /// What each of them holds.
    pub share: Share,
}

/// What each device of a layout holds.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Share {
    /// Every device holds all of it.
    Whole,
    /// Each device holds one slice along `axis`, in the order of the devices.
    Split {
        /// The axis that is cut.
        axis: u8,
        /// Elements along it on each device; they need not be equal.
        parts: Few<u32>,
    },
    /// Each device holds a term; the value is their sum.
    Partial,
}

/// Data movement that a graph states openly rather than leaving to a backend.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Move {
    /// One device's value, copied to another.
    Transfer {
        /// Holder of the value.
        from: DeviceId,
        /// Receiver of the copy.
        to: DeviceId,
    },
    /// One device's value, copied to all devices of the layout that lack it.
    Broadcast {
        /// Holder of the value.
        from: DeviceId,
    },
    /// The sum of all terms, on every device.
    AllReduce,
    /// All slices, on every device.
    AllGather {
        /// The axis that was cut.
        axis: u8,
    },
    /// The sum of all terms, one slice on each device.
    ReduceScatter {
        /// The axis to cut.
        axis: u8,
    },
    /// Each device's own slice of the whole it holds; nothing crosses a link.
    Slice {
        /// The axis to cut.
        axis: u8,
    },
}

/// The moves that turn a value held as `have` into one held as `need`, each with the layout it leaves behind.
///
/// Every transfer and collective follows from this one table. Fails when `need` asks for partial sums or
/// one of the layouts names no device.
pub fn moves(have: &Layout, need: &Layout) -> Result<Vec<(Move, Layout)>> {
    use Share::{Partial, Split, Whole};
    if have.devices.is_empty() || need.devices.is_empty() {
        bail!("a layout names no device");
    }
    if have == need {
        return Ok(Vec::new());
    }
    let whole = |layout: &Layout| Layout { devices: layout.devices.clone(), share: Whole };
    if have.devices == need.devices {
        let one = |movement| Ok(vec![(movement, need.clone())]);
        return match (&have.share, &need.share) {
            (_, Partial) => bail!("no consumer may ask for partial sums"),
            (Whole, Whole) => Ok(Vec::new()),
            (Partial, Whole) => one(Move::AllReduce),
            (Partial, Split { axis, .. }) => one(Move::ReduceScatter { axis: *axis }),
            (Split { axis, .. }, Whole) => one(Move::AllGather { axis: *axis }),
            (Whole, Split { axis, .. }) => one(Move::Slice { axis: *axis }),
            (Split { axis: from, .. }, Split { axis: to, .. }) => Ok(vec![
                (Move::AllGather { axis: *from }, whole(have)),
                (Move::Slice { axis: *to }, need.clone()),
            ]),
        };
    }
    let mut made = moves(have, &whole(have))?;
    let missing: Few<DeviceId> =
        need.devices.iter().copied().filter(|device| !have.devices.contains(device)).collect();
    let from = have.devices[0];
    match (missing.as_slice(), need.devices.as_slice()) {
        // All of them hold the whole already.
        ([], _) => (),
        ([to], [_]) => made.push((Move::Transfer { from, to: *to }, whole(need))),
        _ => made.push((Move::Broadcast { from }, whole(need))),
    }
    made.extend(moves(&whole(need), need)?);
    Ok(made)
}

impl Layout {
    /// All of a value on one device.
    pub fn on(device: DeviceId) -> Self {
        Self { devices: smallvec![device], share: Share::Whole }
    }

    /// All of a value on each of several devices.
    pub fn whole(devices: &[DeviceId]) -> Self {
        Self { devices: devices.into(), share: Share::Whole }
    }

    /// Position of a device among the parts.
    pub fn member(&self, device: DeviceId) -> Option<usize> {
        self.devices.iter().position(|&d| d == device)
    }

    /// `(start, size)` of a member's slice; `None` where nothing is cut.
    pub fn slice(&self, member: usize) -> Option<(u32, u32)> {
        match &self.share {
            Share::Split { parts, .. } => Some((parts[..member].iter().sum(), parts[member])),
            Share::Whole | Share::Partial => None,
        }
    }
}
