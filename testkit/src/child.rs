//! Processes that a test starts: they are listened to with deadlines, and never outlive it.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use crate::processes::until;

/// This test's own program, for one of its tests only: with what is in the environment that test
/// may take another part.
///
/// # Panics
/// The system does not say where the program is.
#[must_use]
pub fn this_test(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([name, "--exact", "--nocapture", "--include-ignored"]);
    command
}

/// A process. Dropping it ends it.
#[derive(Debug)]
pub struct Running {
    child: Child,
    lines: Option<Receiver<String>>,
}

impl Running {
    /// Starts it, with its input and output as the command says.
    ///
    /// # Panics
    /// It cannot be started.
    #[must_use]
    #[track_caller]
    pub fn start(command: &mut Command) -> Self {
        Self { child: command.spawn().unwrap(), lines: None }
    }

    /// Starts one that is talked to by lines.
    ///
    /// # Panics
    /// It cannot be started.
    #[must_use]
    #[track_caller]
    pub fn with_lines(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (sender, lines) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        Self { child, lines: Some(lines) }
    }

    /// The number of the process.
    #[must_use]
    pub fn number(&self) -> i32 {
        self.child.id() as i32
    }

    /// Has it ended, and how?
    ///
    /// # Panics
    /// The system does not say.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Waits until it has ended.
    ///
    /// # Panics
    /// It has not within a minute.
    #[track_caller]
    pub fn end(&mut self) -> ExitStatus {
        until("it does not end", || self.ended())
    }

    /// Tells it a line.
    ///
    /// # Panics
    /// It was not started with lines, or is gone.
    #[track_caller]
    pub fn tell(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// What it says next.
    ///
    /// # Panics
    /// It says nothing for so long, or was not started with lines.
    #[track_caller]
    pub fn hear(&self, longest: Duration) -> String {
        self.lines.as_ref().unwrap().recv_timeout(longest).unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_answers_and_ends_with_its_owner() {
        let mut child = Running::with_lines(&mut Command::new("cat"));
        child.tell("one");
        assert_eq!(child.hear(Duration::from_secs(20)), "one");
        assert!(child.ended().is_none());
        let process = crate::processes::process(child.number()).unwrap();
        drop(child);
        crate::processes::until_gone(&[process].into());
    }
}
