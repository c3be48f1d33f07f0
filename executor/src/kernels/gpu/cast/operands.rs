//! Rows of activations as right operands of a warpgroup's instructions.

use anyhow::{Result, ensure};
use cubecl::prelude::{Cast as _, *};
use ir::op::NormKind;
use ir::tensor::{DType, Format};

use super::{Cast, Norm, affine, cube_sum, normed};
use crate::kernels::gpu::device::{Gpu, Span, element};
use crate::kernels::gpu::given::given;
use crate::kernels::gpu::instructions::{Packed, pack};
use crate::kernels::gpu::matrix::LOAD_BYTES;
use crate::kernels::gpu::overlap::follow;
use crate::kernels::gpu::portion::BLOCK;
use crate::kernels::gpu::warpgroup::RightOperands;

/// Elements that lie side by side in rows and in operands.
const PAIR: usize = 2;
/// Pairs that a unit writes at once.
const PAIRS: usize = LOAD_BYTES / 4;
/// Eights of a block.
const EIGHTS: usize = BLOCK / (PAIR * PAIRS);
/// Units of a cube that shares a row with others, and the fewest of one that has it alone.
const UNITS: usize = 256;
/// The most.
const MOST_UNITS: usize = 1024;
/// Eights that a unit keeps in registers while the squares of its row are added up; more where rows are longer than all
/// units keep.
const KEPT: usize = 8;
/// The most eights of a unit whose factors it loads before the launch before is over: of more, registers have no room.
const MOST_EARLY: usize = 4;

impl Gpu {
    /// Queues a cast to right operands.
    ///
    /// # Errors
    /// When the order asks for another format, or for whole blocks where there are none.
    pub(super) fn cast_operands(&self, cast: &Cast<'_>, order: RightOperands) -> Result<()> {
        let Cast { x, element: taken, tokens, features, norm, residual, format, out, .. } = *cast;
        ensure!(
            format == Format::Bf16
                && features.is_multiple_of(BLOCK)
                && order.count() >= tokens
                && residual.is_none()
                && self.multiplies(DType::Bf16),
            "{tokens} rows of {features} features in {format} are no right operands"
        );
        let eights = features / (PAIR * PAIRS);
        // Who adds up a row's squares has all of it.
        let (units, cubes) = match norm {
            Some(_) => {
                let wanted = eights.div_ceil(KEPT).next_power_of_two();
                (wanted.clamp(UNITS, MOST_UNITS), 1)
            }
            None => (UNITS, eights.div_ceil(UNITS)),
        };
        // Each row's cube has a processor of its own where there are enough.
        let is_alone = norm.is_some() && tokens <= self.processors() as usize;
        let room = if is_alone { self.least_bytes_for_places(1) } else { 0 };
        let row = |span: Option<&Span>| {
            span.map(|span| span.argument(features / PAIR, PAIR * size_of::<f32>())).into()
        };
        // SAFETY: the spans are as long as the shape says, and the kernel stays within it.
        unsafe {
            cast_operands::launch_unchecked(
                &self.client,
                CubeCount::new_2d(tokens as u32, cubes as u32),
                CubeDim::new_1d(units as u32),
                x.argument(tokens * features / PAIR, PAIR * taken.bytes() as usize),
                row(norm.and_then(|norm| norm.scale)),
                row(norm.and_then(|norm| norm.bias)),
                out.argument(order.count() * features * 2 / LOAD_BYTES, LOAD_BYTES),
                order.factor,
                norm.map_or(0.0, |norm| norm.scale_offset),
                norm.map_or(0.0, |norm| norm.epsilon),
                eights,
                norm.map(|norm| norm.kind),
                given(norm.iter().flat_map(Norm::given)),
                order.tokens,
                order.is_spread,
                units,
                cubes,
                self.plane() as usize,
                room / size_of::<f32>(),
                element(taken),
            );
        }
        Ok(())
    }
}

/// Cubes along the first axis take rows, along the second parts of them; units take every `units * cubes`-th eight.
#[cube(launch_unchecked)]
fn cast_operands<X: Float>(
    x: &[Vector<X, Const<2>>],
    scale: &ComptimeOption<Box<[Vector<f32, Const<2>>]>>,
    bias: &ComptimeOption<Box<[Vector<f32, Const<2>>]>>,
    out: &mut [Packed],
    operand_factor: f32,
    scale_offset: f32,
    epsilon: f32,
    #[comptime] eights: usize,
    #[comptime] norm: Option<NormKind>,
    #[comptime] _given: u32,
    #[comptime] tokens: usize,
    #[comptime] is_spread: bool,
    #[comptime] units: usize,
    #[comptime] cubes: usize,
    #[comptime] plane: usize,
    #[comptime] room: usize,
    #[define(X)] _taken: ElemType,
) {
    let features = comptime!((eights * PAIRS * PAIR) as f32);
    let kept = comptime!(eights.div_ceil(units * cubes));
    let token = CUBE_POS_X as usize;
    let first_pair = token * comptime!(eights * PAIRS);
    let unit = CUBE_POS_Y as usize * units + UNIT_POS as usize;
    // No launch writes the factors and terms of a norm.
    let early = comptime!(if norm.is_some() && kept <= MOST_EARLY { kept * PAIRS } else { 0 });
    let mut scales = Array::<Vector<f32, Const<2>>>::new(comptime!(early.max(1)));
    let mut biases = Array::<Vector<f32, Const<2>>>::new(comptime!(early.max(1)));
    #[unroll]
    for i in 0..early {
        let eight = (unit + comptime!(i / PAIRS * units * cubes)).min(comptime!(eights - 1));
        let at = pair_of(eight, comptime!(i % PAIRS), is_spread);
        let (pair, term) = affine(at, scale, bias, scale_offset);
        scales[i] = pair;
        biases[i] = term;
    }
    if comptime!(early > 0) {
        // The compiler moves loads behind the wait for the launch before, but not behind a barrier.
        sync_cube();
    }
    follow();
    let mut pairs = Array::<Vector<f32, Const<2>>>::new(comptime!(kept * PAIRS));
    #[unroll]
    for i in 0..kept {
        let eight = unit + comptime!(i * units * cubes);
        #[unroll]
        for j in 0..PAIRS {
            let mut pair = Vector::<f32, Const<2>>::new(0.0);
            if eight < eights {
                pair = Vector::<f32, Const<2>>::cast_from(
                    x[first_pair + pair_of(eight, j, is_spread)],
                );
            }
            pairs[comptime!(i * PAIRS + j)] = pair;
        }
    }
    let mut mean = f32::new(0.0);
    let mut factor = f32::new(1.0);
    if comptime!(matches!(norm, Some(NormKind::Layer))) {
        let mut sum = f32::new(0.0);
        #[unroll]
        for i in 0..comptime!(kept * PAIRS) {
            sum += pairs[i].extract(0usize) + pairs[i].extract(1usize);
        }
        mean = cube_sum(sum, units, plane, 0usize) / features;
    }
    if comptime!(norm.is_some()) {
        let mut squares = f32::new(0.0);
        #[unroll]
        for i in 0..comptime!(kept * PAIRS) {
            // What lies behind the row is no part of it.
            if unit + comptime!(i / PAIRS * units * cubes) < eights {
                #[unroll]
                for j in 0..PAIR {
                    let element = pairs[i].extract(j) - mean;
                    squares += element * element;
                }
            }
        }
        factor = (cube_sum(squares, units, plane, room) / features + epsilon).inverse_sqrt();
    }
    #[unroll]
    for i in 0..kept {
        let eight = unit + comptime!(i * units * cubes);
        if eight < eights {
            let mut words = Packed::empty();
            #[unroll]
            for j in 0..PAIRS {
                let number = comptime!(i * PAIRS + j);
                if comptime!(early == 0) {
                    let at = pair_of(eight, j, is_spread);
                    let (pair, term) = affine(at, scale, bias, scale_offset);
                    scales[0] = pair;
                    biases[0] = term;
                }
                let of_pair = comptime!(if early > 0 { number } else { 0 });
                let value = normed(pairs[number], mean, factor, scales[of_pair], biases[of_pair])
                    * Vector::new(operand_factor);
                words.insert(j, pack(value.extract(0usize), value.extract(1usize), true));
            }
            let (stack, of_stack) = (token / tokens, token % tokens);
            out[(stack * eights + eight) * tokens + of_stack] = words;
        }
    }
}

/// The pair of a row that is pair `number` of an eight.
#[cube]
fn pair_of(eight: usize, #[comptime] number: usize, #[comptime] is_spread: bool) -> usize {
    if is_spread {
        let (block, first) = (eight / EIGHTS, eight % EIGHTS);
        block * comptime!(BLOCK / PAIR) + first + comptime!(number * EIGHTS)
    } else {
        eight * PAIRS + number
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::kernels::cpu::testing::Random;
    use crate::kernels::gpu::cast::Norm;
    use crate::kernels::gpu::cast::tests::{EPSILON, TOKENS, expected};
    use crate::kernels::gpu::testing::gpu;

    const COLUMNS: usize = 32;

    #[test]
    fn rows_become_right_operands() {
        let Some(gpu) = gpu() else { return };
        if !gpu.multiplies(DType::Bf16) {
            eprintln!("skipped: no matrix instructions");
            return;
        }
        for features in [96, 4096, 14_336, 16_416, 28_672] {
            let kinds = [None, Some(NormKind::Rms), Some(NormKind::Layer)];
            for (kind, is_spread) in
                kinds.into_iter().zip([true, true, false]).chain([(None, false)])
            {
                let x = Random(3).floats(TOKENS * features).iter().map(|x| x + 1.0).collect();
                let x: Vec<f32> = x;
                let [scale, bias] = [5, 7].map(|seed| Random(seed).floats(features));
                let [scale_span, bias_span] = [&scale, &bias].map(|values| gpu.upload(values));
                let is_biased = kind == Some(NormKind::Layer);
                let order = RightOperands { stacks: 1, tokens: COLUMNS, is_spread, factor: 4.0 };
                let out = gpu.poisoned(COLUMNS * features * 2);
                gpu.cast(&Cast {
                    x: &gpu.upload(&x),
                    element: DType::F32,
                    tokens: TOKENS,
                    features,
                    norm: kind.map(|kind| Norm {
                        kind,
                        scale: Some(&scale_span),
                        bias: is_biased.then_some(&bias_span),
                        scale_offset: 1.0,
                        epsilon: EPSILON,
                    }),
                    residual: None,
                    format: Format::Bf16,
                    order: Some(order),
                    out: &out,
                })
                .unwrap();
                let scale = kind.map(|_| &scale[..]);
                let bias = is_biased.then_some(&bias[..]);
                let expected = expected(&x, features, kind, scale, bias, None);
                let out = gpu.download::<bf16>(&out, COLUMNS * features);
                for (eight, of_tokens) in out.chunks_exact(COLUMNS * 8).enumerate() {
                    for (token, elements) in of_tokens.chunks_exact(8).take(TOKENS).enumerate() {
                        for (i, element) in elements.iter().enumerate() {
                            let feature = if is_spread {
                                // Of 32 features the eight hold every fourth pair.
                                eight / 4 * 32 + i / 2 * 8 + eight % 4 * 2 + i % 2
                            } else {
                                8 * eight + i
                            };
                            let expected = 4.0 * expected[token * features + feature];
                            let error = (f64::from(*element) - expected).abs();
                            let is_right = match kind {
                                Some(_) => error <= expected.abs() / 128.0 + 1e-6,
                                // Four times a float is one.
                                None => *element == bf16::from_f32(expected as f32),
                            };
                            assert!(
                                is_right,
                                "token {token}, feature {feature} of {features}: {element}, \
                                 not {expected}"
                            );
                        }
                    }
                }
            }
        }
    }
}
