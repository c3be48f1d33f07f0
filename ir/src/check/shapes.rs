//! Reads, writes and weights of a step have the types that its action expects, in sizes that its device counts.

use anyhow::{Result, bail, ensure};
use smallvec::smallvec;

use crate::check::{Scope, Violation};
use crate::id::WeightId;
use crate::machine::DeviceKind;
use crate::op::{Attention, Experts, Linear, Norm, Op, Then};
use crate::plan::{Action, Buffer, FETCH_ALIGNMENT, Phase, Plan, Program, Step};
use crate::tensor::{DType, Dim, Format, TensorType};
use crate::workspace::{MAX_FUSED_ROWS, broken_loads, product_format};

mod moves;

pub(super) fn check(scope: Scope<'_>, found: &mut Vec<Violation>) {
    let Scope { plan, program } = scope;
    for (id, step) in program.steps.iter() {
        if let Err(error) = step_types(scope, step) {
            found.push(Violation::Shape { step: scope.name(id), problem: error.to_string() });
        }
        if let Some(problem) = uncounted(scope, step) {
            found.push(Violation::Shape { step: scope.name(id), problem });
        }
    }
    if let Some(output) = program.buffers.get(program.output) {
        let logits = TensorType {
            dtype: DType::F32,
            shape: smallvec![Dim::Rows, Dim::Fixed(plan.model.vocabulary)],
        };
        if output.ty != logits {
            let problem = format!("it returns {} instead of {logits}", output.ty);
            found.push(Violation::Output { program: program.name.clone(), problem });
        }
    }
}

fn step_types(scope: Scope<'_>, step: &Step) -> Result<()> {
    let buffer = |&id| scope.program.buffers.get(id).map(|buffer| &buffer.ty);
    let reads: Option<Vec<&TensorType>> = step.reads.iter().map(buffer).collect();
    let writes: Option<Vec<&TensorType>> = step.writes.iter().map(buffer).collect();
    // Ids that name nothing are reported elsewhere.
    let (Some(reads), Some(writes)) = (reads, writes) else { return Ok(()) };
    let device = step.writes.first().and_then(|&id| scope.program.buffers.get(id));
    let device = device.and_then(|buffer| scope.plan.machine.devices.get(buffer.device));
    let is_gpu = device.is_some_and(|device| device.kind.is_gpu());
    match &step.action {
        Action::Run(op) => {
            let plan = scope.plan;
            let named = op.weights().into_iter().all(|weight| plan.weights.get(weight).is_some())
                && op.cache().is_none_or(|cache| plan.caches.get(cache).is_some())
                && op.rope().is_none_or(|rope| plan.ropes.get(rope).is_some());
            // Which weights were fetched to the last reads is a matter of places.
            let packed = reads.iter().rev().take_while(|ty| ty.dtype == DType::U8).count();
            let reads = &reads[..reads.len() - packed];
            let program = scope.program;
            let may_be_narrow = is_gpu && may_be_narrow(program);
            let kind = device.map(|device| &device.kind);
            let run = Run { plan, program, kind, reads, writes: &writes, may_be_narrow };
            if named { run.check(op) } else { Ok(()) }
        }
        Action::Move { movement, collective, slice, algorithm } => {
            let is_sum_of_gpus = scope.plan.is_peer_sum(scope.program, step);
            let may_be_narrow = is_sum_of_gpus && may_be_narrow(scope.program);
            moves::check(
                movement,
                *algorithm,
                collective.is_some(),
                may_be_narrow,
                *slice,
                &reads,
                &writes,
            )?;
            if is_gpu { moves::check_on_gpu(movement, is_sum_of_gpus, &reads) } else { Ok(()) }
        }
        Action::Fetch { weight, offset } => {
            let ([], [y]) = types(&reads, &writes)?;
            let Some(weight) = scope.plan.weights.get(*weight) else { return Ok(()) };
            let Some(packed) = weight.packed_type() else { bail!("a vector is fetched") };
            same(&packed, y)?;
            ensure!(
                offset.is_multiple_of(FETCH_ALIGNMENT),
                "it begins at byte {offset} of the window, which is no multiple of {FETCH_ALIGNMENT}"
            );
            Ok(())
        }
    }
}

/// Whether GPUs may hold values of a program in 16 bits that they round so anyway: in runs of many tokens.
fn may_be_narrow(program: &Program) -> bool {
    program.phase == Phase::Prefill && program.max.tokens > MAX_FUSED_ROWS
}

/// What a step writes that has more elements than kernels of GPUs count, in 32 bits. They count the bytes of packed
/// weights in loads.
fn uncounted(scope: Scope<'_>, step: &Step) -> Option<String> {
    let Scope { plan, program } = scope;
    let option = match program.phase {
        Phase::Prefill => "--prefill-tokens",
        Phase::Decode => "--max-sequences",
    };
    step.writes.iter().find_map(|&id| {
        let Buffer { device, ty } = program.buffers.get(id)?;
        let device = plan.machine.devices.get(*device)?;
        let elements = ty.bytes(program.max) / ty.dtype.bytes();
        let is_counted = !device.kind.is_gpu() || ty.dtype == DType::U8 || elements < 1 << 32;
        (!is_counted).then(|| {
            format!(
                "it writes {elements} elements to {id} of {}, whose kernels count them in 32 bits: lower {option}",
                device.name
            )
        })
    })
}

/// A computation whose ids all name rows.
struct Run<'a> {
    plan: &'a Plan,
    program: &'a Program,
    /// What computes it.
    kind: Option<&'a DeviceKind>,
    reads: &'a [&'a TensorType],
    writes: &'a [&'a TensorType],
    /// Whether values between linears may be of 16 bits: on GPUs, in runs of many tokens.
    may_be_narrow: bool,
}

impl Run<'_> {
    fn check(&self, op: &Op) -> Result<()> {
        match op {
            Op::Embed { table, scale } => {
                let ([], [y]) = self.types()?;
                ensure!(scale.is_finite(), "the scale is {scale}");
                let (rows, features) = self.table(*table)?;
                ensure!(
                    rows >= self.plan.model.vocabulary,
                    "{table} has {rows} rows for a vocabulary of {}",
                    self.plan.model.vocabulary
                );
                floats(y, Dim::Tokens, features)
            }
            Op::AddPosition { table, offset } => {
                let ([x], [y]) = self.types()?;
                let (rows, features) = self.table(*table)?;
                let last = u64::from(self.plan.model.context) + u64::from(*offset);
                ensure!(u64::from(rows) >= last, "{table} has {rows} rows for {last} positions");
                floats(x, Dim::Tokens, features)?;
                same(x, y)
            }
            Op::Norm(norm) => {
                let features = if self.reads.len() == 2 {
                    let ([x, residual], [y]) = self.types()?;
                    same(x, residual)?;
                    same(x, y)?;
                    rows_of(x)?.1
                } else {
                    let ([x], [y]) = self.types()?;
                    same(x, y)?;
                    rows_of(x)?.1
                };
                self.norm(norm, features)
            }
            Op::Linear(linear) => self.linear(linear),
            Op::Attention(attention) => self.attention(attention),
            Op::Activate(_) => self.elementwise::<1>(),
            Op::SoftCap { cap } => {
                ensure!(cap.is_finite() && *cap > 0.0, "the cap is {cap}");
                self.elementwise::<1>()
            }
            Op::Gate(_) | Op::Add => self.elementwise::<2>(),
            Op::SigmoidGate => {
                let ([gate, x], [y]) = self.types()?;
                let (rows, _) = rows_of(x)?;
                floats(gate, rows, 1)?;
                same(x, y)
            }
            Op::Route { used, renormalise: _ } => {
                let ([logits], [ids, weights]) = self.types()?;
                let (rows, experts) = rows_of(logits)?;
                ensure!((1..=experts).contains(used), "{used} of {experts} experts are used");
                whole_numbers(ids, rows, *used)?;
                floats(weights, rows, *used)
            }
            Op::Experts(experts) => self.experts(experts),
            Op::SelectRows => {
                let ([x], [y]) = self.types()?;
                let (rows, features) = rows_of(x)?;
                ensure!(rows == Dim::Tokens, "rows are selected from {x}");
                floats(y, Dim::Rows, features)
            }
        }
    }

    fn linear(&self, linear: &Linear) -> Result<()> {
        let Linear { norm, weights, biases, then, residual } = linear;
        ensure!(!weights.is_empty(), "a linear without a weight");
        ensure!(
            biases.len() == weights.len(),
            "{} biases for {} weights",
            biases.len(),
            weights.len()
        );
        let expected = 1 + usize::from(*residual);
        ensure!(self.reads.len() == expected, "{} reads instead of {expected}", self.reads.len());
        let (rows, inputs) = match norm {
            None => self.rows_of_factor(self.reads[0], weights)?,
            Some(_) => rows_of(self.reads[0])?,
        };
        if let Some(norm) = norm {
            self.norm(norm, inputs)?;
        }
        let mut outputs = Vec::new();
        for (&weight, bias) in weights.iter().zip(biases) {
            let (made, taken) = self.matrix(weight)?;
            ensure!(taken == inputs, "{weight} takes {taken} features and is given {inputs}");
            if let Some(bias) = bias {
                self.vector(*bias, made)?;
            }
            outputs.push(made);
        }
        self.whole_loads(linear, rows, inputs)?;
        if let Then::Gate(_) = then {
            ensure!(
                outputs.len() == 2 && outputs[0] == outputs[1],
                "a gate of linears that make {outputs:?} features"
            );
            self.multiplied_together(weights[0], weights[1])?;
            outputs.pop();
        }
        ensure!(
            self.writes.len() == outputs.len(),
            "{} writes instead of {}",
            self.writes.len(),
            outputs.len()
        );
        match (self.writes, &outputs[..]) {
            ([write], [features]) if !residual => ensure!(
                self.rows_of_factor(write, weights)? == (rows, *features),
                "{write} instead of [{rows}, {features}]"
            ),
            _ => {
                for (write, &features) in self.writes.iter().zip(&outputs) {
                    floats(write, rows, features)?;
                }
            }
        }
        if *residual {
            ensure!(outputs.len() == 1, "a residual for {} outputs", outputs.len());
            same(self.reads[1], self.writes[0])?;
        }
        Ok(())
    }

    /// GPUs lay out the rows of products and of what is normalised before them, in whole loads.
    fn whole_loads(&self, linear: &Linear, rows: Dim, features: u32) -> Result<()> {
        let Some(kind) = self.kind.filter(|kind| kind.is_gpu()) else { return Ok(()) };
        let size = (rows.size(self.program.max), features);
        let held = linear.weights.iter().map(|&weight| self.plan.weights[weight].format);
        match broken_loads(linear, held, size, kind.has_library()) {
            Some(format) => bail!("rows of {features} features in {format} are no whole loads"),
            None => Ok(()),
        }
    }

    /// Rows and features of what matrices take or make, which is f32 or, of many tokens on a GPU between linears or as a
    /// term of a sum, what their products are made of.
    fn rows_of_factor(&self, ty: &TensorType, weights: &[WeightId]) -> Result<(Dim, u32)> {
        let is_factor = |&weight: &WeightId| {
            product_format(self.plan.weights[weight].format, true).float() == Some(ty.dtype)
        };
        if self.may_be_narrow && ty.dtype.bytes() == 2 && weights.iter().all(is_factor) {
            return rows_of_any(ty);
        }
        rows_of(ty)
    }

    fn attention(&self, attention: &Attention) -> Result<()> {
        let ([q, k, v], [y]) = self.types()?;
        let Attention { heads, kv_heads, head_dim, group, .. } = *attention;
        ensure!(
            heads > 0 && kv_heads > 0 && head_dim > 0 && group > 0,
            "{heads} heads over {kv_heads} of {head_dim} features in groups of {group}"
        );
        for (ty, heads) in [(q, heads), (k, kv_heads), (v, kv_heads), (y, heads)] {
            let Some(features) = heads.checked_mul(head_dim) else {
                bail!("{heads} heads of {head_dim} features")
            };
            floats(ty, Dim::Tokens, features)?;
        }
        let cache = &self.plan.caches[attention.cache];
        ensure!(
            (cache.kv_heads, cache.head_dim) == (kv_heads, head_dim),
            "{} holds {} heads of {} features, not {kv_heads} of {head_dim}",
            attention.cache,
            cache.kv_heads,
            cache.head_dim
        );
        for norm in attention.q_norm.iter().chain(&attention.k_norm) {
            self.norm(norm, head_dim)?;
        }
        if let Some(rope) = attention.rope {
            let dims = self.plan.ropes[rope].dims;
            ensure!(dims <= head_dim, "{rope} turns {dims} of {head_dim} features");
        }
        let scale = attention.scale;
        ensure!(scale.is_finite() && scale > 0.0, "the scale is {scale}");
        ensure!(attention.window != Some(0), "the window is empty");
        if let Some(cap) = attention.soft_cap {
            ensure!(cap.is_finite() && cap > 0.0, "the cap is {cap}");
        }
        Ok(())
    }

    fn experts(&self, op: &Experts) -> Result<()> {
        let ([x, ids, weights], [y]) = self.types()?;
        let (rows, features) = rows_of(x)?;
        let (_, used) = rows_of_any(ids)?;
        whole_numbers(ids, rows, used)?;
        floats(weights, rows, used)?;
        same(x, y)?;
        let [gate, up, down] =
            [op.gate, op.up, op.down].map(|weight| self.plan.weights[weight].shape.as_slice());
        let &[experts, inner, taken] = gate else { bail!("{} has shape {gate:?}", op.gate) };
        ensure!(
            taken == features && up == gate && down == [experts, features, inner],
            "experts of shapes {gate:?}, {up:?} and {down:?} for {features} features"
        );
        if self.kind.is_some_and(DeviceKind::is_gpu) {
            let slots = u64::from(rows.size(self.program.max)) * u64::from(used);
            let most = u64::from(features.max(inner));
            ensure!(
                slots.saturating_mul(most) < 1 << 32,
                "{slots} rows of {most} features are beyond a GPU's 32-bit indices"
            );
        }
        self.multiplied_together(op.gate, op.up)?;
        match op.part {
            None => ensure!(used <= experts, "{used} of {experts} experts are used"),
            Some(part) => ensure!(
                (0.0..=1.0).contains(&part.load),
                "experts have {} of all choices",
                part.load
            ),
        }
        Ok(())
    }

    fn elementwise<const READS: usize>(&self) -> Result<()> {
        let (reads, [y]) = self.types::<READS, 1>()?;
        rows_of(y)?;
        reads.into_iter().try_for_each(|read| same(read, y))
    }

    fn norm(&self, norm: &Norm, features: u32) -> Result<()> {
        let Norm { kind: _, scale, bias, epsilon, scale_offset } = norm;
        ensure!(
            epsilon.is_finite() && *epsilon >= 0.0 && scale_offset.is_finite(),
            "a norm with epsilon {epsilon} and offset {scale_offset}"
        );
        scale.iter().chain(bias).try_for_each(|&weight| self.vector(weight, features))
    }

    /// Kernels multiply the matrices of a gate together: they are of one format, and both are fetched or none is.
    fn multiplied_together(&self, gate: WeightId, up: WeightId) -> Result<()> {
        let [of_gate, of_up] = [gate, up].map(|weight| &self.plan.weights[weight]);
        ensure!(
            of_gate.format == of_up.format,
            "a gate of {gate} in {} and {up} in {}",
            of_gate.format,
            of_up.format
        );
        ensure!(
            of_gate.device == of_up.device,
            "a gate of {gate} on {} and {up} on {}",
            of_gate.device,
            of_up.device
        );
        Ok(())
    }

    /// Rows and features of a table that rows are looked up in.
    fn table(&self, weight: WeightId) -> Result<(u32, u32)> {
        let format = self.plan.weights[weight].format;
        let is_gpu = self.kind.is_some_and(DeviceKind::is_gpu);
        ensure!(
            !(is_gpu && format == Format::Bf12),
            "{weight} is in {format}, in which GPUs look up no rows"
        );
        self.matrix(weight)
    }

    fn vector(&self, weight: WeightId, size: u32) -> Result<()> {
        let shape = &self.plan.weights[weight].shape;
        ensure!(*shape == [size], "{weight} has shape {shape:?} instead of [{size}]");
        Ok(())
    }

    fn matrix(&self, weight: WeightId) -> Result<(u32, u32)> {
        match *self.plan.weights[weight].shape {
            [outputs, inputs] => Ok((outputs, inputs)),
            ref shape => bail!("{weight} has shape {shape:?} where a matrix is used"),
        }
    }

    /// The types, where there are as many as the operation has.
    fn types<const READS: usize, const WRITES: usize>(
        &self,
    ) -> Result<([&TensorType; READS], [&TensorType; WRITES])> {
        types(self.reads, self.writes)
    }
}

fn types<'a, const READS: usize, const WRITES: usize>(
    reads: &[&'a TensorType],
    writes: &[&'a TensorType],
) -> Result<([&'a TensorType; READS], [&'a TensorType; WRITES])> {
    match (reads.try_into(), writes.try_into()) {
        (Ok(reads), Ok(writes)) => Ok((reads, writes)),
        _ => bail!(
            "{} reads and {} writes instead of {READS} and {WRITES}",
            reads.len(),
            writes.len()
        ),
    }
}

/// Rows and features of an activation.
fn rows_of(ty: &TensorType) -> Result<(Dim, u32)> {
    ensure!(ty.dtype == DType::F32, "{ty} where numbers of f32 are expected");
    rows_of_any(ty)
}

fn rows_of_any(ty: &TensorType) -> Result<(Dim, u32)> {
    match *ty.shape {
        [rows @ (Dim::Tokens | Dim::Rows), Dim::Fixed(features)] if features > 0 => {
            Ok((rows, features))
        }
        _ => bail!("{ty} where rows of features are expected"),
    }
}

fn floats(ty: &TensorType, rows: Dim, features: u32) -> Result<()> {
    ensure!(rows_of(ty)? == (rows, features), "{ty} instead of [{rows}, {features}]");
    Ok(())
}

fn whole_numbers(ty: &TensorType, rows: Dim, features: u32) -> Result<()> {
    ensure!(
        ty.dtype == DType::I32 && rows_of_any(ty)? == (rows, features),
        "{ty} instead of i32[{rows}, {features}]"
    );
    Ok(())
}

fn same(one: &TensorType, other: &TensorType) -> Result<()> {
    ensure!(one == other, "{one} and {other} where types must be the same");
    Ok(())
}
