//! `perplexity`: how well a plan predicts a text.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, Result, bail, ensure};
use ir::plan::ModelInfo;
use serde_json::{Value, json};

use executor::engine::{Perplexity, check_tokens};
use executor::text::Tokenizer;

use super::answer::{print, with_records};
use super::session::{Opened, Session, exit_if_interrupted, interrupt_flag};
use super::{PerplexityArguments, npy};

/// What is scored: tokens in pieces, each by itself.
struct Pieces {
    /// What each piece begins with.
    prefix: Vec<u32>,
    /// The tokens that are cut.
    tokens: Vec<u32>,
    /// The most of them in a piece.
    most: usize,
}

pub(super) fn run(arguments: PerplexityArguments) -> Result<()> {
    let scored = &arguments.scored;
    let file = scored.ids_file.as_deref().or(scored.text_file.as_deref());
    let file = file.context("no file is named")?;
    let inputs = [&arguments.plan].into_iter().chain(&scored.ids_file).chain(&scored.text_file);
    arguments.run.check_outputs(&arguments.logits, inputs)?;
    let ids = scored.ids_file.as_deref().map(read_ids).transpose()?;
    let text = scored.text_file.as_deref().map(read).transpose()?;
    let opened = Opened::new(&arguments.plan, &arguments.run)?;
    let model = &opened.plan().model;
    let pieces = match (ids, text) {
        (Some(ids), _) => Pieces { prefix: Vec::new(), most: ids.len(), tokens: ids },
        (None, text) => {
            let tokenizer = opened.tokenizer("--ids-file")?;
            Pieces::of_text(tokenizer, &text.unwrap_or_default(), model.context as usize)?
        }
    };
    pieces.check(model).with_context(|| file.display().to_string())?;
    let mut session = opened.load(&arguments.run, false)?;
    // Until here an interruption ends the program at once.
    let abort = interrupt_flag()?;
    let scored = score(&mut session, &pieces, &abort);
    // What has run until then is counted, whatever ended it.
    let recorded = session.write_records(None, None);
    drop(session);
    let reported = match scored {
        Ok(Some(scored)) => report(&scored, arguments.logits.as_deref()),
        Ok(None) => Ok(()),
        Err(error) => Err(error),
    };
    with_records(reported, recorded)?;
    exit_if_interrupted(&abort);
    Ok(())
}

impl Pieces {
    /// A text in pieces that fill a context, each begun as the tokenizer begins a text.
    fn of_text(tokenizer: &Tokenizer, text: &str, context: usize) -> Result<Self> {
        let (ids, empty) = (tokenizer.encode(text, true)?, tokenizer.encode("", true)?);
        // What is put behind a text ends the last piece.
        let begun = ids.iter().zip(&empty).take_while(|(a, b)| a == b).count();
        let (prefix, tokens) = ids.split_at(begun);
        let most = context.saturating_sub(begun);
        Ok(Self { prefix: prefix.to_vec(), tokens: tokens.to_vec(), most })
    }

    /// Fails where they predict nothing, are of another model, or outgrow the context.
    fn check(&self, model: &ModelInfo) -> Result<()> {
        let context = model.context as usize;
        let count = self.before() + self.tokens.len();
        ensure!(count > 1, "{count} token{}; a perplexity takes at least two", plural(count));
        check_tokens(&self.prefix, model.vocabulary)?;
        check_tokens(&self.tokens, model.vocabulary)?;
        let piece = self.prefix.len() + self.most;
        ensure!(
            piece <= context,
            "{piece} tokens are more than the plan's context of {context}: score fewer, or compile it with --context \
             {piece} or more if the model has as much"
        );
        ensure!(
            self.before() + self.most > 1,
            "the plan's context of {context} token{} predicts nothing: compile it with a longer --context",
            plural(context)
        );
        Ok(())
    }

    /// Tokens in front of a piece that predict its first one.
    fn before(&self) -> usize {
        self.prefix.len().min(1)
    }

    /// Where the tokens are cut. A piece of one token with nothing before it predicts nothing, so the last one takes a
    /// token from the one before where it would be left with one, and others are left out.
    fn cuts(&self) -> Vec<Range<usize>> {
        let (count, least) = (self.tokens.len(), 2 - self.before());
        let mut starts: Vec<usize> = (0..count).step_by(self.most).collect();
        if let [_, .., last] = starts.as_mut_slice()
            && *last + least > count
        {
            *last -= 1;
        }
        let ends = starts.iter().skip(1).copied().chain([count]);
        let cuts = starts.iter().zip(ends).map(|(&start, end)| start..end);
        cuts.filter(|cut| cut.len() >= least).collect()
    }
}

fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

/// Scores all pieces; `None` where raising `abort` stopped it.
fn score(session: &mut Session, pieces: &Pieces, abort: &AtomicBool) -> Result<Option<Perplexity>> {
    let mut all = Perplexity { tokens: 0, nll: 0.0, last_logits: Vec::new() };
    for cut in pieces.cuts() {
        let piece = [&pieces.prefix[..], &pieces.tokens[cut]].concat();
        let Some(scored) = session.engine.perplexity_unless(&piece, abort)? else {
            return Ok(None);
        };
        let tokens = all.tokens + scored.tokens;
        let sum = all.nll * all.tokens as f64 + scored.nll * scored.tokens as f64;
        all = Perplexity { tokens, nll: sum / tokens as f64, ..scored };
    }
    Ok(Some(all))
}

fn report(scored: &Perplexity, logits: Option<&Path>) -> Result<()> {
    if let Some(path) = logits {
        command_line::write(path, &npy::encode(&scored.last_logits))?;
    }
    let result =
        json!({"tokens": scored.tokens, "nll": scored.nll, "perplexity": scored.perplexity()});
    print(&format!("{result}\n"))
}

fn read(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    String::from_utf8(bytes).with_context(|| format!("{} is no text in UTF-8", path.display()))
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
    use std::path::PathBuf;

    use super::*;

    /// So many equal tokens behind a prefix, in pieces.
    fn pieces(prefix: &[u32], tokens: usize, most: usize) -> Pieces {
        Pieces { prefix: prefix.to_vec(), tokens: vec![1; tokens], most }
    }

    #[test]
    fn pieces_predict_something_and_the_last_holds_the_last_token() {
        let ends = |prefix: &[u32], tokens, most| -> Vec<(usize, usize)> {
            let cuts = pieces(prefix, tokens, most).cuts();
            cuts.into_iter().map(|cut| (cut.start, cut.end)).collect()
        };
        assert_eq!(ends(&[], 8, 4), [(0, 4), (4, 8)]);
        assert_eq!(ends(&[], 9, 4), [(0, 4), (4, 7), (7, 9)]);
        assert_eq!(ends(&[], 3, 2), [(1, 3)]);
        assert_eq!(ends(&[], 5, usize::MAX), [(0, 5)]);
        // A token that stands before each piece predicts its first one.
        assert_eq!(ends(&[0], 9, 4), [(0, 4), (4, 8), (8, 9)]);
        assert_eq!(ends(&[0], 2, 1), [(0, 1), (1, 2)]);
    }

    #[test]
    fn each_piece_begins_as_the_text() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/tokenizers");
        let in_pieces = |name: &str, text: &str| {
            let tokenizer = Tokenizer::load(&root.join(name)).unwrap();
            (Pieces::of_text(&tokenizer, text, 8).unwrap(), tokenizer)
        };
        let text = "Hello, world! Hello, world!";
        let (pieces, tokenizer) = in_pieces("opt", text);
        assert_eq!((pieces.prefix.len(), pieces.most), (1, 7));
        assert_eq!(pieces.tokens, tokenizer.encode(text, false).unwrap());
        let whole = [&pieces.prefix[..], &pieces.tokens[..]].concat();
        assert_eq!(whole, tokenizer.encode(text, true).unwrap());
        // GPT-2 begins texts with nothing.
        let (pieces, _) = in_pieces("gpt2", text);
        assert_eq!((pieces.prefix.len(), pieces.most), (0, 8));
        assert!(in_pieces("opt", "").0.tokens.is_empty());
    }

    #[test]
    fn what_cannot_be_scored_is_refused() {
        let refusal = |context, pieces: Pieces| {
            let model = ModelInfo {
                name: String::new(),
                architecture: String::new(),
                folder: PathBuf::new(),
                vocabulary: 8,
                context,
                max_sequences: 1,
                block_tokens: 4,
                blocks: 1,
            };
            pieces.check(&model).unwrap_err().to_string()
        };
        let none = "0 tokens; a perplexity takes at least two";
        assert_eq!(refusal(4, pieces(&[], 0, 0)), none);
        let one = "1 token; a perplexity takes at least two";
        assert_eq!(refusal(4, pieces(&[], 1, 4)), one);
        assert_eq!(refusal(4, pieces(&[0, 2], 0, 2)), one);
        let unknown = Pieces { tokens: vec![1, 8], ..pieces(&[], 0, 4) };
        assert!(refusal(4, unknown).starts_with("token id 8 is out of range"));
        let long = "5 tokens are more than the plan's context";
        assert!(refusal(4, pieces(&[], 5, 5)).starts_with(long));
        let short = "the plan's context of 1 token predicts";
        assert!(refusal(1, pieces(&[], 5, 1)).starts_with(short));
        assert!(refusal(1, pieces(&[0], 5, 0)).starts_with(short));
    }
}
