//! Experts of a mixture for a few tokens: each token through the gated MLPs that its router chose.
//!
//! A *slot* is one token at one of its experts. One launch writes every slot's gated rows to a workspace, a second
//! one the weighted sums of what `down` makes of them. Each slot reads its expert's matrices by itself.

#![expect(unsafe_code, reason = "kernels are launched without checks of every index")]

use anyhow::{Result, ensure};
use cubecl::prelude::*;
use ir::op::{Activation, Then};

use super::device::{Gpu, Span};
use super::linear::PANEL_PLANES;
use super::linear::input::{Input, InputLaunch};
use super::linear::panels::put_slots;
use super::linear::product::{multiply_task, zeros};
use super::linear::total::{Output, OutputLaunch, Shape, Totals};
use super::matrix::{LOAD_BYTES, Stack};
use super::panel::{Panel, Walk, panel_vectors};
use super::words::{Words, read_size};
use crate::kernels::cpu::pack::PANEL;

/// Planes that share a panel of `down`. There are few such panels and each stands for all of a token's experts,
/// so a cube is as large as cubes get.
const DOWN_PLANES: usize = 32;

/// The inputs and outputs of a layer of experts.
#[derive(Clone, Copy, Debug)]
pub struct Experts<'a> {
    /// `f32[tokens, features]`.
    pub x: &'a Span,
    /// Rows of `x`.
    pub tokens: usize,
    /// The router's choice, `i32[tokens, used]`. Experts that are not held here count for nothing.
    pub ids: &'a Span,
    /// What each chosen expert's output is multiplied with, `f32[tokens, used]`.
    pub weights: &'a Span,
    /// Experts chosen for a token.
    pub used: usize,
    /// The id of the first expert of each stack.
    pub first_expert: i32,
    /// Matrices of `[intermediate, features]`.
    pub gate: &'a Stack,
    /// Of the same shape and format.
    pub up: &'a Stack,
    /// Matrices of `[features, intermediate]`.
    pub down: &'a Stack,
    /// Of the gate.
    pub activation: Activation,
    /// `f32[tokens · used, intermediate]`, written and read.
    pub workspace: &'a Span,
    /// `f32[tokens, features]`.
    pub out: &'a Span,
}

impl Gpu {
    /// Queues a layer of experts.
    ///
    /// # Errors
    /// When its parts do not fit together.
    pub fn experts(&self, experts: &Experts<'_>) -> Result<()> {
        let Experts { gate, up, down, tokens, used, .. } = *experts;
        let (features, intermediate) = (gate.columns(), gate.rows());
        ensure!(tokens > 0 && used > 0, "{tokens} tokens use {used} experts");
        ensure!(
            (up.format(), up.rows(), up.columns()) == (gate.format(), intermediate, features)
                && (down.rows(), down.columns()) == (features, intermediate)
                && [up, down].iter().all(|stack| stack.experts() == gate.experts()),
            "the experts' stacks differ in shape or format"
        );
        self.gate_experts(experts);
        self.sum_experts(experts);
        Ok(())
    }

    fn gate_experts(&self, experts: &Experts<'_>) {
        let Experts { gate, up, tokens, used, .. } = *experts;
        let panel = Panel { format: gate.format(), columns: gate.columns() };
        let plane = self.plane() as usize;
        let units = PANEL_PLANES / 2 * plane;
        let shape = shape(panel, 2, units, plane);
        let out = output(experts.workspace, tokens * used, gate.rows(), 2);
        // SAFETY: the spans are as long as the shapes say, and the kernel stays within those.
        unsafe {
            gate_experts::launch_unchecked(
                &self.client,
                CubeCount::new_2d((tokens * used) as u32, gate.rows().div_ceil(PANEL) as u32),
                CubeDim::new_1d(units as u32),
                read_size(panel.columns),
                input(experts.x, tokens, panel),
                [gate, up].map(words).into(),
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
        let panel = Panel { format: down.format(), columns: down.columns() };
        let plane = self.plane() as usize;
        let units = DOWN_PLANES * plane;
        let shape = shape(panel, 1, units, plane);
        // SAFETY: as above.
        unsafe {
            sum_experts::launch_unchecked(
                &self.client,
                CubeCount::new_2d(tokens as u32, down.rows().div_ceil(PANEL) as u32),
                CubeDim::new_1d(units as u32),
                read_size(panel.columns),
                input(experts.workspace, tokens * used, panel),
                [words(down)].into(),
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
    Shape {
        tokens: 1,
        matrices,
        rows: panel.rows(),
        slots: panel.slots(),
        groups: units / plane.max(panel.slots()),
        is_normed: false,
    }
}

fn input<N: Size>(x: &Span, rows: usize, panel: Panel) -> InputLaunch<N> {
    let size = read_size(panel.columns);
    let x = x.argument(rows * panel.columns / size, size * size_of::<f32>());
    InputLaunch::new(x, None.into(), 0.0, panel.columns, panel.covered(), false)
}

fn words(stack: &Stack) -> BufferArg {
    stack.data().argument(stack.data().bytes() / LOAD_BYTES, LOAD_BYTES)
}

fn integers(ids: &Span, count: usize) -> BufferArg {
    ids.argument(count, size_of::<i32>())
}

fn output(out: &Span, tokens: usize, rows: usize, matrices: usize) -> OutputLaunch {
    let biases = (0..matrices).map(|_| None.into()).collect();
    OutputLaunch::new(out.argument(tokens * rows, size_of::<f32>()), biases, None.into(), rows)
}

/// A cube for each slot and panel of gate and up.
#[cube(launch_unchecked)]
fn gate_experts<N: Size>(
    input: &Input<N>,
    weights: &Sequence<Box<[Words]>>,
    ids: &[i32],
    output: &mut Output,
    first_expert: i32,
    experts: i32,
    used: usize,
    #[comptime] then: Then,
    #[comptime] shape: Shape,
    #[comptime] panel: Panel,
    #[comptime] plane: usize,
) {
    let slot = CUBE_POS_X as usize;
    let number = CUBE_POS_Y as usize;
    let unit = UNIT_POS as usize;
    let vectors = panel_vectors(output.rows, number);
    let slots = vectors * comptime!(panel.slots() / 2);
    let mut totals = Totals::new(shape);
    let mut sums = zeros(shape.values());
    let mut squares = zeros(1usize);
    let expert = ids[slot] - first_expert;
    if expert >= 0 && expert < experts {
        let start = expert_start(expert as usize, number, output.rows, panel);
        let walk = Walk { start, vectors, slot: unit % slots };
        let stride = CUBE_DIM as usize / slots;
        for task in range_stepped(unit / slots, panel.tasks(), stride) {
            multiply_task(
                input,
                slot / used,
                weights,
                walk,
                task,
                &mut sums,
                &mut squares,
                1usize,
                panel,
            );
        }
    }
    put_slots(&mut totals, &mut sums, &mut squares, shape, plane);
    sync_cube();
    totals.finish(output, number * PANEL, slot, slots, 0.0, panel.columns, then, shape);
}

/// A cube for each token and panel of down, whose units share out the tasks of all its experts.
#[cube(launch_unchecked)]
fn sum_experts<N: Size>(
    input: &Input<N>,
    weights: &Sequence<Box<[Words]>>,
    ids: &[i32],
    expert_weights: &[f32],
    output: &mut Output,
    first_expert: i32,
    experts: i32,
    used: usize,
    #[comptime] shape: Shape,
    #[comptime] panel: Panel,
    #[comptime] plane: usize,
) {
    let token = CUBE_POS_X as usize;
    let number = CUBE_POS_Y as usize;
    let unit = UNIT_POS as usize;
    let vectors = panel_vectors(output.rows, number);
    let slots = vectors * comptime!(panel.slots() / 2);
    let tasks = comptime!(panel.tasks());
    let mut totals = Totals::new(shape);
    let mut sums = zeros(shape.values());
    let mut squares = zeros(1usize);
    for index in range_stepped(unit / slots, used * tasks, CUBE_DIM as usize / slots) {
        let slot = token * used + index / tasks;
        let expert = ids[slot] - first_expert;
        if expert >= 0 && expert < experts {
            let start = expert_start(expert as usize, number, output.rows, panel);
            let walk = Walk { start, vectors, slot: unit % slots };
            let mut products = zeros(shape.values());
            multiply_task(
                input,
                slot,
                weights,
                walk,
                index % tasks,
                &mut products,
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
    put_slots(&mut totals, &mut sums, &mut squares, shape, plane);
    sync_cube();
    totals.finish(output, number * PANEL, token, slots, 0.0, panel.columns, Then::Nothing, shape);
}

/// The first load of a panel of an expert's matrix.
#[cube]
fn expert_start(expert: usize, number: usize, rows: usize, #[comptime] panel: Panel) -> usize {
    (expert * rows.div_ceil(PANEL) + number) * comptime!(panel.stride())
}

#[cfg(test)]
mod tests {
    use ir::tensor::Format;

    use super::*;
    use crate::kernels::cpu::pack::packed_bytes;
    use crate::kernels::cpu::testing::{Random, distance};
    use crate::kernels::gpu::linear::tests::activation_in_64_bits;
    use crate::kernels::gpu::matrix::testing::{packed, unpacked};
    use crate::kernels::gpu::testing::gpu;

    /// The experts held here; the router knows one on either side as well.
    const EXPERTS: usize = 3;
    const FIRST: i32 = 1;

    /// A stack of random matrices and each one's values.
    fn stack(
        gpu: &Gpu,
        format: Format,
        rows: usize,
        columns: usize,
        seed: u64,
    ) -> (Stack, Vec<Vec<f64>>) {
        let matrices: Vec<_> =
            (0..EXPERTS as u64).map(|i| packed(format, rows, columns, seed + i)).collect();
        let values = matrices.iter().map(|bytes| unpacked(bytes, format, rows, columns)).collect();
        assert!(matrices.iter().all(|bytes| bytes.len() == packed_bytes(format, rows, columns)));
        let data = gpu.upload::<u8>(&matrices.concat());
        (Stack::new(format, EXPERTS, rows, columns, data).unwrap(), values)
    }

    fn product(weights: &[f64], x: &[f64]) -> Vec<f64> {
        let row = |row: &[f64]| row.iter().zip(x).map(|(a, b)| a * b).sum();
        weights.chunks_exact(x.len()).map(row).collect()
    }

    fn check(gpu: &Gpu, format: Format, tokens: usize, used: usize, shape: [usize; 2]) {
        let [features, intermediate] = shape;
        let (gate, gates) = stack(gpu, format, intermediate, features, 3);
        let (up, ups) = stack(gpu, format, intermediate, features, 13);
        let (down, downs) = stack(gpu, format, features, intermediate, 23);
        let x = Random(7).floats(tokens * features);
        let weights = Random(9).floats(tokens * used);
        let mut random = Random(11);
        let known = EXPERTS as u64 + 2;
        let ids: Vec<i32> = (0..tokens * used).map(|_| (random.next() % known) as i32).collect();
        let out = gpu.poisoned(tokens * features * 4);
        gpu.experts(&Experts {
            x: &gpu.upload(&x),
            tokens,
            ids: &gpu.upload(&ids),
            weights: &gpu.upload(&weights),
            used,
            first_expert: FIRST,
            gate: &gate,
            up: &up,
            down: &down,
            activation: Activation::Silu,
            workspace: &gpu.poisoned(tokens * used * intermediate * 4),
            out: &out,
        })
        .unwrap();
        let mut expected = vec![0.0; tokens * features];
        for slot in 0..tokens * used {
            let token = slot / used;
            let Ok(expert) = usize::try_from(ids[slot] - FIRST) else { continue };
            if expert >= EXPERTS {
                continue;
            }
            let x: Vec<f64> =
                x[token * features..][..features].iter().map(|&x| f64::from(x)).collect();
            let gated: Vec<f64> = product(&gates[expert], &x)
                .into_iter()
                .zip(product(&ups[expert], &x))
                .map(|(gate, up)| activation_in_64_bits(Activation::Silu, gate) * up)
                .collect();
            let sums = &mut expected[token * features..][..features];
            for (sum, value) in sums.iter_mut().zip(product(&downs[expert], &gated)) {
                *sum += f64::from(weights[slot]) * value;
            }
        }
        let distance = distance(&gpu.download(&out, tokens * features), &expected);
        assert!(distance < 5e-6, "{distance} away: {format}, {tokens} tokens, {shape:?}");
    }

    #[test]
    fn chosen_experts_are_summed_and_absent_ones_are_not() {
        let Some(gpu) = gpu() else { return };
        for format in Format::ALL {
            check(&gpu, format, 1, 2, [64, 96]);
            check(&gpu, format, 5, 3, [72, 40]);
        }
    }

    #[test]
    fn without_any_expert_here_the_sum_is_zero() {
        let Some(gpu) = gpu() else { return };
        let (gate, _) = stack(&gpu, Format::Bf16, 32, 64, 1);
        let (down, _) = stack(&gpu, Format::Bf16, 64, 32, 1);
        let out = gpu.poisoned(64 * 4);
        gpu.experts(&Experts {
            x: &gpu.upload(&[1.0_f32; 64]),
            tokens: 1,
            ids: &gpu.upload(&[0_i32, EXPERTS as i32 + FIRST]),
            weights: &gpu.upload(&[0.5_f32; 2]),
            used: 2,
            first_expert: FIRST,
            gate: &gate,
            up: &gate,
            down: &down,
            activation: Activation::Gelu,
            workspace: &gpu.poisoned(2 * 32 * 4),
            out: &out,
        })
        .unwrap();
        assert_eq!(gpu.download::<f32>(&out, 64), [0.0; 64]);
    }
}
