//! What moves or adds whole rows: looking up embeddings and positions, selecting, adding, scaling.

#![expect(unsafe_code, reason = "members write disjoint parts of one slice")]

use half::{bf16, f16};

use super::isa::Isa;
use super::lanes::{Kernel, LANES, Lanes, vectorize};
use crate::team::Team;

/// Below this many floats one member is done before others would have begun (4 µs of reading and writing).
const LONE_FLOATS: usize = 16 * 1024;

/// A table whose rows are looked up, `[rows, features]`.
#[derive(Clone, Copy, Debug)]
pub enum Lookup<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// IEEE halves.
    F16(&'a [f16]),
    /// Bfloat16.
    Bf16(&'a [bf16]),
}

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
    let whole = Whole(out.as_mut_ptr());
    let rows = out.len() / row;
    let grain = (LONE_FLOATS / 4 / row).max(1);
    team.for_each_chunk(rows, grain, |range| {
        let whole = &whole;
        // SAFETY: chunks are disjoint and lie in `out`, which is borrowed until all are done.
        let piece = unsafe {
            std::slice::from_raw_parts_mut(whole.0.add(range.start * row), range.len() * row)
        };
        work(range.start * row, piece);
    });
}

/// A slice that members write disjoint parts of.
pub(crate) struct Whole<T>(pub(crate) *mut T);

// SAFETY: who dereferences the pointer says why no two members touch the same part.
unsafe impl<T: Send> Sync for Whole<T> {}

/// Writes row `ids[i]` of `table` times `scale` to row `i` of `out`, `[ids, features]`.
///
/// # Panics
/// When an id lies outside of the table.
pub fn embed(team: &Team, isa: Isa, table: Lookup, ids: &[u32], scale: f32, out: &mut [f32]) {
    gather_rows(team, isa, table, ids, 0, Gathered::Scaled(scale), out);
}

/// Adds row `positions[i] + offset` of `table` to row `i` of `x`, `[tokens, features]`.
///
/// # Panics
/// When a position lies outside of the table.
pub fn add_positions(
    team: &Team,
    isa: Isa,
    table: Lookup,
    positions: &[u32],
    offset: u32,
    x: &mut [f32],
) {
    gather_rows(team, isa, table, positions, offset, Gathered::Added, x);
}

/// Copies rows `rows` of `x`, each of `features`, to `out`.
pub fn select_rows(features: usize, x: &[f32], rows: &[u32], out: &mut [f32]) {
    assert_eq!(out.len(), rows.len() * features, "one output row for each selected one");
    for (out, &row) in out.chunks_exact_mut(features).zip(rows) {
        let start = row as usize * features;
        out.copy_from_slice(&x[start..start + features]);
    }
}

/// What becomes of a row that was looked up.
#[derive(Clone, Copy)]
enum Gathered {
    /// It is multiplied and stored.
    Scaled(f32),
    /// It is added to what is there.
    Added,
}

fn gather_rows(
    team: &Team,
    isa: Isa,
    table: Lookup,
    ids: &[u32],
    offset: u32,
    gathered: Gathered,
    out: &mut [f32],
) {
    if ids.is_empty() {
        return;
    }
    let features = out.len() / ids.len();
    assert!(features * ids.len() == out.len(), "one row for each id");
    for_each_row(team, features, out, |first, out| {
        for (i, out) in out.chunks_exact_mut(features).enumerate() {
            let index = first / features + i;
            let start = (ids[index] + offset) as usize * features;
            let range = start..start + features;
            let row = match table {
                Lookup::F32(table) => Lookup::F32(&table[range]),
                Lookup::F16(table) => Lookup::F16(&table[range]),
                Lookup::Bf16(table) => Lookup::Bf16(&table[range]),
            };
            vectorize(isa, GatherRow { row, gathered, out });
        }
    });
}

struct GatherRow<'a> {
    row: Lookup<'a>,
    gathered: Gathered,
    out: &'a mut [f32],
}

impl Kernel for GatherRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        for (i, out) in self.out.chunks_mut(LANES).enumerate() {
            let range = i * LANES..i * LANES + out.len();
            let value = if out.len() == LANES {
                // SAFETY: rows are as long as `out`, so 16 elements can be read.
                unsafe {
                    match self.row {
                        Lookup::F32(row) => L::load(row[range].as_ptr()),
                        Lookup::F16(row) => L::load_f16(row[range].as_ptr().cast()),
                        Lookup::Bf16(row) => L::load_bf16(row[range].as_ptr().cast()),
                    }
                }
            } else {
                let mut padded = [0.0; LANES];
                for (padded, at) in padded.iter_mut().zip(range) {
                    *padded = match self.row {
                        Lookup::F32(row) => row[at],
                        Lookup::F16(row) => row[at].to_f32(),
                        Lookup::Bf16(row) => row[at].to_f32(),
                    };
                }
                L::read(&padded)
            };
            match self.gathered {
                Gathered::Scaled(scale) => value.mul(L::splat(scale)).write(out),
                Gathered::Added => L::read(out).add(value).write(out),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Random, with_team};
    use super::*;

    /// Looks rows up and adds positions, for one way of storing the table.
    fn check(
        features: usize,
        tokens: usize,
        store: impl Fn(&[f32], &mut dyn FnMut(Lookup)) + Sync,
    ) {
        let mut random = Random(3);
        // Multiples of 1/4 below 32 are the same in all formats.
        let table: Vec<f32> =
            (0..40 * features).map(|_| (random.next() % 128) as f32 / 4.0).collect();
        let ids: Vec<u32> = (0..tokens).map(|_| (random.next() % 38) as u32).collect();
        let row = |id: u32| &table[id as usize * features..][..features];
        with_team(2, |team| {
            for isa in Isa::available() {
                store(&table, &mut |lookup| {
                    let mut out = vec![f32::NAN; tokens * features];
                    embed(team, isa, lookup, &ids, 0.5, &mut out);
                    for (out, &id) in out.chunks_exact(features).zip(&ids) {
                        assert!(out.iter().zip(row(id)).all(|(out, x)| *out == x * 0.5), "{isa}");
                    }
                    add_positions(team, isa, lookup, &ids, 2, &mut out);
                    for (out, &id) in out.chunks_exact(features).zip(&ids) {
                        let sums = row(id).iter().zip(row(id + 2)).map(|(x, y)| x * 0.5 + y);
                        assert!(sums.zip(out).all(|(sum, out)| sum == *out), "{isa}");
                    }
                });
            }
        });
    }

    #[test]
    fn rows_of_all_formats_are_looked_up() {
        for (features, tokens) in [(1, 1), (16, 3), (23, 5), (600, 64)] {
            check(features, tokens, |table, run| run(Lookup::F32(table)));
            check(features, tokens, |table, run| {
                let table: Vec<f16> = table.iter().map(|&x| f16::from_f32(x)).collect();
                run(Lookup::F16(&table));
            });
            check(features, tokens, |table, run| {
                let table: Vec<bf16> = table.iter().map(|&x| bf16::from_f32(x)).collect();
                run(Lookup::Bf16(&table));
            });
        }
    }

    #[test]
    fn selected_rows_come_in_the_order_asked_for() {
        let x: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let mut out = [0.0; 6];
        select_rows(3, &x, &[3, 0], &mut out);
        assert_eq!(out, [9.0, 10.0, 11.0, 0.0, 1.0, 2.0]);
    }
}
