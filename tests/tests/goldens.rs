//! Every golden checkpoint, lowered and interpreted, gives the logits that transformers gave.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

#[expect(dead_code, reason = "each test file uses a part")]
mod common;

use std::fs;
use std::path::PathBuf;

use common::{distance, golden};
use serde_json::Value;
use tests::interpreter::Interpreter;

/// Largest difference of a logit from the golden one, which is rounded to six decimals.
const LOGIT_TOLERANCE: f32 = 1e-3;

/// Largest difference of a token's negative log-likelihood.
const NLL_TOLERANCE: f32 = 1e-3;

/// Every folder with a golden.json, in order.
fn goldens() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> =
        fs::read_dir(golden("")).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.retain(|folder| folder.join("golden.json").exists());
    folders.sort();
    assert!(!folders.is_empty(), "golden checkpoints are in the tree");
    folders
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|item| item.as_f64().unwrap() as f32).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn log_likelihood(logits: &[f32], id: u32) -> f64 {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - highest).exp()).sum();
    f64::from(logits[id as usize] - highest) - sum.ln()
}

#[test]
fn interpreted_logits_are_those_of_transformers() {
    for folder in goldens() {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let golden: Value =
            serde_json::from_slice(&fs::read(folder.join("golden.json")).unwrap()).unwrap();
        let model = Interpreter::load(models::lower(&folder).unwrap()).unwrap();
        for prompt in golden["prompts"].as_array().unwrap() {
            let tokens = ids(&prompt["ids"]);
            let logits = model.logits(&tokens, &[tokens.len() - 1]).unwrap();
            let logits = logits.row(0);
            let top = ids(&prompt["top_ids"]).into_iter().map(|id| logits[id as usize]);
            let top: Vec<f32> = top.collect();
            for (kind, found) in [("top_logits", &top[..]), ("logits_first8", &logits[..8])] {
                let off = distance(&numbers(&prompt[kind]), found);
                assert!(off < LOGIT_TOLERANCE, "{name}, prompt {}, {kind}: {off}", prompt["name"]);
            }
        }
        let nll = &golden["nll"];
        let tokens = ids(&nll["ids"]);
        let rows: Vec<usize> = (0..tokens.len() - 1).collect();
        let logits = model.logits(&tokens, &rows).unwrap();
        let likelihoods =
            logits.rows().zip(&tokens[1..]).map(|(row, &id)| -log_likelihood(row, id) as f32);
        let off = distance(&numbers(&nll["per_token"]), &likelihoods.collect::<Vec<f32>>());
        assert!(off < NLL_TOLERANCE, "{name}, negative log-likelihood: {off}");
    }
}
