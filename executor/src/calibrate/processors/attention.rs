//! How fast processors attend, with wide heads and with narrow ones: what a score takes does not shrink with its head.

use anyhow::Result;
use ir::machine::CacheRate;
use ir::tensor::DType;

use super::Memory;
use crate::calibrate::typical;
use crate::calibrate::work::{Heads, Layer};
use crate::kernels::cpu::cache::Element;
use crate::kernels::cpu::isa::Isa;
use crate::team::Team;

/// Tokens that one token looks back on: many, and so few that what it takes is what all take.
const PASTS: [usize; 2] = [4095, 63];
/// Tokens of a prompt.
const PROMPT: usize = 512;
/// Layers with wide heads, together 134 MB in 16 bits.
const LAYERS: usize = 8;

/// How fast attention is with caches of one type.
pub(super) struct Attention {
    pub(super) rate: CacheRate,
    /// What one token's takes beside its cache and scores: to begin, and to join what members made.
    pub(super) nanos: f64,
}

/// Measures it.
///
/// # Errors
/// When there is no memory.
pub(super) fn rates(
    team: &Team,
    isa: Isa,
    memory: &Memory,
    kv_type: DType,
    element: Element,
) -> Result<Attention> {
    let heads = [Heads::WIDE, Heads::NARROW];
    let [wide, narrow] = heads.map(|heads| prompt_nanos(team, isa, heads, element));
    let amounts = heads.map(|heads| [heads.prompt_flops(PROMPT), heads.prompt_scores(PROMPT)]);
    let (attention_flops_per_sec, prompt_score_nanos) = apart(amounts, [wide?, narrow?]);
    let [wide, narrow, short] = token_nanos(team, isa, memory, element)?;
    let [past, few] = PASTS.map(|past| (past + 1) as f64);
    // Of each token that is seen.
    let wide_nanos = ((wide - short) / (past - few)).max(f64::MIN_POSITIVE);
    let nanos = (short - few * wide_nanos).max(0.0);
    let amounts = heads.map(|heads| [heads.token_bytes(element) as f64, heads.queries as f64]);
    let (cache_bytes_per_sec, score_nanos) = apart(amounts, [wide_nanos, (narrow - nanos) / past]);
    let rate = CacheRate {
        kv_type,
        attention_flops_per_sec,
        prompt_score_nanos,
        cache_bytes_per_sec,
        score_nanos,
    };
    Ok(Attention { rate, nanos })
}

/// What is done a second of the first of two amounts, and the nanoseconds of each of the second, from two times of
/// both. The first amounts are unlike.
fn apart([a, b]: [[f64; 2]; 2], nanos: [f64; 2]) -> (f64, f64) {
    let ratio = b[1] / a[1];
    let first = (nanos[1] - ratio * nanos[0]) / (b[0] - ratio * a[0]);
    let second = (nanos[0] - a[0] * first) / a[1];
    // Where one of them is lost in the other, or in noise, all is the first's.
    if first > 0.0 && second > 0.0 { (1e9 / first, second) } else { (a[0] / nanos[0] * 1e9, 0.0) }
}

/// Nanoseconds of a prompt.
fn prompt_nanos(team: &Team, isa: Isa, heads: Heads, element: Element) -> Result<f64> {
    let mut layer = Layer::new(team, heads, element, PROMPT, PROMPT)?;
    typical(|| layer.attend(team, isa, PROMPT, 0))
}

/// Nanoseconds of one token that looks back on many with wide heads and with narrow ones, and on few with wide ones.
fn token_nanos(team: &Team, isa: Isa, memory: &Memory, element: Element) -> Result<[f64; 3]> {
    let layers = |heads: Heads, times: usize| -> Result<Vec<Layer>> {
        let first = Layer::new(team, heads, element, PASTS[0] + 1, 1)?;
        // No layer is still in a small cache when its turn comes again.
        let count = (times * LAYERS).max(memory.least_bytes().div_ceil(first.bytes()));
        let others = (1..count).map(|_| Layer::new(team, heads, element, PASTS[0] + 1, 1));
        [Ok(first)].into_iter().chain(others).collect()
    };
    let times = Heads::WIDE.token_bytes(element) / Heads::NARROW.token_bytes(element);
    let mut layers = [layers(Heads::WIDE, 1)?, layers(Heads::NARROW, times)?];
    let counts = [0, 1, 0].map(|kind: usize| layers[kind].len() as f64);
    let nanos = memory.cold::<3>(team, |part| {
        let past = PASTS[part / 2];
        layers[part % 2].iter_mut().try_for_each(|layer| layer.attend(team, isa, 1, past))
    })?;
    Ok([0, 1, 2].map(|part| nanos[part] / counts[part]))
}

#[cfg(test)]
mod tests {
    use super::apart;

    #[test]
    fn two_costs_are_told_apart() {
        // 4 ns of each of the first, 0.5 of the second.
        let (rate, nanos) = apart([[8.0, 2.0], [4.0, 2.0]], [33.0, 17.0]);
        assert!((rate - 0.25e9).abs() < 1e-3 && (nanos - 0.5).abs() < 1e-12);
        let (rate, nanos) = apart([[8.0, 2.0], [4.0, 1.5]], [33.0, 16.75]);
        assert!((rate - 0.25e9).abs() < 1e-3 && (nanos - 0.5).abs() < 1e-12);
    }

    #[test]
    fn what_is_lost_in_noise_costs_nothing() {
        for narrow in [16.0, 15.0, 40.0] {
            assert_eq!(apart([[8.0, 2.0], [4.0, 2.0]], [32.0, narrow]), (0.25e9, 0.0));
        }
    }
}
