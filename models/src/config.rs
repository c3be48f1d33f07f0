//! `config.json` as transformers 4 and 5 write it: fields by name, with errors that name file and field.
//!
//! A field that is null counts as absent, except where null means something ([`Config::nullable_size`]).

use std::fmt::Write as _;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use ir::op::Activation;
use serde_json::{Map, Value};

/// One JSON object of a configuration.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    file: PathBuf,
    /// Path of this object inside the file: empty, or `rope_scaling.`.
    section: String,
    fields: Map<String, Value>,
}

/// How far one layer sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayerKind {
    /// All earlier tokens.
    Full,
    /// Those inside the window.
    Sliding,
}

impl Config {
    /// Reads `config.json` of a checkpoint's folder.
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let file = folder.join("config.json");
        let text = match std::fs::read(&file) {
            Err(error) if error.kind() == ErrorKind::NotFound => bail!(
                "{} is missing: it is published beside the weights, says what they are, and goes into their folder",
                file.display()
            ),
            read => read.with_context(|| format!("reading {}", file.display()))?,
        };
        Self::parse(file, &text)
    }

    /// The configuration with this text; `file` is for errors. Some editors put a byte order mark before what they save.
    pub(crate) fn parse(file: PathBuf, text: &[u8]) -> Result<Self> {
        match serde_json::from_slice(text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text)) {
            Ok(Value::Object(fields)) => Ok(Self { file, section: String::new(), fields }),
            Ok(_) => bail!("{}: not an object", file.display()),
            Err(error) => bail!("{}: not JSON: {error}", file.display()),
        }
    }

    /// The nested object of that name; an empty one counts as absent.
    pub(crate) fn section(&self, name: &str) -> Result<Option<Self>> {
        match self.field(name) {
            None => Ok(None),
            Some(Value::Object(fields)) if fields.is_empty() => Ok(None),
            Some(Value::Object(fields)) => Ok(Some(Self {
                file: self.file.clone(),
                section: format!("{}{name}.", self.section),
                fields: fields.clone(),
            })),
            Some(_) => Err(self.unexpected(name, "an object")),
        }
    }

    /// The same place in the file without any field: what an absent section stands for.
    pub(crate) fn empty_section(&self, name: &str) -> Self {
        let section = format!("{}{name}.", self.section);
        Self { file: self.file.clone(), section, fields: Map::new() }
    }

    /// These fields, and those of `below` that are not among them.
    pub(crate) fn over(self, below: Self) -> Self {
        let mut fields = below.fields;
        fields.extend(self.fields);
        Self { fields, ..self }
    }

    /// Whether the field is there and not null.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.field(name).is_some()
    }

    /// A size: a whole number from 1 up.
    pub(crate) fn size(&self, name: &str, default: u32) -> Result<u32> {
        Ok(self.optional_size(name)?.unwrap_or(default))
    }

    /// A number of layers.
    pub(crate) fn layers(&self, name: &str, default: u32) -> Result<u32> {
        // No model comes near; a corrupt configuration must not exhaust memory.
        const MAX_LAYERS: u32 = 100_000;
        match self.size(name, default)? {
            layers if layers <= MAX_LAYERS => Ok(layers),
            _ => Err(self.unexpected(name, "a number of layers")),
        }
    }

    /// A size that may be absent.
    pub(crate) fn optional_size(&self, name: &str) -> Result<Option<u32>> {
        let Some(value) = self.field(name) else { return Ok(None) };
        match whole(value) {
            Some(size) if size > 0 => Ok(Some(size)),
            None if value.as_f64().is_some_and(|number| number > f64::from(u32::MAX)) => {
                Err(self.unexpected(name, "a whole number of at most 32 bits"))
            }
            _ => Err(self.unexpected(name, "a whole number from 1 up")),
        }
    }

    /// A size for which null means that there is none, and absence the default. Zero means none too.
    pub(crate) fn nullable_size(&self, name: &str, default: Option<u32>) -> Result<Option<u32>> {
        match self.fields.get(name) {
            None => Ok(default),
            Some(Value::Null) => Ok(None),
            Some(value) => match whole(value) {
                Some(size) => Ok((size > 0).then_some(size)),
                None => Err(self.unexpected(name, "a whole number or null")),
            },
        }
    }

    /// A finite number.
    pub(crate) fn number(&self, name: &str, default: f64) -> Result<f64> {
        Ok(self.optional_number(name)?.unwrap_or(default))
    }

    /// A number that may be absent, and is finite in 32 bits, in which models compute with it.
    pub(crate) fn optional_number(&self, name: &str) -> Result<Option<f64>> {
        let Some(value) = self.field(name) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if (number as f32).is_finite() => Ok(Some(number)),
            Some(_) => Err(self.unexpected(name, "a number that 32 bits hold")),
            None => Err(self.unexpected(name, "a number")),
        }
    }

    /// A number above zero.
    pub(crate) fn positive(&self, name: &str, default: f64) -> Result<f64> {
        match self.optional_positive(name)? {
            Some(number) => Ok(number),
            None => Ok(default),
        }
    }

    /// A number above zero that may be absent.
    pub(crate) fn optional_positive(&self, name: &str) -> Result<Option<f64>> {
        match self.optional_number(name)? {
            Some(number) if number <= 0.0 => Err(self.unexpected(name, "a number above 0")),
            Some(number) if number as f32 <= 0.0 => {
                Err(self.unexpected(name, "a number above 0 that 32 bits hold"))
            }
            number => Ok(number),
        }
    }

    /// A number above zero for which null means that there is none, and absence the default.
    pub(crate) fn nullable_positive(
        &self,
        name: &str,
        default: Option<f64>,
    ) -> Result<Option<f64>> {
        match self.fields.get(name) {
            None => Ok(default),
            Some(_) => self.optional_positive(name),
        }
    }

    /// Numbers above zero.
    pub(crate) fn positives(&self, name: &str) -> Result<Vec<f64>> {
        let error = || self.unexpected(name, "a list of numbers above 0");
        let items =
            self.field(name).ok_or_else(|| self.missing(name))?.as_array().ok_or_else(error)?;
        items
            .iter()
            .map(|item| {
                item.as_f64().filter(|&number| number > 0.0 && number.is_finite()).ok_or_else(error)
            })
            .collect()
    }

    /// Whole numbers; none where the field is absent.
    pub(crate) fn indices(&self, name: &str) -> Result<Vec<u32>> {
        let Some(value) = self.field(name) else { return Ok(Vec::new()) };
        let error = || self.unexpected(name, "a list of whole numbers");
        value
            .as_array()
            .ok_or_else(error)?
            .iter()
            .map(|item| whole(item).ok_or_else(error))
            .collect()
    }

    /// True or false.
    pub(crate) fn flag(&self, name: &str, default: bool) -> Result<bool> {
        match self.field(name) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.unexpected(name, "true or false")),
        }
    }

    /// A text that may be absent.
    pub(crate) fn text(&self, name: &str) -> Result<Option<&str>> {
        match self.field(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.unexpected(name, "a text")),
        }
    }

    /// A list of texts; empty where the field is absent.
    pub(crate) fn texts(&self, name: &str) -> Result<Vec<&str>> {
        let Some(value) = self.field(name) else { return Ok(Vec::new()) };
        let error = || self.unexpected(name, "a list of texts");
        value
            .as_array()
            .ok_or_else(error)?
            .iter()
            .map(|item| item.as_str().ok_or_else(error))
            .collect()
    }

    /// An activation by the name transformers has for it.
    pub(crate) fn activation(&self, name: &str, default: Activation) -> Result<Activation> {
        Ok(match self.text(name)? {
            None => default,
            Some("relu") => Activation::Relu,
            Some("silu" | "swish") => Activation::Silu,
            Some("gelu" | "gelu_python") => Activation::Gelu,
            Some(
                "gelu_new" | "gelu_pytorch_tanh" | "gelu_python_tanh" | "gelu_fast"
                | "gelu_accurate",
            ) => Activation::GeluTanh,
            Some(_) => {
                return Err(self.unexpected(name, "one of relu, silu, gelu and gelu_pytorch_tanh"));
            }
        })
    }

    /// The window of each layer: by `layer_types`, else where `slides` says so.
    pub(crate) fn windows(
        &self,
        layers: u32,
        window: Option<u32>,
        slides: impl Fn(u32) -> bool,
    ) -> Result<Vec<Option<u32>>> {
        Ok(match self.layer_kinds(layers)? {
            Some(kinds) => {
                let of_kind = |kind| window.filter(|_| kind == LayerKind::Sliding);
                kinds.into_iter().map(of_kind).collect()
            }
            None => (0..layers).map(|layer| window.filter(|_| slides(layer))).collect(),
        })
    }

    /// How far each of the layers sees, where `layer_types` says so.
    fn layer_kinds(&self, layers: u32) -> Result<Option<Vec<LayerKind>>> {
        let name = "layer_types";
        if !self.has(name) {
            return Ok(None);
        }
        let kinds: Vec<LayerKind> = self
            .texts(name)?
            .into_iter()
            .map(|kind| match kind {
                "full_attention" => Ok(LayerKind::Full),
                "sliding_attention" => Ok(LayerKind::Sliding),
                _ => Err(self.unexpected(name, "full_attention and sliding_attention only")),
            })
            .collect::<Result<_>>()?;
        ensure!(
            kinds.len() == layers as usize,
            "{}: {name} has {} entries for {layers} layers",
            self.file.display(),
            kinds.len()
        );
        Ok(Some(kinds))
    }

    /// An error about this file.
    pub(crate) fn error(&self, message: impl std::fmt::Display) -> anyhow::Error {
        anyhow!("{}: {message}", self.file.display())
    }

    /// The error for a field without which nothing can be done.
    pub(crate) fn missing(&self, name: &str) -> anyhow::Error {
        self.error(format_args!("{}{name} is missing", self.section))
    }

    /// The error for a field that is there but not as it must be.
    pub(crate) fn unexpected(&self, name: &str, expected: &str) -> anyhow::Error {
        let mut shown = String::new();
        if let Some(value) = self.fields.get(name) {
            let _ = write!(shown, "{value}");
        }
        // A list of a thousand factors would fill the terminal.
        const SHOWN: usize = 60;
        if let Some((end, _)) = shown.char_indices().nth(SHOWN) {
            shown.truncate(end);
            shown.push('…');
        }
        self.error(format_args!("{}{name} is {shown}, not {expected}", self.section))
    }

    fn field(&self, name: &str) -> Option<&Value> {
        self.fields.get(name).filter(|value| !value.is_null())
    }
}

/// A whole number that fits, also when it is written as a float.
fn whole(value: &Value) -> Option<u32> {
    let number = value.as_f64()?;
    (number.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&number))
        .then_some(number as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        Config::parse("config.json".into(), text.as_bytes()).unwrap()
    }

    #[test]
    fn null_counts_as_absent_where_it_has_no_meaning() {
        let config = config(r#"{"head_dim": null, "sliding_window": null}"#);
        assert_eq!(config.optional_size("head_dim").unwrap(), None);
        assert_eq!(config.nullable_size("sliding_window", Some(4096)).unwrap(), None);
        assert_eq!(config.nullable_size("window", Some(4096)).unwrap(), Some(4096));
    }

    #[test]
    fn a_byte_order_mark_is_passed_over() {
        let config = config("\u{feff}{\"hidden_size\": 64}");
        assert_eq!(config.size("hidden_size", 1).unwrap(), 64);
    }

    #[test]
    fn whole_numbers_may_be_written_as_floats() {
        let config = config(r#"{"a": 64.0, "b": 64.5, "c": 1e300, "d": 4294967296}"#);
        assert_eq!(config.size("a", 1).unwrap(), 64);
        for name in ["b", "c", "d"] {
            assert!(config.size(name, 1).is_err(), "{name}");
        }
    }

    #[test]
    fn a_nested_field_is_named_by_its_path() {
        let config = config(r#"{"rope_scaling": {"factor": "four"}}"#);
        let section = config.section("rope_scaling").unwrap().unwrap();
        assert_eq!(
            section.number("factor", 1.0).unwrap_err().to_string(),
            "config.json: rope_scaling.factor is \"four\", not a number"
        );
    }

    #[test]
    fn a_long_value_is_cut_in_an_error() {
        let list = vec!["0"; 1000].join(",");
        let config = config(&format!(r#"{{"short_factor": [{list}]}}"#));
        let error = config.positives("short_factor").unwrap_err().to_string();
        assert!(
            error.ends_with("…, not a list of numbers above 0") && error.len() < 150,
            "{error}"
        );
    }

    #[test]
    fn layer_types_are_one_for_each_layer() {
        let config = config(r#"{"layer_types": ["full_attention", "sliding_attention"]}"#);
        let kinds = Some(vec![LayerKind::Full, LayerKind::Sliding]);
        assert_eq!(config.layer_kinds(2).unwrap(), kinds);
        assert_eq!(
            config.layer_kinds(3).unwrap_err().to_string(),
            "config.json: layer_types has 2 entries for 3 layers"
        );
    }
}
