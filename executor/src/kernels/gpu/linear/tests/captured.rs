//! Linears of few rows and the casts between them, whose captured launches begin while those before them end.

use ir::op::{NormKind, Then};
use ir::tensor::{DType, Format};

use super::{EPSILON, Linear, floats};
use crate::kernels::cpu::pack::PANEL;
use crate::kernels::cpu::testing::Random;
use crate::kernels::gpu::cast::{Cast, Norm};
use crate::kernels::gpu::device::{Gpu, Span};
use crate::kernels::gpu::matrix::Matrix;
use crate::kernels::gpu::matrix::testing::panels;
use crate::kernels::gpu::testing::gpu;

/// More than are taken as floats, and so few that their casts take half of a whole GPU's processors at most.
const TOKENS: usize = 20;
const FEATURES: usize = 1024;

/// Queues a norm of `x`, cast as the matrix takes it, and the linear of that.
fn queue(gpu: &Gpu, matrix: &Matrix, [x, scale, operands, out]: [&Span; 4]) -> anyhow::Result<()> {
    let order = gpu.right_operands(matrix, TOKENS);
    gpu.cast(&Cast {
        x,
        element: DType::F32,
        tokens: TOKENS,
        features: matrix.columns(),
        norm: Some(Norm {
            kind: NormKind::Rms,
            scale: Some(scale),
            bias: None,
            scale_offset: 0.0,
            epsilon: EPSILON,
        }),
        residual: None,
        format: Format::Bf16,
        order,
        out: operands,
    })?;
    gpu.linear(&Linear {
        x: operands,
        element: DType::Bf16,
        order,
        tokens: TOKENS,
        norm: None,
        matrices: &[matrix],
        biases: &[None],
        then: Then::Nothing,
        residual: None,
        outputs: &[out],
        made: DType::F32,
        made_order: None,
        ahead: &[],
        sum: None,
    })
}

#[test]
fn captured_casts_and_linears_overlap_and_see_each_others_outputs() {
    let Some(gpu) = gpu() else { return };
    if !gpu.overlaps() {
        eprintln!("skipped: launches of this GPU do not overlap");
        return;
    }
    // One linear has more cubes than processors and begins early behind its cast; the other has fewer, and does not.
    let inner = 4 * PANEL * (gpu.processors() as usize + 8);
    for format in [Format::Q4, Format::Bf12] {
        let up = panels(&gpu, format, inner, FEATURES, 1).matrix;
        let down = panels(&gpu, format, FEATURES, inner, 2).matrix;
        let [scale, inner_scale] = [FEATURES, inner].map(|count| floats(&gpu, count, 3).0);
        let columns = gpu.right_operands(&up, TOKENS).unwrap().count();
        let operands = [FEATURES, inner].map(|count| gpu.poisoned(columns * count * 2));
        let [x, between, out] = [FEATURES; 3].map(|count| gpu.poisoned(columns * count * 4));
        let wide = gpu.poisoned(columns * inner * 4);
        let run = || {
            for [from, to] in [[&x, &between], [&between, &out]] {
                queue(&gpu, &up, [from, &scale, &operands[0], &wide])?;
                queue(&gpu, &down, [&wide, &inner_scale, &operands[1], to])?;
            }
            anyhow::Ok(())
        };
        let (graph, overlapped) = gpu.captured(run);
        assert_eq!(overlapped, 5, "of seven edges two are whole, from casts to the second linear");
        for seed in 0..10 {
            let given = Random(seed).floats(TOKENS * FEATURES);
            gpu.write(&x, bytemuck::cast_slice(&given)).unwrap();
            run().unwrap();
            let expected = gpu.download::<u32>(&out, TOKENS * FEATURES);
            for span in [&between, &out] {
                gpu.write(span, &[0xff].repeat(TOKENS * FEATURES * 4)).unwrap();
            }
            // SAFETY: the spans live until the end.
            unsafe { graph.replay() }.unwrap();
            let replayed = gpu.download::<u32>(&out, TOKENS * FEATURES);
            assert!(replayed == expected, "other numbers when replayed, {format}, run {seed}");
        }
    }
}
