//! What moves whole rows.

#![expect(unsafe_code, reason = "members write disjoint parts of one slice")]

use super::disjoint::DisjointMut;
use crate::team::Team;

/// Below this many floats one member is done before others would have begun (4 µs of reading and writing).
const LONE_FLOATS: usize = 16 * 1024;

/// Calls `work(first, rows)` with pieces of `out`, cut between rows of `row` floats, on members of the team;
/// `first` is the index in `out` of the piece's first float.
pub(crate) fn for_each_row(
    team: &Team,
    row: usize,
    out: &mut [f32],
    work: impl Fn(usize, &mut [f32]) + Sync,
) {
    assert!(row > 0 && out.len().is_multiple_of(row), "whole rows");
    if out.len() <= LONE_FLOATS || team.members() == 1 {
        return work(0, out);
    }
    let rows = out.len() / row;
    let grain = (LONE_FLOATS / 4 / row).max(1);
    let out = DisjointMut::new(out);
    team.for_each_chunk(rows, grain, |range| {
        // SAFETY: every row is dealt out once.
        let piece = unsafe { out.part(range.start * row..range.end * row) };
        work(range.start * row, piece);
    });
}

/// Copies rows `rows` of `x`, each of `features`, to `out`.
pub fn select_rows(features: usize, x: &[f32], rows: &[u32], out: &mut [f32]) {
    assert_eq!(out.len(), rows.len() * features, "one output row for each selected one");
    for (out, &row) in out.chunks_exact_mut(features).zip(rows) {
        let start = row as usize * features;
        out.copy_from_slice(&x[start..start + features]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selected_rows_come_in_the_order_asked_for() {
        let x: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let mut out = [0.0; 6];
        select_rows(3, &x, &[3, 0], &mut out);
        assert_eq!(out, [9.0, 10.0, 11.0, 0.0, 1.0, 2.0]);
    }
}
