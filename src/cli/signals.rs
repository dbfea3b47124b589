//! Termination by signals: every wait of the process notices them, so that it ends in order.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::exit::{Exit, Failure, Result};
use super::process::restore_default_action;

/// Interval of checks where signals cannot be polled together with the other event.
pub(crate) const SLICE: Duration = Duration::from_millis(100);

/// Caught signals of this process.
#[derive(Debug)]
pub(crate) struct Signals {
    signal_fd: SignalFd,
    caught: SigSet,
    is_termination_requested: Cell<bool>,
    /// Number of SIGHUP so far.
    hangups: Cell<u64>,
    /// Time of the next check by [`Self::termination_requested_throttled`].
    next: Cell<Instant>,
}

impl Signals {
    /// Catches the signals that end the process. Call before starting threads: they inherit the
    /// signal mask.
    pub(crate) fn catch() -> Result<Self> {
        Self::catch_set(&[Signal::SIGINT, Signal::SIGTERM])
    }

    /// Catches SIGHUP, too, which does not end a service.
    pub(crate) fn catch_with_hangup() -> Result<Self> {
        Self::catch_set(&[Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP])
    }

    fn catch_set(caught: &[Signal]) -> Result<Self> {
        let mut all = SigSet::empty();
        caught.iter().for_each(|one| all.add(*one));
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let signal_fd = all.thread_block().and_then(|()| SignalFd::with_flags(&all, flags));
        let signal_fd = signal_fd
            .map_err(|error| Failure::failed(format!("block signals failed: {}", error.desc())))?;
        Ok(Self {
            signal_fd,
            caught: all,
            is_termination_requested: Cell::new(false),
            hangups: Cell::new(0),
            next: Cell::new(Instant::now()),
        })
    }

    /// From now on signals end this process at once: the remaining output may block for any time,
    /// and nothing is left to clean up.
    pub(crate) fn restore_defaults(&self) {
        // A pending signal was meant for the run that has ended.
        self.drain();
        let mut usual = self.caught.iter().map(restore_default_action);
        if let Err(error) =
            usual.try_for_each(|one| one).and_then(|()| self.caught.thread_unblock())
        {
            tracing::debug!(%error, "restore default signal actions failed");
        }
    }

    pub(crate) fn termination_requested(&self) -> bool {
        self.drain();
        self.is_termination_requested.get()
    }

    /// Like [`Self::termination_requested`], for tight loops: checks ten times a second only, since
    /// a check is a system call.
    pub(crate) fn termination_requested_throttled(&self) -> bool {
        let now = Instant::now();
        if now < self.next.get() {
            return self.is_termination_requested.get();
        }
        self.next.set(now + SLICE);
        self.termination_requested()
    }

    /// Fails once [`Self::termination_requested_throttled`] is true.
    pub(crate) fn check_interrupted(&self) -> Result<()> {
        if self.termination_requested_throttled() { Err(interrupted()) } else { Ok(()) }
    }

    pub(crate) fn hangups(&self) -> u64 {
        self.drain();
        self.hangups.get()
    }

    fn drain(&self) {
        while let Ok(Some(signal)) = self.signal_fd.read_signal() {
            match Signal::try_from(signal.ssi_signo as i32) {
                Ok(Signal::SIGHUP) => self.hangups.set(self.hangups.get() + 1),
                _ => self.is_termination_requested.set(true),
            }
        }
    }

    /// Waits until the descriptor is ready, a signal arrives, or the time is over. True if it is
    /// ready.
    pub(crate) fn wait_for(
        &self,
        descriptor: BorrowedFd<'_>,
        events: PollFlags,
        longest: Duration,
    ) -> bool {
        let mut entries = [
            PollFd::new(descriptor, events),
            PollFd::new(self.signal_fd.as_fd(), PollFlags::POLLIN),
        ];
        let _ = poll(&mut entries, milliseconds(longest));
        entries[0].any().unwrap_or(true)
    }

    /// Waits until the time is over, or a signal arrives.
    pub(crate) fn sleep(&self, longest: Duration) {
        let mut entries = [PollFd::new(self.signal_fd.as_fd(), PollFlags::POLLIN)];
        let _ = poll(&mut entries, milliseconds(longest));
    }

    /// Like [`Self::sleep`], but fails if a signal ends the process.
    pub(crate) fn pause(&self, longest: Duration) -> Result<()> {
        self.sleep(longest);
        if self.termination_requested() { Err(interrupted()) } else { Ok(()) }
    }

    /// Runs a blocking task in a thread, which is abandoned if a signal ends the process meanwhile.
    /// Calls `notice` once if the task takes longer than `notice_delay`.
    pub(crate) fn run_interruptible<T: Send + 'static>(
        signals: Option<&Self>,
        task: impl FnOnce() -> T + Send + 'static,
        notice_delay: Duration,
        notice: impl FnOnce(),
    ) -> Result<T> {
        let (began, mut notice) = (Instant::now(), Some(notice));
        let (sender, receiver) = mpsc::channel();
        std::thread::Builder::new()
            .spawn(move || sender.send(task()))
            .map_err(|error| Failure::failed(format!("start thread failed: {error}")))?;
        loop {
            let longest = match (signals, &notice) {
                (Some(_), _) => SLICE / 10,
                (None, Some(_)) => notice_delay,
                (None, None) => Duration::MAX,
            };
            match receiver.recv_timeout(longest) {
                Ok(done) => return Ok(done),
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    if signals.is_some_and(Self::termination_requested) {
                        return Err(interrupted());
                    }
                    if let Some(notice) = notice.take_if(|_| began.elapsed() >= notice_delay) {
                        notice();
                    }
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(Failure::failed("a thread of this process panicked"));
                }
            }
        }
    }
}

/// Rounded up, to avoid polls with a timeout of 0 in the last millisecond.
fn milliseconds(time: Duration) -> PollTimeout {
    let rounded = time.as_nanos().div_ceil(1_000_000);
    PollTimeout::try_from(rounded).unwrap_or(PollTimeout::MAX)
}

/// The failure of a run that a signal ended.
pub(crate) fn interrupted() -> Failure {
    Failure::new(Exit::Interrupted, "interrupted")
}

/// The deadline of a wait, if it has one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    pub(crate) fn after(time: Option<Duration>) -> Self {
        Self(time.and_then(|time| Instant::now().checked_add(time)))
    }

    pub(crate) fn is_over(self) -> bool {
        self.0.is_some_and(|end| Instant::now() >= end)
    }

    /// Timeout of the next poll.
    pub(crate) fn slice(self) -> Duration {
        self.0.map_or(SLICE, |end| end.saturating_duration_since(Instant::now()).min(SLICE))
    }
}
