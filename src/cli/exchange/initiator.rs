//! The first process: it starts the second one, and never leaves it behind.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::frame::Frame;
use super::link::Link;
use super::plan::Plan;
use super::station::Station;
use super::vigil::Role;
use crate::cli::exit::{Exit, Failure};
use crate::cli::process::{pin, remember_child};

/// How long a process that was asked to end may take.
const FAREWELL: Duration = Duration::from_secs(2);

/// Starts the target and opens this side of the exchange.
pub(crate) fn start(plan: &Plan, core: Option<usize>) -> Result<Station, Failure> {
    // What cannot be found here is not worth a second process.
    let (offer, ordered) = plan.offer()?;
    warn_of_order(&offer, ordered);
    let (target, mut link) = Target::start()?;
    if !link.send(&Frame::Plan(plan.clone()))? {
        return Err(target.explain_end());
    }
    if let Some(core) = core {
        pin(core)?;
    }
    Station::open(plan, &offer, link, Role::Initiator(target))
}

/// Says so if an offer is not what was asked for.
pub(super) fn warn_of_order(offer: &fabric::Offer, ordered: bool) {
    if !ordered {
        let provider = &offer.capabilities().provider;
        eprintln!("fabricast: {provider} does not promise the order that was asked for");
    }
}

/// The second process. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Target {
    child: Child,
}

impl Target {
    fn start() -> Result<(Self, Link), Failure> {
        // This very program, even if another has taken its place on disk.
        let mut child = Command::new("/proc/self/exe")
            .arg0("fabricast")
            .arg("exchange-target")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| Failure::failed(format!("starting a second process: {error}")))?;
        remember_child(Some(child.id()));
        let pipes = child.stdout.take().zip(child.stdin.take());
        let target = Self { child };
        let (reader, writer) =
            pipes.ok_or_else(|| Failure::failed("the second process has no pipes"))?;
        Ok((target, Link::new(reader, writer)?))
    }

    /// It closed its pipe: why?
    pub(crate) fn explain_end(mut self) -> Failure {
        match self.wait(FAREWELL) {
            Some(status) => ended(status),
            None => Failure::failed("the target closed its pipe but goes on; it was ended"),
        }
    }

    /// Waits until it has ended by itself, as it should.
    pub(crate) fn finish(mut self) -> Result<(), Failure> {
        match self.wait(FAREWELL) {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(ended(status)),
            None => Err(Failure::new(
                Exit::Deadline,
                format!("the target did not end within {FAREWELL:?}; it was ended"),
            )),
        }
    }

    fn wait(&mut self, timeout: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            if Instant::now() >= deadline {
                return None;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        remember_child(None);
        if !matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        // Asked first: a provider that is asked removes its shared memory.
        if let Ok(number) = i32::try_from(self.child.id()) {
            let _ = kill(Pid::from_raw(number), Signal::SIGTERM);
        }
        if self.wait(FAREWELL).is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

fn ended(status: ExitStatus) -> Failure {
    match (status.code(), status.signal()) {
        (Some(0), _) => Failure::failed("the target process ended too early, with exit status 0"),
        (Some(code), _) => Failure::new(
            Exit::from_code(code),
            format!("the target process failed with exit status {code}"),
        ),
        (None, Some(signal)) => {
            Failure::failed(format!("the target process died of signal {signal}"))
        }
        (None, None) => Failure::failed(format!("the target process ended: {status}")),
    }
}
