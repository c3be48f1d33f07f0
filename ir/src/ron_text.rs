//! How files are written: the same value gives the same bytes.

use anyhow::Result;
use serde::Serialize;

/// A value as the text of a file, where values nested deeper than `lines` stand on the lines of those around them.
pub(crate) fn write(value: &impl Serialize, lines: usize) -> Result<String> {
    let style = ron::ser::PrettyConfig::new()
        .depth_limit(lines)
        .struct_names(false)
        .indentor("  ")
        .new_line("\n");
    Ok(ron::ser::to_string_pretty(value, style)? + "\n")
}
