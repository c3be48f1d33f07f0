//! One line of text, read from left to right.

use std::str::FromStr;

use anyhow::{Context as _, Result, bail, ensure};

use crate::id::Id;

/// A line and how far it is read.
pub(super) struct Line<'a> {
    text: &'a str,
    read: usize,
    /// Where the last thing that was asked for starts: what an error is about.
    asked: usize,
}

impl<'a> Line<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { text, read: 0, asked: 0 }
    }

    /// The column, from 1, of what was asked for last.
    pub(super) fn column(&self) -> usize {
        self.text[..self.asked].chars().count() + 1
    }

    fn ahead(&self) -> &'a str {
        &self.text[self.read..]
    }

    pub(super) fn is_next(&self, what: &str) -> bool {
        self.ahead().starts_with(what)
    }

    /// Reads `what` if it is next.
    pub(super) fn eat(&mut self, what: &str) -> bool {
        self.asked = self.read;
        let is_next = self.is_next(what);
        if is_next {
            self.read += what.len();
        }
        is_next
    }

    pub(super) fn expect(&mut self, what: &str) -> Result<()> {
        ensure!(self.eat(what), "expected {what:?} before {:?}", self.ahead());
        Ok(())
    }

    /// Letters, digits and underscores; perhaps none.
    pub(super) fn word(&mut self) -> &'a str {
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        self.take(is_word)
    }

    /// A number as Rust prints it.
    pub(super) fn number<T: FromStr>(&mut self) -> Result<T> {
        let ahead = self.ahead();
        let text = self.take(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
        text.parse().ok().with_context(|| format!("expected a number before {ahead:?}"))
    }

    /// A whole number without a sign.
    pub(super) fn count<T: FromStr>(&mut self) -> Result<T> {
        let ahead = self.ahead();
        let text = self.take(|c| c.is_ascii_digit());
        text.parse().ok().with_context(|| format!("expected a whole number before {ahead:?}"))
    }

    /// The number behind a prefix.
    pub(super) fn id(&mut self, prefix: &str) -> Result<u32> {
        self.expect(prefix)?;
        self.count()
    }

    pub(super) fn row<I: Id>(&mut self, prefix: &str) -> Result<I> {
        Ok(I::from_index(self.id(prefix)? as usize))
    }

    /// `name=` and what follows it, if that is next.
    pub(super) fn field<T>(
        &mut self,
        name: &str,
        read: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<Option<T>> {
        if self.eat(name) { Ok(Some(read(self)?)) } else { Ok(None) }
    }

    /// One or more items with `, ` between them.
    pub(super) fn list<T, L: Default + Extend<T>>(
        &mut self,
        read: impl FnMut(&mut Self) -> Result<T>,
    ) -> Result<L> {
        self.separated(", ", read)
    }

    pub(super) fn separated<T, L: Default + Extend<T>>(
        &mut self,
        separator: &str,
        mut read: impl FnMut(&mut Self) -> Result<T>,
    ) -> Result<L> {
        let mut items = L::default();
        items.extend([read(self)?]);
        while self.eat(separator) {
            items.extend([read(self)?]);
        }
        Ok(items)
    }

    /// All that is left.
    pub(super) fn rest(&mut self) -> &'a str {
        self.take(|_| true)
    }

    pub(super) fn end(&mut self) -> Result<()> {
        if !self.ahead().is_empty() {
            bail!("expected the end of the line before {:?}", self.ahead());
        }
        Ok(())
    }

    fn take(&mut self, is_part: impl Fn(char) -> bool) -> &'a str {
        self.asked = self.read;
        let ahead = self.ahead();
        let size = ahead.find(|c| !is_part(c)).unwrap_or(ahead.len());
        self.read += size;
        &ahead[..size]
    }
}
