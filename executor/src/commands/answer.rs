//! Answering one prompt: streamed as text, or as one JSON object.

use std::fmt;
use std::io::{ErrorKind, IsTerminal as _, Read as _, Write as _};
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, Result, ensure};
use command_line::{misuse, tell};
use serde_json::{Value, json};

use executor::engine::Timings;
use executor::generation::FinishReason;
use executor::text::{ChatRequest, message};

use super::session::{
    Answer, Asked, Opened, PROMPT_IDS, Session, exit_if_interrupted, interrupt_flag,
};
use super::{AnswerArguments, chat};

pub(super) fn run(arguments: AnswerArguments) -> Result<()> {
    let overrides = arguments.sampling.overrides();
    overrides.check().map_err(misuse)?;
    let is_asked = arguments.prompt.is_some() || arguments.prompt_ids.is_some();
    let is_dialogue = !is_asked && !arguments.json && std::io::stdin().is_terminal();
    let traced = arguments.trace.is_some() || arguments.perfetto.is_some();
    let plan = arguments.plan.as_deref().context("no plan is named")?;
    let records = arguments.trace.iter().chain(&arguments.perfetto);
    arguments.run.check_outputs(records, &arguments.plan)?;
    let opened = Opened::new(plan, &arguments.run)?;
    let asked = Asked {
        generation: opened.generation(&overrides)?,
        continues_text: !is_dialogue && !arguments.chat && arguments.system.is_none(),
    };
    let prompt = if is_dialogue {
        chat::check(&opened, arguments.system.as_deref())?;
        None
    } else {
        Some(checked_prompt(&opened, &asked, &arguments)?)
    };
    let mut session = opened.load(&arguments.run, traced)?;
    // Until here an interruption ends the program at once.
    let abort = interrupt_flag()?;
    let answered = match prompt {
        None => chat::run(&mut session, &asked, arguments.system.as_deref(), &abort),
        Some(prompt) => answer(&mut session, &asked, &prompt, arguments.json, &abort),
    };
    // What has run until then is recorded, whatever ended it.
    let recorded = session.write_records(arguments.trace.as_deref(), arguments.perfetto.as_deref());
    drop(session);
    with_records(answered, recorded)?;
    if !is_dialogue {
        exit_if_interrupted(&abort);
    }
    Ok(())
}

fn answer(
    session: &mut Session,
    asked: &Asked,
    prompt: &[u32],
    as_json: bool,
    abort: &AtomicBool,
) -> Result<()> {
    let sequence = session.engine.open();
    session.engine.append(sequence, prompt)?;
    let answer = session
        .answer(sequence, asked, abort, |text| if as_json { Ok(()) } else { print(text) })?;
    if as_json {
        return print(&format!("{}\n", to_json(session, prompt, &answer)));
    }
    print("\n")?;
    tell(summary(&answer));
    Ok(())
}

/// What a command ends with that also wrote records: its own failure, else theirs. That nobody reads what it prints is
/// none of its own.
pub(super) fn with_records(done: Result<()>, recorded: Result<()>) -> Result<()> {
    match done {
        Err(error) if !error.is::<ReaderGone>() => Err(error),
        Ok(()) | Err(_) => recorded,
    }
}

/// Whoever read standard output has gone, which ends the program quietly, as with other filters.
#[derive(Debug)]
pub(super) struct ReaderGone;

impl fmt::Display for ReaderGone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nobody reads standard output any more")
    }
}

impl std::error::Error for ReaderGone {}

/// Writes to standard output at once.
///
/// # Errors
/// When it cannot be written; [`ReaderGone`] when nobody reads it.
pub(super) fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(ReaderGone.into()),
        result => result.context("writing to standard output"),
    }
}

/// `12 prompt tokens, 31.2 ms to the first token, then 40 tokens at 52.1 tok/s`, and why it stopped where it was not
/// done.
pub(super) fn summary(answer: &Answer) -> String {
    let timings = &answer.timings;
    let tokens = |count: usize| format!("{count} token{}", if count == 1 { "" } else { "s" });
    let count = timings.prompt_tokens;
    let mut text = format!("{count} prompt token{}", if count == 1 { "" } else { "s" });
    if let Some(seconds) = seconds_to_first_token(timings) {
        text += &format!(", {:.1} ms to the first token", seconds * 1e3);
    }
    if let Some(rate) = rate(timings.decoded_tokens, timings.decode.as_secs_f64()) {
        text += &format!(", then {} at {rate:.1} tok/s", tokens(timings.decoded_tokens));
    }
    match answer.finish {
        Some(FinishReason::Length) if answer.fills_context => {
            text += "; stopped: the plan's context is full";
        }
        Some(FinishReason::Length) if answer.ids.is_empty() => {
            text += "; stopped after 0 tokens: nothing was computed";
        }
        Some(FinishReason::Length) => {
            text += &format!("; stopped after {}", tokens(answer.ids.len()));
        }
        Some(FinishReason::Stop) | None => (),
    }
    text
}

/// The prompt, which the plan can answer.
fn checked_prompt(opened: &Opened, asked: &Asked, arguments: &AnswerArguments) -> Result<Vec<u32>> {
    if !arguments.json {
        // There is no text to print without it.
        opened.tokenizer(PROMPT_IDS)?;
    }
    if let Some(stop) = asked.generation.stop_strings.iter().find(|stop| !stop.is_empty()) {
        let looking = || format!("answers are to end at the text {stop:?}");
        opened.tokenizer(PROMPT_IDS).with_context(looking)?;
    }
    let prompt = prompt_ids(opened, arguments)?;
    opened.check_prompt(&prompt)?;
    Ok(prompt)
}

fn prompt_ids(opened: &Opened, arguments: &AnswerArguments) -> Result<Vec<u32>> {
    if let Some(ids) = &arguments.prompt_ids {
        return Ok(ids.clone());
    }
    let text = match &arguments.prompt {
        Some(text) => text.clone(),
        None => {
            if std::io::stdin().is_terminal() {
                tell("the prompt is what is typed here, up to Ctrl-D");
            }
            let text = read_prompt(opened.plan().model.context)?;
            // The end of the line that `echo` writes is not part of the prompt.
            let line = text.strip_suffix('\n').unwrap_or(&text);
            line.strip_suffix('\r').unwrap_or(line).to_owned()
        }
    };
    let is_chat = arguments.chat || arguments.system.is_some();
    // Also where a template would say something around it: a pipe that failed is no message.
    let what = if is_chat { "answer" } else { "continue" };
    ensure!(!text.is_empty(), "the prompt is empty: there is nothing to {what}");
    let tokenizer = opened.tokenizer(PROMPT_IDS)?;
    if !is_chat {
        return tokenizer.encode(&text, true);
    }
    if let Some(system) = &arguments.system {
        chat::warn_of_system(tokenizer, system);
    }
    let system = arguments.system.iter().map(|system| message("system", system));
    let messages = system.chain([message("user", &text)]).collect();
    tokenizer.encode_chat(&ChatRequest::to_answer(messages))
}

/// Text from standard input, of which a context of so many tokens could hold all.
fn read_prompt(context: u32) -> Result<String> {
    /// More than the longest token of any vocabulary stands for.
    const MOST_TOKEN_BYTES: u64 = 1 << 10;
    let most = u64::from(context) * MOST_TOKEN_BYTES;
    let mut text = Vec::new();
    std::io::stdin().take(most + 1).read_to_end(&mut text).context("reading the prompt")?;
    ensure!(
        text.len() as u64 <= most,
        "the prompt is longer than {most} bytes: more than the plan's context of {context} tokens can hold"
    );
    String::from_utf8(text).context("the prompt is no text in UTF-8")
}

fn to_json(session: &Session, prompt: &[u32], answer: &Answer) -> Value {
    let timings = &answer.timings;
    let (first, decode) = (seconds_to_first_token(timings), timings.decode.as_secs_f64());
    json!({
        "prompt_ids": prompt,
        "ids": answer.ids,
        "text": answer.text,
        "finish_reason": answer.finish.map_or("abort", FinishReason::name),
        "timings": {
            "load_seconds": session.load_time.as_secs_f64(),
            "prompt_tokens": timings.prompt_tokens,
            "time_to_first_token_seconds": first,
            "prompt_tokens_per_sec": first.and_then(|first| rate(timings.prompt_tokens, first)),
            "decoded_tokens": timings.decoded_tokens,
            "decode_seconds": decode,
            "decode_tokens_per_sec": rate(timings.decoded_tokens, decode),
        },
    })
}

/// Seconds from the start to the first logits, where there were any.
fn seconds_to_first_token(timings: &Timings) -> Option<f64> {
    (!timings.prompt.is_zero()).then_some(timings.prompt.as_secs_f64())
}

/// Tokens per second, where there were any.
fn rate(tokens: usize, seconds: f64) -> Option<f64> {
    (tokens > 0 && seconds > 0.0).then(|| tokens as f64 / seconds)
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn records_that_cannot_be_written_are_told_though_the_reader_has_gone() {
        let end = |done: Result<()>, recorded: Result<()>| {
            with_records(done, recorded).map_err(|error| error.to_string())
        };
        let full = || Err(anyhow!("the disk is full"));
        assert_eq!(end(Err(ReaderGone.into()), full()), Err("the disk is full".to_owned()));
        assert_eq!(end(Ok(()), full()), Err("the disk is full".to_owned()));
        assert_eq!(end(Err(anyhow!("a lane failed")), full()), Err("a lane failed".to_owned()));
        assert_eq!(end(Err(ReaderGone.into()), Ok(())), Ok(()));
    }
}
