//! Attention over this device's caches.

use anyhow::{Result, ensure};
use ir::op;

use super::{Input, Output, State};
use crate::kernels::cpu::attention::{Attention, Sequence, attention as compute};
use crate::ops::Scope;
use crate::team::Team;

/// `[tokens, heads · head_dim]` of `q`, `k` and `v`.
pub(super) fn attention(
    op: &op::Attention,
    team: &Team,
    state: &mut State,
    scope: Scope<'_>,
    inputs: &[Input],
) -> Result<Output> {
    let [q, k, v] = inputs else {
        anyhow::bail!("attention reads {} tensors", inputs.len());
    };
    let State { isa, weights, caches, rotations } = state;
    let mut cache = caches.view(op.cache)?;
    let shape = *cache.shape();
    let tokens = scope.batch.tokens().len();
    let (width, kv_width) = (op.heads as usize * shape.head_dim, shape.kv_heads * shape.head_dim);
    ensure!(
        [q, k, v].iter().all(|x| x.rows() == tokens)
            && [q.columns(), k.columns(), v.columns()] == [width, kv_width, kv_width],
        "queries, keys and values do not fit the heads"
    );
    let sequences: Vec<Sequence<'_>> = scope
        .batch
        .parts()
        .iter()
        .map(|part| Sequence {
            first_token: part.first_token,
            tokens: part.tokens,
            past: part.past,
            blocks: &part.blocks,
        })
        .collect();
    let norm = |norm: &Option<op::Norm>| norm.as_ref().map(|norm| weights.norm(norm)).transpose();
    let call = Attention {
        q: q.floats()?,
        k: k.floats()?,
        v: v.floats()?,
        sequences: &sequences,
        heads: op.heads as usize,
        group: op.group as usize,
        first_head: op.first_head as usize,
        scale: op.scale,
        window: op.window.map(|window| window as usize),
        soft_cap: op.soft_cap,
        q_norm: norm(&op.q_norm)?,
        k_norm: norm(&op.k_norm)?,
        rope: op.rope.map(|rope| rotations.view(rope, team, scope)),
    };
    let mut out = Output::new(team, tokens, width)?;
    compute(team, *isa, &call, &mut cache, out.floats());
    out.floats()[scope.batch.fed() * width..].fill(0.0);
    Ok(out)
}
