//! The processes of the demonstration, and what they said last.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use pubsub::Row;

use super::cast::{Part, Published, Reading, Role, Said, line};
use super::worker::program;
use crate::cli::exit::{Exit, Failure};
use crate::cli::premises::Premises;
use crate::cli::process::{end_with_this_process, is_ignored};
use crate::cli::signals::{Signals, interrupted};

/// What rates are taken of.
const WINDOW: Duration = Duration::from_secs(3);
/// How long one takes to end that was told to.
const FAREWELL: Duration = Duration::from_secs(2);

/// A process, as far as it is known.
pub(super) struct Member {
    pub(super) role: Role,
    child: Child,
    input: Option<ChildStdin>,
    pub(super) is_separate: bool,
    pub(super) is_ready: bool,
    pub(super) is_done: bool,
    pub(super) listens: Option<String>,
    pub(super) rows: Vec<Row>,
    /// Those about what was sent to the other node.
    pub(super) sent: Vec<Row>,
    /// How often it said what a node knows.
    pub(super) reports: u64,
    pub(super) published: Published,
    pub(super) reading: Reading,
    /// When how many messages had been read.
    history: VecDeque<(Instant, u64)>,
}

impl Member {
    pub(super) fn process(&self) -> u32 {
        self.child.id()
    }

    /// Messages a second that it reads now.
    pub(super) fn rate(&self) -> f64 {
        let (Some(first), Some(last)) = (self.history.front(), self.history.back()) else {
            return 0.0;
        };
        let seconds = (last.0 - first.0).as_secs_f64();
        if seconds > 0.0 { (last.1 - first.1) as f64 / seconds } else { 0.0 }
    }

    fn hear(&mut self, said: Said) -> Result<(), Failure> {
        match said {
            Said::Separate => self.is_separate = true,
            Said::Ready { listens } => (self.is_ready, self.listens) = (true, listens),
            Said::Served(rows) => self.hear_report(rows),
            Said::Published(published) => self.published = published,
            Said::Read(reading) => {
                let now = Instant::now();
                self.history.push_back((now, reading.messages));
                while self.history.front().is_some_and(|(then, _)| now - *then > WINDOW) {
                    self.history.pop_front();
                }
                self.reading = *reading;
            }
            Said::Done => self.is_done = true,
            Said::Failed { exit, message } => {
                let why = format!("{}: {message}", self.role.label);
                return Err(Failure::new(Exit::from_code(exit), why));
            }
        }
        Ok(())
    }

    /// What was sent is remembered: nodes forget rings and topics that are not used any more.
    fn hear_report(&mut self, rows: Vec<Row>) {
        for row in &rows {
            if let Row::Sent { topic, messages, .. } = row {
                let is_before = |known: &Row| match known {
                    Row::Sent { topic: its, messages: before, .. } => {
                        its == topic && before <= messages
                    }
                    _ => false,
                };
                let is_of_it =
                    |known: &Row| matches!(known, Row::Sent { topic: its, .. } if its == topic);
                match self.sent.iter_mut().find(|known| is_of_it(known)) {
                    Some(known) if is_before(known) => *known = row.clone(),
                    Some(_) => {}
                    None => self.sent.push(row.clone()),
                }
            }
        }
        (self.rows, self.reports) = (rows, self.reports + 1);
    }

    /// What it said before it ended was heard.
    fn hear_its_end(&mut self) -> Result<(), Failure> {
        self.input = None;
        if self.is_done {
            return Ok(());
        }
        let status =
            self.child.wait().as_ref().map_or_else(ToString::to_string, ExitStatus::to_string);
        Err(Failure::failed(format!("{} ended too early: {status}", self.role.label)))
    }
}

/// All of them. Dropping it ends them.
pub(super) struct Company {
    pub(super) members: Vec<Member>,
    say: Sender<(usize, Option<Said>)>,
    heard: Receiver<(usize, Option<Said>)>,
    /// Last: nobody is there any more when it goes.
    premises: Premises,
    signals: Signals,
}

impl Company {
    /// To be called before this process has other threads.
    pub(super) fn gather() -> Result<Self, Failure> {
        let (say, heard) = channel();
        let signals = match is_ignored(Signal::SIGHUP) {
            true => Signals::catch()?,
            false => Signals::catch_hangups_too()?,
        };
        let premises = Premises::open_for_one_who_heeds_signals()?;
        Ok(Self { members: Vec::new(), say, heard, premises, signals })
    }

    pub(super) fn directory(&self) -> &Path {
        self.premises.path()
    }

    /// Starts one more.
    pub(super) fn start(&mut self, role: Role) -> Result<(), Failure> {
        let mut command = program(&role.label);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        if std::env::var_os("FABRICAST_LOG").is_none() {
            // What goes wrong is said; that nodes trust each other in here is no news.
            command.env("FABRICAST_LOG", "error");
        }
        // A terminal's signals are for the one that started it, which ends the others.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        end_with_this_process(&mut command, Signal::SIGKILL);
        let mut child = command
            .spawn()
            .map_err(|error| Failure::failed(format!("starting {}: {error}", role.label)))?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let first = line(&role)?;
        let number = self.members.len();
        self.members.push(Member {
            role,
            child,
            input,
            is_separate: false,
            is_ready: false,
            is_done: false,
            listens: None,
            rows: Vec::new(),
            sent: Vec::new(),
            reports: 0,
            published: Published::default(),
            reading: Reading::default(),
            history: VecDeque::new(),
        });
        self.write(number, &first);
        let (say, output) = (self.say.clone(), output.into_iter());
        let reader = move || {
            for line in
                output.flat_map(|output| BufReader::new(output).lines()).map_while(Result::ok)
            {
                let Ok(said) = serde_json::from_str(&line) else { break };
                if say.send((number, Some(said))).is_err() {
                    return;
                }
            }
            let _ = say.send((number, None));
        };
        let thread = std::thread::Builder::new().spawn(reader);
        thread.map(drop).map_err(|error| Failure::failed(format!("starting a thread: {error}")))
    }

    fn write(&mut self, member: usize, text: &str) {
        if let Some(input) = self.members.get_mut(member).and_then(|it| it.input.as_mut()) {
            // Who has ended is heard of in another way.
            let _ = input.write_all(text.as_bytes());
        }
    }

    /// Tells those something that have such a part.
    pub(super) fn tell(&mut self, what: &str, is_meant: impl Fn(&Part) -> bool) {
        for member in 0..self.members.len() {
            if is_meant(&self.members[member].role.part) {
                self.write(member, &format!("{what}\n"));
            }
        }
    }

    /// Hears what they say until it is so; `look` is called again and again meanwhile.
    pub(super) fn until(
        &mut self,
        what: &str,
        deadline: Instant,
        mut look: impl FnMut(&Self) -> Result<(), Failure>,
        is_so: impl Fn(&Self) -> bool,
    ) -> Result<(), Failure> {
        while !is_so(self) {
            look(self)?;
            if self.signals.ask_to_end() || self.signals.hangups() > 0 {
                return Err(interrupted());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let why = format!("it took too long until {what}{}", self.why());
                return Err(Failure::new(Exit::Deadline, why));
            }
            match self.heard.recv_timeout(left.min(Duration::from_millis(100))) {
                Ok((member, said)) => {
                    let Some(member) = self.members.get_mut(member) else { continue };
                    match said {
                        Some(said) => member.hear(said)?,
                        None => member.hear_its_end()?,
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::failed("nobody is there to be heard"));
                }
            }
        }
        look(self)
    }

    /// What nodes say of each other, where that may be why.
    fn why(&self) -> String {
        let rows = self.members.iter().flat_map(|member| &member.rows);
        let all: Vec<String> = rows
            .filter_map(|row| match row {
                Row::Peer { label, address, is_connected: false, detail, .. } => {
                    Some(format!("; node \"{label}\" at {address} is not connected: {detail}"))
                }
                _ => None,
            })
            .collect();
        all.concat()
    }
}

impl Drop for Company {
    fn drop(&mut self) {
        // Those that are about to end may do so.
        let end = Instant::now() + FAREWELL;
        for member in &mut self.members {
            member.input = None;
            while member.is_done
                && Instant::now() < end
                && matches!(member.child.try_wait(), Ok(None))
            {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        for member in &mut self.members {
            let _ = member.child.kill();
        }
        for member in &mut self.members {
            let _ = member.child.wait();
        }
    }
}
