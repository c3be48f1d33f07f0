//! Filters and tests as Jinja in Python has them, where minijinja has others.

use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, filters};

use super::python;

/// Replaces what minijinja has under these names.
pub(super) fn add(environment: &mut Environment<'_>) {
    environment.add_filter("tojson", python::to_json);
    environment.add_filter("string", |value: &Value| python::text(value));
    environment.add_filter("default", default);
    environment.add_filter("d", default);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("replace", replace);
    environment.add_test("callable", is_callable);
    environment.add_test("iterable", is_iterable);
    // Slices of lists, which are sequences, are not told from generators, which in Python are none.
    environment.add_test("sequence", is_iterable);
}

/// The value, or what is given for one that is undefined or, if asked so, counts as false.
fn default(value: &Value, given: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    let argument = |position: usize, name: &str| match given.get(position) {
        Some(argument) => Ok(Some(argument.clone())),
        None if options.has(name) => options.get(name).map(Some),
        None => Ok(None),
    };
    let replacement = argument(0, "default_value")?.unwrap_or_else(|| Value::from(""));
    let replaces_false = argument(1, "boolean")?.is_some_and(|flag| flag.is_true());
    options.assert_all_used()?;
    if given.len() > 2 {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let is_replaced = value.is_undefined() || (replaces_false && !value.is_true());
    Ok(if is_replaced { replacement } else { value.clone() })
}

fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() { Ok(0) } else { filters::length(value) }
}

/// An integer; what is none becomes the default instead of an error.
fn int(
    state: &State<'_, '_>,
    value: &Value,
    default: Option<Value>,
    base: Option<u32>,
    options: Kwargs,
) -> Result<Value, Error> {
    let default = default.or(options.get("default")?).unwrap_or_else(|| Value::from(0));
    filters::int(state, &trimmed(value), Some(default), base, options)
}

/// A float; what is none becomes the default instead of an error.
fn float(
    state: &State<'_, '_>,
    value: &Value,
    default: Option<Value>,
    options: Kwargs,
) -> Result<Value, Error> {
    let default = default.or(options.get("default")?).unwrap_or_else(|| Value::from(0.0));
    filters::float(state, &trimmed(value), Some(default), options)
}

/// Python reads numbers with white space around them.
fn trimmed(value: &Value) -> Value {
    value.as_str().map_or_else(|| value.clone(), |text| Value::from(text.trim()))
}

/// The text with the first `count` occurrences of `old` replaced by `new`, or all of them.
fn replace(
    value: &Value,
    old: &Value,
    new: &Value,
    count: Option<i64>,
    options: Kwargs,
) -> Result<String, Error> {
    let count: Option<i64> = count.or(options.get("count")?);
    options.assert_all_used()?;
    let [value, old, new] = [value, old, new].map(python::text);
    // A negative count is all, as none is.
    Ok(match count.and_then(|count| usize::try_from(count).ok()) {
        Some(count) => value.replacen(&old, &new, count),
        None => value.replace(&old, &new),
    })
}

/// Functions and macros are; so is what is undefined, whose class in Python can be called.
fn is_callable(value: &Value) -> bool {
    value.is_undefined() || value.kind() == ValueKind::Plain
}

/// Texts, lists, mappings and what is undefined are, but not none.
fn is_iterable(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Undefined
        | ValueKind::String
        | ValueKind::Bytes
        | ValueKind::Seq
        | ValueKind::Iterable
        | ValueKind::Map => true,
        ValueKind::None
        | ValueKind::Bool
        | ValueKind::Number
        | ValueKind::Plain
        | ValueKind::Invalid
        | _ => false,
    }
}
