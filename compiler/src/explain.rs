//! Plans as tables for people: what was decided, why, and what it is expected to cost.

mod diff;
mod rows;
mod table;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use ir::captured::lacks_room_for_prompts;
use ir::graph::{Cause, Reason};
use ir::id::DeviceId;
use ir::machine::{Machine, RateSource};
use ir::plan::{Phase, Plan};

pub use diff::diff;

use crate::explain::rows::{Row, folded, rows};
pub(crate) use crate::explain::table::bytes;
use crate::explain::table::{Table, nanos};
use crate::sizes::is_listed;

/// Everything a plan knows of its own making: layers, devices, programs and the candidates it beat.
pub fn explain(plan: &Plan) -> String {
    let mut text = String::new();
    let model = &plan.model;
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "{} ({}), context {}, {} sequence{}, {} cache blocks of {} tokens",
        model.name,
        model.architecture,
        model.context,
        model.max_sequences,
        if model.max_sequences == 1 { "" } else { "s" },
        model.blocks,
        model.block_tokens
    );
    for (id, device) in plan.machine.devices.iter() {
        if let Some(types) = types(plan, id) {
            let _ = writeln!(text, "{}: {types}", device.name);
        }
    }
    let rows = folded(rows(plan));
    let _ = write!(text, "\n{}", layers(plan, &rows));
    let _ = writeln!(text, "{}", legend(&rows));
    let _ = writeln!(text, "{}", devices(plan));
    for (id, device) in plan.machine.devices.iter() {
        let of_device = plan.weights.rows().iter().filter(|weight| weight.device == id);
        let twice = of_device.filter(|weight| weight.also_unpacked);
        let unpacked: u64 = twice.filter_map(|weight| plan.unpacked_bytes(weight)).sum();
        if unpacked > 0 {
            let (name, bytes) = (&device.name, bytes(unpacked));
            let _ = writeln!(
                text,
                "{bytes} of the weights on {name} are copies row after row, for prompts\n"
            );
        }
    }
    if lacks_room_for_prompts(plan) {
        text += "GPUs lack memory to replay prompts, whose launches are queued one by one: a smaller --context, \
                 --max-sequences or --prefill-tokens leaves some\n\n";
    }
    let _ = writeln!(text, "{}", programs(plan));
    let _ = write!(text, "{}", candidates(plan));
    let nominal = nominal_devices(plan);
    if !nominal.is_empty() {
        let _ = writeln!(
            text,
            "\nrates of {} are nominal, so times are guesses: `hybrid-exec calibrate` measures them",
            nominal.join(", ")
        );
    }
    text
}

/// One line: where layers run, and how fast that is predicted to be. `machine` is the file that describes the machine,
/// if one does.
pub fn summary(plan: &Plan, machine: Option<&Path>) -> String {
    let place = plan.forecast.candidates.first().map_or("", |chosen| chosen.name.as_str());
    let time = |phase: Phase| {
        let mut programs = plan.programs.iter().zip(&plan.forecast.programs);
        programs.find(|(program, _)| program.phase == phase).map(|(_, forecast)| forecast)
    };
    let mut text = place.to_owned();
    if let Some(prefill) = time(Phase::Prefill) {
        let plural = if prefill.tokens == 1 { "" } else { "s" };
        text += &format!(
            "; predicted: {} token{plural} of a prompt in {}",
            prefill.tokens,
            nanos(prefill.nanos)
        );
    }
    if let Some(decode) = time(Phase::Decode) {
        text += &format!(", a token in {}", nanos(decode.nanos));
    }
    let nominal = nominal_devices(plan);
    if !nominal.is_empty() {
        let of_file = machine.map(|file| format!(" --machine {}", file.display()));
        text += &format!(
            "; rates of {} are nominal: `hybrid-exec calibrate{} -o machine.ron`, then --machine machine.ron",
            nominal.join(", "),
            of_file.unwrap_or_default()
        );
    }
    text
}

/// Names of devices whose rates nobody measured.
fn nominal_devices(plan: &Plan) -> Vec<&str> {
    let devices = plan.machine.devices.rows().iter();
    let nominal = devices.filter(|device| device.rates.source == RateSource::Nominal);
    nominal.map(|device| device.name.as_str()).collect()
}

/// What a device holds: `weights in bf12 and bf16, KV cache in bf16`; nothing where it holds neither.
fn types(plan: &Plan, device: DeviceId) -> Option<String> {
    // Vectors are few, and in f32 everywhere.
    let matrices = plan.weights.rows().iter().filter(|weight| weight.shape.len() > 1);
    let formats: BTreeSet<String> = matrices
        .filter(|weight| weight.device == device)
        .map(|weight| weight.format.to_string())
        .collect();
    let caches = plan.caches.rows().iter().filter(|cache| cache.device == device);
    let dtypes: BTreeSet<String> = caches.map(|cache| cache.dtype.to_string()).collect();
    let join = |names: BTreeSet<String>| names.into_iter().collect::<Vec<_>>().join(" and ");
    let mut parts = Vec::new();
    if !formats.is_empty() {
        parts.push(format!("weights in {}", join(formats)));
    }
    if !dtypes.is_empty() {
        parts.push(format!("KV cache in {}", join(dtypes)));
    }
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// What signs in the table of layers mean, of those that stand there.
fn legend(rows: &[Row]) -> String {
    let mut text = String::new();
    if rows.iter().any(Row::comes_from_elsewhere) {
        text += "a←b: computed on a with weights or caches that stay on b\n";
    }
    let gaps = rows.iter().filter_map(|row| row.cause.runner_up.as_ref());
    if gaps.clone().next().is_some() {
        text += "runner-up: what a step would take longer there";
        if gaps.clone().any(|runner_up| runner_up.gap_nanos < 0) {
            text += "; less (-) where memory is missing, or other devices were asked for";
        }
        text += "\n";
    }
    text
}

fn layers(plan: &Plan, rows: &[Row]) -> Table {
    let mut table =
        Table::new(&["layers", "device", "weights + KV", "prefill", "decode", "why", "runner-up"]);
    for row in rows {
        table.row(vec![
            row.name(),
            row.devices(&plan.machine),
            bytes(row.bytes),
            nanos(row.prefill.nanos),
            nanos(row.decode.nanos),
            why(row, &plan.machine),
            runner_up(&row.cause, &plan.machine),
        ]);
    }
    table
}

fn why(row: &Row, machine: &Machine) -> String {
    match &row.cause.reason {
        Reason::Fastest => "fastest".into(),
        Reason::Pinned { pattern } => format!("pinned by {pattern:?}"),
        Reason::Requested => "requested".into(),
        Reason::Memory { device, missing_bytes } => {
            format!("{} lacks {}", name(machine, *device), bytes(*missing_bytes))
        }
        Reason::FollowsInput => "follows its input".into(),
        Reason::Mismatch => "moves data".into(),
    }
}

fn runner_up(cause: &Cause, machine: &Machine) -> String {
    let Some(runner_up) = &cause.runner_up else { return "-".into() };
    let names: Vec<&str> = runner_up.devices.iter().map(|&device| name(machine, device)).collect();
    let sign = if runner_up.gap_nanos < 0 { '-' } else { '+' };
    format!("{} {sign}{}", names.join("+"), nanos(runner_up.gap_nanos.unsigned_abs()))
}

fn devices(plan: &Plan) -> Table {
    let mut table = Table::new(&[
        "device", "weights", "KV cache", "buffers", "fetched", "scratch", "used", "of",
    ]);
    for (device, budget) in plan.forecast.devices.iter() {
        let share = 100.0 * budget.needed_bytes() as f64 / budget.capacity_bytes.max(1) as f64;
        table.row(vec![
            name(&plan.machine, device).into(),
            bytes(budget.weight_bytes),
            bytes(budget.cache_bytes),
            bytes(budget.buffer_bytes),
            bytes(budget.fetch_bytes),
            bytes(budget.workspace_bytes + budget.reserved_bytes),
            format!("{share:.1} %"),
            bytes(budget.capacity_bytes),
        ]);
    }
    table
}

fn programs(plan: &Plan) -> Table {
    let mut table =
        Table::new(&["program", "tokens", "cached", "time", "tokens/s", "of which busiest lane"]);
    for (program, forecast) in plan.programs.iter().zip(&plan.forecast.programs) {
        let mut row = |(tokens, cached): (u32, u32), time: u64, busiest: String| {
            let rate = f64::from(tokens) / (time.max(1) as f64 / 1e9);
            table.row(vec![
                forecast.program.clone(),
                tokens.to_string(),
                cached.to_string(),
                nanos(time),
                format!("{rate:.1}"),
                busiest,
            ]);
        };
        let most = program.max.tokens;
        let decodes = program.phase == Phase::Decode;
        // What varies is what prefill feeds, and what decode finds.
        let sizes = |tokens: u32| if decodes { (most, tokens) } else { (tokens, 0) };
        let others = forecast.others.iter().filter(|other| decodes || is_listed(other.tokens));
        let others = others.map(|other| (other.tokens, other.nanos, String::new()));
        let mut all: Vec<(u32, u64, String)> = others.collect();
        all.push((forecast.tokens, forecast.nanos, nanos(forecast.busiest_lane_nanos)));
        all.sort();
        for (tokens, time, busiest) in all {
            row(sizes(tokens), time, busiest);
        }
    }
    table
}

fn candidates(plan: &Plan) -> Table {
    let mut table = Table::new(&["candidate", "prefill", "decode", ""]);
    for (index, candidate) in plan.forecast.candidates.iter().enumerate() {
        let time = |time: Option<u64>| time.map_or("-".into(), nanos);
        let note = match candidate.missing {
            Some((device, missing)) => {
                format!("lacks {} on {}", bytes(missing), name(&plan.machine, device))
            }
            None if index == 0 => "chosen".into(),
            None => String::new(),
        };
        table.row(vec![
            candidate.name.clone(),
            time(candidate.prefill_nanos),
            time(candidate.decode_nanos),
            note,
        ]);
    }
    table
}

/// The device's name; its id where a plan that was edited names one that is not there.
fn name(machine: &Machine, device: DeviceId) -> &str {
    machine.devices.get(device).map_or("?", |device| &device.name)
}
