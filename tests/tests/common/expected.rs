//! What golden checkpoints are expected to make of their prompts.

use std::sync::atomic::AtomicBool;

use executor::engine::Engine;
use executor::load::Options;
use ir::plan::Plan;
use serde_json::Value;

use super::{distance, engine, golden, largest};

/// How far a run may be from that of transformers.
#[derive(Clone, Copy)]
pub(crate) struct Tolerance {
    /// Runs may choose differently where the best two logits are this close.
    pub(crate) margin: f64,
    /// Of the mean negative log-likelihood.
    pub(crate) nll: f64,
}

/// Every golden checkpoint in the tree.
pub(crate) fn goldens() -> Vec<String> {
    let folder = golden("");
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("golden.json").exists())
        .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
        .collect();
    names.sort();
    assert!(!names.is_empty(), "golden checkpoints are in the tree");
    names
}

/// What transformers made of a golden checkpoint.
pub(crate) fn expected(name: &str) -> Value {
    let text = std::fs::read_to_string(golden(name).join("golden.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

pub(crate) fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

pub(crate) fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// The largest distance of any logit from its golden value; fails on other tokens and another likelihood.
pub(crate) fn check(name: &str, engine: &mut Engine, tolerance: Tolerance) -> f32 {
    let expected = expected(name);
    let (mut deviations, mut any_certain) = (Vec::new(), false);
    for prompt in expected["prompts"].as_array().unwrap() {
        let at = format!("{name} {}", prompt["name"]);
        let id = engine.open();
        engine.append(id, &ids(&prompt["ids"])).unwrap();
        let golden_tokens = ids(&prompt["greedy"]);
        let mut tokens = Vec::new();
        engine
            .generate(&[id], &AtomicBool::new(false), |_, logits| {
                if tokens.is_empty() {
                    deviations.push(deviation(prompt, logits));
                }
                tokens.push(argmax(logits));
                Ok((tokens.len() < golden_tokens.len()).then(|| tokens[tokens.len() - 1]))
            })
            .unwrap();
        engine.close(id);
        let margins = floats(&prompt["margins"]);
        let certain =
            margins.iter().position(|&margin| margin < tolerance.margin).unwrap_or(margins.len());
        any_certain |= certain > 0;
        assert_eq!(tokens[..certain], golden_tokens[..certain], "{at}");
    }
    assert!(any_certain, "{name}: no token is certain");
    let nll = engine.perplexity(&ids(&expected["nll"]["ids"])).unwrap().nll;
    let golden = expected["nll"]["mean"].as_f64().unwrap();
    assert!((nll - golden).abs() < tolerance.nll, "{name}: nll {nll}, golden {golden}");
    largest(deviations)
}

fn argmax(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a)));
    best.unwrap() as u32
}

/// The largest distance of a logit after `prompt` from its golden value.
pub(crate) fn deviation(prompt: &Value, logits: &[f32]) -> f32 {
    let (mut tokens, mut golden) = (ids(&prompt["top_ids"]), floats(&prompt["top_logits"]));
    tokens.extend(0..8);
    golden.extend(floats(&prompt["logits_first8"]));
    let given: Vec<f32> = tokens.iter().map(|&token| logits[token as usize]).collect();
    let golden: Vec<f32> = golden.into_iter().map(|golden| golden as f32).collect();
    distance(&golden, &given)
}

/// The logits after each prompt, one prompt after the other.
pub(crate) fn logits_of(name: &str, plan: &Plan, options: &Options) -> Vec<f32> {
    let mut engine = engine(plan, options);
    let prompts = &expected(name)["prompts"];
    let after = |prompt: &Value| {
        let id = engine.open();
        engine.append(id, &ids(&prompt["ids"])).unwrap();
        let logits = engine.advance(&[id]).unwrap().remove(0);
        engine.close(id);
        logits
    };
    prompts.as_array().unwrap().iter().flat_map(after).collect()
}
