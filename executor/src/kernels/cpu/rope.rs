//! Rotary position embedding: the tables of a run, and the turning of a head.

use ir::op::Pairing;

use super::lanes::{LANES, Lanes};
use super::rows::for_each_row;
use crate::team::Team;

/// The rotation of every token of a run, for the leading elements of each head.
#[derive(Clone, Copy, Debug)]
pub struct RopeView<'a> {
    /// Which elements turn together.
    pub pairing: Pairing,
    /// Leading elements of a head that turn.
    pub dims: usize,
    /// For each token `dims / 2` cosines, then as many sines: `[tokens, dims]`.
    pub table: &'a [f32],
}

/// Writes cosine and sine of `position · frequency`, times `magnitude`, for each of `positions`, all of sequences
/// with these frequencies: `[positions, 2, frequencies]`.
///
/// Angles are products of 32 bits and their functions are those of 32-bit floats, as in `transformers`.
pub fn rope_table(
    team: &Team,
    positions: &[u32],
    frequencies: &[f32],
    magnitude: f32,
    table: &mut [f32],
) {
    let pairs = frequencies.len();
    assert_eq!(table.len(), positions.len() * 2 * pairs, "two numbers for each angle");
    for_each_row(team, 2 * pairs, table, |first, table| {
        let positions = &positions[first / (2 * pairs)..];
        for (row, &position) in table.chunks_exact_mut(2 * pairs).zip(positions) {
            rope_row(position, frequencies, magnitude, row);
        }
    });
}

/// Writes the row of one position: all cosines, then all sines.
pub(crate) fn rope_row(position: u32, frequencies: &[f32], magnitude: f32, row: &mut [f32]) {
    let (cos, sin) = row.split_at_mut(frequencies.len());
    for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(frequencies) {
        let (s, c) = (position as f32 * frequency).sin_cos();
        (*cos, *sin) = (c * magnitude, s * magnitude);
    }
}

/// Turns one head of `token` in place.
#[inline(always)]
pub(super) fn rotate<L: Lanes>(rope: &RopeView, token: usize, head: &mut [f32]) {
    let pairs = rope.dims / 2;
    let row = &rope.table[token * rope.dims..(token + 1) * rope.dims];
    let (cos, sin) = row.split_at(pairs);
    match rope.pairing {
        Pairing::Halves => {
            let (first, second) = head[..rope.dims].split_at_mut(pairs);
            let halves = first.chunks_mut(LANES).zip(second.chunks_mut(LANES));
            for (i, (first, second)) in halves.enumerate() {
                let (cos, sin) = (L::read(&cos[i * LANES..]), L::read(&sin[i * LANES..]));
                let (a, b) = (L::read(first), L::read(second));
                a.mul(cos).sub(b.mul(sin)).write(first);
                b.mul(cos).add(a.mul(sin)).write(second);
            }
        }
        Pairing::Neighbours => {
            for (pair, (cos, sin)) in head[..rope.dims].chunks_exact_mut(2).zip(cos.iter().zip(sin))
            {
                let [a, b] = [pair[0], pair[1]];
                pair[0] = a * cos - b * sin;
                pair[1] = b * cos + a * sin;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::with_team;
    use super::*;

    #[test]
    fn tables_hold_cosines_then_sines_of_every_position() {
        let frequencies: Vec<f32> = (0..33).map(|i| 1e4_f32.powf(-i as f32 / 33.0)).collect();
        let positions: Vec<u32> = (0..600).map(|i| i * 211 % 100_000).collect();
        let mut table = vec![f32::NAN; positions.len() * 66];
        with_team(2, |team| rope_table(team, &positions, &frequencies, 1.5, &mut table));
        for (row, &position) in table.chunks_exact(66).zip(&positions) {
            for (i, frequency) in frequencies.iter().enumerate() {
                let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
                assert!((f64::from(row[i]) - 1.5 * cos).abs() < 3e-7);
                assert!((f64::from(row[33 + i]) - 1.5 * sin).abs() < 3e-7);
            }
        }
    }
}
