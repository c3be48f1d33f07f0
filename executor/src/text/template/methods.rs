//! Methods of Python's values: those that minijinja's collection lacks, before that collection.

use minijinja::value::{Kwargs, Tuple, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Calls a method that minijinja itself does not know.
pub(super) fn call(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        return match method {
            "split" => {
                let (separator, limit) = split_arguments(arguments)?;
                let arguments = [Value::from(separator), Value::from(limit)];
                unknown_method_callback(state, value, method, &arguments)
            }
            "rsplit" => rsplit(text, arguments),
            "partition" => partition(text, arguments),
            "rpartition" => rpartition(text, arguments),
            "removeprefix" => stripped(text, arguments, |text, affix| text.strip_prefix(affix)),
            "removesuffix" => stripped(text, arguments, |text, affix| text.strip_suffix(affix)),
            "index" => found(unknown_method_callback(state, value, "find", arguments)?),
            "rindex" => found(unknown_method_callback(state, value, "rfind", arguments)?),
            "ljust" => pad(text, arguments, |_, _| 0),
            "rjust" => pad(text, arguments, |missing, _| missing),
            // Of an odd number of characters the larger half goes where Python puts it.
            "center" => pad(text, arguments, |missing, width| missing / 2 + (missing & width & 1)),
            "zfill" => fill_with_zeros(text, arguments),
            _ => unknown_method_callback(state, value, method, arguments),
        };
    }
    let is_list = value.kind() == ValueKind::Seq;
    match method {
        "copy" if is_list || value.kind() == ValueKind::Map => {
            let () = from_args(arguments)?;
            // No method of a template changes a value, so one serves as its copy.
            Ok(value.clone())
        }
        "index" if is_list => {
            let (item,): (&Value,) = from_args(arguments)?;
            let place = value.try_iter()?.position(|other| other == *item);
            place.map(Value::from).ok_or_else(|| refused(&format!("{item} is not in the list")))
        }
        _ => unknown_method_callback(state, value, method, arguments),
    }
}

fn refused(message: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.to_owned())
}

/// `sep` and `maxsplit`, by position or name.
fn split_arguments(arguments: &[Value]) -> Result<(Option<String>, Option<i64>), Error> {
    let (separator, limit, options): (Option<String>, Option<i64>, Kwargs) = from_args(arguments)?;
    let separator = separator.or(options.get("sep")?);
    let limit = limit.or(options.get("maxsplit")?);
    options.assert_all_used()?;
    Ok((separator, limit))
}

/// Splits from the right, at most as often as the limit says; everywhere where it is negative or missing.
fn rsplit(text: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (separator, limit) = split_arguments(arguments)?;
    let limit = limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(text.len());
    let parts: Vec<&str> = match &separator {
        Some(separator) => text.rsplitn(limit + 1, separator.as_str()).collect(),
        None => rsplit_at_spaces(text, limit),
    };
    Ok(parts.into_iter().rev().map(Value::from).collect())
}

/// The words from the right, then what is left when the limit is reached.
fn rsplit_at_spaces(text: &str, limit: usize) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = text.trim_end();
    while let Some((before, word)) =
        rest.rsplit_once(char::is_whitespace).filter(|_| words.len() < limit)
    {
        words.push(word);
        rest = before.trim_end();
    }
    words.extend(Some(rest).filter(|rest| !rest.is_empty()));
    words
}

fn partition(text: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (separator,): (&str,) = from_args(arguments)?;
    let parts = text.split_once(separator).map(|(before, after)| [before, separator, after]);
    Ok(Value::from(Tuple::from(parts.unwrap_or([text, "", ""]).map(Value::from))))
}

fn rpartition(text: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (separator,): (&str,) = from_args(arguments)?;
    let parts = text.rsplit_once(separator).map(|(before, after)| [before, separator, after]);
    Ok(Value::from(Tuple::from(parts.unwrap_or(["", "", text]).map(Value::from))))
}

/// The text without its beginning or its end, where it has that.
fn stripped(
    text: &str,
    arguments: &[Value],
    strip: for<'a> fn(&'a str, &str) -> Option<&'a str>,
) -> Result<Value, Error> {
    let (affix,): (&str,) = from_args(arguments)?;
    Ok(Value::from(strip(text, affix).unwrap_or(text)))
}

/// The place that a search found; -1 stands for none.
fn found(place: Value) -> Result<Value, Error> {
    if place == Value::from(-1) { Err(refused("substring not found")) } else { Ok(place) }
}

/// The text with characters around it up to a width; `left` says how many of those that are
/// missing to the width come before it.
fn pad(
    text: &str,
    arguments: &[Value],
    left: impl Fn(usize, usize) -> usize,
) -> Result<Value, Error> {
    // Sixteen bits: no template can ask for more memory than there is.
    let (width, filling): (u16, Option<&str>) = from_args(arguments)?;
    let (width, filling) = (usize::from(width), filling.unwrap_or(" "));
    let missing = width.saturating_sub(text.chars().count());
    let left = left(missing, width);
    Ok(Value::from([&filling.repeat(left), text, &filling.repeat(missing - left)].concat()))
}

/// The text with zeros up to a width, behind its sign.
fn fill_with_zeros(text: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (width,): (u16,) = from_args(arguments)?;
    let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
    let missing = usize::from(width).saturating_sub(text.chars().count());
    Ok(Value::from([sign, &"0".repeat(missing), digits].concat()))
}
