//! `perplexity`: how well a plan predicts a text.

use std::ops::Range;
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
    let mut all = Perplexity { tokens: 0, nll: 0.0, last_logits: Vec::new() };
    for piece in pieces(ids.len(), piece) {
        let scored = session.engine.perplexity(&ids[piece])?;
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

/// Pieces of a text of so many tokens, each of `most` at most. One of one token predicts nothing, so the last takes a
/// token from the one before where it would be left with one, and others are left out; a text of one is refused.
fn pieces(tokens: usize, most: usize) -> Vec<Range<usize>> {
    let mut starts: Vec<usize> = (0..tokens).step_by(most).collect();
    if let [_, .., last] = starts.as_mut_slice()
        && *last + 1 == tokens
        && most > 1
    {
        *last -= 1;
    }
    let ends = starts.iter().skip(1).copied().chain([tokens]);
    let pieces = starts.iter().zip(ends).map(|(&start, end)| start..end);
    pieces.filter(|piece| piece.len() > 1 || tokens == 1).collect()
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

#[cfg(test)]
mod tests {
    use super::pieces;

    #[test]
    fn pieces_predict_something_and_the_last_holds_the_last_token() {
        let ends = |tokens, most| -> Vec<(usize, usize)> {
            pieces(tokens, most).into_iter().map(|piece| (piece.start, piece.end)).collect()
        };
        assert_eq!(ends(8, 4), [(0, 4), (4, 8)]);
        assert_eq!(ends(9, 4), [(0, 4), (4, 7), (7, 9)]);
        assert_eq!(ends(3, 2), [(1, 3)]);
        assert_eq!(ends(5, usize::MAX), [(0, 5)]);
        assert_eq!(ends(1, 4), [(0, 1)]);
        assert!(ends(3, 1).is_empty());
    }
}
