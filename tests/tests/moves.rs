//! The table of moves, held against numbers: every pair of small layouts, up to three devices.

use std::collections::BTreeMap;

use ir::id::{DeviceId, Id as _};
use ir::layout::{Layout, Move, Share, moves};

const SIZE: u32 = 6;

/// Rows of a matrix, or of a slice of one.
type Rows = Vec<Vec<i64>>;
/// What each device holds.
type Held = BTreeMap<DeviceId, Rows>;

#[test]
fn moves_bring_every_layout_to_every_other() {
    let layouts = layouts();
    for have in &layouts {
        for need in layouts.iter().filter(|need| need.share != Share::Partial) {
            let mut held = holding(have);
            let mut now = have.clone();
            for (movement, after) in moves(have, need).expect("the layouts name devices") {
                held = moved(&movement, &held, &now, &after);
                now = after;
            }
            let expected = holding(need);
            for device in &need.devices {
                assert_eq!(
                    held.get(device),
                    expected.get(device),
                    "{device} after {:?} of {have} to {need}",
                    moves(have, need)
                );
            }
        }
    }
}

#[test]
fn no_one_may_ask_for_partial_sums() {
    let layouts = layouts();
    for need in layouts.iter().filter(|need| need.share == Share::Partial) {
        for have in layouts.iter().filter(|have| *have != need) {
            assert!(moves(have, need).is_err(), "{have} to {need}");
        }
    }
}

#[test]
fn what_is_held_as_needed_is_not_moved() {
    for layout in layouts() {
        assert_eq!(moves(&layout, &layout).expect("the layout names devices"), []);
    }
}

/// Every layout of a matrix on up to three devices, in every order, cut in every way.
fn layouts() -> Vec<Layout> {
    let mut layouts = Vec::new();
    for devices in ordered_choices() {
        let mut shares = vec![Share::Whole, Share::Partial];
        for parts in compositions(SIZE, devices.len()) {
            shares.extend([0, 1].map(|axis| Share::Split { axis, parts: parts.clone().into() }));
        }
        layouts.extend(
            shares.into_iter().map(|share| Layout { devices: devices.clone().into(), share }),
        );
    }
    layouts
}

fn ordered_choices() -> Vec<Vec<DeviceId>> {
    let all: Vec<DeviceId> = (0..3).map(DeviceId::from_index).collect();
    let mut choices: Vec<Vec<DeviceId>> = vec![vec![]];
    let mut from = 0;
    while from < choices.len() {
        let shorter = choices[from].clone();
        let more = all.iter().filter(|device| !shorter.contains(device));
        choices.extend(more.map(|&device| [shorter.as_slice(), &[device]].concat()));
        from += 1;
    }
    choices.remove(0);
    choices
}

/// All ways to write `total` as a sum of `count` positive numbers.
fn compositions(total: u32, count: usize) -> Vec<Vec<u32>> {
    if count == 1 {
        return vec![vec![total]];
    }
    let mut all = Vec::new();
    for first in 1..total + 1 - (count as u32 - 1) {
        for rest in compositions(total - first, count - 1) {
            all.push([&[first], rest.as_slice()].concat());
        }
    }
    all
}

fn whole() -> Rows {
    let size = i64::from(SIZE);
    (0..size).map(|row| (0..size).map(|column| row * size + column + 1).collect()).collect()
}

/// The matrix as the devices of a layout hold it.
fn holding(layout: &Layout) -> Held {
    let members = layout.devices.iter().enumerate();
    members
        .map(|(member, &device)| {
            let rows = match &layout.share {
                Share::Whole => whole(),
                Share::Split { axis, .. } => cut(&whole(), *axis, slice(layout, member)),
                Share::Partial => term(member, layout.devices.len()),
            };
            (device, rows)
        })
        .collect()
}

/// Terms that differ and add up to the matrix.
fn term(member: usize, count: usize) -> Rows {
    let mut rows = whole();
    for number in rows.iter_mut().flatten() {
        let small = *number * 10 + member as i64;
        let others: i64 = (1..count as i64).map(|other| *number * 10 + other).sum();
        *number = if member == 0 { *number - others } else { small };
    }
    rows
}

fn slice(layout: &Layout, member: usize) -> (u32, u32) {
    layout.slice(member).expect("the layout is cut")
}

fn cut(rows: &Rows, axis: u8, (start, size): (u32, u32)) -> Rows {
    let range = start as usize..(start + size) as usize;
    match axis {
        0 => rows[range].to_vec(),
        _ => rows.iter().map(|row| row[range.clone()].to_vec()).collect(),
    }
}

/// What is held after a movement. What a device holds beside the layout's value is forgotten, except that
/// a broadcast leaves those alone that hold the whole.
fn moved(movement: &Move, held: &Held, before: &Layout, after: &Layout) -> Held {
    let parts: Vec<&Rows> = before.devices.iter().map(|device| &held[device]).collect();
    let everywhere = |rows: Rows| after.devices.iter().map(|&d| (d, rows.clone())).collect();
    let own_slice = |rows: &dyn Fn(DeviceId) -> Rows, axis: u8| {
        let members = after.devices.iter().enumerate();
        members.map(|(m, &d)| (d, cut(&rows(d), axis, slice(after, m)))).collect()
    };
    match *movement {
        Move::Transfer { from, to } => Held::from([(to, held[&from].clone())]),
        Move::Broadcast { from } => {
            let copy = |device: &DeviceId| held.get(device).unwrap_or(&held[&from]).clone();
            after.devices.iter().map(|device| (*device, copy(device))).collect()
        }
        Move::AllReduce => everywhere(sum(&parts)),
        Move::AllGather { axis } => everywhere(join(&parts, axis)),
        Move::ReduceScatter { axis } => own_slice(&|_| sum(&parts), axis),
        Move::Slice { axis } => own_slice(&|device| held[&device].clone(), axis),
    }
}

fn sum(terms: &[&Rows]) -> Rows {
    let mut total = terms[0].clone();
    for term in &terms[1..] {
        for (to, from) in total.iter_mut().flatten().zip(term.iter().flatten()) {
            *to += from;
        }
    }
    total
}

fn join(parts: &[&Rows], axis: u8) -> Rows {
    if axis == 0 {
        return parts.iter().copied().flatten().cloned().collect();
    }
    (0..parts[0].len()).map(|row| parts.iter().flat_map(|p| p[row].clone()).collect()).collect()
}
