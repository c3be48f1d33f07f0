//! A few rows of activations through packed matrices: a cube for each vector of a panel, whose units share out its
//! tasks. (Cubes of whole panels are so few that processors get uneven shares: of 448, some of 132 four and some
//! three.)

use cubecl::prelude::*;
use ir::op::Then;
use ir::tensor::Format;

use super::input::Input;
use super::product::{load_words, multiply_words, zeros};
use super::total::{Output, Shape, Totals, finish_outputs};
use crate::kernels::cpu::pack::VECTOR;
use crate::kernels::gpu::ahead::{Regions, ask_at_the_end};
use crate::kernels::gpu::bf12::{row_factors, scaled};
use crate::kernels::gpu::panel::{Panel, Walk, vector_walk};
use crate::kernels::gpu::words::Words;

/// How a launch is shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct PanelShare {
    pub(super) panel: Panel,
    /// Planes of a cube; planes beside one another take other matrices of an output.
    pub(super) planes: usize,
    /// Units of a plane.
    pub(super) plane: usize,
}

/// Writes every output: cubes take its vectors, output after output.
#[cube(launch_unchecked)]
pub(super) fn multiply_panels<N: Size>(
    input: &Input<N>,
    weights: &Sequence<Sequence<Box<[Words]>>>,
    outputs: &mut Sequence<Output<f32>>,
    ahead: &Regions,
    epsilon: f32,
    #[comptime] then: Then,
    #[comptime] shape: Shape,
    #[comptime] share: PanelShare,
) {
    let cube = CUBE_POS_X as usize;
    let plane = UNIT_POS as usize / share.plane;
    let of_plane = plane % shape.matrices;
    let unit = plane / shape.matrices * share.plane + UNIT_POS as usize % share.plane;
    let panel = comptime!(share.panel);
    let mut totals = Totals::new(&outputs[0], shape);
    let mut first_cube = 0usize.runtime();
    #[unroll]
    for output in 0..outputs.len() {
        let rows = outputs.index(output).rows;
        let cubes = rows.div_ceil(VECTOR);
        if cube >= first_cube && cube < first_cube + cubes {
            let vector = cube - first_cube;
            let walk = vector_walk(0usize, vector, rows, unit, panel);
            let weights = weights.index(output);
            #[unroll]
            for matrix in 0..shape.matrices {
                if of_plane == matrix {
                    let weights = &weights[matrix];
                    multiply_vector(input, weights, walk, unit, &mut totals, matrix, shape, share);
                }
            }
        }
        first_cube += cubes;
    }
    ask_at_the_end(ahead, plane as u32, comptime!(share.planes as u32).runtime());
    sync_cube();
    finish_outputs(&totals, outputs, 0usize, epsilon, VECTOR, panel.columns, then, shape);
}

/// Puts the products of one of a matrix's units, which has the words of its next task on their way while it multiplies.
#[cube]
fn multiply_vector<N: Size>(
    input: &Input<N>,
    weights: &[Words],
    walk: Walk,
    unit: usize,
    totals: &mut Totals,
    #[comptime] matrix: usize,
    #[comptime] shape: Shape,
    #[comptime] share: PanelShare,
) {
    let panel = comptime!(share.panel);
    let tokens = comptime!(shape.tokens);
    let tasks = comptime!(panel.tasks());
    let stride = comptime!(share.planes / shape.matrices * share.plane / shape.slots);
    let mut sums = zeros(comptime!(tokens * shape.rows));
    let mut squares = zeros(tokens);
    let mut task = unit / shape.slots;
    let mut words = load_words(weights, walk, task.min(tasks - 1), panel);
    while task < tasks {
        let next = load_words(weights, walk, (task + stride).min(tasks - 1), panel);
        multiply_words(
            input,
            0usize,
            weights,
            walk,
            task,
            &words,
            &mut sums,
            0usize,
            &mut squares,
            tokens,
            panel,
        );
        #[unroll]
        for word in 0..comptime!(panel.loads()) {
            words[word] = next[word];
        }
        task += stride;
    }
    if comptime!(matches!(panel.format, Format::Bf12)) {
        let factors = row_factors(weights[walk.start + walk.slot]);
        #[unroll]
        for sum in 0..comptime!(tokens * shape.rows) {
            sums[sum] = scaled(sums[sum], factors[comptime!(sum % shape.rows)]);
        }
    }
    add_slots(&mut sums, tokens * shape.rows, shape.slots, share.plane);
    if comptime!(shape.is_normed && matrix == 0) {
        add_slots(&mut squares, tokens, shape.slots, share.plane);
    }
    let group_units = comptime!(share.plane.max(shape.slots));
    let (group, slot) = (unit / group_units, unit % group_units);
    if slot < shape.slots {
        totals.put(group, slot, matrix, &sums, 0usize, shape);
        if comptime!(matrix == 0) {
            totals.put_squares(group, slot, &squares, shape);
        }
    }
}

/// Adds what the units of a plane that have the same slot hold.
#[cube]
pub(in crate::kernels::gpu) fn add_slots(
    values: &mut Array<f32>,
    #[comptime] count: usize,
    #[comptime] slots: usize,
    #[comptime] plane: usize,
) {
    let mut distance = comptime!(plane / 2);
    #[unroll]
    for _ in 0..comptime!((plane / slots).max(1).ilog2()) {
        #[unroll]
        for value in 0..count {
            values[value] += plane_shuffle_xor(values[value], distance as u32);
        }
        comptime!(distance /= 2);
    }
}
