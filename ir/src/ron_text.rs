//! How files are written and read: the same value gives the same bytes, and a field that is misspelt or missing is found.

use anyhow::{Context as _, Result, ensure};
use serde::de::DeserializeOwned;
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

/// The only field that every version of every kind of file has.
#[derive(Deserialize)]
struct Head {
    version: u32,
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

/// Reads what may be nothing, but is written even so: else a field that was lost would mean nothing.
pub(crate) fn written<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    field: D,
) -> Result<Option<T>, D::Error> {
    Option::deserialize(field)
}
