//! Files that a program writes for its user: whole or not at all.

use std::fs::{self, File};
use std::hash::{BuildHasher as _, RandomState};
use std::io::{self, ErrorKind, Write as _};
use std::iter;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

/// Names that are tried for a file that is not there yet: the first is taken once in billions of times.
const TRIES: usize = 8;

/// Writes a file. A reader never sees half of it, and what was there stays where it cannot be written.
pub fn write(path: &Path, contents: &[u8]) -> Result<()> {
    let context = || format!("writing {}", path.display());
    let Some(target) = target_of(path)? else {
        return fs::write(path, contents).with_context(context);
    };
    let (mut file, temporary) = create_beside(&target, suffixes()).with_context(context)?;
    let written = file.write_all(contents).and_then(|()| fs::rename(&temporary, target));
    if written.is_err() {
        // What is left of it helps nobody; that it cannot be removed either is no news.
        let _ = fs::remove_file(&temporary);
    }
    written.with_context(context)
}

/// Fails where [`write()`] would, before the work whose results are to be written, and where one would replace a file
/// that the work reads, a file of a checkpoint, or another of its results. Changes nothing.
pub fn check_outputs<'a>(
    outputs: impl IntoIterator<Item = &'a Path>,
    inputs: impl IntoIterator<Item = &'a Path>,
) -> Result<()> {
    let place = |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let inputs: Vec<PathBuf> = inputs.into_iter().map(place).collect();
    let mut written: Vec<PathBuf> = Vec::new();
    for path in outputs {
        let context = || format!("writing {}", path.display());
        let Some(target) = target_of(path)? else { continue };
        if inputs.contains(&target) {
            bail!("writing {}: it would replace what is read; name another file", path.display());
        }
        // Names lead elsewhere in a cache of downloads.
        if target.exists() && (is_of_checkpoint(path) || is_of_checkpoint(&target)) {
            bail!(
                "writing {}: a file of this name belongs to a checkpoint; name another file",
                path.display()
            );
        }
        if written.contains(&target) {
            bail!("writing {}: two results would go there", path.display());
        }
        let (_, temporary) = create_beside(&target, suffixes()).with_context(context)?;
        fs::remove_file(temporary).with_context(context)?;
        written.push(target);
    }
    Ok(())
}

/// Whether files of this name are parts of checkpoints, which no result is meant to replace.
fn is_of_checkpoint(path: &Path) -> bool {
    const NAMES: [&str; 10] = [
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
    ];
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let is_template = name.starts_with("chat_template.");
    NAMES.contains(&name) || name.ends_with(".safetensors") || is_template
}

/// The file that `path` leads to; `None` for devices and pipes, which no file can replace.
fn target_of(path: &Path) -> Result<Option<PathBuf>> {
    if fs::metadata(path).is_ok_and(|kind| !kind.is_file() && !kind.is_dir()) {
        return Ok(None);
    }
    if path == Path::new("-") {
        bail!(
            "writing -: this is not written to standard output; name a file, or ./- for one of this name"
        );
    }
    let target = fs::canonicalize(path).unwrap_or_else(|_| new_place(path));
    let names_folder = path.as_os_str().as_encoded_bytes().ends_with(b"/");
    if names_folder || target.is_dir() || target.file_name().is_none() {
        bail!("writing {}: it is a folder", path.display());
    }
    Ok(Some(target))
}

/// A file that nobody else writes to, and where it is: beside `target`, with its name and the first of these suffixes
/// that is free.
fn create_beside(
    target: &Path,
    suffixes: impl Iterator<Item = u32>,
) -> io::Result<(File, PathBuf)> {
    for suffix in suffixes {
        let mut name = target.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{suffix:08x}"));
        let temporary = target.with_file_name(name);
        match File::create_new(&temporary) {
            Ok(file) => return Ok((file, temporary)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => (),
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::from(ErrorKind::AlreadyExists))
}

/// Numbers that other processes do not have: those of containers that share a folder may have the same ids.
fn suffixes() -> impl Iterator<Item = u32> {
    // Each of these hashes with another key, the first of which the system draws.
    iter::repeat_with(|| RandomState::new().hash_one(()) as u32).take(TRIES)
}

/// Where a file that is not there would be, spelt as its folder is.
fn new_place(path: &Path) -> PathBuf {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    match (fs::canonicalize(folder.unwrap_or(Path::new("."))), path.file_name()) {
        (Ok(folder), Some(name)) => folder.join(name),
        (Ok(_) | Err(_), _) => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_replaced_as_a_whole_and_through_links() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        write(&file, b"long before").unwrap();
        symlink(&file, &link).unwrap();
        write(&link, b"after").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"after");
        assert_eq!(names(folder.path()), ["file", "link"]);
    }

    #[test]
    fn a_file_that_somebody_else_writes_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("file");
        let (_, others) = create_beside(&target, [7].into_iter()).unwrap();
        let (_, own) = create_beside(&target, [7, 8].into_iter()).unwrap();
        assert_ne!(own, others);
        assert_eq!(names(folder.path()), ["file.00000007", "file.00000008"]);
        let error = create_beside(&target, [7, 8].into_iter()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        write(&target, b"text").unwrap();
        assert_eq!(names(folder.path()), ["file", "file.00000007", "file.00000008"]);
        let drawn: Vec<u32> = suffixes().collect();
        assert!(drawn.iter().any(|&suffix| suffix != drawn[0]), "{drawn:x?}");
    }

    #[test]
    fn looking_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        check_outputs([file.as_path()], []).unwrap();
        assert_eq!(names(folder.path()), [""; 0]);
        write(&file, b"kept").unwrap();
        check_outputs([file.as_path()], []).unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"kept");
    }

    #[test]
    fn folders_and_missing_folders_are_refused_and_devices_taken() {
        let folder = tempfile::tempdir().unwrap();
        for attempt in [|path: &Path| check_outputs([path], []), |path: &Path| write(path, b"text")]
        {
            let error = format!("{:#}", attempt(folder.path()).unwrap_err());
            assert!(error.ends_with("it is a folder"), "{error}");
            let error = format!("{:#}", attempt(&folder.path().join("new/")).unwrap_err());
            assert!(error.ends_with("it is a folder"), "{error}");
            let error = format!("{:#}", attempt(Path::new("-")).unwrap_err());
            assert!(error.contains("name a file"), "{error}");
            let error = format!("{:#}", attempt(&folder.path().join("none/file")).unwrap_err());
            assert!(error.starts_with("writing ") && error.contains("none/file"), "{error}");
            attempt(Path::new("/dev/null")).unwrap();
        }
    }

    #[test]
    fn what_is_read_is_not_replaced_and_results_lie_apart() {
        let folder = tempfile::tempdir().unwrap();
        let (read, other) = (folder.path().join("read"), folder.path().join("other"));
        fs::write(&read, b"text").unwrap();
        let link = folder.path().join("link");
        symlink(&read, &link).unwrap();
        let refusal = |outputs: &[&Path]| {
            let refused = check_outputs(outputs.iter().copied(), [read.as_path()]);
            refused.unwrap_err().to_string()
        };
        for output in [&read, &link] {
            assert!(
                refusal(&[output]).ends_with("it would replace what is read; name another file")
            );
        }
        for name in ["config.json", "model-00001-of-00002.safetensors", "chat_template.jinja"] {
            let file = folder.path().join(name);
            check_outputs([file.as_path()], []).unwrap();
            fs::write(&file, b"text").unwrap();
            assert!(refusal(&[&file]).contains("belongs to a checkpoint"), "{name}");
        }
        // As caches of downloads hold them.
        let (blob, name) = (folder.path().join("0f3a"), folder.path().join("tokenizer.json"));
        fs::write(&blob, b"text").unwrap();
        symlink(&blob, &name).unwrap();
        assert!(refusal(&[&name]).contains("belongs to a checkpoint"));
        assert!(refusal(&[&other, &other]).ends_with("two results would go there"));
        let again = folder.path().join(".").join("other");
        assert!(refusal(&[&other, &again]).ends_with("two results would go there"));
        check_outputs([other.as_path()], [read.as_path()]).unwrap();
        assert_eq!(fs::read(&read).unwrap(), b"text");
    }
}
