//! An interactive conversation on a terminal.

use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result, ensure};
use command_line::tell;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use executor::engine::SequenceId;
use executor::text::{ChatRequest, Tokenizer, message};
use serde_json::Value;

use super::answer::{ReaderGone, print, summary};
use super::session::{Answer, Asked, Opened, PROMPT_IDS, Session};

/// Words of [`HELP`] and others for the same.
const COMMANDS: [&str; 4] = ["exit", "quit", "reset", "help"];
const HELP: &str = "/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer";

/// Fails where there is nothing to chat with.
pub(super) fn check(opened: &Opened, system: Option<&str>) -> Result<()> {
    let tokenizer = opened.tokenizer(PROMPT_IDS)?;
    ensure!(
        tokenizer.has_chat_template(),
        "the tokenizer has no chat template: continue a text with --prompt instead"
    );
    let messages = beginning(system).chain([message("user", "")]).collect();
    tokenizer.render_chat(&ChatRequest::to_answer(messages))?;
    if let Some(system) = system {
        warn_of_system(tokenizer, system);
    }
    Ok(())
}

/// Tells it where the chat template leaves a system message out.
pub(super) fn warn_of_system(tokenizer: &Tokenizer, system: &str) {
    let rendered = |system: Option<&str>| {
        let messages = beginning(system).chain([message("user", "a")]).collect();
        tokenizer.render_chat(&ChatRequest::to_answer(messages)).ok()
    };
    // Some have a message of their own, which may be the same.
    let is_left_out = |with: String| {
        !with.contains(system.trim()) && rendered(None).is_some_and(|without| without == with)
    };
    if rendered(Some(system)).is_some_and(is_left_out) {
        tell("warning: the chat template of this checkpoint leaves the system message out");
    }
}

fn beginning(system: Option<&str>) -> impl Iterator<Item = Value> {
    system.map(|system| message("system", system)).into_iter()
}

pub(super) fn run(
    session: &mut Session,
    asked: &Asked,
    system: Option<&str>,
    abort: &AtomicBool,
) -> Result<()> {
    let mut editor = DefaultEditor::new().context("opening the terminal")?;
    tell(HELP);
    let beginning: Vec<_> = beginning(system).collect();
    let mut messages = beginning.clone();
    let mut sequence = session.engine.open();
    loop {
        let line = match editor.readline("> ") {
            Ok(line) => line,
            Err(ReadlineError::Interrupted) => continue,
            Err(ReadlineError::Eof) => return Ok(()),
            Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
                tell("what was typed is not UTF-8: type it again");
                continue;
            }
            Err(error) => return Err(error).context("reading from the terminal"),
        };
        match line.trim() {
            "" => continue,
            "/exit" | "/quit" => return Ok(()),
            "/help" => {
                tell(HELP);
                continue;
            }
            "/reset" => {
                messages.clone_from(&beginning);
                session.engine.truncate(sequence, 0);
                continue;
            }
            text if is_command(text) => {
                tell(format_args!("{text} is no command; {HELP}"));
                continue;
            }
            text => messages.push(message("user", text)),
        }
        // A history the editor cannot keep is no reason to end a conversation.
        let _ = editor.add_history_entry(&line);
        abort.store(false, Ordering::Relaxed);
        match reply(session, asked, sequence, &messages, abort) {
            Ok(answer) => {
                print("\n")?;
                tell(summary(&answer));
                messages.push(message("assistant", &answer.text));
                if answer.fills_context {
                    tell(HELP);
                }
            }
            Err(error) if error.is::<ReaderGone>() => return Err(error),
            // A conversation that has outgrown the context can be begun anew; the program goes on.
            Err(error) => {
                tell(format_args!("{error:#}\n{HELP}"));
                messages.pop();
                session.engine.close(sequence);
                sequence = session.engine.open();
            }
        }
        abort.store(false, Ordering::Relaxed);
    }
}

/// Whether a line is one word behind a slash, as commands are and hardly any message, or begins with a command.
fn is_command(line: &str) -> bool {
    let word = line.strip_prefix('/').unwrap_or_default();
    let first = word.split_whitespace().next();
    !word.is_empty() && word.chars().all(|c| c.is_ascii_lowercase())
        || first.is_some_and(|first| COMMANDS.contains(&first))
}

/// Continues a conversation, whose beginning the sequence holds.
fn reply(
    session: &mut Session,
    asked: &Asked,
    sequence: SequenceId,
    messages: &[Value],
    abort: &AtomicBool,
) -> Result<Answer> {
    let tokenizer = session.tokenizer(PROMPT_IDS)?;
    let ids = tokenizer.encode_chat(&ChatRequest::to_answer(messages.to_vec()))?;
    // What is cached of an equal beginning need not be fed again; at least one token must be.
    let same = session.engine.tokens(sequence).iter().zip(&ids).take_while(|(a, b)| a == b).count();
    session.engine.truncate(sequence, same.min(ids.len().saturating_sub(1)));
    let kept = session.engine.tokens(sequence).len();
    session.engine.append(sequence, &ids[kept..])?;
    session.answer(sequence, asked, abort, print)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_one_word_or_begins_a_line() {
        for line in ["/reset", "/nope", "/exit now", "/help me"] {
            assert!(is_command(line), "{line}");
        }
        for line in ["/", "/usr/bin is full", "/Reset", "say /exit", "/nope nope"] {
            assert!(!is_command(line), "{line}");
        }
    }
}
