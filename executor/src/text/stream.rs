//! The text of an answer, handed out while its tokens arrive.
//!
//! - What has been handed out is never taken back: together the pieces are the text that
//!   decoding all ids at once gives, up to the stop string.
//! - So half a character, a run of byte tokens that may yet prove malformed, and whatever may
//!   become a stop string wait until the next tokens decide.
//! - What is decoded again with a token is a few tokens, whatever they are, but for runs of byte tokens.
//! - A stop string is found with the token that completes it, and a special token that is left
//!   out of the text ends it where its own text is a stop string.

use anyhow::Result;

use crate::text::tokenizer::{Tokenizer, clean_up_spaces, is_cleaned};

/// Bytes of a character in UTF-8, and so tokens that it may be cut into.
const MOST_BYTES: usize = 4;

/// Decodes one answer.
#[derive(Clone, Debug)]
pub struct TextStream {
    skip_special: bool,
    /// The last ids: those of the last piece, as context, then those whose text is not all handed out.
    window: Vec<u32>,
    /// How many of `window` are context.
    context: usize,
    /// Bytes at the front of the window's text that are handed out.
    handed_bytes: usize,
    /// Decoded text in which spaces may yet be cleaned up.
    uncleaned: String,
    stops: StopStrings,
}

impl TextStream {
    /// A stream that ends at the first of the stop strings, which is not part of the text.
    /// Special tokens are left out if `skip_special`. Empty stop strings are ignored.
    #[must_use]
    pub fn new(stop_strings: &[String], skip_special: bool) -> Self {
        Self {
            skip_special,
            window: Vec::new(),
            context: 0,
            handed_bytes: 0,
            uncleaned: String::new(),
            stops: StopStrings::new(stop_strings),
        }
    }

    /// Lets the text go on behind that of a prompt: a decoder that strips the space in front of a text leaves it then.
    /// To be called before the first token.
    ///
    /// # Errors
    ///
    /// When the prompt's tokens are no text.
    pub fn follow(&mut self, tokenizer: &Tokenizer, prompt: &[u32]) -> Result<()> {
        let skip_special = self.skip_special;
        // Bytes would be one run with those that the text may begin with.
        let is_whole =
            |&id: &u32| !tokenizer.is_silent(id, skip_special) && tokenizer.byte(id).is_none();
        let last = prompt.iter().copied().rfind(is_whole);
        if let Some(id) = last.filter(|_| tokenizer.strips_first_space()) {
            self.window = vec![id];
            self.context = 1;
            self.handed_bytes = tokenizer.decode_raw(&self.window, skip_special)?.len();
        }
        Ok(())
    }

    /// Takes the next token and returns the text that is certain by now.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String> {
        if self.stopped().is_some() {
            return Ok(String::new());
        }
        if tokenizer.is_silent(id, self.skip_special) {
            return self.push_silent(tokenizer, id);
        }
        self.window.push(id);
        match tokenizer.byte(id) {
            None => {
                let text = self.advance(tokenizer)?;
                Ok(text + &self.end_in_what_waits(tokenizer)?)
            }
            Some(byte) if self.stops.may_end_with(byte) => self.end_in_bytes(tokenizer),
            Some(_) => Ok(String::new()),
        }
    }

    /// Returns what waited for a next token; to be called once, when there is none.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        if self.stopped().is_some() {
            return Ok(String::new());
        }
        let decoded = self.decode(tokenizer, true)?;
        let cleaned = self.clean(tokenizer, &decoded, true);
        let mut text = self.stops.push(&cleaned);
        text.push_str(&self.stops.finish());
        Ok(text)
    }

    /// The stop string that ended the text.
    #[must_use]
    pub fn stopped(&self) -> Option<&str> {
        self.stops.matched()
    }

    /// Takes a token that has no text, and returns what waited if it ends the answer.
    fn push_silent(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String> {
        match tokenizer.token(id).filter(|token| self.stops.strings.contains(token)) {
            None => Ok(String::new()),
            Some(token) => {
                let text = self.finish(tokenizer)?;
                // What waited may have held the end of another stop string.
                self.stops.matched.get_or_insert(token);
                Ok(text)
            }
        }
    }

    /// Returns what waits for a next token if a stop string is in it already: before half a character, or before spaces
    /// that may be cleaned up.
    fn end_in_what_waits(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        let waits = self.window.len() > self.context || !self.uncleaned.is_empty();
        if !waits || self.stops.strings.is_empty() || self.stopped().is_some() {
            return Ok(String::new());
        }
        let mut ahead = self.clone();
        let text = ahead.finish(tokenizer)?;
        Ok(self.adopt_if_stopped(ahead, text))
    }

    fn adopt_if_stopped(&mut self, ahead: Self, text: String) -> String {
        if ahead.stopped().is_none() {
            return String::new();
        }
        *self = ahead;
        text
    }

    /// Returns the text of a run of bytes if a stop string ends in it, after which no byte can
    /// make the run malformed any more.
    fn end_in_bytes(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        let run = self.window.iter().rev().map_while(|&id| tokenizer.byte(id));
        let mut run: Vec<u8> = run.collect();
        run.reverse();
        if std::str::from_utf8(&run).is_err() {
            return Ok(String::new());
        }
        let mut ahead = self.clone();
        let text = ahead.advance(tokenizer)?;
        Ok(self.adopt_if_stopped(ahead, text))
    }

    /// Returns the text of the window that is certain.
    fn advance(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        let decoded = self.decode(tokenizer, false)?;
        let cleaned = self.clean(tokenizer, &decoded, false);
        Ok(self.stops.push(&cleaned))
    }

    /// The text of the window that was not handed out, but for an end that is still open.
    fn decode(&mut self, tokenizer: &Tokenizer, all: bool) -> Result<String> {
        // Decoders treat the first token of a text apart (they strip its space), so new tokens
        // are decoded behind those of the last piece and its text is taken off.
        let text = tokenizer.decode_raw(&self.window, self.skip_special)?;
        let new = text.get(self.handed_bytes..).unwrap_or_default();
        // The last replacement character may stand for the beginning of a character; those before it stay.
        let open = new.strip_suffix(char::REPLACEMENT_CHARACTER).filter(|_| !all);
        let certain = open.unwrap_or(new);
        if certain.is_empty() {
            return Ok(String::new());
        }
        if open.is_some() {
            self.handed_bytes += certain.len();
            self.shorten(tokenizer, &text)?;
        } else {
            self.window.drain(..self.context);
            self.context = self.window.len();
            self.handed_bytes = tokenizer.decode_raw(&self.window, self.skip_special)?.len();
        }
        Ok(certain.to_owned())
    }

    /// Drops the front of the window, of which all but the last character of its text is handed out, so that tokens
    /// without end that are no characters cost no more and more.
    fn shorten(&mut self, tokenizer: &Tokenizer, text: &str) -> Result<()> {
        for start in (1..self.window.len()).rev().take(MOST_BYTES) {
            let front = tokenizer.decode_raw(&self.window[..start], self.skip_special)?;
            let back = tokenizer.decode_raw(&self.window[start..], self.skip_special)?;
            let Some(open) = back.strip_suffix(char::REPLACEMENT_CHARACTER) else { continue };
            // Cut inside a character, the parts have more characters than the whole. The back may lack its first space.
            let rest = text.strip_suffix(back.as_str());
            if rest.is_some_and(|rest| rest.starts_with(front.as_str())) {
                self.window.drain(..start);
                self.context = 0;
                self.handed_bytes = open.len();
                return Ok(());
            }
        }
        Ok(())
    }

    fn clean(&mut self, tokenizer: &Tokenizer, decoded: &str, all: bool) -> String {
        if !tokenizer.cleans_up_spaces() {
            return decoded.to_owned();
        }
        self.uncleaned.push_str(decoded);
        let certain = if all {
            self.uncleaned.len()
        } else {
            self.uncleaned.trim_end_matches(is_cleaned).len()
        };
        let rest = self.uncleaned.split_off(certain);
        clean_up_spaces(&std::mem::replace(&mut self.uncleaned, rest))
    }
}

/// Looks for stop strings in text that arrives in pieces, however it is cut.
///
/// The stop string that is complete first ends the text; of several that end together the
/// longest does.
#[derive(Clone, Debug)]
pub(super) struct StopStrings {
    strings: Vec<String>,
    /// The end of the text so far, as long as it may be the beginning of a stop string.
    held: String,
    matched: Option<String>,
}

impl StopStrings {
    pub(super) fn new(strings: &[String]) -> Self {
        let strings = strings.iter().filter(|string| !string.is_empty()).cloned().collect();
        Self { strings, held: String::new(), matched: None }
    }

    pub(super) fn push(&mut self, text: &str) -> String {
        self.held.push_str(text);
        let first = self
            .strings
            .iter()
            .filter_map(|stop| Some((self.held.find(stop)?, stop)))
            .min_by_key(|(start, stop)| (start + stop.len(), *start));
        if let Some((start, stop)) = first {
            self.matched = Some(stop.clone());
            self.held.truncate(start);
            return self.finish();
        }
        let certain = (0..self.held.len())
            .filter(|&start| self.held.is_char_boundary(start))
            .find(|&start| self.strings.iter().any(|stop| stop.starts_with(&self.held[start..])))
            .unwrap_or(self.held.len());
        let rest = self.held.split_off(certain);
        std::mem::replace(&mut self.held, rest)
    }

    /// Whether some stop string has this byte at its end.
    fn may_end_with(&self, byte: u8) -> bool {
        self.strings.iter().any(|stop| stop.as_bytes().last() == Some(&byte))
    }

    pub(super) fn matched(&self) -> Option<&str> {
        self.matched.as_deref()
    }

    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;

    fn tokenizer(name: &str) -> Tokenizer {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/tokenizers");
        Tokenizer::load(&root.join(name)).unwrap()
    }

    /// A tokenizer of two words with that decoder.
    fn with_decoder(decoder: Value) -> Tokenizer {
        let folder = tempfile::tempdir().unwrap();
        let whole = json!({
            "version": "1.0",
            "added_tokens": [],
            "decoder": decoder,
            "model": {
                "type": "WordLevel",
                "vocab": { "\u{2581}is": 0, "\u{2581}Paris": 1 },
                "unk_token": "\u{2581}is",
            },
        });
        std::fs::write(folder.path().join("tokenizer.json"), whole.to_string()).unwrap();
        Tokenizer::load(folder.path()).unwrap()
    }

    /// The text of ids behind a prompt, or by themselves.
    fn text(tokenizer: &Tokenizer, prompt: Option<&[u32]>, stop: &str, ids: &[u32]) -> String {
        let mut stream = TextStream::new(&[stop.to_owned()], true);
        if let Some(prompt) = prompt {
            stream.follow(tokenizer, prompt).unwrap();
        }
        let mut text = String::new();
        for &id in ids {
            text += &stream.push(tokenizer, id).unwrap();
        }
        text + &stream.finish(tokenizer).unwrap()
    }

    #[test]
    fn a_continuation_keeps_the_space_that_a_text_loses() {
        let llama = tokenizer("llama2");
        let [prompt, answer] = ["Paris is", "Paris"].map(|text| llama.encode(text, true).unwrap());
        assert_eq!(text(&llama, None, "", &answer), "Paris");
        assert_eq!(text(&llama, Some(&prompt), "", &answer), " Paris");
        assert_eq!(text(&llama, Some(&prompt), " Par", &answer), "");
        // Nothing comes before it.
        assert_eq!(text(&llama, Some(&[1]), "", &answer), "Paris");
        let metaspace = with_decoder(
            json!({ "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always" }),
        );
        assert_eq!(text(&metaspace, None, "", &[1]), "Paris");
        assert_eq!(text(&metaspace, Some(&[0]), "", &[1]), " Paris");
    }

    #[test]
    fn a_continuation_is_no_part_of_the_characters_before_it() {
        let llama = tokenizer("llama2");
        let prompt = llama.encode("is \u{65E5}", true).unwrap();
        let malformed = llama.token_id("<0xFF>").unwrap();
        assert!(llama.byte(prompt[prompt.len() - 1]).is_some(), "its last character is a token");
        assert_eq!(text(&llama, Some(&prompt), "", &[malformed]), "\u{FFFD}");
        let answer = llama.encode("Paris", true).unwrap();
        assert_eq!(text(&llama, Some(&prompt), "", &answer), " Paris");
    }

    #[test]
    fn decoders_that_strip_no_space_are_not_told_of_the_prompt() {
        let words = with_decoder(json!({ "type": "WordPiece", "prefix": "##", "cleanup": false }));
        assert_eq!(text(&words, Some(&[0]), "", &[1]), text(&words, None, "", &[1]));
        for name in ["gemma", "gpt2", "llama3", "opt", "qwen2"] {
            let tokenizer = tokenizer(name);
            let prompt = tokenizer.encode("Paris is", true).unwrap();
            for answer in ["Paris", " Paris"] {
                let ids = tokenizer.encode(answer, false).unwrap();
                assert_eq!(text(&tokenizer, Some(&prompt), "", &ids), answer, "{name}");
            }
        }
    }

    #[test]
    fn text_that_never_becomes_characters_is_shown_as_it_comes() {
        let tokenizer = tokenizer("gpt2");
        // These bytes stand for themselves in the vocabulary.
        let token = |byte: u8| tokenizer.token_id(&char::from(byte).to_string()).unwrap();
        let before = tokenizer.encode("a", false).unwrap();
        // The middle of a character, the beginning of one, and U+FFFD itself.
        for repeated in [&[0xA5][..], &[0xE6], &[0xEF, 0xBF, 0xBD]] {
            let ids: Vec<u32> = repeated.iter().map(|&byte| token(byte)).collect();
            let ids = [before.clone(), ids.repeat(100)].concat();
            let mut stream = TextStream::new(&["b".to_owned()], true);
            let mut text = String::new();
            for &id in &ids {
                text += &stream.push(&tokenizer, id).unwrap();
                assert!(stream.window.len() <= 2 * MOST_BYTES, "{:?}", stream.window);
            }
            assert_eq!(text, format!("a{}", "\u{FFFD}".repeat(99)));
            // What is open may still become a character.
            let rest = tokenizer.encode("\u{65E5}", false).unwrap();
            let ids = [ids, rest.clone()].concat();
            for id in rest {
                text += &stream.push(&tokenizer, id).unwrap();
            }
            text += &stream.finish(&tokenizer).unwrap();
            assert_eq!(text, tokenizer.decode(&ids, true).unwrap());
        }
    }
}
