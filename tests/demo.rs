//! The demonstration: its results, its end, and that it leaves nothing behind.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::Flock;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use testkit::children::Child;
use testkit::measurement_lock::lock_measurements;
use testkit::processes::{Process, children, poll_until, wait_until_gone};
use testkit::temp_dir::TempDir;

/// Upper bound of its time.
const LIMIT: Duration = Duration::from_secs(50);
/// Number of processes: two nodes, three publishers, eight subscribers.
const PROCESSES: usize = 13;
/// Only a failing test waits so long.
const ENDING: Duration = Duration::from_secs(60);

/// The command line of a process.
fn arguments(number: i32) -> String {
    let text = std::fs::read(format!("/proc/{number}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&text).replace('\0', " ")
}

/// A demonstration with its own directory for temporary files.
struct Demonstration {
    child: Child,
    directory: TempDir,
    began: Instant,
    _lock: Flock<File>,
}

impl Demonstration {
    fn start(name: &str, arguments: &[&str]) -> Self {
        let lock_measurements = lock_measurements();
        let directory = TempDir::new(&format!("demo-{name}"));
        std::fs::create_dir_all(directory.join("tmp")).unwrap();
        let child = Self::launch(&directory, arguments);
        Self { child, directory, began: Instant::now(), _lock: lock_measurements }
    }

    fn launch(directory: &TempDir, arguments: &[&str]) -> Child {
        let file = |name: &str| Stdio::from(File::create(directory.join(name)).unwrap());
        let mut command = Command::new(env!("CARGO_BIN_EXE_fabricast"));
        command.arg("demo").args(arguments).env("TMPDIR", directory.join("tmp"));
        command.env_remove("FI_PROVIDER").env_remove("FABRICAST_LOG");
        Child::start(command.stdout(file("out")).stderr(file("error")))
    }

    /// Starts another one with the same directory for temporary files.
    fn start_again(&mut self, arguments: &[&str]) {
        (self.child, self.began) = (Self::launch(&self.directory, arguments), Instant::now());
    }

    /// The temporary files.
    fn left(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.directory.join("tmp")).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    }

    fn number(&self) -> i32 {
        self.child.id() as i32
    }

    fn output(&self, name: &str) -> String {
        std::fs::read_to_string(self.directory.join(name)).unwrap()
    }

    /// Waits until all processes run.
    fn wait_for_all(&mut self) -> BTreeSet<Process> {
        poll_until("not all processes started", || {
            let ended = self.child.try_wait();
            assert!(ended.is_none(), "{}{}", self.output("out"), self.output("error"));
            let all = children(self.child.id() as i32);
            (all.len() == PROCESSES).then_some(all)
        })
    }

    /// Waits until it has ended by itself, in time.
    #[track_caller]
    fn end(&mut self) -> ExitStatus {
        let status = self.child.wait(ENDING);
        assert!(self.began.elapsed() < LIMIT, "{:?}", self.began.elapsed());
        status
    }

    #[track_caller]
    fn leaves_nothing(&self, others: &BTreeSet<Process>) {
        wait_until_gone(others);
        let left = self.left();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn missing_device_is_an_error_before_the_start() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fabricast"));
    let output = command.args(["demo", "--memory", "emulated:99"]).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{error}");
    assert!(output.stdout.is_empty() && error.contains("emulated:99"), "{error}");
}

#[test]
fn all_messages_are_read_and_verified() {
    let mut demonstration = Demonstration::start("json", &["--time", "2", "--json"]);
    let others = demonstration.wait_for_all();
    let status = demonstration.end();
    let (out, error) = (demonstration.output("out"), demonstration.output("error"));
    assert_eq!(status.code(), Some(0), "{out}{error}");
    assert_eq!(out.lines().count(), 1, "{out}");
    let found: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&found["verified"], &found["complete"]), (&true.into(), &true.into()), "{found}");
    let subscribers = found["subscribers"].as_array().unwrap();
    assert_eq!((subscribers.len(), found["published"].as_object().unwrap().len()), (8, 3));
    for subscriber in subscribers {
        let topic = subscriber["topic"].as_str().unwrap();
        assert!(subscriber["messages"].as_u64() > Some(0), "{subscriber}");
        assert_eq!(subscriber["messages"], found["published"][topic], "{found}");
        assert_eq!(subscriber["corrupted"], 0, "{subscriber}");
        let is_remote = subscriber["paths"][0] != "shared-memory";
        let stages = subscriber["stages"].as_array().unwrap().iter();
        let stages: Vec<_> = stages.map(|it| it["stage"].as_str().unwrap()).collect();
        assert!(stages.starts_with(&["loan", "fill", "queue"]), "{stages:?}");
        assert!(stages.ends_with(&["wakeup", "total"]), "{stages:?}");
        assert_eq!(stages.contains(&"wire"), is_remote, "{stages:?}");
    }
    let paths = found["paths"].as_object().unwrap();
    assert_eq!(paths.len(), 2, "{found}");
    // Sent once to a node, for all its subscribers.
    let carried = paths.iter().find(|(name, _)| *name != "shared-memory").unwrap().1;
    let of_all: u64 =
        found["published"].as_object().unwrap().values().filter_map(Value::as_u64).sum();
    assert_eq!(carried["messages"], of_all, "{found}");
    assert_eq!(found["slowest"].as_array().unwrap().len(), 2);
    demonstration.leaves_nothing(&others);
}

#[test]
fn demonstration_on_loopback_prints_plain_lines() {
    let arguments = ["--time", "1", "--network", "loopback"];
    let mut demonstration = Demonstration::start("loopback", &arguments);
    let status = demonstration.end();
    let (out, error) = (demonstration.output("out"), demonstration.output("error"));
    assert_eq!(status.code(), Some(0), "{out}{error}");
    assert!(out.ends_with("\ndemo: ok\n") && !out.contains('\x1b'), "{out}");
    for word in
        ["on the loopback address", "slowest stage on shared-memory", "0 corrupted, 0 missed"]
    {
        assert!(out.contains(word), "{word} is missing:\n{out}");
    }
    assert!(out.lines().all(|line| line.chars().count() <= 130), "{out}");
    demonstration.leaves_nothing(&BTreeSet::new());
}

#[test]
fn interrupted_demonstration_leaves_nothing() {
    for (name, signal) in [("int", Signal::SIGINT), ("term", Signal::SIGTERM)] {
        let mut demonstration = Demonstration::start(name, &["--time", "60"]);
        let others = demonstration.wait_for_all();
        kill(Pid::from_raw(demonstration.number()), signal).unwrap();
        let status = demonstration.end();
        assert_eq!(status.code(), Some(130), "{signal}: {}", demonstration.output("error"));
        demonstration.leaves_nothing(&others);
    }
}

#[test]
fn killed_process_ends_the_demonstration_and_is_named() {
    for part in ["node 2, b", "node 2", "publisher of lidar"] {
        let mut demonstration = Demonstration::start("killed", &["--time", "60"]);
        let others = demonstration.wait_for_all();
        let is_it =
            |number: i32| arguments(number).contains(&format!("--label {part} --directory"));
        let (number, _) = others.iter().find(|(number, _)| is_it(*number)).unwrap();
        kill(Pid::from_raw(*number), Signal::SIGKILL).unwrap();
        let status = demonstration.end();
        let error = demonstration.output("error");
        assert_eq!(status.code(), Some(1), "{error}");
        assert!(error.contains(&format!("{part} ended unexpectedly")), "{error}");
        demonstration.leaves_nothing(&others);
    }
}

#[test]
fn killed_demonstration_is_cleaned_up_by_the_next() {
    let mut demonstration = Demonstration::start("orphans", &["--time", "60"]);
    let others = demonstration.wait_for_all();
    kill(Pid::from_raw(demonstration.number()), Signal::SIGKILL).unwrap();
    let _ = demonstration.child.wait(ENDING);
    wait_until_gone(&others);
    let [older] = &demonstration.left()[..] else { panic!("{:?}", demonstration.left()) };
    demonstration.start_again(&["--time", "60"]);
    let others = demonstration.wait_for_all();
    assert!(!older.exists() && demonstration.left().len() == 1, "{:?}", demonstration.left());
    kill(Pid::from_raw(demonstration.number()), Signal::SIGTERM).unwrap();
    demonstration.end();
    demonstration.leaves_nothing(&others);
}

#[test]
fn invalid_options_of_the_demonstration_are_usage_errors() {
    for arguments in [&["--time", "0.5"][..], &["--network", "nowhere"]] {
        let mut demonstration = Demonstration::start("refused", arguments);
        assert_eq!(demonstration.end().code(), Some(2), "{arguments:?}");
    }
}
