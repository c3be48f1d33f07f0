use ir::tensor::Format;

use super::grouped::Form;
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
    [experts, rows, columns]: [usize; 3],
    seed: u64,
) -> (Stack, Vec<Vec<f64>>) {
    let matrices: Vec<_> =
        (0..experts as u64).map(|i| packed(format, rows, columns, seed + i)).collect();
    let values = matrices.iter().map(|bytes| unpacked(bytes, format, rows, columns)).collect();
    assert!(matrices.iter().all(|bytes| bytes.len() == packed_bytes(format, rows, columns)));
    let data = gpu.upload::<u8>(&matrices.concat());
    (Stack::new(format, experts, rows, columns, data).unwrap(), values)
}

fn product(weights: &[f64], x: &[f64]) -> Vec<f64> {
    let row = |row: &[f64]| row.iter().zip(x).map(|(a, b)| a * b).sum();
    weights.chunks_exact(x.len()).map(row).collect()
}

/// A layer of random experts.
struct Layer {
    gate: (Stack, Vec<Vec<f64>>),
    up: (Stack, Vec<Vec<f64>>),
    down: (Stack, Vec<Vec<f64>>),
    what: String,
}

impl Layer {
    fn new(gpu: &Gpu, formats: [Format; 2], features: usize, intermediate: usize) -> Self {
        Self::of(gpu, EXPERTS, formats, features, intermediate)
    }

    /// Of so many experts.
    fn of(
        gpu: &Gpu,
        experts: usize,
        [gate, down]: [Format; 2],
        features: usize,
        intermediate: usize,
    ) -> Self {
        Self {
            gate: stack(gpu, gate, [experts, intermediate, features], 3),
            up: stack(gpu, gate, [experts, intermediate, features], 1003),
            down: stack(gpu, down, [experts, features, intermediate], 2003),
            what: format!("{experts} in {gate} and {down}, {features} by {intermediate}"),
        }
    }

    /// Checks all forms that there are for this number of tokens: `ids` are their experts, `used` for each.
    fn check(&self, gpu: &Gpu, ids: &[i32], used: usize) {
        let (gate, up, down) = (&self.gate.0, &self.up.0, &self.down.0);
        let (features, intermediate) = (gate.columns(), gate.rows());
        let tokens = ids.len() / used;
        let x = Random(7).floats(tokens * features);
        let weights = Random(9).floats(ids.len());
        let expected = self.expected(ids, used, &x, &weights);
        let sizes = workspace::Experts {
            tokens: tokens as u32,
            used: used as u32,
            experts: gate.experts() as u32,
            features: features as u32,
            intermediate: intermediate as u32,
        };
        let bytes = sizes.bytes() as usize;
        let [x, weights] = [x, weights].map(|values| gpu.upload(&values));
        let [ids, workspace] = [gpu.upload(ids), gpu.poisoned(bytes)];
        let run = |form: Option<Form>, tolerance: f64| {
            let out = gpu.poisoned(tokens * features * 4);
            let call = Experts {
                x: &x,
                tokens,
                ids: &ids,
                weights: &weights,
                used,
                first_expert: FIRST,
                gate,
                up,
                down,
                activation: Activation::Silu,
                workspace: &workspace,
                out: &out,
            };
            match form {
                Some(form) => gpu.experts_in_form(&call, form).unwrap(),
                None => gpu.experts(&call).unwrap(),
            }
            let actual = gpu.download(&out, tokens * features);
            let distance = distance(&actual, &expected);
            let what = &self.what;
            assert!(distance < tolerance, "{distance} away: {what}, {tokens} tokens, {form:?}");
            actual
        };
        if tokens <= FLOAT_TOKENS {
            run(None, 5e-6);
        } else {
            run(Some(Form::Portable), 5e-6);
            // Matrix instructions take the input, and the gated rows, in 16 bits.
            let actual = run(None, 1e-2);
            assert_eq!(actual, run(None, 1e-2), "a second run of {} differs", self.what);
        }
    }

    fn expected(&self, ids: &[i32], used: usize, x: &[f32], weights: &[f32]) -> Vec<f64> {
        let features = self.gate.0.columns();
        let mut expected = vec![0.0; ids.len() / used * features];
        for (slot, id) in ids.iter().enumerate() {
            let token = slot / used;
            let Ok(expert) = usize::try_from(id - FIRST) else { continue };
            if expert >= self.gate.0.experts() {
                continue;
            }
            let x: Vec<f64> =
                x[token * features..][..features].iter().map(|&x| f64::from(x)).collect();
            let gated: Vec<f64> = product(&self.gate.1[expert], &x)
                .into_iter()
                .zip(product(&self.up.1[expert], &x))
                .map(|(gate, up)| activation_in_64_bits(Activation::Silu, gate) * up)
                .collect();
            let sums = &mut expected[token * features..][..features];
            for (sum, value) in sums.iter_mut().zip(product(&self.down.1[expert], &gated)) {
                *sum += f64::from(weights[slot]) * value;
            }
        }
        expected
    }
}

/// Experts of all kinds for `slots` slots: some that are held and some that are not.
fn any(slots: usize) -> Vec<i32> {
    any_of(EXPERTS, slots)
}

/// The same where so many are held.
fn any_of(experts: usize, slots: usize) -> Vec<i32> {
    let (mut random, known) = (Random(11), experts as u64 + 2);
    (0..slots).map(|_| (random.next() % known) as i32).collect()
}

/// Formats of stacks.
fn formats() -> impl Iterator<Item = Format> {
    Format::ALL.into_iter().filter(|&format| format != Format::Bf12)
}

#[test]
fn chosen_experts_are_summed_and_absent_ones_are_not() {
    let Some(gpu) = gpu() else { return };
    for format in formats() {
        let layer = Layer::new(&gpu, [format; 2], 64, 96);
        layer.check(&gpu, &any(2), 2);
        layer.check(&gpu, &any(9 * 2), 2);
        layer.check(&gpu, &any(80 * 2), 2);
        // Panels that lack rows, and steps that lack columns.
        let layer = Layer::new(&gpu, [format; 2], 72, 40);
        layer.check(&gpu, &any(5 * 3), 3);
        layer.check(&gpu, &any(33 * 3), 3);
        layer.check(&gpu, &any(130 * 3), 3);
    }
}

#[test]
fn longer_rows_take_many_steps() {
    let Some(gpu) = gpu() else { return };
    for format in formats() {
        let layer = Layer::new(&gpu, [format; 2], 448, 264);
        // Tiles of every size.
        for slots in [9, 15, 30, 100, 200] {
            layer.check(&gpu, &any(slots), 1);
        }
    }
}

#[test]
fn formats_may_be_mixed() {
    let Some(gpu) = gpu() else { return };
    use Format::{Bf16, F16, F32, Q4, Q8};
    for formats in [[Q4, Q8], [Q8, F16], [F16, Bf16], [Bf16, F32]] {
        Layer::new(&gpu, formats, 64, 48).check(&gpu, &any(20 * 2), 2);
    }
}

#[test]
fn rows_of_any_length_are_multiplied() {
    let Some(gpu) = gpu() else { return };
    for format in formats() {
        Layer::new(&gpu, [format; 2], 37, 30).check(&gpu, &any(12 * 2), 2);
    }
}

#[test]
fn experts_are_many() {
    let Some(gpu) = gpu() else { return };
    // Those of several planes, and of several rounds, of the cube that lists tiles.
    for (experts, slots) in [(40, 90), (40, 700), (300, 600), (300, 3000)] {
        let layer = Layer::of(&gpu, experts, [Format::Q8; 2], 32, 16);
        layer.check(&gpu, &any_of(experts, slots), 2);
    }
}

#[test]
fn every_token_may_choose_the_same_expert() {
    let Some(gpu) = gpu() else { return };
    let layer = Layer::new(&gpu, [Format::Q4, Format::Q8], 128, 64);
    for expert in 0..EXPERTS as i32 + 2 {
        layer.check(&gpu, &[expert; 300], 1);
    }
}

#[test]
fn without_any_expert_here_the_sum_is_zero() {
    let Some(gpu) = gpu() else { return };
    let layer = Layer::new(&gpu, [Format::Bf16; 2], 64, 32);
    let [below, above] = [0, EXPERTS as i32 + FIRST];
    layer.check(&gpu, &[below, above], 2);
    layer.check(&gpu, &[below, above].repeat(10), 2);
}

#[test]
fn an_expert_may_have_no_token() {
    let Some(gpu) = gpu() else { return };
    let layer = Layer::new(&gpu, [Format::Bf16; 2], 64, 32);
    for left_out in 1..=EXPERTS as i32 {
        let ids: Vec<i32> =
            any(300).iter().map(|&id| if id == left_out { id + 1 } else { id }).collect();
        layer.check(&gpu, &ids, 3);
    }
}

#[test]
fn tokens_of_a_tile_are_any_number() {
    let Some(gpu) = gpu() else { return };
    let layer = Layer::new(&gpu, [Format::Q8; 2], 64, 32);
    for tokens in [15, 16, 17, 31, 32, 47, 63, 64, 65, 97, 128, 129] {
        layer.check(&gpu, &vec![2; tokens], 1);
        layer.check(&gpu, &any(tokens), 1);
    }
}
