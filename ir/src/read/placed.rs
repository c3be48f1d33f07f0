//! Placed work as its `Display` writes it.

use anyhow::{Result, ensure};

use super::line::Line;
use super::op;
use crate::graph::{Cause, Placed, Reason, Work};
use crate::id::{DeviceId, Few};
use crate::layout::{Layout, Move, Share};

/// Leaves the needs empty where the text leaves them out.
pub(super) fn read(line: &mut Line<'_>) -> Result<Placed> {
    let layouts: Vec<Layout> = line.list(layout)?;
    line.expect(" ")?;
    let work = match movement(line)? {
        Some(movement) => Work::Move(movement),
        None => Work::Compute(op::read(line)?),
    };
    let inner = line.field(" inner=", |line| line.separated("+", Line::count))?;
    let home = line.field(" home=", |line| line.row("d"))?;
    let needs = line.field(" needs ", |line| line.list(layout))?;
    Ok(Placed {
        work,
        needs: needs.unwrap_or_default(),
        layouts,
        inner: inner.unwrap_or_default(),
        home,
        cause: Cause { reason: Reason::FollowsInput, runner_up: None },
    })
}

/// `@d0+d1/1:96+64`.
fn layout(line: &mut Line<'_>) -> Result<Layout> {
    line.expect("@")?;
    let devices: Few<DeviceId> = line.separated("+", |line| line.row("d"))?;
    let share = if line.eat("/sum") {
        Share::Partial
    } else if line.eat("/") {
        let axis = line.count()?;
        line.expect(":")?;
        Share::Split { axis, parts: line.separated("+", Line::count)? }
    } else {
        Share::Whole
    };
    if let Share::Split { parts, .. } = &share {
        ensure!(
            parts.len() == devices.len(),
            "{} parts for {} devices",
            parts.len(),
            devices.len()
        );
    }
    Ok(Layout { devices, share })
}

/// A movement, if one is next.
fn movement(line: &mut Line<'_>) -> Result<Option<Move>> {
    Ok(Some(if line.eat("transfer ") {
        let from = line.row("d")?;
        line.expect(" -> ")?;
        Move::Transfer { from, to: line.row("d")? }
    } else if line.eat("broadcast ") {
        Move::Broadcast { from: line.row("d")? }
    } else if line.eat("all_reduce") {
        Move::AllReduce
    } else if line.eat("all_gather axis=") {
        Move::AllGather { axis: line.count()? }
    } else if line.eat("reduce_scatter axis=") {
        Move::ReduceScatter { axis: line.count()? }
    } else if line.eat("slice axis=") {
        Move::Slice { axis: line.count()? }
    } else {
        return Ok(None);
    }))
}
