//! Fields of plan files: none may be misspelt, and only those that a machine's owner need not know may be missing.

use std::ops::Range;

use ir::counts::ExpertCounts;
use ir::forecast::{Candidate, DeviceForecast, ProgramForecast, RunForecast};
use ir::graph::{Cause, Reason, RunnerUp};
use ir::id::{Id as _, RopeId};
use ir::machine::{CacheRate, Collectives, CpuCache, LinearRate, Link, Machine, RatePoint};
use ir::op::{ExpertPart, Frequencies, Op};
use ir::plan::{Action, Plan};
use ir::tensor::{DType, Format};
use ir::trace::Trace;

use crate::named;
use crate::plans::{d, one_device, streamed, tensor_parallel};

/// Fields that say something only where they are written.
const OPTIONAL: [&str; 11] = [
    "collectives",
    "cpu_caches",
    "other_caches",
    "experts",
    "shared_experts",
    "attention_nanos",
    "prompt_score_nanos",
    "score_nanos",
    "nanos",
    "also_unpacked",
    "part",
];

/// Plans with every kind of row between them.
fn plans() -> [Plan; 3] {
    let mut plan = one_device();
    let point = RatePoint { tokens: 1, weights_per_sec: 1e9, nanos: 1.0 };
    let curve = vec![LinearRate { format: Format::Bf16, points: vec![point] }];
    plan.machine.collectives =
        Some(Collectives { bytes_per_sec: 1e11, latency_nanos: 1e4, reserved_bytes: 1 });
    let device = &mut plan.machine.devices[d(0)];
    device.cpu_caches.push(CpuCache { level: 1, bytes: 1 << 15, count: 1 });
    (device.rates.linear, device.rates.experts) = (curve.clone(), curve.clone());
    device.rates.shared_experts = curve;
    device.rates.other_caches.push(CacheRate {
        kv_type: DType::I8,
        attention_flops_per_sec: 1e10,
        prompt_score_nanos: 0.1,
        cache_bytes_per_sec: 1e10,
        score_nanos: 0.1,
    });
    plan.ropes[RopeId::from_index(0)].frequencies =
        Frequencies::Switched { short: vec![1.0; 2], long: vec![1.0; 2], original_tokens: 8 };
    plan.causes.push(Cause {
        reason: Reason::Memory { device: d(0), missing_bytes: 1 },
        runner_up: Some(RunnerUp { devices: vec![d(0)], gap_nanos: 0 }),
    });
    plan.forecast.devices.push(DeviceForecast::default());
    plan.forecast.programs.push(ProgramForecast {
        program: "prefill".into(),
        tokens: 8,
        nanos: 1,
        busiest_lane_nanos: 1,
        others: vec![RunForecast { tokens: 4, nanos: 1 }],
        behind: Some(RunForecast { tokens: 4, nanos: 1 }),
    });
    plan.forecast.candidates.push(Candidate {
        name: "all on numa0".into(),
        prefill_nanos: None,
        decode_nanos: None,
        missing: None,
    });
    let experts = named(&plan.programs[0], "experts");
    let Action::Run(Op::Experts(op)) = &mut plan.programs[0].steps[experts].action else {
        panic!("they are experts")
    };
    op.part = Some(ExpertPart { first: 0, load: 1.0 });
    let mut plans = [plan, tensor_parallel(), streamed()];
    plans.iter_mut().for_each(|plan| plan.programs.truncate(1));
    plans
}

/// The names of all fields of a text, by place.
fn fields(text: &str) -> Vec<Range<usize>> {
    let is_name = |byte: u8| byte.is_ascii_lowercase() || byte == b'_';
    let ends = text.match_indices(": ").map(|(end, _)| end);
    ends.map(|end| {
        let name = text.as_bytes()[..end].iter().rev().take_while(|byte| is_name(**byte));
        end - name.count()..end
    })
    .collect()
}

/// Where the value that stands at `start` ends, with the comma that follows.
fn end_of_value(text: &str, start: usize) -> usize {
    let mut depth = 0;
    for (at, byte) in text.bytes().enumerate().skip(start) {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b',' if depth == 0 => return at + 1,
            b')' | b']' | b'}' if depth == 0 => return at,
            b')' | b']' | b'}' => depth -= 1,
            _ => (),
        }
    }
    text.len()
}

#[test]
fn no_field_may_be_misspelt() {
    for plan in plans() {
        let text = plan.to_ron().unwrap();
        assert!(Plan::from_ron(&text).is_ok());
        for name in fields(&text) {
            let mut harmed = text.clone();
            harmed.insert(name.end, 'x');
            assert!(Plan::from_ron(&harmed).is_err(), "{}x is read", &text[name]);
        }
    }
}

#[test]
fn no_field_of_a_plan_may_be_missing() {
    for plan in plans() {
        let text = plan.to_ron().unwrap();
        let names = fields(&text).into_iter();
        for name in names.filter(|name| !OPTIONAL.contains(&&text[name.clone()])) {
            let mut harmed = text.clone();
            harmed.replace_range(name.start..end_of_value(&text, name.end), "");
            assert!(Plan::from_ron(&harmed).is_err(), "{} may be missing", &text[name]);
        }
    }
}

#[test]
fn a_machine_need_not_tell_what_nothing_depends_on() {
    let machine = plans()[0].machine.clone();
    let mut text = machine.to_ron().unwrap();
    let curves = ["experts", "shared_experts", "other_caches"];
    let times = ["attention_nanos", "prompt_score_nanos", "score_nanos", "nanos"];
    for optional in ["collectives", "cpu_caches"].into_iter().chain(times).chain(curves) {
        let name = fields(&text).into_iter().find(|name| &text[name.clone()] == optional).unwrap();
        text.replace_range(name.start..end_of_value(&text, name.end), "");
    }
    assert!(Machine::from_ron(&text).is_ok());
}

#[test]
fn what_a_machine_need_not_tell_stands_with_or_without_some() {
    let mut machine = plans()[0].machine.clone();
    machine.links.push(Link { letter_nanos: Some(3e3), ..Link::new(d(0), d(0), 1e9, 1e3) });
    let text = machine.to_ron().unwrap();
    let plain = text.replace("Some(3000.0)", "3000.0");
    assert_ne!(plain, text);
    for text in [text, plain] {
        assert_eq!(Machine::from_ron(&text).unwrap(), machine);
    }
}

#[test]
fn files_of_other_versions_are_named_as_such() {
    let others = "(version: 99, fields_of_that_version: 1)";
    for (error, expected) in [
        (Plan::from_ron(others).unwrap_err(), "the plan has version 99"),
        (Trace::from_ron(others).unwrap_err(), "the trace has version 99"),
        (ExpertCounts::from_ron(others).unwrap_err(), "the counts have version 99"),
    ] {
        assert!(error.to_string().starts_with(expected), "{error}");
    }
    let trace = Trace { version: ir::trace::VERSION, ..Trace::default() }.to_ron().unwrap();
    let error = Plan::from_ron(&trace).unwrap_err();
    assert_eq!(error.to_string(), "this is a trace, where a plan is read");
}

#[test]
fn files_of_other_kinds_are_told_by_what_they_are() {
    let [plan, ..] = plans();
    let machine = plan.machine.to_ron().unwrap();
    let counts = ExpertCounts::default().to_ron().unwrap();
    let plan = plan.to_ron().unwrap();
    for (error, expected) in [
        (Trace::from_ron(&plan).unwrap_err(), "this is a plan, where a trace is read"),
        (Machine::from_ron(&plan).unwrap_err(), "this is a plan, where a machine is read"),
        (
            ExpertCounts::from_ron(&machine).unwrap_err(),
            "this is a machine, where counts of experts are read",
        ),
        (Plan::from_ron(&counts).unwrap_err(), "these are counts of experts, where a plan is read"),
    ] {
        assert_eq!(error.to_string(), expected);
    }
}
