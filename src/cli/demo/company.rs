//! The processes of the demonstration, and what they said last: `fabricast node`, `pub` and `sub`.

use std::collections::VecDeque;
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
use super::network::Ground;
use super::show::Show;
use crate::cli::exit::{Exit, Failure};
use crate::cli::process::{end_after, end_with_this_process, is_ignored};
use crate::cli::settings::{FILE_VARIABLE, TABLE};
use crate::cli::signals::{Signals, interrupted};
use crate::cli::statistics::Latency;
use crate::cli::text;
use command::process::this_program;
use command::temp_dir::{Program, TempDir};

/// What rates are taken of.
pub(super) const WINDOW: Duration = Duration::from_secs(3);
/// Between two looks at what the nodes tell of themselves.
const LOOK: Duration = Duration::from_millis(250);
/// What they say is heard so soon.
const SOON: Duration = Duration::from_millis(20);

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
    /// It says nothing more.
    is_silent: bool,
    has_ended: bool,
    /// It has begun.
    pub(super) has_said: bool,
    pub(super) said: Said,
    /// When how many messages had been read or published.
    history: VecDeque<(Instant, u64)>,
}

/// What was heard.
enum Heard {
    /// A process said this on standard output; None if that is over.
    Line(usize, Option<String>),
    /// What a node tells of itself.
    Rows(usize, Vec<Row>),
}

/// All of them. Dropping it ends them.
pub(super) struct Company {
    pub(super) ground: Ground,
    pub(super) members: Vec<Member>,
    /// What is seen of them, once messages are published.
    pub(super) show: Option<Show>,
    /// What each node told of itself last, and how often it did.
    pub(super) rows: [(Vec<Row>, u64); NODES],
    directory: TempDir,
    /// No process lives longer than that, even if this one is stopped.
    limit: Duration,
    say: Sender<Heard>,
    heard: Receiver<Heard>,
    signals: Signals,
}

impl Company {
    /// To be called before this process has other threads.
    pub(super) fn gather(ground: Ground, limit: Duration) -> Result<Self, Failure> {
        let (say, heard) = channel();
        let signals = match is_ignored(Signal::SIGHUP) {
            true => Signals::catch()?,
            false => Signals::catch_hangups_too()?,
        };
        let (members, rows) = (Vec::new(), Default::default());
        let directory = TempDir::create(Program::Demo)?;
        Ok(Self { ground, members, show: None, rows, directory, limit, say, heard, signals })
    }

    fn directory_of(&self, node: usize) -> PathBuf {
        self.directory.path().join(format!("node-{}", node + 1))
    }

    /// What the nodes told of themselves last, each by itself.
    pub(super) fn report(&self) -> impl Iterator<Item = (usize, &Row)> {
        let all = self.rows.iter().enumerate();
        all.flat_map(|(node, (rows, _))| rows.iter().map(move |row| (node, row)))
    }

    /// Asks a node again and again what it tells of itself: a thread waits for that, so that a
    /// node that does not answer keeps nobody waiting.
    pub(super) fn ask(&self, node: usize) -> Result<(), Failure> {
        let (say, directory) = (self.say.clone(), self.directory_of(node));
        let asking = move || {
            let mut is_heard = true;
            while is_heard {
                // One that does not answer yet, or any more, is asked again.
                if let Ok(rows) = pubsub::report(&directory) {
                    is_heard = say.send(Heard::Rows(node, rows)).is_ok();
                }
                std::thread::sleep(LOOK);
            }
        };
        in_a_thread(asking)
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
        let errors = self.directory.path().join(number.to_string());
        if std::env::var_os("FABRICAST_LOG").is_none() {
            // What goes wrong is said; that nodes trust each other in here is no news.
            let file = File::create(&errors).map_err(|error| failed(error.to_string()))?;
            command.env("FABRICAST_LOG", "error").stderr(file);
        }
        // A terminal's signals are for the one that started it, which ends the others.
        command.process_group(0);
        end_with_this_process(&mut command, Signal::SIGKILL);
        end_after(&mut command, self.limit);
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
            is_silent: false,
            has_ended: false,
            has_said: false,
            said: Said::default(),
            history: VecDeque::new(),
        });
        let reader = move || {
            let lines = output.into_iter().flat_map(|output| BufReader::new(output).lines());
            let lines = lines.map_while(Result::ok).map(Some);
            // Nobody hears it once all is over.
            let _ = lines.chain([None]).try_for_each(|line| say.send(Heard::Line(number, line)));
        };
        in_a_thread(reader)
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
        is_so: impl Fn(&[Member]) -> bool,
    ) -> Result<(), Failure> {
        self.until_all(what, deadline, |it| is_so(&it.members))
    }

    /// The same of all of them, and of what the nodes tell.
    pub(super) fn until_all(
        &mut self,
        what: &str,
        deadline: Instant,
        is_so: impl Fn(&Self) -> bool,
    ) -> Result<(), Failure> {
        loop {
            self.members.iter_mut().try_for_each(Member::look)?;
            let is_over = is_so(self);
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
            match self.heard.recv_timeout(left.min(SOON)) {
                Ok(Heard::Line(member, line)) => self.members[member].hear(line)?,
                Ok(Heard::Rows(node, rows)) => self.rows[node] = (rows, self.rows[node].1 + 1),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::failed("nobody is there to be heard"));
                }
            }
        }
    }

    /// What nodes say of each other, where that may be why.
    fn why(&self) -> String {
        let all: Vec<String> = self
            .report()
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
            let now = Instant::now();
            self.history.push_back((now, self.said.messages));
            // One that is older stays, so that there is all of the time.
            while self.history.get(1).is_some_and(|(then, _)| now - *then > WINDOW) {
                self.history.pop_front();
            }
        } else {
            self.is_silent = true;
        }
        Ok(())
    }

    /// Messages a second lately.
    pub(super) fn rate(&self) -> f64 {
        let (Some(first), Some(last)) = (self.history.front(), self.history.back()) else {
            return 0.0;
        };
        // One that says nothing more does nothing more.
        let seconds = first.0.elapsed().as_secs_f64();
        if seconds > 0.0 { (last.1 - first.1) as f64 / seconds } else { 0.0 }
    }

    /// Looks how one ended that says nothing more.
    fn look(&mut self) -> Result<(), Failure> {
        if self.has_ended || !self.is_silent {
            return Ok(());
        }
        let (code, status) = match self.child.try_wait() {
            Ok(None) => return Ok(()),
            Ok(Some(status)) => (status.code(), status.to_string()),
            Err(error) => (None, error.to_string()),
        };
        self.has_ended = true;
        // `pub` was asked to end before it was done: there is no end to its messages.
        let is_in_order = matches!(code, Some(0)) || code == Some(Exit::Interrupted as i32);
        if self.is_to_end && is_in_order {
            return Ok(());
        }
        if let Ok(errors) = std::fs::read_to_string(&self.errors) {
            text::complain(errors.trim_end());
        }
        let how = if self.is_to_end { "did not end as it should" } else { "ended too early" };
        let exit = Exit::from_code(code.unwrap_or(1));
        Err(Failure::new(exit, format!("{} {how}: {status}", self.label)))
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

fn in_a_thread(task: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
    let thread = std::thread::Builder::new().spawn(task);
    thread.map(drop).map_err(|error| Failure::failed(format!("starting a thread: {error}")))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn member(script: &str, is_to_end: bool) -> Member {
        let child = Command::new("sh").args(["-c", script]).spawn().unwrap();
        Member {
            part: Part::Read(0),
            node: 0,
            label: "node 1, a".to_owned(),
            child,
            errors: PathBuf::new(),
            is_to_end,
            is_silent: true,
            has_ended: false,
            has_said: false,
            said: Said::default(),
            history: VecDeque::new(),
        }
    }

    fn end(script: &str, is_to_end: bool) -> Result<(), Failure> {
        let mut member = member(script, is_to_end);
        while !member.has_ended {
            member.look()?;
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    #[test]
    fn who_was_asked_to_end_ends_in_order_or_fails_by_name() {
        assert!(end("exit 0", true).is_ok() && end("exit 130", true).is_ok());
        for (script, code) in [("exit 8", Exit::Missed), ("kill -SEGV $$", Exit::Failed)] {
            let failure = end(script, true).unwrap_err();
            let why = failure.to_string();
            assert_eq!(failure.exit(), code, "{why}");
            assert!(why.starts_with("node 1, a did not end as it should: "), "{why}");
        }
        let why = end("exit 0", false).unwrap_err().to_string();
        assert!(why.contains("ended too early"), "{why}");
    }

    #[test]
    fn rates_are_those_of_late() {
        let mut member = member("true", true);
        let now = Instant::now();
        let ago = |milliseconds| now.checked_sub(Duration::from_millis(milliseconds)).unwrap();
        member.history.extend([(ago(9000), 0), (ago(8000), 900), (ago(2000), 1000)]);
        member
            .hear(Some(
                r#"{"messages":1012,"bytes":0,"messages_per_s":99,"bytes_per_s":0,"latencies":[]}"#
                    .to_owned(),
            ))
            .unwrap();
        assert_eq!(member.history.len(), 3);
        assert!((13.0..15.0).contains(&member.rate()), "{}", member.rate());
        member.child.wait().unwrap();
    }
}
