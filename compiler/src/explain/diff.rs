//! What differs between two plans.

use std::fmt::Write as _;

use ir::plan::{ModelInfo, Plan};

use crate::explain::rows::rows;
use crate::explain::table::{Table, bytes, nanos};
use crate::explain::types;

/// The differences of `after` from `before`; one sentence where there are none.
pub fn diff(before: &Plan, after: &Plan) -> String {
    if before == after {
        return "the plans are the same\n".into();
    }
    let mut text = String::new();
    let mut facts = Table::new(&["", "before", "after"]);
    let mut fact = |what: &str, a: String, b: String| {
        if a != b {
            facts.row(vec![what.into(), a, b]);
        }
    };
    let (a, b) = (&before.model, &after.model);
    // A folder's name says little: the same checkpoint may lie in two.
    if before.fingerprints() != after.fingerprints() {
        let name = |model: &ModelInfo| format!("{} ({})", model.name, model.architecture);
        fact("model", name(a), name(b));
        fact("checkpoint", "one".into(), "another".into());
    }
    fact("context", a.context.to_string(), b.context.to_string());
    fact("sequences", a.max_sequences.to_string(), b.max_sequences.to_string());
    fact("cache blocks", a.blocks.to_string(), b.blocks.to_string());
    let objective = |plan: &Plan| plan.asked.objective.to_string();
    fact("minimised", objective(before), objective(after));
    let chosen = |plan: &Plan| plan.forecast.candidates.first().map(|best| best.name.clone());
    fact("placement", chosen(before).unwrap_or_default(), chosen(after).unwrap_or_default());
    for name in program_names(before, after) {
        let forecasts = [before, after]
            .map(|plan| plan.forecast.programs.iter().find(|known| known.program == name));
        let [tokens, others] = forecasts.map(|forecast| forecast.map(|forecast| forecast.tokens));
        let [first, second] = forecasts.map(|forecast| match forecast {
            None => "-".into(),
            Some(forecast) if tokens == others => nanos(forecast.nanos),
            Some(forecast) => format!("{} at {} tokens", nanos(forecast.nanos), forecast.tokens),
        });
        fact(&name, first, second);
    }
    for name in device_names(before, after) {
        let used = |plan: &Plan| {
            let Some(device) = plan.machine.device(&name) else { return "-".into() };
            let Some(budget) = plan.forecast.devices.get(device) else { return "-".into() };
            bytes(budget.needed_bytes())
        };
        fact(&format!("bytes on {name}"), used(before), used(after));
        let types = |plan: &Plan| {
            let device = plan.machine.device(&name);
            device.and_then(|device| types(plan, device)).unwrap_or_else(|| "-".into())
        };
        fact(&format!("held on {name}"), types(before), types(after));
    }
    // Writing to a string cannot fail.
    let _ = write!(text, "{facts}");
    let (old, new) = (rows(before), rows(after));
    let mut moved = Table::new(&["layer", "before", "after"]);
    let mut count = 0;
    for row in &new {
        let name = row.name();
        let here = row.devices(&after.machine);
        let there = old
            .iter()
            .find(|known| known.name() == name)
            .map_or("-".into(), |known| known.devices(&before.machine));
        if here != there {
            count += 1;
            moved.row(vec![name, there, here]);
        }
    }
    for row in old.iter().filter(|row| !new.iter().any(|known| known.name() == row.name())) {
        count += 1;
        moved.row(vec![row.name(), row.devices(&before.machine), "-".into()]);
    }
    if count > 0 {
        let _ = write!(text, "\n{moved}");
    } else {
        let _ = writeln!(text, "\nevery layer is on the same devices");
    }
    text
}

fn program_names(before: &Plan, after: &Plan) -> Vec<String> {
    let all = before.forecast.programs.iter().chain(&after.forecast.programs);
    distinct(all.map(|forecast| forecast.program.clone()))
}

fn device_names(before: &Plan, after: &Plan) -> Vec<String> {
    let all = before.machine.devices.rows().iter().chain(after.machine.devices.rows());
    distinct(all.map(|device| device.name.clone()))
}

fn distinct(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut seen: Vec<String> = Vec::new();
    for name in names {
        if !seen.contains(&name) {
            seen.push(name);
        }
    }
    seen
}
