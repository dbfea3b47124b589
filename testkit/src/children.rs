//! Child processes of tests.
//!
//! A child is the test program again, with words that name its task. A test program with such
//! children names a function with [`child_entry!`](crate::child_entry), which runs instead of
//! the tests. A [`Child`] may also be any other program, and a [`ForkedChild`] continues with a
//! copy of the test's memory.
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

/// Set in the environment of a child.
const CHILD: &str = "TEST_CHILD";
/// Set in the environment of tests for another processor: the emulator that runs them, with its
/// arguments. Without it the system could not run a child.
const EMULATOR: &str = "TEST_EMULATOR";
/// Pause between two checks whether a child has exited.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Names the function `fn(&[&str])` that children of this test program run instead of the
/// tests, with the words given to [`respawn`](crate::children::respawn). Once in a program.
#[macro_export]
macro_rules! child_entry {
    ($run_if_child:expr) => {
        const _: () = {
            const CHILD: fn(&[&str]) = $run_if_child;
            extern "C" fn run_before_main() {
                $crate::children::run_if_child(CHILD);
            }
            // Runs before main, and so before the test harness, so that a child runs no tests.
            #[used]
            #[allow(unsafe_code)]
            #[unsafe(link_section = ".init_array")]
            static ENTRY: extern "C" fn() = run_before_main;
        };
    };
}

/// Runs the child's function and exits, if this process is a child.
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

/// A command that runs this program again, as a child with these words. Its input is a pipe,
/// its output is discarded.
pub fn respawn(words: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Command {
    respawn_with(&[], words)
}

/// Like [`respawn`], but started by another program, such as `unshare` with its arguments.
///
/// # Panics
/// If this program's path is unknown.
pub fn respawn_with(
    program: &[&str],
    words: impl IntoIterator<Item = impl AsRef<OsStr>>,
) -> Command {
    let mut command = this_program_by(program);
    command.args(words).env(CHILD, "1").stdin(Stdio::piped()).stdout(Stdio::null());
    command
}

/// A command that runs this program again, not as a child: for test programs that parse their
/// own arguments.
///
/// # Panics
/// If this program's path is unknown.
#[must_use]
pub fn this_program() -> Command {
    this_program_by(&[])
}

fn this_program_by(program: &[&str]) -> Command {
    let this = std::env::current_exe().expect("determine the path of this program");
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

/// In a child: writes a line to the test.
///
/// # Panics
/// If the test no longer reads.
pub fn say(line: &str) {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{line}").and_then(|()| output.flush()).expect("write to the test");
}

/// In a child: the next line that the test [wrote](Child::say); None at the end of the input.
///
/// # Panics
/// If the input cannot be read.
pub fn next_line() -> Option<String> {
    let mut line = String::new();
    let length = std::io::stdin().read_line(&mut line).expect("read the input");
    (length > 0).then(|| line.trim_end().to_owned())
}

/// In a child: waits until the test [ends](Child::end) it.
pub fn wait_for_end_of_input() {
    while next_line().is_some() {}
}

/// A child process, killed at the latest when it is dropped.
#[derive(Debug)]
pub struct Child {
    process: std::process::Child,
    /// The bytes that were read after the last line.
    unread: Vec<u8>,
}

/// Waits until all threads of a process have stopped.
///
/// # Panics
/// If they do not stop within the timeout.
#[track_caller]
pub fn wait_for_stop(process: u32, timeout: Duration) {
    let threads = format!("/proc/{process}/task");
    let is_stopped = |thread: std::fs::DirEntry| {
        let line = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        // After its name, which may contain any characters.
        line.rsplit_once(')').is_none_or(|(_, unread)| unread.trim_start().starts_with('T'))
    };
    let end = Instant::now() + timeout;
    while !std::fs::read_dir(&threads).expect("a child").flatten().all(is_stopped) {
        assert!(Instant::now() < end, "the process {process} does not stop");
        std::thread::sleep(POLL_INTERVAL);
    }
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

    /// The child's process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// The next line of its output, which must be a pipe; None at the end of the output.
    ///
    /// # Panics
    /// If no line arrives within the timeout.
    #[track_caller]
    pub fn line(&mut self, timeout: Duration) -> Option<String> {
        let end = Instant::now() + timeout;
        loop {
            if let Some(length) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=length).collect();
                return Some(String::from_utf8_lossy(&line[..length]).into_owned());
            }
            let output = self.process.stdout.as_mut().expect("the output is a pipe");
            let left = end.saturating_duration_since(Instant::now()).as_millis();
            let mut entry =
                libc::pollfd { fd: output.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one entry, which lives longer than the call.
            let found = unsafe { libc::poll(&raw mut entry, 1, left.min(60_000) as i32) };
            assert!(found > 0 || left > 0, "the child wrote no line in time");
            if found > 0 {
                let mut bytes = [0; 1024];
                match output.read(&mut bytes).expect("read the output of the child") {
                    0 => return None,
                    length => self.unread.extend_from_slice(&bytes[..length]),
                }
            }
        }
    }

    /// Writes a line to it, for its [`next_line`].
    ///
    /// # Panics
    /// If it no longer reads.
    #[track_caller]
    pub fn say(&mut self, line: &str) {
        let input = self.process.stdin.as_mut().expect("the input is a pipe");
        writeln!(input, "{line}").and_then(|()| input.flush()).expect("write to the child");
    }

    /// Waits for its exit.
    ///
    /// # Panics
    /// If it does not exit within the timeout.
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

    /// The child's exit status, if it has exited.
    ///
    /// # Panics
    /// If the system reports an error.
    #[track_caller]
    pub fn try_wait(&mut self) -> Option<ExitStatus> {
        self.process.try_wait().expect("query the child")
    }

    /// Runs a command to its exit. Returns the lines of its output, sorted: those of several processes
    /// come in any order.
    ///
    /// # Panics
    /// If it cannot be started, writes no line or does not exit within the timeout.
    #[track_caller]
    pub fn run(command: &mut Command, timeout: Duration) -> (Vec<String>, ExitStatus) {
        let mut child = Self::start(command.stdout(Stdio::piped()));
        let mut lines = Vec::new();
        while let Some(line) = child.line(timeout) {
            lines.push(line);
        }
        lines.sort();
        (lines, child.wait(timeout))
    }

    /// Waits for its successful exit.
    ///
    /// # Panics
    /// If it fails, or does not exit within the timeout.
    #[track_caller]
    pub fn finish(&mut self, timeout: Duration) {
        let status = self.wait(timeout);
        assert!(status.success(), "the child failed: {status}");
    }

    /// Closes its input, and waits for its successful exit.
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
    /// If it was already waited for.
    #[track_caller]
    pub fn kill(&mut self) {
        self.process.kill().and_then(|()| self.process.wait()).expect("kill the child");
    }

    /// Sends it a signal.
    ///
    /// # Panics
    /// If the system reports an error.
    #[track_caller]
    pub fn signal(&self, signal: i32) {
        // SAFETY: no pointers; the child is not reaped, so the process id is its own.
        assert_eq!(unsafe { libc::kill(self.id() as i32, signal) }, 0);
    }

    /// Stops all of its threads, until it is [resumed](Self::resume) or killed. With several
    /// processors some threads stop a while later, so this waits for them.
    ///
    /// # Panics
    /// If it does not stop within the timeout.
    #[track_caller]
    pub fn stop(&self, timeout: Duration) {
        self.signal(libc::SIGSTOP);
        wait_for_stop(self.id(), timeout);
    }

    /// Resumes it after a stop.
    ///
    /// # Panics
    /// As [`Self::signal`].
    #[track_caller]
    pub fn resume(&self) {
        self.signal(libc::SIGCONT);
    }

    /// The child's output, for another thread to read. It must be a pipe.
    ///
    /// # Panics
    /// If it is not a pipe, or was already taken.
    pub fn output(&mut self) -> std::process::ChildStdout {
        self.process.stdout.take().expect("the output is a pipe")
    }

    /// The number of its open file descriptors.
    ///
    /// # Panics
    /// If it has exited.
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
    /// A child that runs this function and exits, successfully unless it panics. It has only
    /// this one of the test's threads, so the function must not need another thread, or a lock
    /// that another thread holds.
    ///
    /// # Panics
    /// If the system cannot create a process.
    pub fn new(act: impl FnOnce()) -> Self {
        // SAFETY: the child continues alone, with a copy of everything. It uses only what this
        // thread uses, and never returns from here.
        let number = unsafe { libc::fork() };
        assert!(number >= 0, "fork: {}", std::io::Error::last_os_error());
        if number == 0 {
            let code = i32::from(catch_unwind(AssertUnwindSafe(act)).is_err());
            // SAFETY: ends the child without running any code of the parent.
            unsafe { libc::_exit(code) };
        }
        Self { number, parent: std::process::id(), is_reaped: false }
    }

    /// A pidfd of the process.
    ///
    /// # Panics
    /// If the system returns none.
    #[must_use]
    pub fn pidfd(&self) -> OwnedFd {
        // SAFETY: no pointers; the child is not reaped, so the process id is its own.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, self.number, 0) };
        assert!(fd >= 0, "pidfd_open: {}", std::io::Error::last_os_error());
        // SAFETY: just opened, and not shared.
        unsafe { OwnedFd::from_raw_fd(fd as RawFd) }
    }

    /// Kills it; it must still be [waited for](Self::wait).
    pub fn kill(&self) {
        // SAFETY: a child of this process, not reaped yet.
        unsafe { libc::kill(self.number, libc::SIGKILL) };
    }

    /// Waits for its exit.
    ///
    /// # Panics
    /// If it is not a child of this process.
    pub fn wait(mut self) -> ExitStatus {
        self.reap()
    }

    fn reap(&mut self) -> ExitStatus {
        let mut status = 0;
        self.is_reaped = true;
        // SAFETY: a child of this process, not reaped before.
        let found = unsafe { libc::waitpid(self.number, &raw mut status, 0) };
        assert_eq!(found, self.number);
        ExitStatus::from_raw(status)
    }

    /// Waits for its exit, and returns whether it was killed. Otherwise it succeeded.
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
        // A forked child may have copies of other handles, which are not its children.
        if !self.is_reaped && self.parent == std::process::id() {
            self.kill();
            self.reap();
        }
    }
}
