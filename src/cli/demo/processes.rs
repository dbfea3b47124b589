//! The processes of the demonstration, and their last reports: `fabricast node`, `pub` and `sub`.

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
use pubsub::{Row, Setting};

use super::display::{LiveDisplay, WINDOW, stages};
use super::network::DemoNetwork;
use super::{DemoTopic, NODES, ProcessReport, SubscriberRow, TOPICS};
use crate::cli::exit::{Exit, Failure, Result};
use crate::cli::process::{is_ignored, kill_with_parent, limit_lifetime};
use crate::cli::settings::FILE_VARIABLE;
use crate::cli::signals::{Signals, interrupted};
use crate::cli::text;
use command::process::this_program;
use command::temp_dir::{Program, TempDir};

const REPORT_INTERVAL: Duration = Duration::from_millis(250);
/// Longest delay of an event.
const EVENT_POLL_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    NodeService,
    /// Publishes to this topic.
    Publish(usize),
    Subscribe(usize),
}

impl Role {
    pub(super) fn publishes(self) -> bool {
        matches!(self, Self::Publish(_))
    }

    pub(super) fn reads(self) -> bool {
        matches!(self, Self::Subscribe(_))
    }
}

pub(super) struct DemoProcess {
    pub(super) part: Role,
    pub(super) node: usize,
    pub(super) label: String,
    child: Child,
    /// File with its standard error, unless that is shown to the user at once.
    errors: PathBuf,
    is_terminating: bool,
    output_closed: bool,
    has_exited: bool,
    /// The process has reported, so it has started.
    pub(super) has_reported: bool,
    pub(super) last_report: ProcessReport,
    /// Times, and messages read or published until then.
    history: VecDeque<(Instant, u64)>,
}

enum ProcessEvent {
    /// A line of standard output; None at its end.
    OutputLine(usize, Option<String>),
    NodeReport(usize, Vec<Row>),
}

/// All processes. Dropping it ends them.
pub(super) struct DemoProcesses {
    pub(super) network: DemoNetwork,
    pub(super) members: Vec<DemoProcess>,
    /// The display, once messages are published.
    pub(super) display: Option<LiveDisplay>,
    /// The last report of each node, and the number of its reports.
    pub(super) rows: [(Vec<Row>, u64); NODES],
    directory: TempDir,
    /// No process runs longer, even if this one is stopped.
    limit: Duration,
    event_sender: Sender<ProcessEvent>,
    events: Receiver<ProcessEvent>,
    signals: Signals,
}

impl DemoProcesses {
    /// Call before starting threads.
    pub(super) fn new(network: DemoNetwork, limit: Duration) -> Result<Self> {
        let (event_sender, events) = channel();
        let signals = match is_ignored(Signal::SIGHUP) {
            true => Signals::catch()?,
            false => Signals::catch_with_hangup()?,
        };
        Ok(Self {
            network,
            members: Vec::new(),
            display: None,
            rows: Default::default(),
            directory: TempDir::create(Program::Demo)?,
            limit,
            event_sender,
            events,
            signals,
        })
    }

    fn directory_of(&self, node: usize) -> PathBuf {
        self.directory.path().join(format!("node-{}", node + 1))
    }

    /// The last report of each node.
    pub(super) fn report(&self) -> impl Iterator<Item = (usize, &Row)> {
        let all = self.rows.iter().enumerate();
        all.flat_map(|(node, (rows, _))| rows.iter().map(move |row| (node, row)))
    }

    /// Requests reports of a node repeatedly, in a thread, so that a node without answer blocks
    /// nothing.
    pub(super) fn poll_node(&self, node: usize) -> Result<()> {
        let (event_sender, directory) = (self.event_sender.clone(), self.directory_of(node));
        let poll_reports = move || {
            let mut is_received = true;
            while is_received {
                // A node that does not answer gets another request.
                if let Ok(rows) = pubsub::report(&directory) {
                    is_received = event_sender.send(ProcessEvent::NodeReport(node, rows)).is_ok();
                }
                std::thread::sleep(REPORT_INTERVAL);
            }
        };
        spawn_thread(poll_reports)
    }

    /// Starts a process. Tests distinguish the processes by their labels.
    pub(super) fn start(
        &mut self,
        part: Role,
        node: usize,
        label: String,
        arguments: impl IntoIterator<Item = String>,
    ) -> Result<()> {
        let failed = |why: String| Failure::failed(format!("start {label} failed: {why}"));
        let mut command = this_program("fabricast");
        command.args(arguments).args(["--service-timeout", "20", "--label", &label]);
        command.arg("--directory").arg(self.directory_of(node));
        command.env_remove(FILE_VARIABLE);
        for setting in Setting::all() {
            command.env_remove(&setting.variable);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let number = self.members.len();
        let errors = self.directory.path().join(number.to_string());
        if std::env::var_os("FABRICAST_LOG").is_none() {
            // Errors are logged; the warning that nodes are not authenticated would only disturb.
            let file = File::create(&errors).map_err(|error| failed(error.to_string()))?;
            command.env("FABRICAST_LOG", "error").stderr(file);
        }
        // Terminal signals go to the parent, which ends the processes in order.
        command.process_group(0);
        kill_with_parent(&mut command, Signal::SIGKILL);
        limit_lifetime(&mut command, self.limit);
        self.network.enter(node)?;
        let mut child = command.spawn().map_err(|error| failed(error.to_string()))?;
        let (event_sender, output) = (self.event_sender.clone(), child.stdout.take());
        self.members.push(DemoProcess {
            part,
            node,
            label: label.clone(),
            child,
            errors,
            is_terminating: false,
            output_closed: false,
            has_exited: false,
            has_reported: false,
            last_report: ProcessReport::default(),
            history: VecDeque::new(),
        });
        let reader = move || {
            let lines = output.into_iter().flat_map(|output| BufReader::new(output).lines());
            let lines = lines.map_while(Result::ok).map(Some);
            // At the end the receiver is closed.
            let _ = lines
                .chain([None])
                .try_for_each(|line| event_sender.send(ProcessEvent::OutputLine(number, line)));
        };
        spawn_thread(reader)
    }

    /// Terminates the processes of some roles, and waits until they have ended.
    pub(super) fn end(&mut self, selects: impl Fn(Role) -> bool, deadline: Instant) -> Result<()> {
        for member in self.members.iter_mut().filter(|member| selects(member.part)) {
            member.is_terminating = true;
            let _ = kill(Pid::from_raw(member.child.id() as i32), Signal::SIGTERM);
        }
        self.wait_until("all had ended", deadline, |it| {
            it.members.iter().all(|member| member.has_exited || !selects(member.part))
        })
    }

    /// Processes events until the condition holds, and updates the display.
    pub(super) fn wait_until(
        &mut self,
        what: &str,
        deadline: Instant,
        condition: impl Fn(&Self) -> bool,
    ) -> Result<()> {
        loop {
            self.members.iter_mut().try_for_each(DemoProcess::check_exit)?;
            let is_over = condition(self);
            if let Some(display) = &mut self.display {
                display.update(|| readers(&self.members))?;
            }
            if is_over {
                return Ok(());
            }
            if self.signals.termination_requested() || self.signals.hangups() > 0 {
                return Err(interrupted());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let why = self.why();
                let why =
                    format!("run the demonstration failed: timed out waiting until {what}{why}");
                return Err(Failure::new(Exit::Deadline, why));
            }
            match self.events.recv_timeout(left.min(EVENT_POLL_INTERVAL)) {
                Ok(ProcessEvent::OutputLine(member, line)) => {
                    self.members[member].receive_line(line)?
                }
                Ok(ProcessEvent::NodeReport(node, rows)) => {
                    self.rows[node] = (rows, self.rows[node].1 + 1)
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    let why = "run the demonstration failed: all of its processes have ended";
                    return Err(Failure::failed(why));
                }
            }
        }
    }

    /// Peers that are not connected, as a possible cause.
    fn why(&self) -> String {
        let disconnected = self.report().filter_map(|(_, row)| match row {
            Row::Peer { label, address, is_connected: false, detail, .. } => {
                Some(format!("; node \"{label}\" at {address} is not connected: {detail}"))
            }
            _ => None,
        });
        disconnected.collect()
    }
}

impl DemoProcess {
    fn receive_line(&mut self, line: Option<String>) -> Result<()> {
        if let Some(line) = line {
            let wrong = |error| {
                Failure::failed(format!("parse output of {} failed: {line:?}: {error}", self.label))
            };
            (self.last_report, self.has_reported) =
                (serde_json::from_str(&line).map_err(wrong)?, true);
            let now = Instant::now();
            self.history.push_back((now, self.last_report.messages));
            // One older than the period stays, so that the whole period is covered.
            while self.history.get(1).is_some_and(|(then, _)| now - *then > WINDOW) {
                self.history.pop_front();
            }
        } else {
            self.output_closed = true;
        }
        Ok(())
    }

    /// Messages per second in the last period.
    pub(super) fn rate(&self) -> f64 {
        let (Some(first), Some(last)) = (self.history.front(), self.history.back()) else {
            return 0.0;
        };
        // A process with closed output does nothing more.
        let seconds = first.0.elapsed().as_secs_f64();
        if seconds > 0.0 { (last.1 - first.1) as f64 / seconds } else { 0.0 }
    }

    /// Checks the exit status of a process with closed output.
    fn check_exit(&mut self) -> Result<()> {
        if self.has_exited || !self.output_closed {
            return Ok(());
        }
        let (code, status) = match self.child.try_wait() {
            Ok(None) => return Ok(()),
            Ok(Some(status)) => (status.code(), status.to_string()),
            Err(error) => (None, error.to_string()),
        };
        self.has_exited = true;
        // `pub` was interrupted: it publishes without end.
        let is_in_order = matches!(code, Some(0)) || code == Some(Exit::Interrupted as i32);
        if self.is_terminating && is_in_order {
            return Ok(());
        }
        if let Ok(errors) = std::fs::read_to_string(&self.errors) {
            text::print_error(errors.trim_end());
        }
        let how = if self.is_terminating { "failed at exit" } else { "ended unexpectedly" };
        let exit = Exit::from_code(code.unwrap_or(1));
        Err(Failure::new(exit, format!("{} {how}: {status}", self.label)))
    }
}

impl Drop for DemoProcesses {
    fn drop(&mut self) {
        for member in &mut self.members {
            let _ = member.child.kill();
        }
        for member in &mut self.members {
            let _ = member.child.wait();
        }
    }
}

fn spawn_thread(task: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = std::thread::Builder::new().spawn(task);
    thread.map(drop).map_err(|error| Failure::failed(format!("start thread failed: {error}")))
}

pub(super) fn readers(members: &[DemoProcess]) -> Vec<SubscriberRow> {
    let one = |member: &DemoProcess| {
        let Role::Subscribe(topic) = member.part else { return None };
        let publisher = members.iter().find(|it| it.part == Role::Publish(topic));
        let known = || publisher.into_iter().chain([member]).flat_map(|it| &it.last_report.stages);
        let latency = |name| known().find(|one| one.stage == name).cloned();
        let latencies = stages().filter_map(latency).collect();
        let DemoTopic { name, size, from, .. } = TOPICS[topic];
        Some(SubscriberRow {
            topic: name,
            message_bytes: size,
            name: member.label.clone(),
            is_local: member.node == from,
            rate: member.rate(),
            last_report: ProcessReport { stages: latencies, ..member.last_report.clone() },
        })
    };
    members.iter().filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn member(script: &str, is_terminating: bool) -> DemoProcess {
        let child = Command::new("sh").args(["-c", script]).spawn().unwrap();
        DemoProcess {
            part: Role::Subscribe(0),
            node: 0,
            label: "node 1, a".to_owned(),
            child,
            errors: PathBuf::new(),
            is_terminating,
            output_closed: true,
            has_exited: false,
            has_reported: false,
            last_report: ProcessReport::default(),
            history: VecDeque::new(),
        }
    }

    fn end(script: &str, is_terminating: bool) -> Result<()> {
        let mut member = member(script, is_terminating);
        while !member.has_exited {
            member.check_exit()?;
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    #[test]
    fn failure_at_exit_names_the_process() {
        assert!(end("exit 0", true).is_ok() && end("exit 130", true).is_ok());
        for (script, code) in [("exit 8", Exit::MessagesMissed), ("kill -SEGV $$", Exit::Failed)] {
            let failure = end(script, true).unwrap_err();
            let why = failure.to_string();
            assert_eq!(failure.exit(), code, "{why}");
            assert!(why.starts_with("node 1, a failed at exit: "), "{why}");
        }
        let why = end("exit 0", false).unwrap_err().to_string();
        assert!(why.contains("ended unexpectedly"), "{why}");
    }

    #[test]
    fn rate_covers_the_last_period_only() {
        let mut member = member("true", true);
        let now = Instant::now();
        let ago = |milliseconds| now.checked_sub(Duration::from_millis(milliseconds)).unwrap();
        member.history.extend([(ago(9000), 0), (ago(8000), 900), (ago(2000), 1000)]);
        member
            .receive_line(Some(
                r#"{"messages":1012,"bytes":0,"messages_per_s":99,"bytes_per_s":0,"stages":[]}"#
                    .to_owned(),
            ))
            .unwrap();
        assert_eq!(member.history.len(), 3);
        assert!((13.0..15.0).contains(&member.rate()), "{}", member.rate());
        member.child.wait().unwrap();
    }
}
