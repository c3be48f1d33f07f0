//! How an answer is generated and when it ends: the checkpoint's defaults, what the user asks
//! for instead, and the state of one answer.

use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Map, Value};

use crate::sample::{Sampler, SamplingOptions, Shortlist};
use crate::text::tokenizer::read_object;
use crate::text::{TextStream, Tokenizer};

/// How answers are generated.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationOptions {
    pub sampling: SamplingOptions,
    /// Any of these tokens ends the answer.
    pub end_ids: Vec<u32>,
    /// Any of these texts ends the answer.
    pub stop_strings: Vec<String>,
    /// The most tokens of an answer; none if only the context limits it.
    pub max_tokens: Option<usize>,
}

/// What a user asks for instead of the checkpoint's defaults.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationOverrides {
    pub temperature: Option<f32>,
    pub top_k: Option<usize>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub seed: Option<u64>,
    pub stop_strings: Vec<String>,
    pub max_tokens: Option<usize>,
    /// Whether answers go on past the tokens that would end them.
    pub ignores_end: bool,
}

impl GenerationOptions {
    /// The defaults of a checkpoint, from `generation_config.json` and `config.json` in its
    /// folder; greedy without an end where they say nothing.
    ///
    /// As in transformers, answers are greedy unless `do_sample` is true, the 50 most likely tokens
    /// are sampled unless `top_k` says otherwise, and the ends come from `generation_config.json`,
    /// else `config.json`, else the tokenizer's `eos_token`.
    ///
    /// Whether values are in their ranges is for [`Self::overridden`] to say, which may replace them.
    ///
    /// # Errors
    ///
    /// When a file is malformed, or a value of the wrong kind.
    pub fn load(folder: &Path, tokenizer: Option<&Tokenizer>) -> Result<Self> {
        let path = folder.join("generation_config.json");
        let generation = read_object(&path)?;
        let config_path = folder.join("config.json");
        let config = read_object(&config_path)?;
        let mut options = Self::from_config(&generation)
            .with_context(|| format!("cannot use {}", path.display()))?;
        let ignored = ignored(&generation);
        if !ignored.is_empty() {
            tracing::warn!(
                "{} asks for what is not done here: {}",
                path.display(),
                ignored.join(", ")
            );
        }
        if options.end_ids.is_empty() {
            options.end_ids = end_ids(&config)
                .with_context(|| format!("cannot use {}", config_path.display()))?;
        }
        if options.end_ids.is_empty()
            && let Some(tokenizer) = tokenizer
        {
            let end = tokenizer.special_token("eos_token");
            options.end_ids.extend(end.and_then(|token| tokenizer.token_id(token)));
        }
        Ok(options)
    }

    /// The defaults in the fields of `generation_config.json`.
    pub fn from_config(config: &Map<String, Value>) -> Result<Self> {
        let is_sampled = match given(config, "do_sample") {
            None => false,
            Some(value) => value.as_bool().context("do_sample is neither true nor false")?,
        };
        let default = SamplingOptions::default();
        let sampling = SamplingOptions {
            temperature: match float(config, "temperature")? {
                _ if !is_sampled => 0.0,
                None => 1.0,
                Some(temperature) => temperature,
            },
            top_k: top_k(config)?,
            top_p: float(config, "top_p")?.unwrap_or(default.top_p),
            min_p: float(config, "min_p")?.unwrap_or(default.min_p),
            repetition_penalty: float(config, "repetition_penalty")?
                .unwrap_or(default.repetition_penalty),
            seed: default.seed,
        };
        Ok(Self {
            sampling,
            end_ids: end_ids(config)?,
            stop_strings: stop_strings(config)?,
            max_tokens: count(config, "max_new_tokens")?,
        })
    }

    /// These options with what the user asks for instead.
    ///
    /// A temperature above 0 turns sampling on, 0 turns it off; without one, the checkpoint's
    /// choice between sampling and greedy stays; what the user then gives for sampling is of no
    /// effect, which is logged.
    ///
    /// # Errors
    ///
    /// Naming the first value that is out of its range.
    pub fn overridden(mut self, overrides: &GenerationOverrides) -> Result<Self> {
        // First what the user says alone, so that the checkpoint is not blamed for it.
        overrides.check()?;
        self.sampling = overrides.sampling(&self.sampling);
        self.sampling
            .check()
            .context("an option must replace a value of the checkpoint's generation_config.json")?;
        for option in overrides.without_effect(&self.sampling) {
            tracing::warn!(
                "{option} has no effect, since the checkpoint's choice is greedy: give a --temperature"
            );
        }
        self.stop_strings.extend(overrides.stop_strings.iter().cloned());
        self.max_tokens = overrides.max_tokens.or(self.max_tokens);
        if overrides.ignores_end {
            self.end_ids.clear();
        }
        Ok(self)
    }
}

impl GenerationOverrides {
    /// Whether every value that has an effect is in its range, whatever a checkpoint says: at a temperature of 0
    /// top-p and min-p have none, without a temperature they may have one.
    ///
    /// # Errors
    ///
    /// Naming the first value that is not.
    pub fn check(&self) -> Result<()> {
        ensure!(
            self.stop_strings.iter().all(|text| !text.is_empty()),
            "a --stop is empty: no text ends with it, so leave it out"
        );
        let any = SamplingOptions { temperature: 1.0, ..SamplingOptions::default() };
        self.sampling(&any).check()
    }

    /// How tokens are chosen where so much is asked for instead of these options.
    fn sampling(&self, options: &SamplingOptions) -> SamplingOptions {
        SamplingOptions {
            temperature: self.temperature.unwrap_or(options.temperature),
            top_k: self.top_k.unwrap_or(options.top_k),
            top_p: self.top_p.unwrap_or(options.top_p),
            min_p: self.min_p.unwrap_or(options.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(options.repetition_penalty),
            seed: self.seed.unwrap_or(options.seed),
        }
    }

    /// The options that were given and act only where tokens are drawn, where none are and nobody said so.
    fn without_effect(&self, chosen: &SamplingOptions) -> Vec<&'static str> {
        if chosen.temperature > 0.0 || self.temperature.is_some() {
            return Vec::new();
        }
        [
            (self.top_k.is_some(), "--top-k"),
            (self.top_p.is_some(), "--top-p"),
            (self.min_p.is_some(), "--min-p"),
            (self.seed.is_some(), "--seed"),
        ]
        .into_iter()
        .filter_map(|(is_given, option)| is_given.then_some(option))
        .collect()
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A token or text that ends answers.
    Stop,
    /// The most tokens that were allowed.
    Length,
}

impl FinishReason {
    /// As the OpenAI interface spells it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// One token of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub id: u32,
    /// The text that became certain with this token; empty without a tokenizer.
    pub text: String,
    pub finish: Option<FinishReason>,
}

/// An answer while it grows.
#[derive(Clone, Debug)]
pub struct Generation {
    sampler: Sampler,
    end_ids: Vec<u32>,
    max_tokens: usize,
    stream: TextStream,
    ids: Vec<u32>,
    text: String,
}

impl Generation {
    /// An answer to a prompt; `room_tokens` is what the context leaves for it.
    #[must_use]
    pub fn new(options: &GenerationOptions, prompt: &[u32], room_tokens: usize) -> Self {
        let mut sampler = Sampler::new(&options.sampling);
        sampler.observe(prompt);
        Self {
            sampler,
            end_ids: options.end_ids.clone(),
            max_tokens: options.max_tokens.unwrap_or(room_tokens).min(room_tokens),
            stream: TextStream::new(&options.stop_strings, true),
            ids: Vec::new(),
            text: String::new(),
        }
    }

    /// Takes the answer for the continuation of the prompt's text, so that it begins with the space between the two.
    ///
    /// # Errors
    ///
    /// When the tokens are no text.
    pub fn continue_text(&mut self, prompt: &[u32], tokenizer: &Tokenizer) -> Result<()> {
        self.stream.follow(tokenizer, prompt)
    }

    /// Chooses the next token from the logits of all ids. Without a tokenizer there is no text,
    /// and stop strings are not looked for.
    ///
    /// # Errors
    ///
    /// When the logits are not numbers, or the tokens no text.
    pub fn step(&mut self, logits: &[f32], tokenizer: Option<&Tokenizer>) -> Result<Step> {
        let id = self.sampler.sample(logits)?;
        self.accept(id, tokenizer)
    }

    /// One over the temperature, if the most likely tokens are probably enough for the next step.
    #[must_use]
    pub fn inverse_temperature(&self) -> Option<f32> {
        self.sampler.inverse_temperature()
    }

    /// The same from the most likely tokens; `None` where they are too few to tell.
    ///
    /// # Errors
    ///
    /// As [`Generation::step`].
    pub fn step_from(
        &mut self,
        list: &Shortlist<'_>,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Option<Step>> {
        let id = self.sampler.sample_shortlist(list)?;
        id.map(|id| self.accept(id, tokenizer)).transpose()
    }

    /// Takes a token that was chosen elsewhere.
    pub fn accept(&mut self, id: u32, tokenizer: Option<&Tokenizer>) -> Result<Step> {
        self.ids.push(id);
        let is_end = self.end_ids.contains(&id);
        let mut text = match tokenizer {
            // What ends an answer is no part of it, whether the tokenizer calls it special or not.
            Some(tokenizer) if !is_end => self.stream.push(tokenizer, id)?,
            _ => String::new(),
        };
        let finish = if is_end || self.stream.stopped().is_some() {
            Some(FinishReason::Stop)
        } else if self.ids.len() >= self.max_tokens {
            Some(FinishReason::Length)
        } else {
            None
        };
        if let (Some(_), Some(tokenizer)) = (finish, tokenizer) {
            text.push_str(&self.stream.finish(tokenizer)?);
        }
        self.text.push_str(&text);
        // What waited for a next token may hold the end of a stop string.
        let finish = match finish {
            Some(_) if self.stream.stopped().is_some() => Some(FinishReason::Stop),
            finish => finish,
        };
        Ok(Step { id, text, finish })
    }

    /// Ends an answer that gets no further token, and returns the text that waited for one.
    ///
    /// # Errors
    ///
    /// When the tokens are no text.
    pub fn end(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        let text = self.stream.finish(tokenizer)?;
        self.text.push_str(&text);
        Ok(text)
    }

    /// The most tokens this answer may have; with 0 there is nothing to step.
    #[must_use]
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// The tokens so far, with the one that ended the answer.
    #[must_use]
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The text so far, without what ended the answer.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }
}

/// Fields of `generation_config.json` that would change answers and have no effect here, where they ask for something.
fn ignored(config: &Map<String, Value>) -> Vec<&'static str> {
    // Each with the value that changes nothing.
    let numbers = [
        ("no_repeat_ngram_size", 0.0),
        ("min_new_tokens", 0.0),
        ("min_length", 0.0),
        ("typical_p", 1.0),
        ("num_beams", 1.0),
        ("penalty_alpha", 0.0),
        ("guidance_scale", 1.0),
    ];
    let lists = ["suppress_tokens", "begin_suppress_tokens", "bad_words_ids"];
    let is_neutral = |value: &Value, neutral: f64| value.as_f64() == Some(neutral);
    let is_empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    let asks = |(name, neutral): &(&str, f64)| {
        given(config, name).is_some_and(|value| !is_neutral(value, *neutral))
    };
    let numbers = numbers.into_iter().filter(asks).map(|(name, _)| name);
    let lists = lists.into_iter();
    let lists = lists.filter(|name| given(config, name).is_some_and(|value| !is_empty(value)));
    numbers.chain(lists).collect()
}

/// A field that is there and not null.
fn given<'a>(config: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    config.get(name).filter(|value| !value.is_null())
}

fn float(config: &Map<String, Value>, name: &str) -> Result<Option<f32>> {
    given(config, name)
        .map(|value| value.as_f64().map(|float| float as f32))
        .map(|float| float.with_context(|| format!("{name} is not a number")))
        .transpose()
}

fn count(config: &Map<String, Value>, name: &str) -> Result<Option<usize>> {
    given(config, name)
        .map(|value| integer(value).and_then(|count| usize::try_from(count).ok()))
        .map(|count| count.with_context(|| format!("{name} is not a count")))
        .transpose()
}

/// An integer, which some files write as 50.0.
fn integer(value: &Value) -> Option<i64> {
    let whole = |float: &f64| float.fract() == 0.0 && float.abs() <= f64::from(u32::MAX);
    value.as_i64().or_else(|| value.as_f64().filter(whole).map(|float| float as i64))
}

/// How many of the most likely tokens are sampled: 50 where the file says nothing, as in transformers.
/// All are at 0, and at -1 in files that were written for vLLM.
fn top_k(config: &Map<String, Value>) -> Result<usize> {
    match given(config, "top_k").and_then(integer) {
        Some(-1) => Ok(0),
        Some(_) | None => Ok(count(config, "top_k")?.unwrap_or(50)),
    }
}

/// The tokens that end an answer: one or several, by id; -1 stands for none.
fn end_ids(config: &Map<String, Value>) -> Result<Vec<u32>> {
    let id = |value: &Value| match integer(value) {
        Some(-1) => Ok(None),
        id => id
            .and_then(|id| u32::try_from(id).ok())
            .map(Some)
            .with_context(|| format!("eos_token_id holds {value}, which is no token id")),
    };
    match given(config, "eos_token_id") {
        None => Ok(Vec::new()),
        Some(Value::Array(ids)) => ids.iter().filter_map(|value| id(value).transpose()).collect(),
        Some(value) => Ok(id(value)?.into_iter().collect()),
    }
}

fn stop_strings(config: &Map<String, Value>) -> Result<Vec<String>> {
    let text =
        |value: &Value| value.as_str().map(str::to_owned).context("stop_strings holds no text");
    match given(config, "stop_strings") {
        None => Ok(Vec::new()),
        Some(Value::Array(strings)) => strings.iter().map(text).collect(),
        Some(value @ Value::String(_)) => Ok(vec![text(value)?]),
        Some(_) => bail!("stop_strings is neither text nor a list"),
    }
}

#[cfg(test)]
mod tests;
