//! Burn's GPU backend, extended.

#![expect(unsafe_code, reason = "who attends answers for the numbers that say where in a cache")]

use anyhow::{Context as _, Result, ensure};
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use ir::op::{Activation, Then};
use ir::tensor::{DType as Stored, Format};
use ir::workspace::shortlist::{LIST_WORDS, bytes as list_bytes, is_listed};
use ir::workspace::{attention_splits, attention_terms};

use super::tensors::{Operand, stored};
use super::{Attention, Experts, Kernels, Linear, Norm};
use crate::kernels::gpu::attention::append::{Append, NormWeights, Rotation};
use crate::kernels::gpu::attention::decode::Decode;
use crate::kernels::gpu::attention::prefill::Prefill;
use crate::kernels::gpu::attention::{Cache, Reach, Tokens};
use crate::kernels::gpu::cast::{self, Cast};
use crate::kernels::gpu::device::{Gpu, Span};
use crate::kernels::gpu::epilogue::Epilogue;
use crate::kernels::gpu::experts;
use crate::kernels::gpu::matrix::{Layout, Matrix};
use crate::kernels::gpu::rows::Gather;

impl Kernels for CubeBackend {
    fn matrix(weight: CubeTensor) -> Result<Matrix> {
        let format = match stored(weight.dtype)? {
            Stored::F16 => Format::F16,
            Stored::Bf16 => Format::Bf16,
            Stored::F32 | Stored::I32 | Stored::U8 | Stored::I8 => Format::F32,
        };
        let weight = into_contiguous(weight);
        let &[rows, columns] = weight.meta.shape().as_slice() else {
            anyhow::bail!("a matrix has {} axes", weight.meta.shape().num_dims());
        };
        Matrix::new(format, Layout::RowMajor, rows, columns, Span::of(weight.handle))
    }

    fn look_up(table: &Matrix, rows: CubeTensor, scale: f32) -> Result<CubeTensor> {
        gather(table, rows, 0, scale, None)
    }

    fn add_rows(
        x: CubeTensor,
        table: &Matrix,
        rows: CubeTensor,
        offset: u32,
    ) -> Result<CubeTensor> {
        gather(table, rows, offset, 1.0, Some(x))
    }

    fn select_rows(x: CubeTensor, rows: CubeTensor) -> Result<CubeTensor> {
        let gpu = Gpu::of(&x);
        let (x, rows) = (Operand::floats(x)?, Operand::ints(rows)?);
        let (made, out) = gpu.fresh(rows.count(), x.columns, DType::F32);
        let call = Gather {
            rows: &rows.span,
            offset: 0,
            scale: 1.0,
            base: None,
            count: rows.count(),
            features: x.columns,
        };
        gpu.select(&x.span, x.rows, &call, &out);
        Ok(made)
    }

    fn norm(x: CubeTensor, norm: &Norm<Self>, residual: Option<CubeTensor>) -> Result<CubeTensor> {
        let gpu = Gpu::of(&x);
        let x = Operand::floats(x)?;
        let residual = residual.map(Operand::floats).transpose()?;
        let residual = residual.as_ref().map(|term| term.sized(x.count(), "what is added"));
        let weights = NormOperands::of(norm, x.columns)?;
        let (made, out) = gpu.fresh(x.rows, x.columns, DType::F32);
        gpu.cast(&Cast {
            norm: Some(weights.norm(norm)),
            residual: residual.transpose()?,
            ..Cast::plain(&x.span, [x.rows, x.columns], Format::F32, &out)
        })?;
        Ok(made)
    }

    fn linear(linear: Linear<'_, Self>) -> Result<Vec<CubeTensor>> {
        super::linear::linear(linear)
    }

    unsafe fn attention(attention: Attention<'_, Self>) -> Result<CubeTensor> {
        let Attention { form, queries, keys, values, head_norms, rotation, cache, tokens } =
            attention;
        let gpu = Gpu::of(&queries);
        let (heads, kv_heads, head_dim) =
            (form.heads as usize, form.kv_heads as usize, form.head_dim as usize);
        let queries = Operand::floats(queries)?;
        let (rows, width) = (queries.rows, heads * head_dim);
        queries.sized(rows * width, "queries")?;
        let [keys, values] = [keys, values].map(Operand::floats);
        let (keys, values) = (keys?, values?);
        let kv_count = rows * kv_heads * head_dim;
        let [query_norm, key_norm] = head_norms.map(|weights| NormOperands::new(weights, head_dim));
        let (query_norm, key_norm) = (query_norm?, key_norm?);
        let turned = match rotation {
            Some(super::Rotation { pairing, table, rows }) => {
                Some((pairing, Operand::floats(table)?, Operand::ints(rows)?))
            }
            None => None,
        };
        let rotation = match &turned {
            Some((pairing, table, of_tokens)) => {
                let dims = table.columns;
                ensure!(
                    dims.is_multiple_of(2) && dims <= head_dim,
                    "{dims} of {head_dim} features of a head turn in pairs"
                );
                Some(Rotation {
                    pairing: *pairing,
                    dims: u32::try_from(dims)?,
                    table: &table.span,
                    table_rows: table.rows,
                    rows: of_tokens.sized(rows, "rows of the rotation")?,
                })
            }
            None => None,
        };
        let cached = Cached::of(cache, [kv_heads, head_dim])?;
        let held = Held::of(&tokens, rows)?;
        let cache = cached.cache();
        let run = held.tokens(tokens.longest);
        let append = Append {
            attention: form,
            cache,
            tokens: run,
            queries: &queries.span,
            keys: keys.sized(kv_count, "keys")?,
            values: values.sized(kv_count, "values")?,
            query_norm: query_norm.weights(),
            key_norm: key_norm.weights(),
            rotation,
        };
        let (made, out) = gpu.fresh(rows, width, DType::F32);
        let ready = gpu.scratch(rows * width * size_of::<f32>());
        let appends = tokens.is_decode && gpu.decode_appends(form, &cache);
        if !appends {
            gpu.append(&append, &ready);
        }
        if tokens.is_decode {
            let splits = attention_splits(form.kv_heads, rows as u32);
            let bytes: u64 = attention_terms(form, rows as u32, splits).iter().sum();
            gpu.decode(
                &Decode {
                    attention: form,
                    cache,
                    tokens: run,
                    queries: &ready,
                    fresh: appends.then_some(&append),
                    ahead: &[],
                    workspace: &gpu.scratch(bytes as usize),
                    order: None,
                },
                &out,
            );
        } else {
            gpu.prefill(&Prefill { attention: form, cache, tokens: run, queries: &ready }, &out);
        }
        Ok(made)
    }

    fn route(
        logits: CubeTensor,
        used: usize,
        renormalise: bool,
    ) -> Result<(CubeTensor, CubeTensor)> {
        let gpu = Gpu::of(&logits);
        let logits = Operand::floats(logits)?;
        let experts = logits.columns;
        ensure!(used > 0 && used <= experts, "{used} of {experts} experts are used");
        let (ids, ids_at) = gpu.fresh(logits.rows, used, DType::I32);
        let (weights, weights_at) = gpu.fresh(logits.rows, used, DType::F32);
        let shape = [logits.rows, experts];
        gpu.route(&logits.span, shape, used, renormalise, &ids_at, &weights_at);
        Ok((ids, weights))
    }

    fn experts(call: Experts<'_, Self>) -> Result<CubeTensor> {
        let Experts { x, ids, weights, first_expert, stacks: [gate, up, down], activation } = call;
        let gpu = Gpu::of(&x);
        let (x, ids, weights) =
            (Operand::floats(x)?, Operand::ints(ids)?, Operand::floats(weights)?);
        ensure!(
            x.columns == gate.columns() && ids.rows == x.rows,
            "{} tokens of {} features, of which {} chose, come to experts of {}",
            x.rows,
            x.columns,
            ids.rows,
            gate.columns()
        );
        let (made, out) = gpu.fresh(x.rows, x.columns, DType::F32);
        let mut call = experts::Experts {
            x: &x.span,
            tokens: x.rows,
            ids: &ids.span,
            weights: weights.sized(ids.count(), "weights of experts")?,
            used: ids.columns,
            first_expert,
            gate,
            up,
            down,
            activation,
            workspace: &out,
            out: &out,
        };
        let workspace = gpu.scratch(call.sizes().bytes() as usize);
        call.workspace = &workspace;
        gpu.experts(&call)?;
        Ok(made)
    }

    fn activate(
        activation: Activation,
        x: CubeTensor,
        up: Option<CubeTensor>,
    ) -> Result<CubeTensor> {
        let gpu = Gpu::of(&x);
        let x = Operand::floats(x)?;
        let up = up.map(Operand::floats).transpose()?;
        let up = up.as_ref().map(|up| up.sized(x.count(), "what a gate is multiplied with"));
        let up = up.transpose()?;
        let (made, out) = gpu.fresh(x.rows, x.columns, DType::F32);
        gpu.epilogue(&Epilogue {
            products: Some(&x.span),
            up,
            element: Stored::F32,
            tokens: x.rows,
            features: x.columns,
            biases: &[None, None][..1 + usize::from(up.is_some())],
            then: if up.is_some() { Then::Gate(activation) } else { Then::Activate(activation) },
            residual: None,
            out: &out,
        })?;
        Ok(made)
    }

    fn sigmoid_gate(gate: CubeTensor, x: CubeTensor) -> Result<CubeTensor> {
        let gpu = Gpu::of(&x);
        let (gate, x) = (Operand::floats(gate)?, Operand::floats(x)?);
        let (made, out) = gpu.fresh(x.rows, x.columns, DType::F32);
        let gate = gate.sized(x.rows, "one gate for each row")?;
        gpu.sigmoid_gate(gate, &x.span, &out, x.rows, x.columns);
        Ok(made)
    }

    fn soft_cap(cap: f32, x: CubeTensor) -> Result<CubeTensor> {
        let gpu = Gpu::of(&x);
        let x = Operand::floats(x)?;
        let (made, out) = gpu.fresh(x.rows, x.columns, DType::F32);
        gpu.soft_cap(cap, &x.span, &out, x.count());
        Ok(made)
    }

    fn shortlist(logits: CubeTensor, inverse_temperatures: CubeTensor) -> Result<CubeTensor> {
        let gpu = Gpu::of(&logits);
        let (logits, temperatures) =
            (Operand::floats(logits)?, Operand::floats(inverse_temperatures)?);
        let (rows, vocabulary) = (logits.rows, logits.columns);
        ensure!(is_listed(vocabulary as u32), "rows of {vocabulary} logits are short themselves");
        let temperatures = temperatures.sized(rows, "one temperature for each row")?;
        let scratch = gpu.scratch(list_bytes(rows as u32, vocabulary as u32) as usize);
        let lists = gpu.shortlist(&logits.span, [rows, vocabulary], temperatures, &scratch);
        let lists = lists.part(0, rows * LIST_WORDS as usize * size_of::<f32>());
        let shape = burn::tensor::Shape::new([rows, LIST_WORDS as usize]);
        let Gpu { client, device } = gpu;
        Ok(CubeTensor::new_contiguous(client, device, shape, lists.handle(), DType::F32))
    }
}

/// Rows of a table, added to `base` where there is one.
fn gather(
    table: &Matrix,
    rows: CubeTensor,
    offset: u32,
    scale: f32,
    base: Option<CubeTensor>,
) -> Result<CubeTensor> {
    let gpu = Gpu::of(&rows);
    let (rows, features) = (Operand::ints(rows)?, table.columns());
    let count = rows.count();
    let base = base.map(Operand::floats).transpose()?;
    let base = base.as_ref().map(|base| base.sized(count * features, "what rows are added to"));
    let (made, out) = gpu.fresh(count, features, DType::F32);
    let call = Gather { rows: &rows.span, offset, scale, base: base.transpose()?, count, features };
    gpu.gather(table, &call, &out)?;
    Ok(made)
}

/// Weights of a norm.
pub(super) struct NormOperands {
    scale: Option<Operand>,
    bias: Option<Operand>,
}

impl NormOperands {
    /// Those of rows of `features`.
    pub(super) fn of(norm: &Norm<CubeBackend>, features: usize) -> Result<Self> {
        Self::new([norm.scale.clone(), norm.bias.clone()], features)
    }

    /// Factors and terms of rows of `features`.
    fn new(weights: [Option<CubeTensor>; 2], features: usize) -> Result<Self> {
        let [scale, bias] = weights.map(|weight| -> Result<Option<Operand>> {
            let weight = weight.map(Operand::floats).transpose()?;
            weight.iter().try_for_each(|weight| weight.sized(features, "a norm").map(drop))?;
            Ok(weight)
        });
        Ok(Self { scale: scale?, bias: bias? })
    }

    fn weights(&self) -> NormWeights<'_> {
        let scale = self.scale.as_ref().map(|scale| &scale.span);
        NormWeights { scale, bias: self.bias.as_ref().map(|bias| &bias.span) }
    }

    /// The norm with them.
    pub(super) fn norm(&self, norm: &Norm<CubeBackend>) -> cast::Norm<'_> {
        let NormWeights { scale, bias } = self.weights();
        let &Norm { kind, scale_offset, epsilon, .. } = norm;
        cast::Norm { kind, scale, bias, scale_offset, epsilon }
    }
}

/// A cache, where it lies.
struct Cached {
    sides: [Span; 2],
    element: Stored,
    blocks: usize,
    block_tokens: usize,
}

impl Cached {
    fn of(sides: [CubeTensor; 2], heads: [usize; 2]) -> Result<Self> {
        let [keys, values] = sides;
        ensure!(
            keys.is_contiguous() && values.is_contiguous() && keys.dtype == values.dtype,
            "a cache's keys and values do not lie alike"
        );
        let (shape, element) = (keys.meta.shape().clone(), stored(keys.dtype)?);
        let &[blocks, kv_heads, block_tokens, head_dim] = shape.as_slice() else {
            anyhow::bail!("a cache has {} axes", shape.num_dims());
        };
        ensure!(
            [kv_heads, head_dim] == heads && *values.meta.shape() == shape,
            "a cache of {shape:?} does not fit {heads:?} heads and features of each"
        );
        let sides = [Span::of(keys.handle), Span::of(values.handle)];
        Ok(Self { sides, element, blocks, block_tokens })
    }

    fn cache(&self) -> Cache<'_> {
        let Self { sides: [keys, values], element, blocks, block_tokens } = self;
        Cache { keys, values, element: *element, blocks: *blocks, block_tokens: *block_tokens }
    }
}

/// What a run is about, where it lies.
struct Held {
    rows: usize,
    sequence: Operand,
    position: Operand,
    parts: Operand,
    blocks: Operand,
}

impl Held {
    fn of(tokens: &super::Tokens<CubeBackend>, rows: usize) -> Result<Self> {
        let ints = |tensor: &CubeTensor| Operand::ints(tensor.clone());
        let sequence = ints(&tokens.sequence).context("sequences")?;
        let position = ints(&tokens.position).context("positions")?;
        let (parts, blocks) = (ints(&tokens.parts)?, ints(&tokens.blocks)?);
        sequence.sized(rows, "a sequence for each row")?;
        position.sized(rows, "a position for each row")?;
        parts.sized(blocks.rows * 3, "three numbers for each sequence")?;
        Ok(Self { rows, sequence, position, parts, blocks })
    }

    fn tokens(&self, longest: usize) -> Tokens<'_> {
        Tokens {
            tokens: self.rows,
            sequences: self.blocks.rows,
            sequence: &self.sequence.span,
            position: &self.position.span,
            parts: &self.parts.span,
            blocks: &self.blocks.span,
            max_blocks: self.blocks.columns,
            reach: Reach::of(longest),
        }
    }
}
