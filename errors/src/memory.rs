//! Memory available to this process: `/proc/meminfo` and the limits of control groups.

use std::path::Path;

/// A limit of memory, and how much of it is free.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AvailableMemory {
    /// Bytes that can still be allocated.
    pub bytes: u64,
    /// Which limit it is: "on this machine", or "to its control group /…".
    pub limit: String,
}

/// The smallest of what the host has available and what each control group of this process may
/// still allocate. None if the system does not report it.
#[must_use]
pub fn available() -> Option<AvailableMemory> {
    available_below(Path::new("/"))
}

/// Like [`available`], for a system whose files are below this directory.
fn available_below(root: &Path) -> Option<AvailableMemory> {
    let text = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
    let of_host = kibibytes(&text("proc/meminfo"), "MemAvailable:");
    let of_host =
        of_host.map(|bytes| AvailableMemory { bytes, limit: "on this machine".to_owned() });
    let membership = text("proc/self/cgroup");
    let of_groups =
        hierarchies(&membership).flat_map(|(version, group)| version.limits(root, group));
    of_host.into_iter().chain(of_groups).min_by_key(|available| available.bytes)
}

/// The value of a line of `/proc/meminfo`, or of the status of a process, in bytes.
pub fn kibibytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes << 10)
}

/// File names of a version of control groups.
#[derive(Debug)]
struct CgroupVersion {
    /// Where the hierarchy is mounted.
    mount_point: &'static str,
    limit: &'static str,
    used: &'static str,
    /// Lines of `memory.stat` with pages of files, which the kernel reclaims before it refuses
    /// memory. Groups below count, too.
    file_page_lines: [&'static str; 2],
}

const CGROUP_V1: CgroupVersion = CgroupVersion {
    mount_point: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    file_page_lines: ["total_inactive_file", "total_active_file"],
};

const CGROUP_V2: CgroupVersion = CgroupVersion {
    mount_point: "sys/fs/cgroup",
    limit: "memory.max",
    used: "memory.current",
    file_page_lines: ["inactive_file", "active_file"],
};

/// Reads `/proc/self/cgroup`: lines of a number, controllers and a group. Version 2 has one line,
/// without controllers.
fn hierarchies(membership: &str) -> impl Iterator<Item = (&'static CgroupVersion, &Path)> {
    membership.lines().filter_map(|line| {
        let (number, rest) = line.split_once(':')?;
        let (controllers, group) = rest.split_once(':')?;
        let version = match (number, controllers) {
            ("0", "") => &CGROUP_V2,
            _ if controllers.split(',').any(|one| one == "memory") => &CGROUP_V1,
            _ => return None,
        };
        Some((version, Path::new(group.trim_start_matches('/'))))
    })
}

impl CgroupVersion {
    /// What the group of this process, and each group above, may still allocate. In a container
    /// often only part of the hierarchy is mounted: groups outside it are left out.
    fn limits(&self, root: &Path, group: &Path) -> impl Iterator<Item = AvailableMemory> {
        let mount_point = root.join(self.mount_point);
        group.ancestors().filter_map(move |group| {
            let bytes = self.remaining(&mount_point.join(group))?;
            let limit = format!("to its control group /{}", group.display());
            Some(AvailableMemory { bytes, limit })
        })
    }

    /// Bytes that a group may still allocate; None if it has no limit.
    fn remaining(&self, group: &Path) -> Option<u64> {
        let text = |name: &str| std::fs::read_to_string(group.join(name)).ok();
        let number = |name: &str| text(name)?.trim().parse::<u64>().ok();
        let limit = number(self.limit)?;
        let statistics = text("memory.stat").unwrap_or_default();
        let file_page_lines = statistics.lines().filter_map(|line| {
            let (name, bytes) = line.split_once(' ')?;
            self.file_page_lines.contains(&name).then(|| bytes.trim().parse::<u64>().ok())?
        });
        let file_page_lines = file_page_lines.fold(0, u64::saturating_add);
        Some(limit.saturating_sub(number(self.used)?.saturating_sub(file_page_lines)))
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// Creates these files below a directory that stands for `/`.
    fn system(name: &str, files: &[(&str, &str)]) -> PathBuf {
        let root =
            std::env::temp_dir().join(format!("fabricast-memory-{name}-{}", std::process::id()));
        for (path, text) in files {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    /// Available bytes, and the limit.
    fn found(name: &str, files: &[(&str, &str)]) -> Option<(u64, String)> {
        let root = system(name, files);
        let found = available_below(&root).map(|found| (found.bytes, found.limit));
        let _ = std::fs::remove_dir_all(root);
        found
    }

    const HOST: (&str, &str) = ("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:    8 kB\n");

    #[test]
    fn available_memory_without_group_limit_is_that_of_the_host() {
        let on_host = Some((8192, "on this machine".to_owned()));
        assert_eq!(found("host", &[HOST]), on_host);
        let unlimited = [
            HOST,
            ("proc/self/cgroup", "0::/a\n"),
            ("sys/fs/cgroup/a/memory.max", "max\n"),
            ("sys/fs/cgroup/a/memory.current", "4096\n"),
        ];
        assert_eq!(found("unlimited", &unlimited), on_host);
        assert_eq!(found("nothing", &[]), None);
    }

    #[test]
    fn file_pages_count_as_available_to_a_group() {
        let files = [
            HOST,
            ("proc/self/cgroup", "0::/user/a b\n"),
            ("sys/fs/cgroup/user/a b/memory.max", "5000\n"),
            ("sys/fs/cgroup/user/a b/memory.current", "4500\n"),
            (
                "sys/fs/cgroup/user/a b/memory.stat",
                "anon 900\nfile 3600\ninactive_file 3000\nactive_file 600\n",
            ),
        ];
        let expected = Some((4100, "to its control group /user/a b".to_owned()));
        assert_eq!(found("files", &files), expected);
    }

    #[test]
    fn smallest_limit_up_to_the_root_group_counts() {
        let files = [
            HOST,
            ("proc/self/cgroup", "0::/a/b/c\n"),
            ("sys/fs/cgroup/a/b/c/memory.max", "6000\n"),
            ("sys/fs/cgroup/a/b/c/memory.current", "100\n"),
            ("sys/fs/cgroup/a/memory.max", "5000\n"),
            ("sys/fs/cgroup/a/memory.current", "4000\n"),
            ("sys/fs/cgroup/other/memory.max", "1\n"),
            ("sys/fs/cgroup/other/memory.current", "0\n"),
        ];
        assert_eq!(found("levels", &files), Some((1000, "to its control group /a".to_owned())));
        // A container sees its own group as the root.
        let files = [
            HOST,
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "7000\n"),
            ("sys/fs/cgroup/memory.current", "9000\n"),
        ];
        assert_eq!(found("root", &files), Some((0, "to its control group /".to_owned())));
    }

    #[test]
    fn groups_of_version_1_limit_memory() {
        let files = [
            HOST,
            ("proc/self/cgroup", "5:cpu,cpuacct:/c\n4:memory:/docker/1\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "3000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "2500\n"),
            (
                "sys/fs/cgroup/memory/memory.stat",
                "inactive_file 1\nactive_file 1\ntotal_inactive_file 400\ntotal_active_file 100\n",
            ),
            ("sys/fs/cgroup/cpu/c/memory.limit_in_bytes", "1\n"),
        ];
        assert_eq!(found("first", &files), Some((1000, "to its control group /".to_owned())));
    }
}
