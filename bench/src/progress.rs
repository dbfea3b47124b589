//! A line with the elapsed time of a measurement, on a terminal.

use std::io::Write;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, SigmaskHow};

/// Interval of the updates.
const PAUSE: Duration = Duration::from_secs(1);

/// The line, on standard error. Removed on drop.
#[derive(Debug)]
pub(crate) struct Progress(Option<(Sender<()>, JoinHandle<()>)>);

impl Progress {
    /// Shows the line, if standard error is a terminal. A thread updates it, to not disturb the
    /// measurement.
    pub(crate) fn begin(what: String) -> Self {
        if !command::terminal::redraws_lines(&std::io::stderr()) {
            return Self(None);
        }
        let (end, ended) = channel();
        let show = move || {
            let began = Instant::now();
            while ended.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout) {
                let seconds = began.elapsed().as_secs();
                let _ = write!(std::io::stderr(), "\r{what}: {seconds} s");
            }
            if began.elapsed() >= PAUSE {
                let drawn = format!("{what}: {} s", began.elapsed().as_secs()).chars().count();
                let _ = write!(std::io::stderr(), "\r{:drawn$}\r", "");
            }
        };
        // Other threads handle signals, from the start of this one.
        let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK);
        let thread = std::thread::Builder::new().name("fabricast-progress".to_owned()).spawn(show);
        if let Ok(before) = before {
            let _ = before.thread_set_mask();
        }
        Self(thread.ok().map(|thread| (end, thread)))
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((end, thread)) = self.0.take() {
            drop(end);
            let _ = thread.join();
        }
    }
}
