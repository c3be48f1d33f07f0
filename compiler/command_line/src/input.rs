//! Reading the files that these programs write.

use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

/// What these programs write for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// What runs where and when.
    Plan,
    /// What happened when.
    Trace,
    /// Devices, their rates and links.
    Machine,
    /// How often a mixture's experts were chosen.
    ExpertCounts,
}

impl FileKind {
    /// Where one comes from.
    fn origin(self) -> &'static str {
        match self {
            Self::Plan => "`hybridc compile` makes one of a checkpoint",
            Self::Trace => "`hybrid-exec --trace` records one",
            Self::Machine => "`hybridc probe` writes one",
            Self::ExpertCounts => "`hybrid-exec --count-experts` writes one",
        }
    }
}

impl fmt::Display for FileKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plan => "a plan",
            Self::Trace => "a trace",
            Self::Machine => "a machine",
            Self::ExpertCounts => "a file of counted experts",
        })
    }
}

/// A file of that kind, by what makes something of its text.
///
/// # Errors
/// Naming the file: those of [`read_text()`] and of `from_text`.
pub fn read<T>(path: &Path, kind: FileKind, from_text: fn(&str) -> Result<T>) -> Result<T> {
    let text = read_text(path, kind)?;
    from_text(&text).with_context(|| format!("reading {}", path.display()))
}

/// The text of a file that should be of that kind.
///
/// # Errors
/// Naming the file: when it is a folder, holds no text, or cannot be read.
pub fn read_text(path: &Path, kind: FileKind) -> Result<String> {
    let (name, origin) = (path.display(), kind.origin());
    ensure!(!path.is_dir(), "{name} is a folder, not {kind}; {origin}");
    let bytes = fs::read(path).with_context(|| format!("reading {name}"))?;
    let text = String::from_utf8(bytes).ok();
    text.with_context(|| format!("{name} is not {kind} but no text at all; {origin}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(path: &Path, kind: FileKind, expected: &str) {
        let error = format!("{:#}", read_text(path, kind).unwrap_err());
        assert_eq!(error.replace(&path.display().to_string(), "FILE"), expected);
    }

    #[test]
    fn what_is_of_no_such_kind_is_refused_with_where_one_comes_from() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.safetensors");
        fs::write(&file, [0xFF, 0xFE]).unwrap();
        let plan = "`hybridc compile` makes one of a checkpoint";
        check(folder.path(), FileKind::Plan, &format!("FILE is a folder, not a plan; {plan}"));
        let machine = "FILE is not a machine but no text at all; `hybridc probe` writes one";
        check(&file, FileKind::Machine, machine);
        let missing = "reading FILE: No such file or directory (os error 2)";
        check(&folder.path().join("none"), FileKind::Trace, missing);
        fs::write(&file, "text").unwrap();
        assert_eq!(read_text(&file, FileKind::ExpertCounts).unwrap(), "text");
    }
}
