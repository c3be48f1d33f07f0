//! The files that were opened last, kept between sessions.

use std::path::{Path, PathBuf};
use std::{env, fs};

/// What was opened: a plan, maybe with a trace.
pub type Opened = (PathBuf, Option<PathBuf>);

const MOST: usize = 10;

/// The list, newest first; without a file it lives as long as the program.
#[derive(Debug, Default)]
pub struct Recent {
    file: Option<PathBuf>,
    /// Newest first.
    pub opened: Vec<Opened>,
}

impl Recent {
    /// The user's list, in the folder that the XDG base directory specification gives to state.
    pub fn of_user() -> Self {
        let state = env::var_os("XDG_STATE_HOME").map(PathBuf::from);
        let home = || env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state"));
        let file = state.or_else(home).map(|state| state.join("hybrid-viewer/recent"));
        file.map_or_else(Self::default, Self::in_file)
    }

    /// The list in a file; empty where there is none.
    pub fn in_file(file: PathBuf) -> Self {
        let text = fs::read_to_string(&file).unwrap_or_default();
        let opened = text.lines().filter(|line| !line.is_empty()).map(|line| {
            let (plan, trace) = line.split_once('\t').unwrap_or((line, ""));
            (plan.into(), (!trace.is_empty()).then(|| trace.into()))
        });
        Recent { opened: opened.take(MOST).collect(), file: Some(file) }
    }

    /// Puts what was opened in front.
    pub fn add(&mut self, plan: &Path, trace: Option<&Path>) {
        let whole = |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let entry = (whole(plan), trace.map(whole));
        self.opened.retain(|other| *other != entry);
        self.opened.insert(0, entry);
        self.opened.truncate(MOST);
        let Some(file) = &self.file else { return };
        let lines = self.opened.iter().map(|(plan, trace)| {
            let trace = trace.as_deref().unwrap_or(Path::new(""));
            format!("{}\t{}\n", plan.display(), trace.display())
        });
        let lines: String = lines.collect();
        // A list that cannot be kept is no reason to disturb anyone.
        let _ = file.parent().map(fs::create_dir_all);
        let _ = fs::write(file, lines);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_opened_comes_first_and_only_once() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("state/recent");
        let mut recent = Recent::in_file(file.clone());
        recent.add(Path::new("/a.ron"), None);
        recent.add(Path::new("/b.ron"), Some(Path::new("/t.ron")));
        recent.add(Path::new("/a.ron"), None);
        let read = Recent::in_file(file);
        let expected: Vec<Opened> =
            vec![("/a.ron".into(), None), ("/b.ron".into(), Some("/t.ron".into()))];
        assert_eq!(read.opened, expected);
    }
}
