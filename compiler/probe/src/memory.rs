//! How much memory the system and its control groups have, in all and left over.

use std::fs;
use std::path::{Path, PathBuf};

use crate::{field, kernel_file};

/// Where control groups are mounted.
const GROUPS: &str = "/sys/fs/cgroup";

/// The system's memory.
pub(crate) fn of_system() -> Option<u64> {
    bytes_of(&kernel_file("/proc/meminfo").ok()?, "MemTotal")
}

/// The least memory that the control groups of this process may take.
pub(crate) fn limit() -> Option<u64> {
    groups().iter().filter_map(Group::limit).min()
}

/// Bytes that this process can take now without swapping, files in the page cache given up: of the system's memory, and
/// of what the control groups around it may take. `None` where the system does not tell.
pub fn available_memory() -> Option<u64> {
    let system = bytes_of(&kernel_file("/proc/meminfo").ok()?, "MemAvailable")?;
    Some(groups().iter().filter_map(Group::room).fold(system, u64::min))
}

/// A size of `/proc/meminfo`.
fn bytes_of(meminfo: &str, name: &str) -> Option<u64> {
    let kibibytes: u64 = field(meminfo, name)?.trim_end_matches("kB").trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

fn groups() -> Vec<Group> {
    let list = kernel_file("/proc/self/cgroup").unwrap_or_default();
    Group::around(&list, Path::new(GROUPS))
}

/// A control group that limits memory.
struct Group {
    folder: PathBuf,
    files: &'static Files,
}

/// What the files of a control group, and the lines of its statistics, are called.
struct Files {
    limit: &'static str,
    used: &'static str,
    cached: [&'static str; 2],
}

const UNIFIED: Files =
    Files { limit: "memory.max", used: "memory.current", cached: ["active_file", "inactive_file"] };
const FIRST: Files = Files {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: ["total_active_file", "total_inactive_file"],
};

impl Group {
    /// The control groups of a process, as `/proc/self/cgroup` lists them, and those around them. Inside a container
    /// the outermost is the container's, whatever path the list names.
    fn around(list: &str, mounted: &Path) -> Vec<Self> {
        let mut found = Vec::new();
        for line in list.lines() {
            let mut parts = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
            let (root, files) = if controllers.is_empty() {
                (mounted.to_owned(), &UNIFIED)
            } else if controllers.split(',').any(|controller| controller == "memory") {
                (mounted.join("memory"), &FIRST)
            } else {
                continue;
            };
            let inside = root.join(path.trim_start_matches('/'));
            let around = inside.ancestors().take_while(|folder| folder.starts_with(&root));
            found.extend(around.map(|folder| Self { folder: folder.to_owned(), files }));
        }
        found
    }

    /// Beyond what there is, or `None`, where nothing is limited.
    fn limit(&self) -> Option<u64> {
        self.number(self.files.limit)
    }

    /// What of its limit is free, or in files that the system may give up.
    fn room(&self) -> Option<u64> {
        let (limit, used) = (self.limit()?, self.number(self.files.used)?);
        let statistics = fs::read_to_string(self.folder.join("memory.stat")).unwrap_or_default();
        let lines = statistics.lines().filter_map(|line| line.split_once(' '));
        let cached = lines.filter(|(name, _)| self.files.cached.contains(name));
        let cached: u64 = cached.filter_map(|(_, bytes)| bytes.parse::<u64>().ok()).sum();
        Some(limit.saturating_sub(used.saturating_sub(cached)))
    }

    /// A file of one number; `None` for other words, such as `max`.
    fn number(&self, name: &str) -> Option<u64> {
        fs::read_to_string(self.folder.join(name)).ok()?.trim().parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Folders with control groups in them.
    struct Mounted(tempfile::TempDir);

    impl Mounted {
        fn write(&self, path: &str, text: &str) {
            let file = self.0.path().join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }

        fn around(&self, list: &str) -> Vec<Group> {
            Group::around(list, self.0.path())
        }
    }

    #[test]
    fn the_least_limit_around_a_process_holds() {
        let mounted = Mounted(tempfile::tempdir().unwrap());
        let found = |list: &str| mounted.around(list).iter().filter_map(Group::limit).min();
        assert_eq!(found("0::/"), None);
        mounted.write("memory.max", "max\n");
        mounted.write("jobs/memory.max", "4096\n");
        mounted.write("jobs/step/memory.max", "max\n");
        mounted.write("jobs/more/memory.max", "512\n");
        assert_eq!(found("0::/jobs/step\n"), Some(4096));
        assert_eq!(found("0::/jobs/more"), Some(512));
        // A path of the host, of which a container sees nothing but its own group.
        assert_eq!(found("0::/elsewhere"), None);
        mounted.write("memory.max", "65536");
        assert_eq!(found("0::/elsewhere/inside"), Some(65536));
        mounted.write("memory/memory.limit_in_bytes", "1024");
        assert_eq!(found("5:cpu,memory:/docker/1\n1:cpuset:/\n"), Some(1024));
        assert_eq!(found("12:hugetlb:/jobs/more"), None);
    }

    #[test]
    fn files_in_the_page_cache_are_room() {
        let mounted = Mounted(tempfile::tempdir().unwrap());
        let found = |list: &str| mounted.around(list).iter().filter_map(Group::room).min();
        mounted.write("jobs/memory.max", "10000\n");
        assert_eq!(found("0::/jobs"), None, "what is used is not told");
        mounted.write("jobs/memory.current", "7000\n");
        assert_eq!(found("0::/jobs"), Some(3000));
        mounted.write("jobs/memory.stat", "anon 1\nactive_file 500\ninactive_file 1500\nslab 9\n");
        assert_eq!(found("0::/jobs"), Some(5000));
        // More cached than used, as while it changes, and more used than may be.
        mounted.write("jobs/memory.current", "1000\n");
        assert_eq!(found("0::/jobs"), Some(10000));
        mounted.write("jobs/memory.current", "20000\n");
        assert_eq!(found("0::/jobs"), Some(0));
        mounted.write("memory/job/memory.limit_in_bytes", "100");
        mounted.write("memory/job/memory.usage_in_bytes", "90");
        mounted.write("memory/job/memory.stat", "inactive_file 1\ntotal_inactive_file 20\n");
        assert_eq!(found("4:memory:/job"), Some(30));
    }

    #[test]
    fn this_system_has_memory_left() {
        let (all, available) = (of_system().unwrap(), available_memory().unwrap());
        assert!(0 < available && available <= all, "{available} of {all}");
    }
}
