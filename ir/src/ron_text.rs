//! How files are written and read: the same value gives the same bytes, a misspelt or missing field is found, and so is
//! a file of another kind.

use anyhow::{Context as _, Result, bail, ensure};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Deserializer, Serialize};

/// How deep values of a file are nested at most.
const MOST_NESTED: usize = 64;

/// The version of a kind of file that is read.
pub(crate) struct Version {
    /// Raised whenever a field changes meaning.
    pub(crate) number: u32,
    /// What has it: `the plan has`.
    pub(crate) subject: &'static str,
    /// What other text is: `not a plan`.
    pub(crate) otherwise: &'static str,
    /// What to do about a file of another version: `compile it again`.
    pub(crate) remedy: &'static str,
}

/// The only field that every version of a file with versions has.
#[derive(Deserialize)]
struct Head {
    version: u32,
}

/// What tells kinds of files apart: of each kind a field that no other has.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Marks {
    programs: Mark,
    spans: Mark,
    routers: Mark,
    links: Mark,
}

/// Whether a field is there, whatever it holds.
#[derive(Default)]
struct Mark(bool);

impl<'de> Deserialize<'de> for Mark {
    fn deserialize<D: Deserializer<'de>>(field: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(field).map(|_| Self(true))
    }
}

/// A value as the text of a file, where values nested deeper than `lines` stand on the lines of those around them.
pub(crate) fn write(value: &impl Serialize, lines: usize) -> Result<String> {
    let style = ron::ser::PrettyConfig::new()
        .depth_limit(lines)
        .struct_names(false)
        .indentor("  ")
        .new_line("\n");
    Ok(ron::ser::to_string_pretty(value, style)? + "\n")
}

/// The value that a file of that version holds; `version_of` is that of a value.
pub(crate) fn read<T: DeserializeOwned>(
    text: &str,
    version: &Version,
    version_of: fn(&T) -> u32,
) -> Result<T> {
    let options = ron::Options::default().with_recursion_limit(MOST_NESTED);
    let Version { number, subject, otherwise, remedy } = version;
    let read: Result<T, _> = options.from_str(text);
    if read.is_err() {
        refuse_other_kinds(text, otherwise.trim_start_matches("not "))?;
    }
    let found = match &read {
        Ok(value) => version_of(value),
        // A file of another version need not have the fields of this one.
        Err(_) => options.from_str::<Head>(text).map_or(*number, |head| head.version),
    };
    ensure!(
        found == *number,
        "{subject} version {found}, this build reads version {number}: {remedy}"
    );
    read.context(*otherwise)
}

/// Fails where a text that is not read as `wanted`, such as `a plan`, is a file of another kind, of whatever version.
pub(crate) fn refuse_other_kinds(text: &str, wanted: &str) -> Result<()> {
    let options = ron::Options::default().with_recursion_limit(MOST_NESTED);
    let Marks { programs, spans, routers, links } = options.from_str(text).unwrap_or_default();
    let kinds = [
        (programs, "a plan"),
        (spans, "a trace"),
        (routers, "counts of experts"),
        (links, "a machine"),
    ];
    let found = kinds.into_iter().find(|(mark, _)| mark.0).map(|(_, kind)| kind);
    if let Some(found) = found.filter(|&found| found != wanted) {
        let is_one = |kind: &str| kind.starts_with("a ");
        let this = if is_one(found) { "this is" } else { "these are" };
        let is = if is_one(wanted) { "is" } else { "are" };
        bail!("{this} {found}, where {wanted} {is} read");
    }
    Ok(())
}

/// Reads what may be nothing, but is written even so: else a field that was lost would mean nothing.
pub(crate) fn written<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    field: D,
) -> Result<Option<T>, D::Error> {
    Option::deserialize(field)
}
