//! Attention over this device's caches.

use anyhow::Result;
use burn_flex::{Flex, FlexTensor};
use ir::op;

use super::State;
use crate::kernels::cpu::attention::{Attention, Sequence};
use crate::kernels::cpu::extension::{Cores, Kernels};
use crate::ops::Scope;

/// `[tokens, heads · head_dim]` of `q`, `k` and `v`.
pub(super) fn attention(
    op: &op::Attention,
    cores: Cores<'_>,
    state: &mut State,
    scope: Scope<'_>,
    [q, k, v]: [FlexTensor; 3],
) -> Result<FlexTensor> {
    let State { weights, caches, rotations, .. } = state;
    let parts = scope.batch.parts().iter();
    let sequences = parts.map(|part| Sequence {
        first_token: part.first_token,
        tokens: part.tokens,
        past: part.past,
        blocks: &part.blocks,
    });
    let sequences: Vec<Sequence<'_>> = sequences.collect();
    let norm = |norm: &Option<op::Norm>| norm.as_ref().map(|norm| weights.norm(norm)).transpose();
    let call = Attention {
        q,
        k,
        v,
        sequences: &sequences,
        heads: op.heads as usize,
        group: op.group as usize,
        first_head: op.first_head as usize,
        scale: op.scale,
        window: op.window.map(|window| window as usize),
        soft_cap: op.soft_cap,
        q_norm: norm(&op.q_norm)?,
        k_norm: norm(&op.k_norm)?,
        rope: op.rope.map(|rope| rotations.view(rope, cores.team, scope)),
    };
    Flex::attention(cores, call, &mut caches.view(op.cache)?)
}
