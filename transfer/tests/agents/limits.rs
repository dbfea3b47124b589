//! Agents that the system refuses something: descriptors, memory, threads, or their directory.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
use nix::unistd::{Uid, setuid};
use testkit::children::{self, Child};
use transfer::{Agent, AgentOptions, ErrorKind};

use crate::common::TIMEOUT;
use crate::fixture::with_rails;
use crate::rails::tcp;

/// A user without rights.
const UNPRIVILEGED: u32 = 65534;

/// The child: starts agents within its limit until one cannot start or connect, and says why.
pub fn run(what: &str, directory: &Path) {
    let options = AgentOptions::new("limited").directory(directory);
    let (kind, number) = what.split_once(' ').unwrap();
    let number: u64 = number.parse().unwrap();
    let mut options = match kind {
        "descriptors" | "user" | "any" => options,
        _ => with_rails(options.force_remote(), tcp(), 1),
    };
    match kind {
        "descriptors" | "rail-descriptors" => {
            setrlimit(Resource::RLIMIT_NOFILE, number, number).unwrap();
        }
        "memory" => {
            // What the process has already, and this number of bytes.
            let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
            let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
            let limit = pages * ipc::page_size() as u64 + number;
            setrlimit(Resource::RLIMIT_AS, limit, RLIM_INFINITY).unwrap();
        }
        "user" => setuid(Uid::from_raw(number as u32)).unwrap(),
        _ => {}
    }
    let mut agents: Vec<Agent> = Vec::new();
    loop {
        options = options.label(&format!("limited {}", agents.len()));
        let error = match Agent::start(options.clone()) {
            Ok(agent) => {
                let card = agent.card().encode().unwrap();
                let connected = agents.first_mut().map(|first| first.connect(&card, TIMEOUT));
                agents.push(agent);
                match connected {
                    Some(Err(error)) => error,
                    _ => continue,
                }
            }
            Err(error) => error,
        };
        return children::say(&format!("{:?} {error}", error.kind()));
    }
}

struct TestDirectory(std::path::PathBuf);

impl TestDirectory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("fc-limits-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// The error of a child of this role.
    fn error_of(&self, wrapper: &[&str], what: &str) -> String {
        let words = [format!("limited {what}"), self.0.display().to_string()];
        let mut command = children::respawn_with(wrapper, words);
        let (lines, status) = Child::run(&mut command, Duration::from_secs(60));
        assert!(status.success(), "{what}: {status}: {lines:?}");
        lines.concat()
    }
}

impl Drop for TestDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Whichever descriptor is missing: also where the provider reports another error.
#[test]
fn agent_without_descriptors_names_limit_and_number() {
    let directory = TestDirectory::new("descriptors");
    for (what, limits) in
        [("descriptors", (8..28).collect()), ("rail-descriptors", vec![8, 10, 14, 16, 20, 24])]
    {
        for limit in limits {
            let error = directory.error_of(&[], &format!("{what} {limit}"));
            let number = format!("of {limit} descriptors are open");
            assert!(
                error.contains(&number) && error.contains("ulimit -n"),
                "{what} {limit}: {error}"
            );
        }
    }
}

/// Rust aborts without memory for a small allocation.
#[test]
fn agent_without_memory_is_an_error_and_no_abort() {
    let directory = TestDirectory::new("memory");
    for mebibytes in [1, 8, 16, 24, 33, 48, 64] {
        let error = directory.error_of(&[], &format!("memory {}", mebibytes << 20));
        let has_remedy = error.contains("the address space of this process may have");
        assert!(has_remedy && error.ends_with("ulimit -v unlimited"), "{mebibytes} MiB: {error}");
    }
}

#[test]
fn directory_without_the_right_to_write_is_denied_with_remedy() {
    let directory = TestDirectory::new("denied");
    std::fs::set_permissions(&directory.0, PermissionsExt::from_mode(0o555)).unwrap();
    let user = if Uid::effective().is_root() { UNPRIVILEGED } else { Uid::effective().as_raw() };
    let error = directory.error_of(&[], &format!("user {user}"));
    let text = "writing the card file: Permission denied (os error 13). Let this user write there, or \
                choose another directory";
    assert!(error.starts_with("Denied start agent at ") && error.ends_with(text), "{error}");
}

/// No room for the card, no inode for the socket, and a file system that is read-only.
#[test]
fn full_or_read_only_directory_has_a_remedy() {
    let directory = TestDirectory::new("full");
    let path = directory.0.display();
    let free = "Free space or inodes on its file system (df, df -i), or choose another directory";
    for (options, fill, remedy) in [
        ("size=8k", "8192", free),
        ("nr_inodes=2", "0", free),
        ("size=8k,ro", "0", "Its file system is read-only: choose another directory"),
    ] {
        let script = format!(
            "mount -t tmpfs -o {options} none {path} && \
             {{ [ {fill} = 0 ] || head -c {fill} /dev/zero >{path}/fill; }} && exec \"$@\""
        );
        let unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"];
        let mut probe = Command::new(unshare[0]);
        probe.args(&unshare[1..]).args([&script, "-", "true"]).stderr(Stdio::null());
        if !probe.status().is_ok_and(|status| status.success()) {
            testkit::skip!("no namespace with a file system of its own can be made");
        }
        let wrapper = [&unshare[..], &[script.as_str(), "-"]].concat();
        let error = directory.error_of(&wrapper, "any 0");
        assert!(error.contains("start agent at ") && error.ends_with(remedy), "{options}: {error}");
    }
}

#[test]
fn directory_that_is_a_file_has_a_remedy() {
    let directory = TestDirectory::new("file");
    let file = directory.0.join("file");
    std::fs::write(&file, b"").unwrap();
    let error = Agent::start(AgentOptions::new("limited").directory(&file)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Failed);
    assert!(
        error.to_string().ends_with("Not a directory (os error 20). Name a directory"),
        "{error}"
    );
}
