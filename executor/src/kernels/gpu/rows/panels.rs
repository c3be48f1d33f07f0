//! Rows picked from a table word by word: of panels, where a row's words lie a vector or two apart, and of the host's
//! memory, by address.

use cubecl::prelude::*;
use ir::tensor::Format;

use crate::kernels::cpu::pack::{BLOCK_PAIR, PANEL, packed_bytes, padded};
use crate::kernels::gpu::addressed::load_word;
use crate::kernels::gpu::matrix::Layout;
use crate::kernels::gpu::panel::panel_vectors;
use crate::kernels::gpu::words::half_of;

/// What is known of a table when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Table {
    pub(super) format: Format,
    pub(super) layout: Layout,
    pub(super) columns: usize,
    /// Whether it lies at an address: of its words, which are left out then, the hash of a kernel on disk has no trace
    /// (see [`crate::kernels::gpu::given`]).
    pub(super) is_reached: bool,
}

impl Table {
    /// Words that hold something of a row, each for one unit.
    pub(super) fn words(self) -> usize {
        match (self.format, self.layout) {
            (Format::F32, Layout::RowMajor) => self.columns,
            (Format::F32 | Format::F16, Layout::Panels) => padded(self.format, self.columns),
            // Rows are whole loads.
            (Format::F16 | Format::Bf16, Layout::RowMajor) => self.columns / 2,
            (Format::Bf16, Layout::Panels) => padded(self.format, self.columns) / 2,
            (Format::Q8, _) => padded(self.format, self.columns) / 4,
            (Format::Q4, _) => padded(self.format, self.columns) / 8,
            (Format::Bf12, _) => unreachable!("no table is in 12 bits"),
        }
    }

    /// Whether a word has an element of each of two rows, not two of one.
    fn has_pairs_of_rows(self) -> bool {
        matches!((self.format, self.layout), (Format::F16, Layout::Panels))
    }

    /// Words from one panel to the next.
    fn stride(self) -> usize {
        packed_bytes(self.format, PANEL, self.columns) / size_of::<u32>()
    }

    /// Words of a row in a block pair, less its two scales, which are one word.
    fn pair_words(self) -> usize {
        packed_bytes(self.format, PANEL, BLOCK_PAIR) / size_of::<u32>() / PANEL - 1
    }
}

/// `out[i] = table[rows[i] + offset] · scale (+ base[i])`; each unit takes a word of the table, which is `words` or lies
/// at `address`.
#[cube(launch)]
pub(super) fn gather_words(
    words: &ComptimeOption<Box<[u32]>>,
    address: u64,
    rows: &[u32],
    base: &ComptimeOption<Box<[f32]>>,
    out: &mut [f32],
    scale: f32,
    offset: u32,
    table_rows: usize,
    all: usize,
    #[comptime] table: Table,
) {
    let at = ABSOLUTE_POS;
    if at < all {
        let (index, word) = (at / comptime!(table.words()), at % comptime!(table.words()));
        let row = rows[index] as usize + offset as usize;
        let mut start = row * comptime!(table.words());
        let mut lanes = 1usize.runtime();
        let mut lane = 0usize.runtime();
        if comptime!(table.layout == Layout::Panels) {
            let number = row / PANEL;
            start = number * comptime!(table.stride());
            lanes = panel_vectors(table_rows, number) * comptime!(PANEL / 2);
            lane = row % PANEL;
        }
        let first = index * table.columns;
        match comptime!(table.format) {
            Format::F32 => {
                let bits = word_at(words, address, start + word * lanes + lane);
                put(out, base, first, word, scale * f32::reinterpret(bits), table);
            }
            Format::F16 | Format::Bf16 => {
                if comptime!(table.has_pairs_of_rows()) {
                    let pair = word_at(words, address, start + (word * lanes + lane) / 2);
                    put(out, base, first, word, scale * half_at(pair, lane), table);
                } else {
                    let pair = word_at(words, address, start + word * lanes + lane);
                    #[unroll]
                    for i in 0..2usize {
                        let value = half_of(pair, i, table.format);
                        put(out, base, first, 2 * word + i, scale * value, table);
                    }
                }
            }
            Format::Q8 => {
                let (pair, group) =
                    (word / comptime!(table.pair_words()), word % comptime!(table.pair_words()));
                let start = start + pair * lanes * comptime!(table.pair_words() + 1);
                let block = group / comptime!(table.pair_words() / 2);
                let scales = word_at(words, address, start + (block * lanes + lane) / 2);
                let factor = scale * half_at(scales, lane);
                let codes = word_at(words, address, start + (group + 1) * lanes + lane);
                #[unroll]
                for i in 0..4usize {
                    let value = factor * code(codes, 8 * i, 8u32);
                    put(out, base, first, 4 * word + i, value, table);
                }
            }
            Format::Bf12 => comptime!(unreachable!("no table is in 12 bits")),
            Format::Q4 => {
                let (pair, group) =
                    (word / comptime!(table.pair_words()), word % comptime!(table.pair_words()));
                let start = start + pair * lanes * comptime!(table.pair_words() + 1);
                let codes = word_at(words, address, start + (group + 1) * lanes + lane);
                #[unroll]
                for block in 0..2usize {
                    let scales = word_at(words, address, start + (block * lanes + lane) / 2);
                    let factor = scale * half_at(scales, lane);
                    let column = pair * BLOCK_PAIR + comptime!(block * BLOCK_PAIR / 2) + 4 * group;
                    #[unroll]
                    for i in 0..4usize {
                        let value = factor * code(codes, 8 * i + 4 * block, 4u32);
                        put(out, base, first, column + i, value, table);
                    }
                }
            }
        }
    }
}

/// Word number `at` of a table.
#[cube]
fn word_at(words: &ComptimeOption<Box<[u32]>>, address: u64, at: usize) -> u32 {
    #[comptime]
    match words.clone() {
        ComptimeOption::Some(words) => words[at],
        ComptimeOption::None => load_word(address + u64::cast_from(at) * 4),
    }
}

/// The half of a word that is a lane's, where lanes are in pairs.
#[cube]
fn half_at(word: u32, lane: usize) -> f32 {
    let (lower, upper) = (half_of(word, 0usize, Format::F16), half_of(word, 1usize, Format::F16));
    select(lane % 2 == 1, upper, lower)
}

/// A block's code of `bits` bits, from bit `lowest` of a word on, less what stands for zero.
#[cube]
fn code(word: u32, #[comptime] lowest: usize, #[comptime] bits: u32) -> f32 {
    let code = (word >> comptime!(lowest as u32)) & comptime!((1u32 << bits) - 1);
    f32::cast_from(code) - comptime!((1u32 << (bits - 1)) as f32)
}

#[cube]
fn put(
    out: &mut [f32],
    base: &ComptimeOption<Box<[f32]>>,
    first: usize,
    column: usize,
    value: f32,
    #[comptime] table: Table,
) {
    if column < table.columns {
        let mut value = value;
        #[comptime]
        match base.clone() {
            ComptimeOption::Some(base) => value += base[first + column],
            ComptimeOption::None => {}
        }
        out[first + column] = value;
    }
}

#[cfg(test)]
mod tests {
    use crate::kernels::gpu::device::Gpu;
    use crate::kernels::gpu::matrix::testing::{SPOILT_ROWS, panels, panels_of, spoilt};
    use crate::kernels::gpu::rows::Gather;
    use crate::kernels::gpu::testing::gpu;

    use super::*;

    const ROWS: [u32; 5] = [38, 0, 2, 31, 2];
    const OFFSET: u32 = 2;

    fn check(gpu: &Gpu, format: Format, table_rows: usize, features: usize, with_base: bool) {
        let table = panels(gpu, format, table_rows, features, 3);
        let count = ROWS.len() * features;
        let base: Vec<f32> = (0..count).map(|i| i as f32 * 0.25).collect();
        let base_span = gpu.upload(&base);
        let out = gpu.poisoned(count * 4);
        let call = Gather {
            rows: &gpu.upload(&ROWS),
            offset: OFFSET,
            scale: 1.5,
            base: with_base.then_some(&base_span),
            count: ROWS.len(),
            features,
        };
        gpu.gather(&table.matrix, &call, &out).unwrap();
        for (i, actual) in gpu.download::<f32>(&out, count).into_iter().enumerate() {
            let row = (ROWS[i / features] + OFFSET) as usize;
            let base = if with_base { f64::from(base[i]) } else { 0.0 };
            let expected = table.values[row * features + i % features] * 1.5 + base;
            let distance = (f64::from(actual) - expected).abs();
            assert!(
                distance <= 1e-6 * expected.abs(),
                "{actual} is not {expected}: {format}, {table_rows} by {features}, element {i}"
            );
        }
    }

    /// Formats of tables.
    fn formats() -> impl Iterator<Item = Format> {
        Format::ALL.into_iter().filter(|&format| format != Format::Bf12)
    }

    #[test]
    fn what_is_infinite_or_no_number_is_picked_as_such() {
        let Some(gpu) = gpu() else { return };
        let (table_rows, features) = (41, 72);
        let wide = spoilt(table_rows, features, 3);
        let count = SPOILT_ROWS.len() * features;
        for format in formats() {
            let table = panels_of(&gpu, format, table_rows, features, &wide);
            let out = gpu.upload(&vec![0.0_f32; count]);
            let call = Gather {
                rows: &gpu.upload(&SPOILT_ROWS),
                offset: 0,
                scale: 1.5,
                base: None,
                count: SPOILT_ROWS.len(),
                features,
            };
            gpu.gather(&table.matrix, &call, &out).unwrap();
            for (i, actual) in gpu.download::<f32>(&out, count).into_iter().enumerate() {
                let row = SPOILT_ROWS[i / features] as usize;
                let expected = table.values[row * features + i % features] * 1.5;
                let is_right = if expected.is_finite() {
                    (f64::from(actual) - expected).abs() <= 1e-6 * expected.abs()
                } else {
                    !actual.is_finite()
                };
                assert!(is_right, "{actual} is not {expected}: {format}, row {row}, element {i}");
            }
        }
    }

    #[test]
    fn rows_of_every_format_are_picked_scaled_and_added() {
        let Some(gpu) = gpu() else { return };
        for format in formats() {
            for with_base in [false, true] {
                // The last panel has one vector, then two.
                check(&gpu, format, 41, 72, with_base);
                check(&gpu, format, 64, 128, with_base);
                check(&gpu, format, 50, 37, with_base);
            }
        }
    }
}
