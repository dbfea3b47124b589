//! Runs the command with a node in the test's own directory.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use testkit::temp_dir::TempDir;

/// Only a failing test waits so long.
const LIMIT: Duration = Duration::from_secs(60);

/// Names and values.
pub(crate) type Pairs<'a> = &'a [(&'a str, &'a str)];

/// A directory with a node in it.
pub(crate) struct TestNode {
    directory: TempDir,
}

/// How the command ended.
#[derive(Debug)]
pub(crate) struct ProcessResult {
    pub(crate) code: Option<i32>,
    pub(crate) output: String,
    pub(crate) error: String,
}

/// A process of the command, killed when this is dropped.
pub(crate) struct Running(Child);

impl TestNode {
    pub(crate) fn new() -> Self {
        let name = std::thread::current().name().unwrap_or("messages").replace("::", "-");
        Self { directory: TempDir::new(&name) }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    pub(crate) fn write(&self, name: &str, content: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fabricast"));
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("FABRICAST_") {
                command.env_remove(name);
            }
        }
        command.args(arguments).env("FABRICAST_DIRECTORY", self.path("node"));
        command.env_remove("NOTIFY_SOCKET").env_remove("FI_PROVIDER").env_remove("FI_LOG_LEVEL");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs the command to its end, with this standard input.
    pub(crate) fn run_with(
        &self,
        arguments: &[&str],
        input: &str,
        environment: &[(&str, &str)],
    ) -> ProcessResult {
        let input = std::fs::File::open(self.write("input", input)).unwrap();
        let begin = Instant::now();
        let mut command = self.command(arguments);
        let output = command.stdin(input).envs(environment.iter().copied()).output().unwrap();
        assert!(begin.elapsed() < LIMIT, "{arguments:?} took {:?}", begin.elapsed());
        assert_eq!(output.status.signal(), None, "{arguments:?}");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        ProcessResult {
            code: output.status.code(),
            output: text(&output.stdout),
            error: text(&output.stderr),
        }
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> ProcessResult {
        self.run_with(arguments, "", &[])
    }

    /// Starts the command, and waits until the node has the topic or, without a topic, is served.
    pub(crate) fn start(&self, arguments: &[&str], topic: Option<&str>) -> Running {
        let mut command = self.command(arguments);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let running = Running(child);
        let end = Instant::now() + LIMIT;
        loop {
            let report = self.run(&["topics", "--json"]);
            let named = topic.map(|topic| format!("\"name\":\"{topic}\""));
            if report.code == Some(0) && named.is_none_or(|named| report.output.contains(&named)) {
                return running;
            }
            assert!(Instant::now() < end, "{report:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Replaces names in braces by the paths of this test and these values.
    fn filled(&self, text: &str, words: &[(&str, &str)]) -> String {
        let directory = self.path("node");
        let directory = directory.parent().unwrap().display().to_string();
        let text = text.replace("{directory}", &directory);
        words.iter().fold(text, |text, (name, word)| text.replace(&format!("{{{name}}}"), word))
    }

    /// The command ends with this code, and standard error is this text.
    #[track_caller]
    pub(crate) fn fails(&self, arguments: &[&str], code: i32, error: &str) {
        self.fails_with(arguments, ("", &[], &[]), code, error);
    }

    /// Like [`Self::fails`], with an input, variables, and values of names in braces.
    #[track_caller]
    pub(crate) fn fails_with(
        &self,
        arguments: &[&str],
        (input, environment, words): (&str, Pairs<'_>, Pairs<'_>),
        code: i32,
        error: &str,
    ) {
        let ended = self.run_with(arguments, input, environment);
        let expected = self.filled(error, words);
        assert_eq!(ended.error, expected, "{arguments:?}");
        assert_eq!(ended.code, Some(code), "{arguments:?}: {ended:?}");
    }
}

impl Running {
    /// Stops all its threads.
    pub(crate) fn stop(&self) {
        use nix::sys::signal::{Signal, kill};
        kill(nix::unistd::Pid::from_raw(self.0.id() as i32), Signal::SIGSTOP).unwrap();
        let end = Instant::now() + LIMIT;
        let is_stopped = || {
            let line = std::fs::read_to_string(format!("/proc/{}/stat", self.id())).unwrap();
            line.rsplit_once(')').unwrap().1.trim_start().starts_with('T')
        };
        while !is_stopped() {
            assert!(Instant::now() < end, "it does not stop");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub(crate) fn id(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
