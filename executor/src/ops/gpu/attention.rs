//! Attention over this device's caches.

use anyhow::{Result, ensure};
use ir::op::{self, Norm};

use super::borrowed::Borrowed;
use super::scratch::Scratch;
use super::state::{Operands, State};
use crate::kernels::gpu::attention::append::{Append, NormWeights, Rotation};
use crate::kernels::gpu::attention::decode::Decode;
use crate::kernels::gpu::attention::prefill::Prefill;
use crate::ops::Scope;

impl State {
    /// `[tokens, heads · head_dim]` of `q`, `k` and `v`.
    pub(super) fn attention(
        &self,
        op: &op::Attention,
        scope: Scope<'_>,
        operands: &Operands,
    ) -> Result<()> {
        let ([q, k, v], [out]) = (operands.inputs.as_slice(), operands.outputs.as_slice()) else {
            anyhow::bail!("attention reads {} tensors", operands.inputs.len());
        };
        let width = (op.heads * op.head_dim) as usize;
        let kv_width = (op.kv_heads * op.head_dim) as usize;
        ensure!(
            [q.columns, k.columns, v.columns, out.columns] == [width, kv_width, kv_width, width],
            "queries, keys and values do not fit the heads"
        );
        let cache = self.caches.cache(op.cache)?;
        let queries = Scratch::first(&self.scratch.inner, q.rows * width * size_of::<f32>())?;
        let (query_norm, key_norm) = (self.head_norm(&op.q_norm)?, self.head_norm(&op.k_norm)?);
        let home = self.caches.home(scope.plan, self.device, op.cache)?;
        let is_decode = scope.batch.is_decode();
        let attend = |rotation: Option<Rotation<'_>>| {
            self.inputs.with_tokens(|tokens| {
                let (gpu, batch) = (&self.gpu, scope.batch);
                let borrowed = home.as_deref().map(|home| Borrowed {
                    gpu,
                    home,
                    window: cache,
                    batch,
                    tokens,
                });
                borrowed.iter().try_for_each(|borrowed| borrowed.bring(op.window))?;
                let append = Append {
                    attention: op,
                    cache,
                    tokens,
                    queries: &q.span,
                    keys: &k.span,
                    values: &v.span,
                    query_norm,
                    key_norm,
                    rotation,
                };
                let appends = is_decode && self.gpu.decode_appends(op, &cache);
                if !appends {
                    self.gpu.append(&append, &queries);
                }
                if is_decode {
                    let call = Decode {
                        attention: op,
                        cache,
                        tokens,
                        queries: &queries,
                        fresh: appends.then_some(&append),
                        ahead: &operands.ahead,
                        workspace: &self.scratch.partial,
                        order: out.order,
                    };
                    self.gpu.decode(&call, &out.span);
                } else {
                    let call = Prefill { attention: op, cache, tokens, queries: &queries };
                    self.gpu.prefill(&call, &out.span);
                }
                borrowed.iter().try_for_each(Borrowed::give_back)
            })
        };
        match op.rope {
            Some(rope) => {
                self.rotations.with(rope, &self.inputs, |rotation| attend(Some(rotation)))?
            }
            None => attend(None),
        }
    }

    fn head_norm(&self, norm: &Option<Norm>) -> Result<NormWeights<'_>> {
        let Some(norm) = norm else { return Ok(NormWeights::default()) };
        let (scale, bias) = (self.weights.optional(norm.scale)?, self.weights.optional(norm.bias)?);
        Ok(NormWeights { scale, bias })
    }
}
