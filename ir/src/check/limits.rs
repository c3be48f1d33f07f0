//! The machine's devices, the model's limits and the sequence of programs.

use std::collections::BTreeSet;

use crate::check::Violation;
use crate::machine::{DeviceKind, named_twice};
use crate::plan::{CACHE_TILE_TOKENS, Phase, Plan, Program};

pub(super) fn check(plan: &Plan, found: &mut Vec<Violation>) {
    let devices = plan.machine.devices.rows();
    unique("devices", devices.iter().map(|device| device.name.as_str()), found);
    unique("programs", plan.programs.iter().map(|program| program.name.as_str()), found);
    for device in devices {
        if matches!(&device.kind, DeviceKind::Numa { cpus, .. } if cpus.is_empty()) {
            found.push(Violation::NoProcessors { device: device.name.clone() });
        }
    }
    let problems = named_twice(devices).into_iter().chain(model_problems(plan));
    found.extend(problems.map(|problem| Violation::Limits { problem }));
    for (index, program) in plan.programs.iter().enumerate() {
        let before = index.checked_sub(1).and_then(|index| plan.programs.get(index));
        found.extend(program_problems(program, before).into_iter().map(|problem| {
            Violation::Phases { program: program.name.clone(), problem: problem.into() }
        }));
    }
    if let Some(last) = plan.programs.last()
        && last.max_sequences < plan.model.max_sequences
    {
        let problem = format!(
            "it takes {} sequences and comes last, but there may be {}",
            last.max_sequences, plan.model.max_sequences
        );
        found.push(Violation::Phases { program: last.name.clone(), problem });
    }
}

fn unique<'a>(
    kind: &'static str,
    names: impl Iterator<Item = &'a str>,
    found: &mut Vec<Violation>,
) {
    let mut seen = BTreeSet::new();
    for name in names {
        if !seen.insert(name) {
            found.push(Violation::DuplicateName { kind, name: name.into() });
        }
    }
}

fn model_problems(plan: &Plan) -> Vec<String> {
    let model = &plan.model;
    let mut problems = Vec::new();
    for (what, size) in [
        ("vocabulary", model.vocabulary),
        ("context", model.context),
        ("number of sequences", model.max_sequences),
        ("cache block", model.block_tokens),
    ] {
        if size == 0 {
            problems.push(format!("the {what} is empty"));
        }
    }
    if !model.block_tokens.is_multiple_of(CACHE_TILE_TOKENS) {
        problems.push(format!(
            "cache blocks have {} tokens, which is no multiple of {CACHE_TILE_TOKENS}",
            model.block_tokens
        ));
    }
    let cached = u64::from(model.blocks) * u64::from(model.block_tokens);
    if cached < u64::from(model.context) {
        problems.push(format!(
            "caches of {cached} tokens do not hold one sequence of {}",
            model.context
        ));
    }
    let has = |phase| plan.programs.iter().any(|program| program.phase == phase);
    if !has(Phase::Prefill) || !has(Phase::Decode) {
        problems.push("a plan has a prefill and at least one decode program".into());
    }
    // A plan that was made by hand may forecast nothing.
    let forecast = &plan.forecast.programs;
    let names = plan.programs.iter().map(|program| &program.name);
    if !forecast.is_empty() && !forecast.iter().map(|forecast| &forecast.program).eq(names) {
        problems.push("its forecast is of other programs".into());
    }
    problems
}

fn program_problems(program: &Program, before: Option<&Program>) -> Vec<&'static str> {
    let max = program.max;
    let mut problems = Vec::new();
    let mut unless = |holds: bool, problem| {
        if !holds {
            problems.push(problem);
        }
    };
    match (program.phase, before) {
        (Phase::Prefill, None) => (),
        (Phase::Prefill, Some(before)) => {
            unless(before.phase == Phase::Prefill, "a prefill that comes after a decode");
            unless(
                before.phase == Phase::Decode || before.max.tokens > max.tokens,
                "prefills do not fall in tokens",
            );
        }
        (Phase::Decode, None) => unless(false, "a decode that is first"),
        (Phase::Decode, Some(before)) => unless(
            before.phase == Phase::Prefill || before.max_sequences < program.max_sequences,
            "decodes do not rise in sequences",
        ),
    }
    unless(max.tokens > 0 && max.rows > 0 && program.max_sequences > 0, "its extent is empty");
    unless(max.rows <= max.tokens, "it returns more rows than it is fed tokens");
    if program.phase == Phase::Decode {
        unless(
            max.tokens >= program.max_sequences && max.rows >= program.max_sequences,
            "it has fewer tokens or rows than sequences",
        );
    }
    problems
}
