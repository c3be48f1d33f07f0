//! Experts for a few tokens: one launch writes every slot's gated rows, a second one the weighted sums of what
//! `down` makes of them. Each slot reads its expert's matrices by itself.

#![expect(unsafe_code, reason = "kernels are launched without checks of every index")]

use cubecl::prelude::*;
use ir::op::Then;

use super::Experts;
use crate::kernels::cpu::pack::{PANEL, VECTOR};
use crate::kernels::gpu::device::{Gpu, Span};
use crate::kernels::gpu::linear::PANEL_PLANES;
use crate::kernels::gpu::linear::input::{Input, InputLaunch};
use crate::kernels::gpu::linear::panels::add_slots;
use crate::kernels::gpu::linear::product::{load_words, multiply_words, zeros};
use crate::kernels::gpu::linear::total::{Output, OutputLaunch, Shape, Totals};
use crate::kernels::gpu::panel::{Panel, vector_walk};
use crate::kernels::gpu::words::{Words, read_size};

/// Planes that share a vector of `down`. There are few such vectors and each stands for all of a token's experts,
/// so a cube is as large as cubes get.
const DOWN_PLANES: usize = 32;

impl Gpu {
    /// Queues the experts of a few tokens; `workspace` is `f32[tokens · used, intermediate]`.
    pub(super) fn experts_of_few(&self, experts: &Experts<'_>) {
        self.gate_experts(experts);
        self.sum_experts(experts);
    }

    fn gate_experts(&self, experts: &Experts<'_>) {
        let Experts { gate, up, tokens, used, .. } = *experts;
        let panel = gate.panel();
        let plane = self.plane() as usize;
        let units = PANEL_PLANES / 2 * plane;
        let shape = shape(panel, 2, units, plane);
        let out = output(experts.workspace, tokens * used, gate.rows(), 2);
        // SAFETY: the spans are as long as the shapes say, and the kernel stays within those.
        unsafe {
            gate_experts::launch_unchecked(
                &self.client,
                CubeCount::new_2d((tokens * used) as u32, gate.rows().div_ceil(VECTOR) as u32),
                CubeDim::new_1d(units as u32),
                read_size(panel.columns),
                input(experts.x, tokens, panel),
                [gate, up].map(|stack| stack.data().loads()).into(),
                integers(experts.ids, tokens * used),
                out,
                experts.first_expert,
                gate.experts() as i32,
                used,
                Then::Gate(experts.activation),
                shape,
                panel,
                plane,
            );
        }
    }

    fn sum_experts(&self, experts: &Experts<'_>) {
        let Experts { down, tokens, used, .. } = *experts;
        let panel = down.panel();
        let plane = self.plane() as usize;
        let units = DOWN_PLANES * plane;
        let shape = shape(panel, 1, units, plane);
        // SAFETY: as above.
        unsafe {
            sum_experts::launch_unchecked(
                &self.client,
                CubeCount::new_2d(tokens as u32, down.rows().div_ceil(VECTOR) as u32),
                CubeDim::new_1d(units as u32),
                read_size(panel.columns),
                input(experts.workspace, tokens * used, panel),
                [down.data().loads()].into(),
                integers(experts.ids, tokens * used),
                experts.weights.argument(tokens * used, size_of::<f32>()),
                output(experts.out, tokens, down.rows(), 1),
                experts.first_expert,
                down.experts() as i32,
                used,
                shape,
                panel,
                plane,
            );
        }
    }
}

fn shape(panel: Panel, matrices: usize, units: usize, plane: usize) -> Shape {
    let slots = panel.vector_slots();
    Shape { matrices, rows: panel.rows(), slots, groups: units / plane.max(slots), ..Shape::ONE }
}

fn input<N: Size>(x: &Span, rows: usize, panel: Panel) -> InputLaunch<N> {
    let size = read_size(panel.columns);
    let x = x.argument(rows * panel.columns / size, size * size_of::<f32>());
    InputLaunch::new(x, None.into(), 0.0, panel.columns, panel.covered(), false, 0)
}

fn integers(ids: &Span, count: usize) -> BufferArg {
    ids.argument(count, size_of::<i32>())
}

fn output(out: &Span, tokens: usize, rows: usize, matrices: usize) -> OutputLaunch<f32> {
    let biases = (0..matrices).map(|_| None.into()).collect();
    OutputLaunch::new(
        out.argument(tokens * rows, size_of::<f32>()),
        biases,
        None.into(),
        None.into(),
        rows,
        0,
    )
}

/// A cube for each slot and vector of gate and up.
#[cube(launch_unchecked)]
fn gate_experts<N: Size>(
    input: &Input<N>,
    weights: &Sequence<Box<[Words]>>,
    ids: &[i32],
    output: &mut Output<f32>,
    first_expert: i32,
    experts: i32,
    used: usize,
    #[comptime] then: Then,
    #[comptime] shape: Shape,
    #[comptime] panel: Panel,
    #[comptime] plane: usize,
) {
    let slot = CUBE_POS_X as usize;
    let vector = CUBE_POS_Y as usize;
    let unit = UNIT_POS as usize;
    let mut totals = Totals::new(&*output, shape);
    let mut sums = zeros(shape.values());
    let mut squares = zeros(1usize);
    let expert = ids[slot] - first_expert;
    if expert >= 0 && expert < experts {
        let first_panel = expert as usize * output.rows.div_ceil(PANEL);
        let walk = vector_walk(first_panel, vector, output.rows, unit, panel);
        let stride = CUBE_DIM as usize / shape.slots;
        let (token, rows) = (slot / used, comptime!(panel.rows()));
        for task in range_stepped(unit / shape.slots, panel.tasks(), stride) {
            let (gate, up) = (&weights[0], &weights[1]);
            let gate_words = load_words(gate, walk, task, panel);
            let up_words = load_words(up, walk, task, panel);
            multiply_words(
                input,
                token,
                gate,
                walk,
                task,
                &gate_words,
                &mut sums,
                0usize,
                &mut squares,
                1usize,
                panel,
            );
            multiply_words(
                input,
                token,
                up,
                walk,
                task,
                &up_words,
                &mut sums,
                rows,
                &mut squares,
                1usize,
                panel,
            );
        }
    }
    put_slots(&mut totals, &mut sums, shape, plane);
    sync_cube();
    let slots = shape.slots.runtime();
    totals.finish(output, vector * VECTOR, slot, slots, 0.0, panel.columns, then, shape);
}

/// A cube for each token and vector of down, whose units share out the tasks of all its experts.
#[cube(launch_unchecked)]
fn sum_experts<N: Size>(
    input: &Input<N>,
    weights: &Sequence<Box<[Words]>>,
    ids: &[i32],
    expert_weights: &[f32],
    output: &mut Output<f32>,
    first_expert: i32,
    experts: i32,
    used: usize,
    #[comptime] shape: Shape,
    #[comptime] panel: Panel,
    #[comptime] plane: usize,
) {
    let token = CUBE_POS_X as usize;
    let vector = CUBE_POS_Y as usize;
    let unit = UNIT_POS as usize;
    let tasks = comptime!(panel.tasks());
    let mut totals = Totals::new(&*output, shape);
    let mut sums = zeros(shape.values());
    let mut squares = zeros(1usize);
    let stride = CUBE_DIM as usize / shape.slots;
    for index in range_stepped(unit / shape.slots, used * tasks, stride) {
        let slot = token * used + index / tasks;
        let expert = ids[slot] - first_expert;
        if expert >= 0 && expert < experts {
            let first_panel = expert as usize * output.rows.div_ceil(PANEL);
            let walk = vector_walk(first_panel, vector, output.rows, unit, panel);
            let (down, task) = (&weights[0], index % tasks);
            let words = load_words(down, walk, task, panel);
            let mut products = zeros(shape.values());
            multiply_words(
                input,
                slot,
                down,
                walk,
                task,
                &words,
                &mut products,
                0usize,
                &mut squares,
                1usize,
                panel,
            );
            #[unroll]
            for value in 0..comptime!(shape.values()) {
                sums[value] += expert_weights[slot] * products[value];
            }
        }
    }
    put_slots(&mut totals, &mut sums, shape, plane);
    sync_cube();
    let (then, slots) = (comptime!(Then::Nothing), shape.slots.runtime());
    totals.finish(output, vector * VECTOR, token, slots, 0.0, panel.columns, then, shape);
}

/// Adds the sums of a plane's units that have the same slot, and puts them.
#[cube]
fn put_slots(
    totals: &mut Totals,
    sums: &mut Array<f32>,
    #[comptime] shape: Shape,
    #[comptime] plane: usize,
) {
    add_slots(sums, shape.values(), shape.slots, plane);
    let group_units = comptime!(plane.max(shape.slots));
    let unit = UNIT_POS as usize;
    if unit % group_units < shape.slots {
        #[unroll]
        for matrix in 0..shape.matrices {
            let first = comptime!(matrix * shape.rows);
            totals.put(unit / group_units, unit % group_units, matrix, &*sums, first, shape);
        }
    }
}
