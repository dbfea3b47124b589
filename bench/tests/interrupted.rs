//! Interrupted benchmarks leave no process and no directory.

use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use testkit::children::Child;
use testkit::measurement_lock::lock_measurements;
use testkit::processes::{Process, descendants, poll_until, wait_until_gone};
use testkit::temp_dir::TempDir;

const UNSHARE: [&str; 7] =
    ["--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--ipc", "--net"];

/// An endless benchmark, with its own directory for temporary files.
struct Measurement {
    child: Child,
    directory: Rc<TempDir>,
}

impl Measurement {
    fn start(name: &str, arguments: &[&str]) -> Self {
        let directory = Rc::new(TempDir::new(&format!("ends-{name}")));
        let child = Child::start(&mut bench(&directory, arguments));
        Self { child, directory }
    }

    fn number(&self) -> i32 {
        self.child.id() as i32
    }

    fn left(&self) -> Vec<PathBuf> {
        self.directory.entries()
    }

    /// Waits until it has started other processes.
    fn wait_for_others(&self, count: usize) -> BTreeSet<Process> {
        poll_until("no other process was started", || {
            let all = descendants(self.number());
            (all.len() >= count).then_some(all)
        })
    }

    /// Ends it, and waits until all its processes have exited.
    fn end(&mut self, signal: Signal, others: &BTreeSet<Process>) {
        kill(Pid::from_raw(self.number()), signal).unwrap();
        let status = self.child.wait(ENDING);
        // libfabric's shm catches signals, removes its files, and exits with 1.
        let is_by_provider = signal != Signal::SIGKILL && status.code() == Some(1);
        assert!(is_by_provider || status.signal() == Some(signal as i32), "{status}");
        wait_until_gone(others);
    }
}

fn bench(directory: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fabricast-bench"));
    command.args(arguments).env("TMPDIR", directory).env_remove("FI_PROVIDER");
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// Only a failing test waits so long.
const ENDING: Duration = Duration::from_secs(60);
const TRANSFER: [&str; 9] =
    ["transfer", "--from", "emulated:0", "--to", "emulated:1", "--size", "4K", "--iters", "1G"];

#[test]
fn terminated_benchmark_leaves_nothing() {
    let _lock = lock_measurements();
    for (name, arguments) in [
        ("transfer", &TRANSFER[..]),
        ("queue", &["queue", "--iters", "1G", "--waiting", "block"]),
        ("alloc", &["alloc", "--processes", "2", "--iters", "1G"]),
        ("share", &["share", "--device", "emulated:0", "--size", "4K", "--iters", "1G"]),
    ] {
        for signal in [Signal::SIGTERM, Signal::SIGINT] {
            let mut measurement = Measurement::start(name, arguments);
            let others = measurement.wait_for_others(1);
            measurement.end(signal, &others);
            assert_eq!(measurement.left(), [""; 0].map(PathBuf::from), "{name} {signal}");
        }
    }
}

#[test]
fn benchmark_between_namespaces_leaves_nothing() {
    let _lock = lock_measurements();
    let works = Command::new("unshare").args(UNSHARE).arg("true").stderr(Stdio::null()).status();
    if !works.is_ok_and(|status| status.success()) {
        testkit::skip!("namespaces are not permitted here");
    }
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let arguments = [&TRANSFER[..], &["--isolated"]].concat();
        let mut measurement = Measurement::start("isolated", &arguments);
        // unshare, and the worker in it.
        let others = measurement.wait_for_others(2);
        measurement.end(signal, &others);
        assert!(signal == Signal::SIGKILL || measurement.left().is_empty());
    }
}

#[test]
fn next_benchmark_removes_what_a_killed_one_left() {
    let _lock = lock_measurements();
    let mut measurement = Measurement::start("killed", &TRANSFER);
    let others = measurement.wait_for_others(1);
    measurement.end(Signal::SIGKILL, &others);
    assert_eq!(measurement.left().len(), 1);
    // A running one is not touched.
    let second = Child::start(&mut bench(&measurement.directory, &TRANSFER));
    let mut second = Measurement { child: second, directory: Rc::clone(&measurement.directory) };
    let others = second.wait_for_others(1);
    assert_eq!(second.left().len(), 1);
    let short = ["alloc", "--iters", "100", "--processes", "1"];
    assert!(bench(&measurement.directory, &short).status().unwrap().success());
    assert_eq!(second.left().len(), 1);
    second.end(Signal::SIGTERM, &others);
    assert_eq!(second.left().len(), 0);
}

/// Signals are ignored under nohup, and in background jobs of a script.
#[test]
fn ignored_signal_stays_ignored() {
    let _lock = lock_measurements();
    let directory = Rc::new(TempDir::new("ends-ignored"));
    let program = env!("CARGO_BIN_EXE_fabricast-bench");
    let script = format!("trap '' INT; exec {program} {}", TRANSFER.join(" "));
    let mut shell = Command::new("sh");
    shell.args(["-c", &script]).env("TMPDIR", &**directory).stdout(Stdio::null());
    let child = Child::start(shell.stderr(Stdio::null()));
    let mut measurement = Measurement { child, directory };
    let others = measurement.wait_for_others(1);
    kill(Pid::from_raw(measurement.number()), Signal::SIGINT).unwrap();
    measurement.end(Signal::SIGTERM, &others);
}

#[test]
fn processes_of_an_exchange_end_with_their_parent() {
    let _lock = lock_measurements();
    for command in ["fabric", "ring"] {
        // A killed process leaves shared memory of provider shm.
        for (signal, provider) in
            [(Signal::SIGTERM, "shm"), (Signal::SIGINT, "shm"), (Signal::SIGKILL, "tcp;ofi_rxm")]
        {
            let arguments = [command, "--provider", provider, "--iters", "1G"];
            let mut measurement = Measurement::start(command, &arguments);
            let others = measurement.wait_for_others(1);
            measurement.end(signal, &others);
            assert!(measurement.left().is_empty());
        }
    }
}

#[test]
fn missing_core_is_a_usage_error() {
    let _lock = lock_measurements();
    let directory = TempDir::new("ends-cores");
    for arguments in [
        &["transfer", "--from", "emulated:0", "--size", "4K", "--cores", "0,1000"][..],
        &["transfer", "--from", "emulated:0", "--size", "4K", "--cores", "1000,0"],
        &["transfer", "--from", "emulated:0", "--size", "4K", "--cores", "0"],
        &["share", "--device", "emulated:0", "--size", "4K", "--cores", "0,1000"],
        &["queue", "--iters", "10", "--cores", "0,1000"],
        &["alloc", "--iters", "10", "--processes", "1", "--cores", "1000"],
        &["fabric", "--provider", "shm", "--iters", "10", "--cores", "0,1000"],
    ] {
        let status = bench(&directory, arguments).status().unwrap();
        assert_eq!(status.code(), Some(2), "{arguments:?}");
    }
    assert!(directory.entries().is_empty());
}
