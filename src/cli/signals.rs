//! Being asked to end, by Ctrl-C or by who runs this process: noticed wherever it waits, so
//! that it ends in order.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::exit::{Exit, Failure};
use super::process::restore_default_action;

/// How long something is waited for that cannot be waited for together with signals.
pub(crate) const SLICE: Duration = Duration::from_millis(100);

/// Signals of this process, which do nothing else from now on.
#[derive(Debug)]
pub(crate) struct Signals {
    signal_fd: SignalFd,
    caught: SigSet,
    is_termination_requested: Cell<bool>,
    hangups: Cell<u64>,
    /// When a [`termination_requested_throttled`](Self::glance) looks again.
    next: Cell<Instant>,
}

impl Signals {
    /// Those that ask to end. To be called before any thread is started: threads have to leave
    /// signals to this one.
    pub(crate) fn catch() -> Result<Self, Failure> {
        Self::catch_set(&[Signal::SIGINT, Signal::SIGTERM])
    }

    /// As well as that the terminal was closed, which does not end a service.
    pub(crate) fn catch_with_hangup() -> Result<Self, Failure> {
        Self::catch_set(&[Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP])
    }

    fn catch_set(caught: &[Signal]) -> Result<Self, Failure> {
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

    /// From now on they end this process at once: what is still to be done may take
    /// as long as somebody else likes, and nothing would be left behind.
    pub(crate) fn restore_defaults(&self) {
        // One that is there already was meant for what is over.
        self.drain();
        let mut usual = self.caught.iter().map(restore_default_action);
        if let Err(error) =
            usual.try_for_each(|one| one).and_then(|()| self.caught.thread_unblock())
        {
            tracing::debug!(%error, "restore default signal actions failed");
        }
    }

    /// Was this process asked to end?
    pub(crate) fn termination_requested(&self) -> bool {
        self.drain();
        self.is_termination_requested.get()
    }

    /// The same for what is done very often: a look at signals is a call of the system, so it
    /// looks ten times a second only.
    pub(crate) fn termination_requested_throttled(&self) -> bool {
        let now = Instant::now();
        if now < self.next.get() {
            return self.is_termination_requested.get();
        }
        self.next.set(now + SLICE);
        self.termination_requested()
    }

    /// Fails once this process was asked to end, by a [`termination_requested_throttled`](Self::glance).
    pub(crate) fn check_interrupted(&self) -> Result<(), Failure> {
        if self.termination_requested_throttled() { Err(interrupted()) } else { Ok(()) }
    }

    /// How often its terminal was closed, or it was told to read its settings again.
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

    /// Waits until the descriptor is ready, or a signal came, or the time is over. True if it is ready.
    pub(crate) fn wait_for(
        &self,
        descriptor: BorrowedFd<'_>,
        what: PollFlags,
        longest: Duration,
    ) -> bool {
        let mut entries =
            [PollFd::new(descriptor, what), PollFd::new(self.signal_fd.as_fd(), PollFlags::POLLIN)];
        let _ = poll(&mut entries, milliseconds(longest));
        entries[0].any().unwrap_or(true)
    }

    /// Waits until the time is over, or a signal came.
    pub(crate) fn sleep(&self, longest: Duration) {
        let mut entries = [PollFd::new(self.signal_fd.as_fd(), PollFlags::POLLIN)];
        let _ = poll(&mut entries, milliseconds(longest));
    }

    /// The same; fails if this process was asked to end.
    pub(crate) fn pause(&self, longest: Duration) -> Result<(), Failure> {
        self.sleep(longest);
        if self.termination_requested() { Err(interrupted()) } else { Ok(()) }
    }

    /// Does something that takes its time, in a thread that is left alone if this process is
    /// asked to end meanwhile.
    pub(crate) fn run_interruptible<T: Send + 'static>(
        &self,
        task: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Failure> {
        self.run_interruptible_with_notice(task, Duration::MAX, || {})
    }

    /// The same; if it takes longer than so long, that is said once.
    pub(crate) fn run_interruptible_with_notice<T: Send + 'static>(
        &self,
        task: impl FnOnce() -> T + Send + 'static,
        notice_delay: Duration,
        notice: impl FnOnce(),
    ) -> Result<T, Failure> {
        let (began, mut notice) = (Instant::now(), Some(notice));
        let (sender, receiver) = mpsc::channel();
        std::thread::Builder::new()
            .spawn(move || {
                let _ = sender.send(task());
            })
            .map_err(|error| Failure::failed(format!("start thread failed: {error}")))?;
        loop {
            match receiver.recv_timeout(SLICE / 10) {
                Ok(done) => return Ok(done),
                Err(mpsc::RecvTimeoutError::Timeout) if self.termination_requested() => {
                    return Err(interrupted());
                }
                Err(mpsc::RecvTimeoutError::Timeout) if began.elapsed() >= notice_delay => {
                    if let Some(notice) = notice.take() {
                        notice();
                    }
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(Failure::failed("a thread of this process panicked"));
                }
            }
        }
    }
}

/// Rounded up, so that nobody polls with a timeout of 0 until the last microsecond is over.
fn milliseconds(time: Duration) -> PollTimeout {
    let rounded = time.as_nanos().div_ceil(1_000_000);
    PollTimeout::try_from(rounded).unwrap_or(PollTimeout::MAX)
}

/// It was asked to end before it was done.
pub(crate) fn interrupted() -> Failure {
    Failure::new(Exit::Interrupted, "interrupted")
}

/// Until when to wait, if there is an end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    pub(crate) fn after(time: Option<Duration>) -> Self {
        Self(time.and_then(|time| Instant::now().checked_add(time)))
    }

    pub(crate) fn is_over(self) -> bool {
        self.0.is_some_and(|end| Instant::now() >= end)
    }

    /// How long to wait at a time.
    pub(crate) fn slice(self) -> Duration {
        self.0.map_or(SLICE, |end| end.saturating_duration_since(Instant::now()).min(SLICE))
    }
}
