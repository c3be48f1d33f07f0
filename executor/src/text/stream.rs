//! The text of an answer, handed out while its tokens arrive.
//!
//! - What has been handed out is never taken back: together the pieces are the text that
//!   decoding all ids at once gives, up to the stop string.
//! - So half a character, a run of byte tokens that may yet prove malformed, and whatever may
//!   become a stop string wait until the next tokens decide.
//! - A stop string is found with the token that completes it, and a special token that is left
//!   out of the text ends it where its own text is a stop string.

use anyhow::Result;

use crate::text::tokenizer::{Tokenizer, clean_up_spaces, is_cleaned};

/// Decodes one answer.
#[derive(Clone, Debug)]
pub struct TextStream {
    skip_special: bool,
    /// The last ids: those of the last piece, as context, then those not yet decoded.
    window: Vec<u32>,
    /// How many of `window` are context.
    context: usize,
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
            uncleaned: String::new(),
            stops: StopStrings::new(stop_strings),
        }
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

    /// The text of the window after its context, unless its end is still open.
    fn decode(&mut self, tokenizer: &Tokenizer, all: bool) -> Result<String> {
        // Decoders treat the first token of a text apart (they strip its space), so new tokens
        // are decoded behind those of the last piece and its text is taken off.
        let known = tokenizer.decode_raw(&self.window[..self.context], self.skip_special)?;
        let text = tokenizer.decode_raw(&self.window, self.skip_special)?;
        let new = text.get(known.len()..).unwrap_or_default();
        // The replacement character stands for the beginning of a character.
        if new.is_empty() || (new.ends_with(char::REPLACEMENT_CHARACTER) && !all) {
            return Ok(String::new());
        }
        let new = new.to_owned();
        self.window.drain(..self.context);
        self.context = self.window.len();
        Ok(new)
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
