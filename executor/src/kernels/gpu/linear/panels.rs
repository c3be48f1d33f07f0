//! A few rows of activations through packed matrices: a cube for each panel, whose units share out its tasks.

use cubecl::prelude::*;
use ir::op::Then;
use ir::tensor::Format;

use super::input::Input;
use super::product::{multiply_task, zeros};
use super::total::{Output, Shape, Totals};
use crate::kernels::cpu::pack::PANEL;
use crate::kernels::gpu::ahead::{Regions, ask_at_the_end};
use crate::kernels::gpu::bf12::row_factors;
use crate::kernels::gpu::panel::{Panel, Walk, panel_vectors};
use crate::kernels::gpu::words::Words;

/// Writes every output: cubes take its panels, output after output.
#[cube(launch_unchecked)]
pub(super) fn multiply_panels<N: Size>(
    input: &Input<N>,
    weights: &Sequence<Sequence<Box<[Words]>>>,
    outputs: &mut Sequence<Output>,
    ahead: &Regions,
    epsilon: f32,
    #[comptime] then: Then,
    #[comptime] shape: Shape,
    #[comptime] panel: Panel,
    #[comptime] plane: usize,
) {
    let cube = CUBE_POS_X as usize;
    let mut totals = Totals::new(shape);
    let mut first_cube = 0usize.runtime();
    #[unroll]
    for output in 0..outputs.len() {
        let rows = outputs.index(output).rows;
        let cubes = rows.div_ceil(PANEL);
        if cube >= first_cube && cube < first_cube + cubes {
            let number = cube - first_cube;
            let mut sums = zeros(shape.values());
            let mut squares = zeros(shape.tokens);
            let vectors = panel_vectors(rows, number);
            let slots = vectors * comptime!(panel.slots() / 2);
            let unit = UNIT_POS as usize;
            let start = number * comptime!(panel.stride());
            let walk = Walk { start, vectors, slot: unit % slots };
            let stride = CUBE_DIM as usize / slots;
            let mut bases = Array::<Words>::new(shape.matrices);
            if comptime!(matches!(panel.format, Format::Bf12)) {
                #[unroll]
                for matrix in 0..shape.matrices {
                    bases[matrix] = weights[output][matrix][start + walk.slot];
                }
            }
            for task in range_stepped(unit / slots, panel.tasks(), stride) {
                multiply_task(
                    input,
                    0usize,
                    weights.index(output),
                    walk,
                    task,
                    &mut sums,
                    &mut squares,
                    shape.tokens,
                    panel,
                );
            }
            if comptime!(matches!(panel.format, Format::Bf12)) {
                #[unroll]
                for matrix in 0..shape.matrices {
                    let factors = row_factors(bases[matrix]);
                    #[unroll]
                    for sum in 0..comptime!(shape.tokens * shape.rows) {
                        let at = comptime!(matrix * shape.tokens * shape.rows + sum);
                        sums[at] *= factors[comptime!(sum % shape.rows)];
                    }
                }
            }
            put_slots(&mut totals, &mut sums, &mut squares, shape, plane);
        }
        first_cube += cubes;
    }
    let units = comptime!(plane as u32);
    ask_at_the_end(ahead, UNIT_POS / units, CUBE_DIM / units);
    sync_cube();
    let mut first_cube = 0usize.runtime();
    #[unroll]
    for output in 0..outputs.len() {
        let rows = outputs.index(output).rows;
        let cubes = rows.div_ceil(PANEL);
        if cube >= first_cube && cube < first_cube + cubes {
            let number = cube - first_cube;
            let slots = panel_vectors(rows, number) * comptime!(panel.slots() / 2);
            let output = outputs.index_mut(output);
            totals.finish(
                output,
                number * PANEL,
                0usize,
                slots,
                epsilon,
                panel.columns,
                then,
                shape,
            );
        }
        first_cube += cubes;
    }
}

/// Adds the sums of a plane's units that have the same slot in a whole panel, and puts them.
#[cube]
pub(in crate::kernels::gpu) fn put_slots(
    totals: &mut Totals,
    sums: &mut Array<f32>,
    squares: &mut Array<f32>,
    #[comptime] shape: Shape,
    #[comptime] plane: usize,
) {
    let mut distance = comptime!(plane / 2);
    #[unroll]
    for _ in 0..comptime!((plane / shape.slots).max(1).ilog2()) {
        #[unroll]
        for value in 0..shape.values() {
            sums[value] += plane_shuffle_xor(sums[value], distance as u32);
        }
        if comptime!(shape.is_normed) {
            #[unroll]
            for token in 0..shape.tokens {
                squares[token] += plane_shuffle_xor(squares[token], distance as u32);
            }
        }
        comptime!(distance /= 2);
    }
    let group_units = comptime!(plane.max(shape.slots));
    let unit = UNIT_POS as usize;
    if unit % group_units < shape.slots {
        totals.put(unit / group_units, unit % group_units, &*sums, &*squares, shape);
    }
}
