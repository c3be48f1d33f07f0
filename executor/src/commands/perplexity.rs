//! `perplexity`: how well a plan predicts a text.

use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use executor::engine::Perplexity;
use executor::generation::GenerationOverrides;

use super::answer::print;
use super::session::{Opened, Session};
use super::{PerplexityArguments, npy};

pub(super) fn run(arguments: PerplexityArguments) -> Result<()> {
    let scored = &arguments.scored;
    let inputs = [&arguments.plan].into_iter().chain(&scored.ids_file).chain(&scored.text_file);
    arguments.run.check_outputs(&arguments.logits, inputs)?;
    let ids = scored.ids_file.as_deref().map(read_ids).transpose()?;
    let text = scored.text_file.as_deref().map(read).transpose()?;
    let opened = Opened::new(&arguments.plan, &arguments.run, &GenerationOverrides::default())?;
    let (ids, context) = match (ids, text) {
        (Some(ids), _) => (ids, usize::MAX),
        (None, text) => {
            let text = text.unwrap_or_default();
            (opened.tokenizer()?.encode(&text, true)?, opened.plan().model.context as usize)
        }
    };
    let mut session = opened.load(&arguments.run, false)?;
    let scored = score(&mut session, &ids, context)?;
    session.write_records(None, None)?;
    if let Some(path) = &arguments.logits {
        command_line::write(path, &npy::encode(&scored.last_logits))?;
    }
    let result =
        json!({"tokens": scored.tokens, "nll": scored.nll, "perplexity": scored.perplexity()});
    print(&format!("{result}\n"))
}

/// Scores tokens in pieces of so many, each by itself.
fn score(session: &mut Session, ids: &[u32], piece: usize) -> Result<Perplexity> {
    ensure!(!ids.is_empty(), "there are no tokens to score");
    // A piece of one token predicts nothing; a text of one is refused.
    let pieces = ids.chunks(piece).filter(|piece| piece.len() > 1 || ids.len() == 1);
    let mut all = Perplexity { tokens: 0, nll: 0.0, last_logits: Vec::new() };
    for piece in pieces {
        let scored = session.engine.perplexity(piece)?;
        let tokens = all.tokens + scored.tokens;
        let sum = all.nll * all.tokens as f64 + scored.nll * scored.tokens as f64;
        all = Perplexity { tokens, nll: sum / tokens as f64, ..scored };
    }
    ensure!(
        all.tokens > 0,
        "the plan's context of {piece} token predicts nothing: compile it with a longer --context"
    );
    Ok(all)
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}

/// Token ids from a JSON list, or from an object's `ids`.
fn read_ids(path: &Path) -> Result<Vec<u32>> {
    let name = path.display();
    let text = read(path)?;
    let value: Value =
        serde_json::from_str(&text).with_context(|| format!("{name} is not JSON"))?;
    let list = match &value {
        Value::Array(list) => list,
        Value::Object(object) => match object.get("ids") {
            Some(Value::Array(list)) => list,
            _ => bail!("{name} has no list of token ids under \"ids\""),
        },
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {
            bail!("{name} is neither a list of token ids nor an object with \"ids\"")
        }
    };
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    list.iter()
        .map(|value| id(value).with_context(|| format!("{name}: {value} is no token id")))
        .collect()
}
