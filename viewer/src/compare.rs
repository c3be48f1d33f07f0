//! Two plans or two traces side by side: what differs, listed and coloured.

use std::collections::BTreeMap;

use crate::quantity;
use crate::scene::{Block, Device, Program, Scene, Size, size_text};

/// One line of a comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// What it is about: a program, a device, layers.
    pub subject: String,
    /// How it is in the first.
    pub before: String,
    /// How it is in the second.
    pub after: String,
    /// The relative change of a time or of bytes; negative is less.
    pub change: Option<f64>,
    /// Index of the first block it is about, in the first scene.
    pub block: Option<usize>,
}

impl Difference {
    /// In one line, without its change: `prefill predicted: 2 ms → 1 ms`, `decode1: only in the first`.
    pub fn text(&self) -> String {
        let mut sides = [&self.before, &self.after].into_iter();
        match sides.find(|side| side.starts_with("only in ")) {
            Some(only) => format!("{}: {only}", self.subject),
            None => format!("{}: {} → {}", self.subject, self.before, self.after),
        }
    }
}

/// Everything that differs between two scenes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Comparison {
    /// `different models: demo / big`; `None` where both are plans of one checkpoint, wherever that lies.
    pub models: Option<String>,
    /// Times of programs.
    pub programs: Vec<Difference>,
    /// Bytes of devices, where they differ.
    pub devices: Vec<Difference>,
    /// Layers that run elsewhere, in another format, or took another time.
    pub blocks: Vec<Difference>,
}

/// Less than this is noise in a measured time.
const NOISE: f64 = 0.05;

/// Compares `program` of the first scene with the program of that name in the second.
pub fn compare(before: &Scene, after: &Scene, program: usize) -> Comparison {
    // Made-up models have no files.
    let is_known = !before.checkpoint.is_empty() || !after.checkpoint.is_empty();
    let are_same_names = before.title == after.title;
    let are_same = if is_known { before.checkpoint == after.checkpoint } else { are_same_names };
    let models = match are_same {
        true => None,
        false if are_same_names => Some(format!("different checkpoints called {}", before.title)),
        false => Some(format!("different models: {} / {}", before.title, after.title)),
    };
    let mut comparison = Comparison { models, ..Comparison::default() };
    for (number, row) in before.programs.iter().enumerate() {
        match after.programs.iter().position(|other| other.name == row.name) {
            Some(other) => compare_times((before, number), (after, other), &mut comparison),
            None => comparison.programs.push(only(&row.name, "only in the first")),
        }
    }
    for row in &after.programs {
        if !before.programs.iter().any(|other| other.name == row.name) {
            comparison.programs.push(only(&row.name, "only in the second"));
        }
    }
    compare_devices(before, after, &mut comparison);
    let name = before.programs.get(program).map(|program| program.name.as_str());
    let other = after.programs.iter().position(|other| Some(other.name.as_str()) == name);
    if let (Some(_), Some(other)) = (name, other) {
        compare_blocks((before, program), (after, other), &mut comparison);
    }
    comparison
}

fn compare_times(
    (before, p): (&Scene, usize),
    (after, q): (&Scene, usize),
    comparison: &mut Comparison,
) {
    let (a, b) = (&before.summaries[p], &after.summaries[q]);
    let (program, other) = (&before.programs[p], &after.programs[q]);
    let name = &program.name;
    let sized = |what: &str, nanos: (u64, u64), (size, other_size): (Size, Size)| {
        let mut difference = times(format!("{name} {what}"), nanos.0, nanos.1);
        if size != other_size {
            difference.before += &format!(" {}", size_text(program, size));
            difference.after += &format!(" {}", size_text(other, other_size));
            // Of runs of other sizes, neither is faster.
            difference.change = difference.change.filter(|_| size.is_like(other_size));
        }
        difference
    };
    let sizes = (program.predicted_size(), other.predicted_size());
    comparison.programs.push(sized("predicted", (a.predicted_nanos, b.predicted_nanos), sizes));
    let (Some(first), Some(second)) = (a.measured_nanos, b.measured_nanos) else { return };
    // What was measured has a size.
    let sizes = a.size.zip(b.size).unwrap_or(sizes);
    comparison.programs.push(sized("measured", (first, second), sizes));
}

fn compare_devices(before: &Scene, after: &Scene, comparison: &mut Comparison) {
    let mut names: Vec<&str> =
        before.devices.iter().chain(&after.devices).map(|d| d.name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    for name in names {
        let held = |device: &Device| (device.used_bytes(), device.capacity_bytes);
        let (a, b) = (find(before, name), find(after, name));
        if a.map(held) == b.map(held) {
            continue;
        }
        let text = |device: Option<&Device>| {
            device.map_or_else(
                || "–".to_owned(),
                |device| {
                    let (used, capacity) = held(device);
                    format!("{} of {}", quantity::bytes(used), quantity::bytes(capacity))
                },
            )
        };
        comparison.devices.push(Difference {
            subject: name.to_owned(),
            before: text(a),
            after: text(b),
            change: None,
            block: None,
        });
    }
}

fn find<'a>(scene: &'a Scene, name: &str) -> Option<&'a Device> {
    scene.devices.iter().find(|device| device.name == name)
}

fn compare_blocks(
    (before, p): (&Scene, usize),
    (after, q): (&Scene, usize),
    comparison: &mut Comparison,
) {
    let (first, second) = (&before.programs[p], &after.programs[q]);
    let by_name: BTreeMap<&str, usize> = second
        .blocks
        .iter()
        .enumerate()
        .map(|(number, block)| (block.name.as_str(), number))
        .collect();
    let mut changed: Vec<(usize, usize)> = Vec::new();
    let mut only_first: Vec<usize> = Vec::new();
    for (number, block) in first.blocks.iter().enumerate() {
        match by_name.get(block.name.as_str()) {
            Some(&other) if differs((before, p, number), (after, q, other)) => {
                changed.push((number, other));
            }
            Some(_) => (),
            None => only_first.push(number),
        }
    }
    let follows_first = |&a: &usize, &b: &usize| follows_alike((before, p), a, b);
    for run in only_first.chunk_by(follows_first) {
        let what = format!("only in the first, {}", place_text(before, p, &first.blocks[run[0]]));
        let row = only(&before.blocks_text(p, run), "only in the first");
        comparison.blocks.push(Difference { before: what, block: Some(run[0]), ..row });
    }
    let known: Vec<&str> = first.blocks.iter().map(|block| block.name.as_str()).collect();
    let is_new = |&number: &usize| !known.contains(&second.blocks[number].name.as_str());
    let only_second: Vec<usize> = (0..second.blocks.len()).filter(is_new).collect();
    let follows_second = |&a: &usize, &b: &usize| follows_alike((after, q), a, b);
    for run in only_second.chunk_by(follows_second) {
        let what = format!("only in the second, {}", place_text(after, q, &second.blocks[run[0]]));
        let row = only(&after.blocks_text(q, run), "only in the second");
        comparison.blocks.push(Difference { after: what, ..row });
    }
    // Neighbours that changed alike are one line.
    let follows = |&(a, b): &(usize, usize), &(next_a, next_b): &(usize, usize)| {
        follows_first(&a, &next_a) && follows_second(&b, &next_b)
    };
    for rows in changed.chunk_by(follows) {
        let (a, b) = rows[0];
        let key =
            (place_text(before, p, &first.blocks[a]), place_text(after, q, &second.blocks[b]));
        let subjects: Vec<usize> = rows.iter().map(|&(a, _)| a).collect();
        let sum = |blocks: &mut dyn Iterator<Item = u64>| blocks.fold(0, u64::saturating_add);
        let measured = is_measured_alike(first, second)
            && rows.iter().all(|&(a, b)| {
                let (a, b) = (&first.blocks[a], &second.blocks[b]);
                a.measured_nanos.is_some() && b.measured_nanos.is_some()
            });
        let nanos = |block: &Block| {
            if measured { block.measured_nanos.unwrap_or(0) } else { block.predicted_nanos }
        };
        let before_nanos = sum(&mut rows.iter().map(|&(a, _)| nanos(&first.blocks[a])));
        let after_nanos = sum(&mut rows.iter().map(|&(_, b)| nanos(&second.blocks[b])));
        let verb = if measured { "measured" } else { "predicted" };
        comparison.blocks.push(Difference {
            subject: before.blocks_text(p, &subjects),
            before: format!("{}, {verb} {}", key.0, quantity::nanos(before_nanos as f64)),
            after: format!("{}, {verb} {}", key.1, quantity::nanos(after_nanos as f64)),
            change: quantity::relative_change(before_nanos, after_nanos),
            block: Some(a),
        });
    }
}

/// Whether a block is the layer after another and lies alike.
fn follows_alike((scene, program): (&Scene, usize), first: usize, second: usize) -> bool {
    let rows = &scene.programs[program].blocks;
    let place = |block: usize| place_text(scene, program, &rows[block]);
    first + 1 == second
        && rows[first].number.is_some()
        && rows[second].number.is_some()
        && place(first) == place(second)
}

/// `gpu0 in bf16`, `gpu0, weights at home on numa0, in q4`.
fn place_text(scene: &Scene, program: usize, block: &Block) -> String {
    let names: Vec<String> =
        block.devices.iter().map(|&device| scene.device_name(device)).collect();
    let mut places = vec![names.join(" + ")];
    places.extend(Some(scene.home_text(program, &block.steps)).filter(|text| !text.is_empty()));
    let place = places.join(", ");
    let formats = block.steps.iter().filter_map(|&step| {
        let step = &scene.programs[program].steps[step];
        step.format.filter(|_| step.weight_bytes > 0)
    });
    let mut formats: Vec<_> = formats.collect();
    formats.sort_unstable();
    formats.dedup();
    let formats: Vec<String> = formats.iter().map(ToString::to_string).collect();
    if formats.is_empty() {
        place
    } else {
        let comma = if places.len() > 1 { "," } else { "" };
        format!("{place}{comma} in {}", formats.join(", "))
    }
}

/// Whether the blocks, each of a program of a scene, run elsewhere, hold something else or take another time.
fn differs(
    (before, p, first): (&Scene, usize, usize),
    (after, q, second): (&Scene, usize, usize),
) -> bool {
    let (first_program, second_program) = (&before.programs[p], &after.programs[q]);
    let (a, b) = (&first_program.blocks[first], &second_program.blocks[second]);
    let noisy =
        |a: u64, b: u64| quantity::relative_change(a, b).is_some_and(|change| change.abs() > NOISE);
    let measured = a.measured_nanos.zip(b.measured_nanos);
    let measured = measured.filter(|_| is_measured_alike(first_program, second_program));
    place_text(before, p, a) != place_text(after, q, b)
        || a.weight_bytes != b.weight_bytes
        || is_predicted_alike(first_program, second_program)
            && noisy(a.predicted_nanos, b.predicted_nanos)
        || measured.is_some_and(|(a, b)| noisy(a, b))
}

/// Whether predicted times are of runs of one size.
fn is_predicted_alike(first: &Program, second: &Program) -> bool {
    first.predicted_size().is_like(second.predicted_size())
}

/// Whether times of blocks are of runs of as many tokens.
fn is_measured_alike(first: &Program, second: &Program) -> bool {
    first.measured_tokens == second.measured_tokens
}

fn times(subject: String, before: u64, after: u64) -> Difference {
    Difference {
        subject,
        before: quantity::nanos(before as f64),
        after: quantity::nanos(after as f64),
        change: quantity::relative_change(before, after),
        block: None,
    }
}

fn only(subject: &str, what: &str) -> Difference {
    let (before, after) = if what.ends_with("first") { (what, "–") } else { ("–", what) };
    Difference {
        subject: subject.to_owned(),
        before: before.to_owned(),
        after: after.to_owned(),
        change: None,
        block: None,
    }
}
