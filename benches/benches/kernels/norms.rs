//! Norms of more rows than the caches hold.

use anyhow::Result;
use executor::kernels::cpu::norm::{Norm, norm};
use ir::op::NormKind;

use crate::{Amount, Bench, made_up};

const FEATURES: usize = 2048;
const TOKENS: usize = 16_384;

pub(crate) fn measure(bench: &mut Bench) -> Result<()> {
    let x: Vec<f32> = (0..TOKENS * FEATURES).map(made_up).collect();
    let (scale, mut out) = (vec![1.0; FEATURES], vec![0.0; TOKENS * FEATURES]);
    let rms = Norm {
        kind: NormKind::Rms,
        scale: Some(&scale),
        bias: None,
        epsilon: 1e-5,
        scale_offset: 0.0,
    };
    // Read, and written.
    let bytes = (2 * x.len() * size_of::<f32>()) as u64;
    bench.measure(&format!("norm of {TOKENS} rows"), Amount::Bytes(bytes), |team, isa| {
        norm(team, isa, &rms, FEATURES, &x, None, &mut out);
    })
}
