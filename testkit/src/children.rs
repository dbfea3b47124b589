//! Child processes of tests.
//!
//! A child is the test program once more, with words that say what it is to do. A test program that
//! has such children names a function with [`child_entry!`](crate::child_entry), which
//! runs instead of the tests. A [`Child`] may also be any other program, and a [`ForkedChild`] goes
//! on with a copy of the test's memory.
//!
//! ```
//! use std::process::Stdio;
//! use std::time::Duration;
//! use testkit::children::{self, Child};
//!
//! testkit::child_entry!(|words| {
//!     children::say(&format!("{} words", words.len()));
//!     children::wait_for_end_of_input();
//! });
//!
//! let mut child = Child::start(children::respawn(["one", "two"]).stdout(Stdio::piped()));
//! assert_eq!(child.line(Duration::from_secs(20)).as_deref(), Some("2 words"));
//! child.end(Duration::from_secs(20));
//! ```
#![allow(unsafe_code)]

use std::ffi::OsStr;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// In the environment of a child.
const CHILD: &str = "FABRICAST_TEST_CHILD";
/// In the environment of tests of another processor: the emulator that runs them, with its
/// arguments. The system would not know how to run a child without it.
const EMULATOR: &str = "FABRICAST_TEST_EMULATOR";
/// Between two looks whether a child has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Names the function `fn(&[&str])` that children of this test program run instead of the tests,
/// with the words that [`respawn`](crate::children::again) was given. Once in a program.
#[macro_export]
macro_rules! child_entry {
    ($run_if_child:expr) => {
        const _: () = {
            const CHILD: fn(&[&str]) = $run_if_child;
            extern "C" fn run_before_main() {
                $crate::children::run_if_child(CHILD);
            }
            // Run before main, and so before the harness of the tests: only there a child can be
            // told from a test program without being a test itself.
            #[used]
            #[allow(unsafe_code)]
            #[unsafe(link_section = ".init_array")]
            static ENTRY: extern "C" fn() = run_before_main;
        };
    };
}

/// Runs a child, if this process is one; it does not return then.
#[doc(hidden)]
pub fn run_if_child(child: fn(&[&str])) {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    // SAFETY: what the runtime does before main; no other thread runs yet.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let ended = catch_unwind(|| child(&words));
    std::process::exit(if ended.is_ok() { 0 } else { 101 });
}

/// This program again, as a child with these words. Its input is a pipe, its output goes nowhere.
pub fn respawn(words: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Command {
    respawn_with(&[], words)
}

/// The same, started by another program, such as `unshare` with its arguments.
///
/// # Panics
/// If this program's path is not known.
pub fn respawn_with(
    program: &[&str],
    words: impl IntoIterator<Item = impl AsRef<OsStr>>,
) -> Command {
    let mut command = this_program_by(program);
    command.args(words).env(CHILD, "1").stdin(Stdio::piped()).stdout(Stdio::null());
    command
}

/// This program again, not as a child: for test programs that have arguments of their own.
///
/// # Panics
/// If this program's path is not known.
#[must_use]
pub fn this_program() -> Command {
    this_program_by(&[])
}

fn this_program_by(program: &[&str]) -> Command {
    let this = std::env::current_exe().expect("the path of this program");
    let emulator = std::env::var(EMULATOR).unwrap_or_default();
    let mut line = program.iter().copied().chain(emulator.split_whitespace());
    match line.next() {
        Some(first) => {
            let mut command = Command::new(first);
            command.args(line).arg(this);
            command
        }
        None => Command::new(this),
    }
}

/// In a child: says a line to the test.
///
/// # Panics
/// If the test does not read any more.
pub fn say(line: &str) {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{line}").and_then(|()| output.flush()).expect("a test that reads");
}

/// In a child: the next line that the test [says](Child::say); None when there are no more.
///
/// # Panics
/// If the input cannot be read.
pub fn next_line() -> Option<String> {
    let mut line = String::new();
    let length = std::io::stdin().read_line(&mut line).expect("an input of text");
    (length > 0).then(|| line.trim_end().to_owned())
}

/// In a child: waits until the test lets it [end](Child::end).
pub fn wait_for_end_of_input() {
    while next_line().is_some() {}
}

/// A child process, killed at the latest when it is dropped.
#[derive(Debug)]
pub struct Child {
    process: std::process::Child,
    /// What was read behind the last line.
    unread: Vec<u8>,
}

impl Child {
    /// Starts a child.
    ///
    /// # Panics
    /// If it cannot be started.
    #[track_caller]
    pub fn start(command: &mut Command) -> Self {
        let process = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        Self { process, unread: Vec::new() }
    }

    /// Its number.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// The next line of its output, which has to be a pipe; None when there are no more.
    ///
    /// # Panics
    /// If there is none for so long.
    #[track_caller]
    pub fn line(&mut self, timeout: Duration) -> Option<String> {
        let end = Instant::now() + timeout;
        loop {
            if let Some(length) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=length).collect();
                return Some(String::from_utf8_lossy(&line[..length]).into_owned());
            }
            let output = self.process.stdout.as_mut().expect("an output that is a pipe");
            let left = end.saturating_duration_since(Instant::now()).as_millis();
            let mut entry =
                libc::pollfd { fd: output.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one entry, which lives longer than the call.
            let found = unsafe { libc::poll(&raw mut entry, 1, left.min(60_000) as i32) };
            assert!(found > 0 || left > 0, "the child wrote no line in time");
            if found > 0 {
                let mut bytes = [0; 1024];
                match output.read(&mut bytes).expect("its output") {
                    0 => return None,
                    length => self.unread.extend_from_slice(&bytes[..length]),
                }
            }
        }
    }

    /// Says a line to it: it reads [that](next_line).
    ///
    /// # Panics
    /// If it does not read any more.
    #[track_caller]
    pub fn say(&mut self, line: &str) {
        let input = self.process.stdin.as_mut().expect("an input that is a pipe");
        writeln!(input, "{line}").and_then(|()| input.flush()).expect("a child that reads");
    }

    /// Waits until it has ended.
    ///
    /// # Panics
    /// If it did not exit in time for so long.
    #[track_caller]
    pub fn wait(&mut self, timeout: Duration) -> ExitStatus {
        let end = Instant::now() + timeout;
        loop {
            if let Some(status) = self.try_wait() {
                return status;
            }
            assert!(Instant::now() < end, "the child {} did not exit in time", self.id());
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// How it ended, if it has.
    ///
    /// # Panics
    /// If the system does not say.
    #[track_caller]
    pub fn try_wait(&mut self) -> Option<ExitStatus> {
        self.process.try_wait().expect("a child of ours")
    }

    /// Waits until it has ended well.
    ///
    /// # Panics
    /// If it fails, or did not exit in time for so long.
    #[track_caller]
    pub fn finish(&mut self, timeout: Duration) {
        let status = self.wait(timeout);
        assert!(status.success(), "the child failed: {status}");
    }

    /// Closes its input, and waits until it has ended well.
    ///
    /// # Panics
    /// As [`Self::finish`].
    #[track_caller]
    pub fn end(&mut self, timeout: Duration) {
        drop(self.process.stdin.take());
        self.finish(timeout);
    }

    /// Kills it.
    ///
    /// # Panics
    /// If it has been waited for before.
    #[track_caller]
    pub fn kill(&mut self) {
        self.process.kill().and_then(|()| self.process.wait()).expect("a child that lives");
    }

    /// Sends it a signal.
    ///
    /// # Panics
    /// If the system does not do it.
    #[track_caller]
    pub fn signal(&self, signal: i32) {
        // SAFETY: no pointers; a child that is not reaped, so the number is its own.
        assert_eq!(unsafe { libc::kill(self.id() as i32, signal) }, 0);
    }

    /// Stops it, until it is [resumed](Self::resume) or killed. All of it: on several processors some
    /// of its threads run a while longer.
    ///
    /// # Panics
    /// If it does not stop for so long.
    #[track_caller]
    pub fn stop(&self, timeout: Duration) {
        self.signal(libc::SIGSTOP);
        let threads = format!("/proc/{}/task", self.id());
        let is_stopped = |thread: std::fs::DirEntry| {
            let line = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            // Behind its name, which may have anything in it.
            line.rsplit_once(')').is_none_or(|(_, unread)| unread.trim_start().starts_with('T'))
        };
        let end = Instant::now() + timeout;
        while !std::fs::read_dir(&threads).expect("a child").flatten().all(is_stopped) {
            assert!(Instant::now() < end, "the child {} does not stop", self.id());
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Lets it go on.
    ///
    /// # Panics
    /// As [`Self::signal`].
    #[track_caller]
    pub fn resume(&self) {
        self.signal(libc::SIGCONT);
    }

    /// Its output, to be read by another thread. It has to be a pipe.
    ///
    /// # Panics
    /// If it is none, or was taken.
    pub fn output(&mut self) -> std::process::ChildStdout {
        self.process.stdout.take().expect("an output that is a pipe")
    }

    /// How many descriptors it has open.
    ///
    /// # Panics
    /// If it has ended.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.id())).expect("a child").count()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A child with a copy of this process, killed at the latest when it is dropped.
#[derive(Debug)]
pub struct ForkedChild {
    number: libc::pid_t,
    parent: u32,
    is_reaped: bool,
}

impl ForkedChild {
    /// A child that does this and ends, well unless it panics. Of the test's threads it has this one
    /// alone, so what it does must need no other, and no lock that another holds.
    ///
    /// # Panics
    /// If the system has no place for it.
    pub fn new(act: impl FnOnce()) -> Self {
        // SAFETY: the child goes on alone, with a copy of everything. It uses what this thread uses,
        // and never returns from here.
        let number = unsafe { libc::fork() };
        assert!(number >= 0, "fork: {}", std::io::Error::last_os_error());
        if number == 0 {
            let code = i32::from(catch_unwind(AssertUnwindSafe(act)).is_err());
            // SAFETY: ends the child without running anything that is the parent's.
            unsafe { libc::_exit(code) };
        }
        Self { number, parent: std::process::id(), is_reaped: false }
    }

    /// A descriptor of the process.
    ///
    /// # Panics
    /// If the system gives none.
    #[must_use]
    pub fn pidfd(&self) -> OwnedFd {
        // SAFETY: no pointers; the child is not reaped, so the number is its own.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, self.number, 0) };
        assert!(fd >= 0, "pidfd_open: {}", std::io::Error::last_os_error());
        // SAFETY: just opened, and nobody else's.
        unsafe { OwnedFd::from_raw_fd(fd as RawFd) }
    }

    /// Kills it; it stays to be [waited for](Self::wait).
    pub fn kill(&self) {
        // SAFETY: a child of ours, not reaped yet.
        unsafe { libc::kill(self.number, libc::SIGKILL) };
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// If it is no child of this process.
    pub fn wait(mut self) -> ExitStatus {
        self.reap()
    }

    fn reap(&mut self) -> ExitStatus {
        let mut status = 0;
        self.is_reaped = true;
        // SAFETY: a child of ours, not reaped before.
        let found = unsafe { libc::waitpid(self.number, &raw mut status, 0) };
        assert_eq!(found, self.number);
        ExitStatus::from_raw(status)
    }

    /// Waits for its end: was it killed? If not, it ended well.
    ///
    /// # Panics
    /// If it failed.
    #[track_caller]
    pub fn was_killed(self) -> bool {
        let status = self.wait();
        let was_killed = status.signal() == Some(libc::SIGKILL);
        assert!(was_killed || status.success(), "the child failed: {status}");
        was_killed
    }
}

impl Drop for ForkedChild {
    fn drop(&mut self) {
        // A child may have copies of others, which are not its children.
        if !self.is_reaped && self.parent == std::process::id() {
            self.kill();
            self.reap();
        }
    }
}
