//! A line that says how long a measurement has been going on, where a person looks.

use std::io::{IsTerminal, Write};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, SigmaskHow};

/// Between two changes of the line.
const PAUSE: Duration = Duration::from_secs(1);

/// The line, on standard error. It goes when this is dropped.
#[derive(Debug)]
pub(crate) struct Progress(Option<(Sender<()>, JoinHandle<()>)>);

impl Progress {
    /// Shows it, if standard error is a terminal. A thread does that: what is measured is left alone.
    pub(crate) fn begin(what: String) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self(None);
        }
        let (end, ended) = channel();
        let show = move || {
            let began = Instant::now();
            while ended.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout) {
                let seconds = began.elapsed().as_secs();
                let _ = write!(std::io::stderr(), "\r{what}: {seconds} s\x1b[K");
            }
            if began.elapsed() >= PAUSE {
                let _ = write!(std::io::stderr(), "\r\x1b[K");
            }
        };
        // Signals are for other threads, from the first moment on.
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
