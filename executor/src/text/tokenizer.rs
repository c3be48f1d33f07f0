//! Token ids from text and text from token ids, as the checkpoint's own tokenizer files say.
//!
//! - `tokenizer.json` decides alone which special tokens surround a text: `add_bos_token` in
//!   `tokenizer_config.json` counts only where `tokenizer.json` is absent and the tokenizer is
//!   put together from `vocab.json` and `merges.txt`. Transformers 5 does the same.
//! - Spaces are cleaned up only where the configuration asks for it and the model is not BPE,
//!   whose spaces carry meaning.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use anyhow::{Context as _, Result, anyhow, bail};
use serde_json::{Map, Value};
use tokenizers::{AddedToken, DecoderWrapper, ModelWrapper};

use crate::text::parts;
use crate::text::template::{ChatRequest, ChatTemplate};

/// Names under which tokenizer files hold special tokens that stand alone.
const SPECIAL_TOKEN_NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The tokenizer of one checkpoint with its chat template.
#[derive(Debug)]
pub struct Tokenizer {
    tokenizer: tokenizers::Tokenizer,
    special_ids: HashSet<u32>,
    /// The tokens that stand for one byte each.
    bytes: HashMap<u32, u8>,
    /// Special tokens by name (`bos_token`, …), as chat templates see them.
    special_tokens: Map<String, Value>,
    /// A template that cannot be used matters only to those who need it.
    template: Result<Option<ChatTemplate>>,
    cleans_up_spaces: bool,
    strips_first_space: bool,
    /// Ids put before and after every text, where the tokenizer files ask for them outside of
    /// `tokenizer.json`.
    surround: (Vec<u32>, Vec<u32>),
}

impl Tokenizer {
    /// Reads the tokenizer files of a checkpoint's folder.
    ///
    /// # Errors
    ///
    /// [`NoTokenizer`](super::NoTokenizer) when `tokenizer.json` is not there and cannot be made up
    /// for; else when a file is malformed, which the error names. What is wrong with the chat
    /// template, [`Self::render_chat`] says.
    pub fn load(folder: &Path) -> Result<Self> {
        let config = read_object(&folder.join("tokenizer_config.json"))?;
        let map = read_object(&folder.join("special_tokens_map.json"))?;
        let whole = folder.join("tokenizer.json");
        let mut tokenizer = if whole.is_file() {
            tokenizers::Tokenizer::from_file(&whole)
                .map_err(|error| anyhow!("cannot read tokenizer {}: {error}", whole.display()))?
        } else {
            parts::load(folder, &config)?
        };
        // Padding and truncation in the file describe how the model was trained, not how
        // prompts are encoded.
        tokenizer.with_padding(None);
        tokenizer
            .with_truncation(None)
            .map_err(|error| anyhow!("cannot read tokenizer {}: {error}", whole.display()))?;

        let special_tokens = special_tokens(&config, &map);
        add_configured_tokens(&mut tokenizer, &config, &special_tokens);

        let surround = if whole.is_file() {
            (Vec::new(), Vec::new())
        } else {
            let id = |flag: &str, name: &str| {
                let wanted = config.get(flag).and_then(Value::as_bool).unwrap_or(false);
                let token = special_tokens.get(name).and_then(Value::as_str);
                token
                    .filter(|_| wanted)
                    .and_then(|token| tokenizer.token_to_id(token))
                    .into_iter()
                    .collect()
            };
            (id("add_bos_token", "bos_token"), id("add_eos_token", "eos_token"))
        };

        let special_ids = tokenizer
            .get_added_tokens_decoder()
            .into_iter()
            .filter_map(|(id, token)| token.special.then_some(id))
            .collect();
        let decoder = decoder_json(tokenizer.get_decoder());
        let bytes = if decoder.contains("\"ByteFallback\"") {
            (0..=u8::MAX)
                .filter_map(|byte| Some((tokenizer.token_to_id(&format!("<0x{byte:02X}>"))?, byte)))
                .collect()
        } else {
            HashMap::new()
        };
        let is_bpe = matches!(tokenizer.get_model(), ModelWrapper::BPE(_));
        let cleanup = config.get("clean_up_tokenization_spaces").and_then(Value::as_bool);
        Ok(Self {
            special_ids,
            bytes,
            template: ChatTemplate::load(folder, &config),
            special_tokens,
            cleans_up_spaces: cleanup.unwrap_or(false) && !is_bpe,
            strips_first_space: ["\"Strip\"", "\"Metaspace\""]
                .into_iter()
                .any(|kind| decoder.contains(kind)),
            surround,
            tokenizer,
        })
    }

    /// The ids of a text; `add_special` puts the special tokens around it that the model was
    /// trained with (usually one that begins the text).
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let encoding = self
            .tokenizer
            .encode_fast(text, add_special)
            .map_err(|error| anyhow!("cannot tokenise the text: {error}"))?;
        if !add_special {
            return Ok(encoding.get_ids().to_vec());
        }
        let (before, after) = &self.surround;
        Ok([before, encoding.get_ids(), after].concat())
    }

    /// The text of ids; ids outside the vocabulary have none.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        let text = self.decode_raw(ids, skip_special)?;
        Ok(if self.cleans_up_spaces { clean_up_spaces(&text) } else { text })
    }

    /// The prompt of a conversation, as text with its special tokens.
    pub fn render_chat(&self, request: &ChatRequest) -> Result<String> {
        self.template
            .as_ref()
            .map_err(|error| anyhow!("{error:#}"))?
            .as_ref()
            .context("the tokenizer has no chat template: leave out --chat and --system")?
            .render(request, &self.special_tokens)
    }

    /// The prompt of a conversation, as ids.
    pub fn encode_chat(&self, request: &ChatRequest) -> Result<Vec<u32>> {
        // The template writes the special tokens itself.
        self.encode(&self.render_chat(request)?, false)
    }

    /// Whether the checkpoint has a chat template; [`Self::render_chat`] says if it cannot be used.
    #[must_use]
    pub fn has_chat_template(&self) -> bool {
        self.template.as_ref().map_or(true, Option::is_some)
    }

    /// The text of a special token such as `bos_token` or `eos_token`.
    #[must_use]
    pub fn special_token(&self, name: &str) -> Option<&str> {
        self.special_tokens.get(name)?.as_str()
    }

    /// The id of a token's exact text.
    #[must_use]
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// The text of ids before any clean-up of spaces.
    pub(super) fn decode_raw(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.tokenizer
            .decode(ids, skip_special)
            .map_err(|error| anyhow!("cannot turn {} token ids into text: {error}", ids.len()))
    }

    /// Whether decoding leaves the token out.
    pub(super) fn is_silent(&self, id: u32, skip_special: bool) -> bool {
        (skip_special && self.special_ids.contains(&id)) || self.tokenizer.id_to_token(id).is_none()
    }

    /// The text that the vocabulary has for a token.
    pub(super) fn token(&self, id: u32) -> Option<String> {
        self.tokenizer.id_to_token(id)
    }

    /// The byte that the token is, of a character that the vocabulary lacks.
    pub(super) fn byte(&self, id: u32) -> Option<u8> {
        self.bytes.get(&id).copied()
    }

    pub(super) fn cleans_up_spaces(&self) -> bool {
        self.cleans_up_spaces
    }

    /// Whether decoding leaves out the space in front of a text's first token.
    pub(super) fn strips_first_space(&self) -> bool {
        self.strips_first_space
    }
}

/// Takes the spaces away that a word-wise tokenizer leaves before English punctuation and
/// contractions.
pub(super) fn clean_up_spaces(text: &str) -> String {
    [(" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't")]
        .into_iter()
        .chain([(" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")])
        .fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

/// The characters of which the patterns of [`clean_up_spaces`] are made: no change reaches
/// across any other character.
pub(super) fn is_cleaned(character: char) -> bool {
    " .?!,'ntmsver".contains(character)
}

/// A JSON object from a file; empty if there is no such file.
pub(crate) fn read_object(path: &Path) -> Result<Map<String, Value>> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Map::new()),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    match serde_json::from_str(&text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => bail!("{} does not hold a JSON object", path.display()),
        Err(error) => Err(error).with_context(|| format!("malformed JSON in {}", path.display())),
    }
}

/// Special tokens by name; `tokenizer_config.json` goes before `special_tokens_map.json`.
fn special_tokens(config: &Map<String, Value>, map: &Map<String, Value>) -> Map<String, Value> {
    let mut tokens = Map::new();
    for name in SPECIAL_TOKEN_NAMES {
        let found = [config, map].iter().find_map(|file| file.get(name).and_then(token_text));
        if let Some(text) = found {
            tokens.insert(name.to_owned(), Value::from(text));
        }
    }
    tokens
}

/// A token written as its text or as an object that holds it.
fn token_text(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content")?.as_str())
}

/// Adds the tokens that the configuration names and `tokenizer.json` lacks.
fn add_configured_tokens(
    tokenizer: &mut tokenizers::Tokenizer,
    config: &Map<String, Value>,
    special_tokens: &Map<String, Value>,
) {
    let listed = ["additional_special_tokens", "extra_special_tokens"]
        .into_iter()
        .filter_map(|name| config.get(name)?.as_array())
        .flatten();
    let named: Vec<&str> = special_tokens.values().chain(listed).filter_map(token_text).collect();
    let mut added: Vec<(u32, AddedToken)> = Vec::new();
    if let Some(Value::Object(entries)) = config.get("added_tokens_decoder") {
        for (id, entry) in entries {
            if let (Ok(id), Some(text)) = (id.parse(), token_text(entry)) {
                let flag = |name: &str| entry.get(name).and_then(Value::as_bool).unwrap_or(false);
                // A token that is named as special is, whatever its entry says.
                let token = AddedToken::from(text, flag("special") || named.contains(&text))
                    .single_word(flag("single_word"))
                    .lstrip(flag("lstrip"))
                    .rstrip(flag("rstrip"))
                    .normalized(flag("normalized"));
                added.push((id, token));
            }
        }
    }
    // New tokens get the next free ids, so their order decides the ids.
    added.sort_by_key(|(id, _)| *id);
    let mut tokens: Vec<AddedToken> = added.into_iter().map(|(_, token)| token).collect();

    for text in named {
        let known = tokens.iter().any(|token| token.content == text)
            || tokenizer.get_added_vocabulary().get_vocab().contains_key(text);
        if !known {
            tokens.push(AddedToken::from(text, true));
        }
    }
    tokenizer.add_tokens(&tokens);
}

/// The JSON form of a decoder: the members of a sequence of decoders are private, this is not. One of the kind
/// `"ByteFallback"` joins tokens such as `<0xE6>` into characters.
fn decoder_json(decoder: Option<&DecoderWrapper>) -> String {
    decoder.and_then(|decoder| serde_json::to_string(decoder).ok()).unwrap_or_default()
}
