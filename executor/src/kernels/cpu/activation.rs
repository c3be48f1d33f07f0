//! What is done to single elements: activations, gates, sums, bounds.

use ir::op::Activation;

use super::isa::Isa;
use super::lanes::{Kernel, LANES, Lanes, vectorize};
use super::math::{erf, sigmoid, tanh};
use super::rows::for_each_row;
use crate::team::Team;

/// Writes `activation(x)` to `out`, of the same shape.
pub fn activate(team: &Team, isa: Isa, activation: Activation, x: &[f32], out: &mut [f32]) {
    elementwise(team, isa, Elementwise::Activate(activation), x, None, out);
}

/// Writes `activation(gate) · up` to `out`, all of one shape.
pub fn gate(
    team: &Team,
    isa: Isa,
    activation: Activation,
    gate: &[f32],
    up: &[f32],
    out: &mut [f32],
) {
    elementwise(team, isa, Elementwise::Gate(activation), gate, Some(up), out);
}

/// Writes `a + b` to `out`, all of one shape.
pub fn add(team: &Team, isa: Isa, a: &[f32], b: &[f32], out: &mut [f32]) {
    elementwise(team, isa, Elementwise::Add, a, Some(b), out);
}

/// Writes `factor · x` to `out`, of the same shape.
pub fn scale(team: &Team, isa: Isa, factor: f32, x: &[f32], out: &mut [f32]) {
    elementwise(team, isa, Elementwise::Scale(factor), x, None, out);
}

/// Writes `cap · tanh(x / cap)` to `out`, of the same shape.
pub fn soft_cap(team: &Team, isa: Isa, cap: f32, x: &[f32], out: &mut [f32]) {
    elementwise(team, isa, Elementwise::SoftCap(cap), x, None, out);
}

/// Writes `sigmoid(gate) · x` to `out`; `gate` is `[tokens, 1]`, the others `[tokens, features]`.
pub fn sigmoid_gate(
    team: &Team,
    isa: Isa,
    gate: &[f32],
    features: usize,
    x: &[f32],
    out: &mut [f32],
) {
    assert!(x.len() == out.len() && gate.len() * features == x.len(), "one gate for each row");
    for_each_row(team, features, out, |first, out| {
        let rows = out.chunks_exact_mut(features).zip(x[first..].chunks_exact(features));
        for ((out, x), &gate) in rows.zip(&gate[first / features..]) {
            vectorize(isa, SigmoidGateRow { gate, x, out });
        }
    });
}

/// What one pass over elements does.
#[derive(Clone, Copy)]
enum Elementwise {
    Activate(Activation),
    Gate(Activation),
    Add,
    Scale(f32),
    SoftCap(f32),
}

fn elementwise(
    team: &Team,
    isa: Isa,
    what: Elementwise,
    a: &[f32],
    b: Option<&[f32]>,
    out: &mut [f32],
) {
    assert!(a.len() == out.len() && b.is_none_or(|b| b.len() == a.len()), "one shape");
    // Whole vectors are rows here, as far as there are any.
    let row = if out.len().is_multiple_of(LANES) { LANES } else { out.len().max(1) };
    for_each_row(team, row, out, |first, out| {
        let range = first..first + out.len();
        let b = b.map(|b| &b[range.clone()]);
        vectorize(isa, Pass { what, a: &a[range.clone()], b, out });
    });
}

struct Pass<'a> {
    what: Elementwise,
    a: &'a [f32],
    b: Option<&'a [f32]>,
    out: &'a mut [f32],
}

impl Kernel for Pass<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Pass { what, a, b, out } = self;
        let b = b.unwrap_or(a);
        // The choice stands outside of the loops, so that each is one straight line.
        macro_rules! each {
            ($a:ident, $b:ident => $value:expr) => {
                for ((out, a), b) in out.chunks_mut(LANES).zip(a.chunks(LANES)).zip(b.chunks(LANES))
                {
                    let ($a, $b) = (L::read(a), L::read(b));
                    $value.write(out);
                }
            };
        }
        match what {
            Elementwise::Activate(Activation::Relu) => each!(a, _b => relu(a)),
            Elementwise::Activate(Activation::Silu) => each!(a, _b => silu(a)),
            Elementwise::Activate(Activation::Gelu) => each!(a, _b => gelu(a)),
            Elementwise::Activate(Activation::GeluTanh) => each!(a, _b => gelu_tanh(a)),
            Elementwise::Gate(Activation::Relu) => each!(a, b => relu(a).mul(b)),
            Elementwise::Gate(Activation::Silu) => each!(a, b => silu(a).mul(b)),
            Elementwise::Gate(Activation::Gelu) => each!(a, b => gelu(a).mul(b)),
            Elementwise::Gate(Activation::GeluTanh) => each!(a, b => gelu_tanh(a).mul(b)),
            Elementwise::Add => each!(a, b => a.add(b)),
            Elementwise::Scale(factor) => each!(a, _b => a.mul(L::splat(factor))),
            Elementwise::SoftCap(cap) => {
                let bound = L::splat(cap);
                each!(a, _b => tanh(a.div(bound)).mul(bound));
            }
        }
    }
}

struct SigmoidGateRow<'a> {
    gate: f32,
    x: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for SigmoidGateRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let gate = sigmoid(L::splat(self.gate));
        for (out, x) in self.out.chunks_mut(LANES).zip(self.x.chunks(LANES)) {
            L::read(x).mul(gate).write(out);
        }
    }
}

/// Sixteen elements, activated. For work beside which the choice costs nothing.
#[inline(always)]
pub(super) fn activated<L: Lanes>(activation: Activation, x: L) -> L {
    match activation {
        Activation::Relu => relu(x),
        Activation::Silu => silu(x),
        Activation::Gelu => gelu(x),
        Activation::GeluTanh => gelu_tanh(x),
    }
}

#[inline(always)]
fn relu<L: Lanes>(x: L) -> L {
    L::splat(0.0).max(x)
}

#[inline(always)]
fn silu<L: Lanes>(x: L) -> L {
    x.mul(sigmoid(x))
}

#[inline(always)]
fn gelu<L: Lanes>(x: L) -> L {
    let half = x.mul(L::splat(0.5));
    half.mul(erf(x.mul(L::splat(std::f32::consts::FRAC_1_SQRT_2))).add(L::splat(1.0)))
}

#[inline(always)]
fn gelu_tanh<L: Lanes>(x: L) -> L {
    let cubic = x.mul(x).mul(x).mul_add(L::splat(0.044_715), x);
    // √(2 / π)
    let bent = tanh(cubic.mul(L::splat(0.797_884_6)));
    x.mul(L::splat(0.5)).mul(bent.add(L::splat(1.0)))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Random, distance, erf_in_64_bits, with_team};
    use super::*;

    const ACTIVATIONS: [Activation; 4] =
        [Activation::Relu, Activation::Silu, Activation::Gelu, Activation::GeluTanh];

    fn activated_in_64_bits(activation: Activation, x: f64) -> f64 {
        match activation {
            Activation::Relu => x.max(0.0),
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::Gelu => 0.5 * x * (1.0 + erf_in_64_bits(x / 2.0_f64.sqrt())),
            Activation::GeluTanh => {
                let bent = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                0.5 * x * (1.0 + bent.tanh())
            }
        }
    }

    /// Runs `kernel` at every level on few and many elements against `reference` of each pair.
    fn check(
        kernel: impl Fn(&Team, Isa, &[f32], &[f32], &mut [f32]) + Sync,
        reference: impl Fn(f64, f64) -> f64 + Sync,
    ) {
        with_team(2, |team| {
            for count in [1, 16, 37, 50_000, 50_001] {
                let mut random = Random(5);
                let mut a: Vec<f32> = random.floats(count).iter().map(|x| x * 9.0).collect();
                // Errors are measured against the largest result, which must not be next to nothing.
                a[0] = 4.0;
                let b = random.floats(count);
                let pairs = a.iter().zip(&b);
                let expected: Vec<f64> =
                    pairs.map(|(&a, &b)| reference(f64::from(a), f64::from(b))).collect();
                for isa in Isa::available() {
                    let mut out = vec![f32::NAN; count];
                    kernel(team, isa, &a, &b, &mut out);
                    let error = distance(&out, &expected);
                    assert!(error < 3e-7, "{isa}, {count} elements: off by {error}");
                }
            }
        });
    }

    #[test]
    fn activations_and_gates_match_the_reference() {
        for kind in ACTIVATIONS {
            check(
                |team, isa, x, _, out| activate(team, isa, kind, x, out),
                |x, _| activated_in_64_bits(kind, x),
            );
            check(
                |team, isa, x, up, out| gate(team, isa, kind, x, up, out),
                |x, up| activated_in_64_bits(kind, x) * up,
            );
        }
    }

    #[test]
    fn sums_factors_and_bounds_match_the_reference() {
        check(add, |a, b| a + b);
        check(|team, isa, x, _, out| scale(team, isa, 0.3, x, out), |x, _| f64::from(0.3_f32) * x);
        check(
            |team, isa, x, _, out| soft_cap(team, isa, 5.0, x, out),
            |x, _| 5.0 * (x / 5.0).tanh(),
        );
    }

    #[test]
    fn each_row_has_its_own_sigmoid_gate() {
        let mut random = Random(9);
        for (tokens, features) in [(1, 7), (3, 48), (40, 1000)] {
            let (gates, x) = (random.floats(tokens), random.floats(tokens * features));
            let expected: Vec<f64> = x
                .iter()
                .enumerate()
                .map(|(i, &x)| {
                    activated_in_64_bits(Activation::Silu, f64::from(gates[i / features]))
                        / f64::from(gates[i / features])
                        * f64::from(x)
                })
                .collect();
            with_team(2, |team| {
                for isa in Isa::available() {
                    let mut out = vec![f32::NAN; x.len()];
                    sigmoid_gate(team, isa, &gates, features, &x, &mut out);
                    assert!(distance(&out, &expected) < 3e-7, "{isa}");
                }
            });
        }
    }
}
