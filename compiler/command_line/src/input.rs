//! Reading the files that these programs write.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

/// The text of a file that should hold `kind`: `a plan`, `a machine`.
///
/// # Errors
/// Naming the file: when it is a folder, holds no text, or cannot be read.
pub fn read_text(path: &Path, kind: &str) -> Result<String> {
    let name = path.display();
    let advice =
        if kind == "a plan" { "; `hybridc compile` makes one of a checkpoint" } else { "" };
    ensure!(!path.is_dir(), "{name} is a folder, not {kind}{advice}");
    let bytes = fs::read(path).with_context(|| format!("reading {name}"))?;
    let text = String::from_utf8(bytes).ok();
    text.with_context(|| format!("{name} is not {kind} but no text at all{advice}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(path: &Path, expected: &str) {
        let error = format!("{:#}", read_text(path, "a plan").unwrap_err());
        assert_eq!(error.replace(&path.display().to_string(), "FILE"), expected);
    }

    #[test]
    fn what_cannot_be_a_plan_is_refused_with_advice() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.safetensors");
        fs::write(&file, [0xFF, 0xFE]).unwrap();
        let advice = "; `hybridc compile` makes one of a checkpoint";
        check(folder.path(), &format!("FILE is a folder, not a plan{advice}"));
        check(&file, &format!("FILE is not a plan but no text at all{advice}"));
        check(&folder.path().join("none"), "reading FILE: No such file or directory (os error 2)");
        fs::write(&file, "text").unwrap();
        assert_eq!(read_text(&file, "a plan").unwrap(), "text");
    }
}
