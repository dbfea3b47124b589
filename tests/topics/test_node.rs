//! A node of a test, and its processes.

use std::cell::Cell;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// Only a failing test waits so long.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A directory with a node in it, removed at the end.
pub(crate) struct TestNode {
    pub(crate) directory: PathBuf,
    next: Cell<u32>,
}

impl TestNode {
    pub(crate) fn open() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fabricast-topics-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory).unwrap();
        Self { directory, next: Cell::new(0) }
    }

    /// The directory of the node.
    pub(crate) fn node(&self) -> PathBuf {
        self.directory.join("node")
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.path(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    /// The command with the directory of the node.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fabricast"));
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("FABRICAST_") {
                command.env_remove(name);
            }
        }
        command.args(arguments).env("FABRICAST_DIRECTORY", self.node());
        command.env_remove("NOTIFY_SOCKET");
        command
    }

    /// A named pipe.
    pub(crate) fn pipe(&self, name: &str) -> String {
        let path = self.path(name);
        nix::unistd::mkfifo(path.as_str(), nix::sys::stat::Mode::S_IRWXU).unwrap();
        path
    }

    /// Starts the command at the node.
    pub(crate) fn start(&self, arguments: &[&str]) -> Process {
        self.start_with(arguments, "", &[])
    }

    pub(crate) fn start_with(
        &self,
        arguments: &[&str],
        input: &str,
        environment: &[(&str, &str)],
    ) -> Process {
        let number = self.next.get();
        self.next.set(number + 1);
        let path = |what: &str| self.directory.join(format!("{number}.{what}"));
        let (input_file, output, error) = (path("in"), path("out"), path("err"));
        std::fs::write(&input_file, input).unwrap();
        let mut command = self.command(arguments);
        command.envs(environment.iter().copied());
        command.stdin(File::open(input_file).unwrap());
        command.stdout(File::create(&output).unwrap()).stderr(File::create(&error).unwrap());
        let child = command.spawn().unwrap();
        Process { child, what: arguments.join(" "), output, error }
    }

    /// Like [`Self::start`], with this standard output.
    pub(crate) fn start_to(&self, arguments: &[&str], to: impl Into<Stdio>) -> Process {
        let number = self.next.get();
        self.next.set(number + 1);
        let (output, error) = (self.directory.join("none"), format!("{number}.err"));
        let error = self.directory.join(error);
        let mut command = self.command(arguments);
        command.stdin(Stdio::null()).stdout(to).stderr(File::create(&error).unwrap());
        let child = command.spawn().unwrap();
        Process { child, what: arguments.join(" "), output, error }
    }

    /// Like [`Self::start`], with this standard input.
    pub(crate) fn start_from(&self, arguments: &[&str], from: impl Into<Stdio>) -> Process {
        let number = self.next.get();
        self.next.set(number + 1);
        let path = |what: &str| self.directory.join(format!("{number}.{what}"));
        let (output, error) = (path("out"), path("err"));
        let mut command = self.command(arguments);
        command.stdin(from);
        command.stdout(File::create(&output).unwrap()).stderr(File::create(&error).unwrap());
        let child = command.spawn().unwrap();
        Process { child, what: arguments.join(" "), output, error }
    }

    /// Starts a dedicated service of the node.
    #[track_caller]
    pub(crate) fn serve(&self) -> Process {
        let mut node = self.start(&["node"]);
        node.wait_for("serving node");
        node
    }

    /// Runs the command to its end. Returns the exit code, and standard output and error.
    pub(crate) fn run(&self, arguments: &[&str]) -> (Option<i32>, String) {
        self.run_with(arguments, "", &[])
    }

    pub(crate) fn run_with(
        &self,
        arguments: &[&str],
        input: &str,
        environment: &[(&str, &str)],
    ) -> (Option<i32>, String) {
        let mut process = self.start_with(arguments, input, environment);
        let code = process.end().code();
        (code, process.output() + &process.error())
    }

    /// Runs the command, which must succeed. Returns standard output.
    #[track_caller]
    pub(crate) fn succeed(&self, arguments: &[&str]) -> String {
        let mut process = self.start(arguments);
        process.succeed()
    }

    #[track_caller]
    pub(crate) fn json(&self, arguments: &[&str]) -> Value {
        parse(&self.succeed(arguments))
    }

    /// Waits until the node's report meets a condition.
    #[track_caller]
    pub(crate) fn wait_until(&self, what: &str, condition: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + TIMEOUT;
        loop {
            let mut process = self.start(&["topics", "--json"]);
            if process.end().success() {
                let report = parse(&process.output());
                if condition(&report) {
                    return report;
                }
            }
            assert!(Instant::now() < end, "{what}: {} {}", process.output(), process.error());
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

impl Drop for TestNode {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.directory);
        }
    }
}

/// One line of JSON.
#[track_caller]
pub(crate) fn parse(text: &str) -> Value {
    assert_eq!(text.lines().count(), 1, "{text}");
    serde_json::from_str(text).unwrap()
}

/// The topic of a report.
pub(crate) fn topic<'a>(report: &'a Value, name: &str) -> Option<&'a Value> {
    report["topics"].as_array()?.iter().find(|topic| topic["name"] == name)
}

/// A process of the command; killed on drop.
pub(crate) struct Process {
    child: Child,
    what: String,
    output: PathBuf,
    error: PathBuf,
}

impl Process {
    pub(crate) fn output(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.output).unwrap()).into_owned()
    }

    pub(crate) fn error(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.error).unwrap()).into_owned()
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
        if signal == Signal::SIGSTOP {
            // Some threads run on for a while.
            testkit::children::wait_for_stop(self.child.id(), TIMEOUT);
        }
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    #[track_caller]
    pub(crate) fn end(&mut self) -> ExitStatus {
        let end = Instant::now() + TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < end, "{} does not end: {}", self.what, self.error());
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    #[track_caller]
    pub(crate) fn succeed(&mut self) -> String {
        let status = self.end();
        let (output, error) = (self.output(), self.error());
        assert_eq!(status.code(), Some(0), "{}\n{output}\n{error}", self.what);
        output
    }

    /// Interrupts the process repeatedly, since it may not catch the first signal.
    #[track_caller]
    pub(crate) fn interrupt(&mut self) -> ExitStatus {
        let end = Instant::now() + TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < end, "{} does not end: {}", self.what, self.error());
            self.signal(Signal::SIGINT);
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits until standard error contains this text.
    #[track_caller]
    pub(crate) fn wait_for(&mut self, what: &str) {
        let end = Instant::now() + TIMEOUT;
        while !self.error().contains(what) {
            let status = self.child.try_wait().unwrap();
            let error = self.error();
            assert!(status.is_none() && Instant::now() < end, "{}: {what}: {error}", self.what);
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Kills the process, as a crash.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
