//! Values as Python has and prints them, for templates that were written for it.

use std::ffi::CString;
use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use serde_json::Value as Json;

/// A JSON value as a template sees it; the keys of objects keep their order.
pub(super) fn value(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(truth) => Value::from(*truth),
        Json::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(integer), _, _) => Value::from(integer),
            (None, Some(integer), _) => Value::from(integer),
            (None, None, float) => Value::from(float.unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => Value::from(items.iter().map(value).collect::<Vec<_>>()),
        Json::Object(entries) => {
            Value::from_pairs(entries.iter().map(|(key, item)| (key.as_str(), value(item))))
        }
    }
}

/// `str(value)`.
pub(super) fn text(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None if value.is_undefined() => String::new(),
        None => representation(value),
    }
}

/// `repr(value)`.
fn representation(value: &Value) -> String {
    if let Some(text) = value.as_str() {
        return quoted(text);
    }
    match value.kind() {
        ValueKind::None => "None".to_owned(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.to_owned(),
        ValueKind::Number => number(value),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<String> = items(value).iter().map(representation).collect();
            match (value.is_tuple(), items.as_slice()) {
                (true, [only]) => format!("({only},)"),
                (true, items) => format!("({})", items.join(", ")),
                (false, items) => format!("[{}]", items.join(", ")),
            }
        }
        ValueKind::Map => {
            let entries: Vec<String> = items(value)
                .iter()
                .map(|key| {
                    format!("{}: {}", representation(key), representation(&entry(value, key)))
                })
                .collect();
            format!("{{{}}}", entries.join(", "))
        }
        ValueKind::Undefined
        | ValueKind::String
        | ValueKind::Bytes
        | ValueKind::Plain
        | ValueKind::Invalid
        | _ => value.to_string(),
    }
}

fn items(value: &Value) -> Vec<Value> {
    value.try_iter().map(Iterator::collect).unwrap_or_default()
}

fn entry(map: &Value, key: &Value) -> Value {
    map.get_item(key).unwrap_or_default()
}

/// A string in single quotes, or in double ones where it holds single quotes only.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut quoted = String::from(quote);
    for character in text.chars() {
        match character {
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            '\\' => quoted.push_str("\\\\"),
            character if character == quote => quoted.extend(['\\', character]),
            character if character.is_ascii_control() => {
                let _ = write!(quoted, "\\x{:02x}", u32::from(character));
            }
            character => quoted.push(character),
        }
    }
    quoted.push(quote);
    quoted
}

fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let float = f64::try_from(value.clone()).unwrap_or(f64::NAN);
    let size = float.abs();
    if float.is_nan() {
        "nan".to_owned()
    } else if float.is_infinite() {
        if float > 0.0 { "inf" } else { "-inf" }.to_owned()
    } else if size == 0.0 || (1e-4..1e16).contains(&size) {
        format!("{float:?}")
    } else {
        // Rust writes 1e-7 where Python writes 1e-07.
        let text = format!("{float:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) =
            exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
        format!("{digits}e{sign}{exponent:0>2}")
    }
}

/// `json.dumps` with the defaults of transformers: nothing escaped that needs no escape.
pub(super) fn to_json(value: &Value, rest: Rest<Value>, options: Kwargs) -> Result<String, Error> {
    // By position come `ensure_ascii` and `indent`.
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    let indent: Option<Value> = options.get("indent")?;
    let indent = indent.or_else(|| rest.get(1).cloned()).filter(|indent| !indent.is_none());
    let separators: Option<Vec<String>> = options.get("separators")?;
    let sorted: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let indent = match indent {
        None => None,
        Some(indent) if indent.as_str().is_some() => Some(text(&indent)),
        // As many as no template can ask for more memory with than there is.
        Some(indent) => Some(" ".repeat(usize::from(u8::try_from(indent)?))),
    };
    let item_separator = if indent.is_some() { "," } else { ", " };
    let (item_separator, key_separator) = match separators.as_deref() {
        None => (item_separator, ": "),
        Some([item, key]) => (item.as_str(), key.as_str()),
        Some(_) => {
            let message = "separators of tojson are a pair";
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
    };
    let ascii = ascii.or_else(|| rest.first().map(Value::is_true)).unwrap_or(false);
    let sorted = sorted.unwrap_or(false);
    let mut writer =
        JsonWriter { output: String::new(), ascii, sorted, indent, item_separator, key_separator };
    writer.write(value, 0)?;
    Ok(writer.output)
}

struct JsonWriter<'a> {
    output: String,
    ascii: bool,
    sorted: bool,
    indent: Option<String>,
    item_separator: &'a str,
    key_separator: &'a str,
}

impl JsonWriter<'_> {
    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if let Some(text) = value.as_str() {
            self.string(text);
            return Ok(());
        }
        match value.kind() {
            ValueKind::None => self.output.push_str("null"),
            ValueKind::Bool => self.output.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => {
                let number = match number(value).as_str() {
                    "nan" => "NaN".to_owned(),
                    "inf" => "Infinity".to_owned(),
                    "-inf" => "-Infinity".to_owned(),
                    number => number.to_owned(),
                };
                self.output.push_str(&number);
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let items = items(value);
                self.output.push('[');
                for (i, item) in items.iter().enumerate() {
                    self.separate(i == 0, depth + 1);
                    self.write(item, depth + 1)?;
                }
                self.close(items.is_empty(), depth, ']');
            }
            ValueKind::Map => {
                let mut keys = items(value);
                if self.sorted {
                    keys.sort();
                }
                self.output.push('{');
                for (i, key) in keys.iter().enumerate() {
                    self.separate(i == 0, depth + 1);
                    self.string(&text(key));
                    self.output.push_str(self.key_separator);
                    self.write(&entry(value, key), depth + 1)?;
                }
                self.close(keys.is_empty(), depth, '}');
            }
            kind @ (ValueKind::Undefined
            | ValueKind::String
            | ValueKind::Bytes
            | ValueKind::Plain
            | ValueKind::Invalid
            | _) => {
                let message = format!("{kind} is not JSON serializable");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
        Ok(())
    }

    fn separate(&mut self, is_first: bool, depth: usize) {
        if !is_first {
            self.output.push_str(self.item_separator);
        }
        self.line(depth);
    }

    fn close(&mut self, is_empty: bool, depth: usize, bracket: char) {
        if !is_empty {
            self.line(depth);
        }
        self.output.push(bracket);
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.output.push('\n');
            self.output.push_str(&indent.repeat(depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.output.push('"');
        for character in text.chars() {
            match character {
                '"' => self.output.push_str("\\\""),
                '\\' => self.output.push_str("\\\\"),
                '\n' => self.output.push_str("\\n"),
                '\r' => self.output.push_str("\\r"),
                '\t' => self.output.push_str("\\t"),
                '\u{8}' => self.output.push_str("\\b"),
                '\u{c}' => self.output.push_str("\\f"),
                character if character < ' ' || (self.ascii && !character.is_ascii()) => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.output, "\\u{unit:04x}");
                    }
                }
                character => self.output.push(character),
            }
        }
        self.output.push('"');
    }
}

/// `datetime.now().strftime(format)`.
pub(super) fn strftime_now(format: &str) -> Result<String, Error> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    strftime(format, now).ok_or_else(|| {
        Error::new(ErrorKind::InvalidOperation, format!("cannot write the time as {format:?}"))
    })
}

/// The local time at `seconds` since the epoch as C's `strftime` writes it, which is what Python
/// calls; at most 511 bytes.
#[expect(unsafe_code, reason = "the time zone and strftime are the C library's")]
fn strftime(format: &str, seconds: u64) -> Option<String> {
    if format.is_empty() {
        return Some(String::new());
    }
    let pattern = CString::new(format).ok()?;
    let seconds = libc::time_t::try_from(seconds).ok()?;
    // SAFETY: `tm` is plain data for which all zeros is a value.
    let mut time: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to live values of the types asked for.
    if unsafe { libc::localtime_r(&raw const seconds, &raw mut time) }.is_null() {
        return None;
    }
    let mut text = [0_u8; 512];
    // SAFETY: `text` has the length that is passed, `pattern` ends with a zero byte, and
    // `localtime_r` filled `time`.
    let length = unsafe {
        libc::strftime(text.as_mut_ptr().cast(), text.len(), pattern.as_ptr(), &raw const time)
    };
    (length > 0).then(|| String::from_utf8_lossy(&text[..length]).into_owned())
}
