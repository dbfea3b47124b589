//! The processes of the demonstration, and what they said last: `fabricast node`, `pub` and `sub`.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pubsub::Row;
use serde::{Deserialize, Serialize};

use super::cast::NODES;
use super::directory::Directory;
use super::network::Ground;
use super::show::Show;
use crate::cli::exit::{Exit, Failure};
use crate::cli::process::{end_with_this_process, is_ignored};
use crate::cli::settings::{FILE_VARIABLE, TABLE};
use crate::cli::signals::{Signals, interrupted};
use crate::cli::statistics::Latency;
use crate::cli::text;
use command::process::this_program;

/// What a process does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Serve,
    /// In this topic.
    Publish(usize),
    Read(usize),
}

impl Part {
    pub(super) fn publishes(self) -> bool {
        matches!(self, Self::Publish(_))
    }

    pub(super) fn reads(self) -> bool {
        matches!(self, Self::Read(_))
    }
}

/// What `pub` and `sub` say, in a line of JSON each.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub(super) struct Said {
    pub(super) messages: u64,
    pub(super) bytes: u64,
    pub(super) messages_per_s: f64,
    pub(super) bytes_per_s: f64,
    #[serde(default)]
    pub(super) altered: u64,
    /// Not known of one that was removed from its topic.
    #[serde(default)]
    pub(super) missed: Option<u64>,
    /// By which ways messages came.
    #[serde(default)]
    pub(super) paths: Vec<String>,
    #[serde(rename(serialize = "stages"))]
    pub(super) latencies: Vec<Latency>,
}

/// A process, as far as it is known.
pub(super) struct Member {
    pub(super) part: Part,
    pub(super) node: usize,
    pub(super) label: String,
    child: Child,
    /// What it said is in there, if it is not told to the user at once.
    errors: PathBuf,
    is_to_end: bool,
    has_ended: bool,
    /// It has begun.
    pub(super) has_said: bool,
    pub(super) said: Said,
}

/// What a process said on standard output; None if it is over.
type Heard = (usize, Option<String>);

/// All of them. Dropping it ends them.
pub(super) struct Company {
    pub(super) ground: Ground,
    pub(super) members: Vec<Member>,
    /// What is seen of them, once messages are published.
    pub(super) show: Option<Show>,
    directory: Directory,
    say: Sender<Heard>,
    heard: Receiver<Heard>,
    signals: Signals,
}

impl Company {
    /// To be called before this process has other threads.
    pub(super) fn gather(ground: Ground) -> Result<Self, Failure> {
        let (say, heard) = channel();
        let signals = match is_ignored(Signal::SIGHUP) {
            true => Signals::catch()?,
            false => Signals::catch_hangups_too()?,
        };
        let directory = Directory::make()?;
        Ok(Self { ground, members: Vec::new(), show: None, directory, say, heard, signals })
    }

    pub(super) fn directory_of(&self, node: usize) -> PathBuf {
        self.directory.join(&format!("node-{}", node + 1))
    }

    /// What the nodes tell of themselves, each by itself.
    pub(super) fn report(&self) -> Vec<(usize, Row)> {
        let of = |node| (pubsub::report(&self.directory_of(node)).unwrap_or_default(), node);
        let all = (0..NODES).map(of);
        all.flat_map(|(rows, node)| rows.into_iter().map(move |row| (node, row))).collect()
    }

    /// Starts one more. Tests tell them apart by their labels.
    pub(super) fn start(
        &mut self,
        (part, node, label): (Part, usize, String),
        arguments: impl IntoIterator<Item = String>,
    ) -> Result<(), Failure> {
        let failed = |why: String| Failure::failed(format!("starting {label}: {why}"));
        let mut command = this_program("fabricast");
        command.args(arguments).args(["--patience", "20", "--label", &label]);
        command.arg("--directory").arg(self.directory_of(node));
        for variable in TABLE.iter().map(|one| &*one.variable).chain([FILE_VARIABLE]) {
            command.env_remove(variable);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let number = self.members.len();
        let errors = self.directory.join(&number.to_string());
        if std::env::var_os("FABRICAST_LOG").is_none() {
            // What goes wrong is said; that nodes trust each other in here is no news.
            let file = File::create(&errors).map_err(|error| failed(error.to_string()))?;
            command.env("FABRICAST_LOG", "error").stderr(file);
        }
        // A terminal's signals are for the one that started it, which ends the others.
        command.process_group(0);
        end_with_this_process(&mut command, Signal::SIGKILL);
        self.ground.enter(node)?;
        let mut child = command.spawn().map_err(|error| failed(error.to_string()))?;
        let (say, output) = (self.say.clone(), child.stdout.take());
        self.members.push(Member {
            part,
            node,
            label: label.clone(),
            child,
            errors,
            is_to_end: false,
            has_ended: false,
            has_said: false,
            said: Said::default(),
        });
        let reader = move || {
            let lines = output.into_iter().flat_map(|output| BufReader::new(output).lines());
            let lines = lines.map_while(Result::ok).map(Some);
            lines.chain([None]).try_for_each(|line| say.send((number, line)))
        };
        let thread = std::thread::Builder::new().spawn(reader);
        thread.map(drop).map_err(|error| failed(error.to_string()))
    }

    /// Asks those to end that have such a part, and waits until they have.
    pub(super) fn end(
        &mut self,
        is_meant: impl Fn(Part) -> bool,
        deadline: Instant,
    ) -> Result<(), Failure> {
        for member in self.members.iter_mut().filter(|member| is_meant(member.part)) {
            member.is_to_end = true;
            let _ = kill(Pid::from_raw(member.child.id() as i32), Signal::SIGTERM);
        }
        self.until("all had ended", deadline, |members| {
            members.iter().all(|member| member.has_ended || !is_meant(member.part))
        })
    }

    /// Hears what they say until it is so, and shows it meanwhile.
    pub(super) fn until(
        &mut self,
        what: &str,
        deadline: Instant,
        mut is_so: impl FnMut(&[Member]) -> bool,
    ) -> Result<(), Failure> {
        loop {
            let is_over = is_so(&self.members);
            if let Some(show) = &mut self.show {
                show.look(&self.members)?;
            }
            if is_over {
                return Ok(());
            }
            if self.signals.ask_to_end() || self.signals.hangups() > 0 {
                return Err(interrupted());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let why = format!("it took too long until {what}{}", self.why());
                return Err(Failure::new(Exit::Deadline, why));
            }
            match self.heard.recv_timeout(left.min(Duration::from_millis(100))) {
                Ok((member, line)) => self.members[member].hear(line)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::failed("nobody is there to be heard"));
                }
            }
        }
    }

    /// What nodes say of each other, where that may be why.
    fn why(&self) -> String {
        let rows = self.report().into_iter();
        let all: Vec<String> = rows
            .filter_map(|(_, row)| match row {
                Row::Peer { label, address, is_connected: false, detail, .. } => {
                    Some(format!("; node \"{label}\" at {address} is not connected: {detail}"))
                }
                _ => None,
            })
            .collect();
        all.concat()
    }
}

impl Member {
    fn hear(&mut self, line: Option<String>) -> Result<(), Failure> {
        if let Some(line) = line {
            let wrong = |error| Failure::failed(format!("{} says {line:?}: {error}", self.label));
            (self.said, self.has_said) = (serde_json::from_str(&line).map_err(wrong)?, true);
            return Ok(());
        }
        self.has_ended = true;
        if self.is_to_end {
            return Ok(());
        }
        let (exit, status) = match self.child.wait() {
            Ok(status) => (Exit::from_code(status.code().unwrap_or(1)), status.to_string()),
            Err(error) => (Exit::Failed, error.to_string()),
        };
        if let Ok(errors) = std::fs::read_to_string(&self.errors) {
            text::complain(errors.trim_end());
        }
        Err(Failure::new(exit, format!("{} ended too early: {status}", self.label)))
    }
}

impl Drop for Company {
    fn drop(&mut self) {
        for member in &mut self.members {
            let _ = member.child.kill();
        }
        for member in &mut self.members {
            let _ = member.child.wait();
        }
    }
}
