//! A tokenizer put together from `vocab.json` and `merges.txt`, which older uploads have instead of
//! `tokenizer.json`.
//!
//! These files do not say how a text is cut before its pieces are merged: the tokenizer's class does.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use serde_json::{Map, Value};
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::normalizer::SplitDelimiterBehavior;
use tokenizers::{PreTokenizerWrapper, Tokenizer};

use crate::text::tokenizer::read_object;

/// No tokenizer lies in a checkpoint's folder, nor what one could be put together from.
#[derive(Debug)]
pub struct NoTokenizer(String);

impl fmt::Display for NoTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NoTokenizer {}

/// Where Qwen2 cuts a text, as transformers has it.
const QWEN2_PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The classes whose way of cutting texts is known here.
enum Class {
    Gpt2,
    Qwen2,
}

/// Reads the parts in a checkpoint's folder; `config` is its `tokenizer_config.json`.
pub(super) fn load(folder: &Path, config: &Map<String, Value>) -> Result<Tokenizer> {
    let parts: [PathBuf; 2] = ["vocab.json", "merges.txt"].map(|name| folder.join(name));
    if !parts.iter().all(|path| path.is_file()) {
        return Err(NoTokenizer(format!("no tokenizer.json in {}", folder.display())).into());
    }
    let class = class(folder, config)?;
    let [vocabulary, merges] = parts.map(|path| path.display().to_string());
    let model = BPE::from_file(&vocabulary, &merges)
        .build()
        .map_err(|error| anyhow!("cannot read tokenizer {vocabulary} and {merges}: {error}"))?;
    let mut tokenizer = Tokenizer::new(model);
    match class {
        Class::Gpt2 => {
            tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
        }
        Class::Qwen2 => {
            tokenizer.with_normalizer(Some(NFC)).with_pre_tokenizer(Some(qwen2_cuts()?));
        }
    }
    tokenizer.with_decoder(Some(ByteLevel::default()));
    Ok(tokenizer)
}

/// The class that the checkpoint names; where it names none, its architecture tells Qwen's from
/// GPT-2's.
fn class(folder: &Path, config: &Map<String, Value>) -> Result<Class> {
    let model = read_object(&folder.join("config.json"))?;
    let text = |file: &Map<String, Value>, name: &str| {
        file.get(name).and_then(Value::as_str).map(str::to_owned)
    };
    let named = text(config, "tokenizer_class").or_else(|| text(&model, "tokenizer_class"));
    match named.as_deref() {
        Some("GPT2Tokenizer" | "GPT2TokenizerFast") => Ok(Class::Gpt2),
        Some("Qwen2Tokenizer" | "Qwen2TokenizerFast") => Ok(Class::Qwen2),
        Some(other) => {
            let what = format!(
                "no tokenizer.json in {}, and none is made here from the vocab.json and merges.txt of a {other}: \
                 transformers' AutoTokenizer.from_pretrained and save_pretrained write one",
                folder.display()
            );
            Err(NoTokenizer(what).into())
        }
        None => {
            let architecture = text(&model, "model_type").unwrap_or_default();
            let is_qwen = architecture.starts_with("qwen2") || architecture.starts_with("qwen3");
            Ok(if is_qwen { Class::Qwen2 } else { Class::Gpt2 })
        }
    }
}

fn qwen2_cuts() -> Result<Sequence> {
    let pattern = SplitPattern::Regex(QWEN2_PATTERN.to_owned());
    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
        .map_err(|error| anyhow!("the pattern of Qwen2's tokenizer is malformed: {error}"))?;
    let bytes = ByteLevel::new(false, true, false);
    Ok(Sequence::new(vec![
        PreTokenizerWrapper::Split(split),
        PreTokenizerWrapper::ByteLevel(bytes),
    ]))
}
