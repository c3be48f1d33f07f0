//! What a run takes of memory, as the system counts it, against what its plan says.

#![cfg(target_os = "linux")]

use std::fs;

use compiler::Options;
use compiler::options::Request;
use executor::engine::Engine;
use executor::load::{self, PlanFile};
use tests::made_up::{LlamaShape, MadeUp, MixtureShape};

/// What the process itself takes: pages of the program that have been touched, its relocations, the plan, threads.
/// `hybrid-exec` has 28 MiB of that, and these tests the compiler as well.
const PROCESS_BYTES: u64 = 40 << 20;
/// How far off the plan may be, in percent.
const TOLERANCE: u64 = 3;

/// Two layers and large tables: one that stayed in memory while it is read would be as much as the whole plan.
const LLAMA: LlamaShape = LlamaShape {
    vocabulary: 65_536,
    hidden: 1024,
    intermediate: 2816,
    layers: 2,
    heads: 16,
    kv_heads: 4,
};

/// A checkpoint of 234 MiB, which is hashed whole when it is opened: half as much again as its plan says.
const MIXTURE: MixtureShape = MixtureShape {
    vocabulary: 8192,
    hidden: 1024,
    inner: 512,
    experts: 32,
    layers: 2,
    heads: 8,
    kv_heads: 2,
};

/// The most bytes that this process has had in memory so far.
fn peak_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// One test, since all tests of a file may run in one process, and peaks stay: plans go from small to large.
#[test]
fn loading_and_runs_of_many_lengths_take_what_the_plan_says() {
    let whole = || (None, Request::Pipeline(vec!["numa0".into()]));
    let shared = || {
        let members = ["numa0", "numa1"].map(|name| (name.into(), None));
        (Some(2), Request::TensorParallel(members.to_vec()))
    };
    holds(&MadeUp::llama(LLAMA), "q4", whole());
    holds(&MadeUp::mixture_of(MIXTURE), "q4", shared());
    holds(&MadeUp::llama(LLAMA), "q8", whole());
}

/// Checks a checkpoint in a format, on this machine with each node split into so many devices.
fn holds(checkpoint: &MadeUp, format: &str, (split, request): (Option<u32>, Request)) {
    let folder = tempfile::tempdir().unwrap();
    checkpoint.write(folder.path(), 1).unwrap();
    let model = models::lower(folder.path()).unwrap();
    let machine = probe::machine(split).unwrap();
    let options = Options {
        context: Some(1024),
        formats: vec![format.parse().unwrap()],
        request,
        ..Options::default()
    };
    let plan = compiler::compile(&model, &machine, &options, &mut |_, _| ()).unwrap();
    let path = folder.path().join("plan.ron");
    fs::write(&path, plan.to_ron().unwrap()).unwrap();
    let file = PlanFile::open(&path).unwrap();
    let needed = plan.forecast.devices.rows().iter().map(|device| device.needed_bytes());
    let needed = needed.sum::<u64>();
    let allowed = needed * (100 + TOLERANCE) / 100 + PROCESS_BYTES;
    // One thread more or less of a large host is not what this is about.
    let options = load::Options { threads: Some(2), ..load::Options::default() };
    let mut engine = Engine::new(load::load(file, &options, |_, _| ()).unwrap());
    let check = |when: &str| {
        let peak = peak_bytes();
        assert!(
            peak <= allowed,
            "{format} {when}: {peak} bytes, the plan says {needed} and {allowed} are allowed"
        );
    };
    check("while it was loaded");
    for tokens in (23..=512).step_by(27).chain([512, 700, 1]) {
        let id = engine.open();
        engine.append(id, &vec![7; tokens]).unwrap();
        for _ in 0..2 {
            engine.advance(&[id]).unwrap();
            engine.append(id, &[5]).unwrap();
        }
        engine.close(id);
    }
    check("after prompts of many lengths");
}
