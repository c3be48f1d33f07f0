//! Weights, caches and rotary embeddings by themselves.

use std::collections::BTreeSet;

use crate::check::Violation;
use crate::id::{CacheId, WeightId};
use crate::machine::DeviceKind;
use crate::op::{Frequencies, Rope};
use crate::packing::stored_together;
use crate::plan::{Action, Cache, Plan, Weight};
use crate::tensor::{DType, Format};
use crate::weight::Source;

pub(super) fn check(plan: &Plan, found: &mut Vec<Violation>) {
    let used_otherwise = used_otherwise(plan);
    for (id, weight) in plan.weights.iter() {
        let mut problems = weight_problems(plan, weight);
        if used_otherwise.contains(&id) {
            problems.push("a GPU looks rows up in it, and others use it as well".into());
        }
        for problem in problems {
            found.push(Violation::Weight { weight: id, name: weight.name.clone(), problem });
        }
    }
    let borrowed: BTreeSet<CacheId> =
        plan.machine.devices.ids().flat_map(|device| plan.borrowed_by(device)).collect();
    let mut layers = BTreeSet::new();
    for (id, cache) in plan.caches.iter() {
        let mut problems = cache_problems(plan, cache, borrowed.contains(&id));
        if !layers.insert((cache.device, &cache.name)) {
            problems.push("its device has another cache of the layer".into());
        }
        let name = || cache.name.clone();
        found.extend(problems.into_iter().map(|problem| Violation::Cache {
            cache: id,
            name: name(),
            problem,
        }));
    }
    for (id, rope) in plan.ropes.iter() {
        if let Some(problem) = rope_problem(rope) {
            found.push(Violation::Rope { rope: id, problem });
        }
    }
}

/// Tables that GPUs reach and that are more than that: they lie at home as GPUs hold them.
fn used_otherwise(plan: &Plan) -> BTreeSet<WeightId> {
    let mut reached = plan.reached_tables();
    if reached.is_empty() {
        return reached;
    }
    let mut others = BTreeSet::new();
    for program in &plan.programs {
        for lane in &program.lanes {
            for step in lane.steps.iter().filter_map(|&step| program.steps.get(step)) {
                match &step.action {
                    Action::Run(op) if plan.reached(op, lane.device).is_some() => (),
                    Action::Run(op) => others.extend(op.weights()),
                    Action::Fetch { weight, .. } => drop(others.insert(*weight)),
                    Action::Move { .. } => (),
                }
            }
        }
    }
    reached.retain(|weight| others.contains(weight));
    reached
}

fn cache_problems(plan: &Plan, cache: &Cache, is_borrowed: bool) -> Vec<String> {
    let Cache { name: _, dtype, kv_heads, head_dim, device } = *cache;
    let kind = plan.machine.devices.get(device).map(|device| &device.kind);
    let is_on_gpu = kind.is_some_and(DeviceKind::is_gpu);
    let mut problems = Vec::new();
    // Kernels of GPUs read no bytes.
    let is_held = dtype.is_float() || dtype == DType::I8 && !is_on_gpu;
    if !is_held || kv_heads == 0 || head_dim == 0 {
        problems.push(format!("{kv_heads} heads of {head_dim} features in {dtype}"));
    }
    let together = stored_together(dtype);
    if !is_on_gpu && !head_dim.is_multiple_of(together) {
        problems.push(format!(
            "heads of {head_dim} features in {dtype}, which NUMA nodes store {together} at a time"
        ));
    }
    let sizes = [plan.model.blocks, plan.model.block_tokens, kv_heads, head_dim];
    let elements = sizes.into_iter().map(u64::from).fold(1, u64::saturating_mul);
    if (is_on_gpu || is_borrowed) && elements > u64::from(u32::MAX) {
        problems.push(format!("{elements} keys, more than GPUs tell apart"));
    }
    problems
}

fn weight_problems(plan: &Plan, weight: &Weight) -> Vec<String> {
    let mut problems = Vec::new();
    let shape = &weight.shape;
    if !(1..=3).contains(&shape.len()) || shape.contains(&0) {
        problems.push(format!("a weight of shape {shape:?}"));
    }
    if shape.len() == 1 && weight.format != Format::F32 {
        problems.push(format!("a vector is held as {} instead of f32", weight.format));
    }
    if weight.format == Format::Bf12 && shape.len() != 2 {
        problems.push("bf12 is for matrices".into());
    }
    if weight.also_unpacked && plan.unpacked_bytes(weight).is_none() {
        problems.push("only packed matrices of GPUs are held unpacked as well".into());
    }
    match weight.sources.as_slice() {
        [] => problems.push("it has no source".into()),
        [source] if source.axes.len() == shape.len() => {
            problems.extend(source_problems(plan, source, shape));
        }
        sources => {
            let rows = shape.first().map_or(0, |&rows| rows as usize);
            if sources.len() != rows {
                problems.push(format!("{} sources for {rows} rows", sources.len()));
            }
            for source in sources {
                problems.extend(source_problems(plan, source, shape.get(1..).unwrap_or(&[])));
            }
        }
    }
    problems
}

fn source_problems(plan: &Plan, source: &Source, shape: &[u32]) -> Vec<String> {
    let mut problems = Vec::new();
    if !source.dtype.is_float() {
        problems.push(format!("a source of {} elements", source.dtype));
    }
    if source.axes.iter().any(|axis| !(1..=2).contains(&axis.len())) {
        problems.push("an axis of a source has one or two strides".into());
    }
    // Sizes are compared, not counted: a product of strides may exceed what an axis can be.
    let sizes: Vec<u64> = source
        .axes
        .iter()
        .map(|axis| axis.iter().map(|s| u64::from(s.size)).fold(1, u64::saturating_mul))
        .collect();
    if !sizes.iter().copied().eq(shape.iter().map(|&size| u64::from(size))) {
        problems.push(format!("a source of shape {sizes:?} where {shape:?} is held"));
    }
    if let Some(file) = plan.files.get(source.file) {
        let (start, end) = source.span();
        if end > file.bytes {
            problems.push(format!(
                "bytes {start}..{end} of {}, which has {}",
                file.path.display(),
                file.bytes
            ));
        }
    }
    problems
}

fn rope_problem(rope: &Rope) -> Option<String> {
    let dims = rope.dims;
    if dims == 0 || !dims.is_multiple_of(2) {
        return Some(format!("it turns {dims} elements in pairs"));
    }
    if !rope.magnitude.is_finite() {
        return Some(format!("its magnitude is {}", rope.magnitude));
    }
    let pairs = dims as usize / 2;
    let sets = match &rope.frequencies {
        Frequencies::Fixed(frequencies) => vec![frequencies],
        Frequencies::Switched { short, long, original_tokens: _ } => vec![short, long],
        Frequencies::Dynamic { base, factor, original_tokens } => {
            // Growth divides by the first two, and powers are of positive numbers.
            let is_positive = |number: &f64| number.is_finite() && *number > 0.0;
            if dims == 2 || *original_tokens == 0 || !is_positive(base) || !is_positive(factor) {
                return Some(format!(
                    "base {base} cannot grow by {factor} beyond {original_tokens} tokens"
                ));
            }
            vec![]
        }
    };
    if let Some(wrong) = sets.iter().find(|set| set.len() != pairs) {
        return Some(format!("{} frequencies for {pairs} pairs", wrong.len()));
    }
    let wrong = sets.into_iter().flatten().find(|frequency| !frequency.is_finite())?;
    Some(format!("a pair turns by {wrong} at each position"))
}
