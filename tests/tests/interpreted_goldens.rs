//! Every golden checkpoint, lowered and interpreted, gives the logits that transformers gave.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

#[expect(dead_code, reason = "each test file uses a part")]
mod common;

use common::expected::{expected, goldens, ids};
use common::{distance, golden};
use serde_json::Value;
use tests::interpreter::Interpreter;

/// Largest difference of a logit from the golden one, which is rounded to six decimals.
const LOGIT_TOLERANCE: f32 = 1e-3;

/// Largest difference of a token's negative log-likelihood.
const NLL_TOLERANCE: f32 = 1e-3;

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|item| item.as_f64().unwrap() as f32).collect()
}

fn log_likelihood(logits: &[f32], id: u32) -> f64 {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - highest).exp()).sum();
    f64::from(logits[id as usize] - highest) - sum.ln()
}

#[test]
fn interpreted_logits_are_those_of_transformers() {
    for name in goldens() {
        let expected = expected(&name);
        let model = Interpreter::load(models::lower(&golden(&name)).unwrap()).unwrap();
        for prompt in expected["prompts"].as_array().unwrap() {
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
        let nll = &expected["nll"];
        let tokens = ids(&nll["ids"]);
        let rows: Vec<usize> = (0..tokens.len() - 1).collect();
        let logits = model.logits(&tokens, &rows).unwrap();
        let likelihoods =
            logits.rows().zip(&tokens[1..]).map(|(row, &id)| -log_likelihood(row, id) as f32);
        let off = distance(&numbers(&nll["per_token"]), &likelihoods.collect::<Vec<f32>>());
        assert!(off < NLL_TOLERANCE, "{name}, negative log-likelihood: {off}");
    }
}
