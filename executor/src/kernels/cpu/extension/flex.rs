//! Burn's `flex` backend, extended.

use anyhow::{Result, ensure};
use burn_flex::{Flex, FlexTensor};
use ir::op::{Activation, Then};

use super::{Cores, Input, Kernels, Output};
use crate::kernels::cpu::attention::{Attention, attention};
use crate::kernels::cpu::cache::Cache;
use crate::kernels::cpu::experts::{Experts, experts};
use crate::kernels::cpu::linear::{Linear, linear};
use crate::kernels::cpu::norm::{Norm, norm};
use crate::kernels::cpu::table::Lookup;
use crate::kernels::cpu::{activation, router, rows};
use crate::kernels::launches;

impl Kernels for Flex {
    fn look_up(
        cores: Cores<'_>,
        table: Lookup<'_>,
        rows: &[u32],
        scale: f32,
    ) -> Result<FlexTensor> {
        ensure_rows(rows.iter().copied(), table.rows(), "a table")?;
        let features = table.columns();
        let mut out = Output::new(cores.team, rows.len(), features)?;
        rows::for_each_row(cores.team, features, out.floats(), |first, places| {
            for (place, &row) in places.chunks_exact_mut(features).zip(&rows[first / features..]) {
                table.read_row(row as usize, place);
                if scale != 1.0 {
                    place.iter_mut().for_each(|x| *x *= scale);
                }
            }
        });
        Ok(out.into_floats())
    }

    fn add_rows(
        cores: Cores<'_>,
        x: FlexTensor,
        table: Lookup<'_>,
        rows: &[u32],
        offset: u32,
    ) -> Result<FlexTensor> {
        let (x, features) = (Input::of(x), table.columns());
        let row = |&row: &u32| row.saturating_add(offset);
        ensure_rows(rows.iter().map(row), table.rows(), "a table")?;
        ensure!(
            (x.rows(), x.columns()) == (rows.len(), features),
            "{} rows of {} get {} rows of {features}",
            x.rows(),
            x.columns(),
            rows.len()
        );
        let mut out = Output::new(cores.team, rows.len(), features)?;
        let x = x.floats()?;
        rows::for_each_row(cores.team, features, out.floats(), |first, places| {
            let places = places.chunks_exact_mut(features).zip(&rows[first / features..]);
            for ((place, of), x) in places.zip(x[first..].chunks_exact(features)) {
                table.read_row(row(of) as usize, place);
                place.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
            }
        });
        Ok(out.into_floats())
    }

    fn select_rows(cores: Cores<'_>, x: FlexTensor, rows: &[u32]) -> Result<FlexTensor> {
        let x = Input::of(x);
        ensure_rows(rows.iter().copied(), x.rows(), "an activation")?;
        let mut out = Output::new(cores.team, rows.len(), x.columns())?;
        rows::select_rows(x.columns(), x.floats()?, rows, out.floats());
        Ok(out.into_floats())
    }

    fn norm(
        cores: Cores<'_>,
        x: FlexTensor,
        by: &Norm<'_>,
        residual: Option<FlexTensor>,
    ) -> Result<FlexTensor> {
        let (x, residual) = (Input::of(x), residual.map(Input::of));
        let residual = residual.as_ref().map(Input::floats).transpose()?;
        let mut out = Output::new(cores.team, x.rows(), x.columns())?;
        norm(cores.team, cores.isa, by, x.columns(), x.floats()?, residual, out.floats());
        Ok(out.into_floats())
    }

    fn linear(cores: Cores<'_>, call: Linear<'_, FlexTensor>) -> Result<Vec<FlexTensor>> {
        let Linear { x, tokens, norm, weights, biases, then, residual } = call;
        let (x, residual) = (Input::of(x), residual.map(Input::of));
        let residual = residual.as_ref().map(Input::floats).transpose()?;
        ensure!(x.rows() == tokens, "a linear of {tokens} tokens gets {}", x.rows());
        ensure!(weights.len() == biases.len(), "a linear has no place for every bias");
        let is_gated = matches!(then, Then::Gate(_));
        let made = if is_gated { &weights[..weights.len().min(1)] } else { weights };
        let outputs = made.iter().map(|weight| Output::new(cores.team, tokens, weight.rows()));
        let mut outputs = outputs.collect::<Result<Vec<_>>>()?;
        for part in launches(weights, then, |weight| weight.format()) {
            let outputs = &mut outputs[part.start..part.end.min(made.len())];
            let (weights, biases) = (&weights[part.clone()], &biases[part]);
            let call = Linear { x: x.floats()?, tokens, norm, weights, biases, then, residual };
            let mut slices: Vec<&mut [f32]> = outputs.iter_mut().map(Output::floats).collect();
            linear(cores.team, cores.isa, &call, &mut slices)?;
        }
        Ok(outputs.into_iter().map(Output::into_floats).collect())
    }

    fn attention(
        cores: Cores<'_>,
        call: Attention<'_, FlexTensor>,
        cache: &mut Cache<'_>,
    ) -> Result<FlexTensor> {
        let [q, k, v] = [&call.q, &call.k, &call.v].map(|x| Input::of(x.clone()));
        let shape = *cache.shape();
        let (width, kv_width) = (call.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let tokens = q.rows();
        ensure!(
            [k.rows(), v.rows()] == [tokens; 2]
                && [q.columns(), k.columns(), v.columns()] == [width, kv_width, kv_width],
            "queries, keys and values do not fit the heads"
        );
        let mut out = Output::new(cores.team, tokens, width)?;
        let call = call.with([q.floats()?, k.floats()?, v.floats()?]);
        attention(cores.team, cores.isa, &call, cache, out.floats());
        let ends = call.sequences.iter().map(|sequence| sequence.first_token + sequence.tokens);
        out.floats()[ends.max().unwrap_or(0) * width..].fill(0.0);
        Ok(out.into_floats())
    }

    fn route(
        cores: Cores<'_>,
        logits: FlexTensor,
        used: usize,
        renormalise: bool,
    ) -> Result<(FlexTensor, FlexTensor)> {
        let logits = Input::of(logits);
        let (tokens, experts) = (logits.rows(), logits.columns());
        ensure!(used > 0 && used <= experts, "{used} of {experts} experts are used");
        let mut ids = Output::new(cores.team, tokens, used)?;
        let mut weights = Output::new(cores.team, tokens, used)?;
        let (sizes, places) = ((experts, used), (ids.ints(), weights.floats()));
        router::route(cores.team, logits.floats()?, sizes, renormalise, places.0, places.1);
        Ok((ids.into_ints(), weights.into_floats()))
    }

    fn experts(cores: Cores<'_>, call: Experts<'_, FlexTensor, FlexTensor>) -> Result<FlexTensor> {
        let Experts { x, tokens, ids, weights, first_expert, experts: held, activation } = call;
        let [x, ids, weights] = [x, ids, weights].map(Input::of);
        let call = Experts {
            x: x.floats()?,
            tokens,
            ids: ids.ints()?,
            weights: weights.floats()?,
            first_expert,
            experts: held,
            activation,
        };
        let mut out = Output::new(cores.team, x.rows(), x.columns())?;
        experts(cores.team, cores.isa, &call, out.floats())?;
        Ok(out.into_floats())
    }

    fn activate(cores: Cores<'_>, kind: Activation, x: FlexTensor) -> Result<FlexTensor> {
        let (x, mut out) = with_result(cores, x)?;
        activation::activate(cores.team, cores.isa, kind, x.floats()?, out.floats());
        Ok(out.into_floats())
    }

    fn gate(
        cores: Cores<'_>,
        kind: Activation,
        gate: FlexTensor,
        up: FlexTensor,
    ) -> Result<FlexTensor> {
        let ((gate, mut out), up) = (with_result(cores, gate)?, Input::of(up));
        let operands = (gate.floats()?, up.floats()?);
        ensure!(operands.0.len() == operands.1.len(), "a gate and its values differ in size");
        activation::gate(cores.team, cores.isa, kind, operands.0, operands.1, out.floats());
        Ok(out.into_floats())
    }

    fn sigmoid_gate(cores: Cores<'_>, gate: FlexTensor, x: FlexTensor) -> Result<FlexTensor> {
        let (gate, (x, mut out)) = (Input::of(gate), with_result(cores, x)?);
        ensure!((gate.rows(), gate.columns()) == (x.rows(), 1), "one gate for each row");
        let (gate, features) = (gate.floats()?, x.columns());
        let out_floats = out.floats();
        activation::sigmoid_gate(cores.team, cores.isa, gate, features, x.floats()?, out_floats);
        Ok(out.into_floats())
    }

    fn add_by_team(cores: Cores<'_>, a: FlexTensor, b: FlexTensor) -> Result<FlexTensor> {
        let ((a, mut out), b) = (with_result(cores, a)?, Input::of(b));
        let operands = (a.floats()?, b.floats()?);
        ensure!(operands.0.len() == operands.1.len(), "terms differ in size");
        activation::add(cores.team, cores.isa, operands.0, operands.1, out.floats());
        Ok(out.into_floats())
    }

    fn soft_cap(cores: Cores<'_>, cap: f32, x: FlexTensor) -> Result<FlexTensor> {
        let (x, mut out) = with_result(cores, x)?;
        activation::soft_cap(cores.team, cores.isa, cap, x.floats()?, out.floats());
        Ok(out.into_floats())
    }
}

/// A tensor to read, and one of its shape to write.
fn with_result(cores: Cores<'_>, x: FlexTensor) -> Result<(Input, Output)> {
    let x = Input::of(x);
    let out = Output::new(cores.team, x.rows(), x.columns())?;
    Ok((x, out))
}

/// Fails where one of `rows` is not among the `count` rows of `what`.
fn ensure_rows(mut rows: impl Iterator<Item = u32>, count: usize, what: &str) -> Result<()> {
    match rows.find(|&row| row as usize >= count) {
        Some(row) => anyhow::bail!("row {row} is asked for of {what} with {count} rows"),
        None => Ok(()),
    }
}
