//! The thread that drives a ring between calls of its user.
//!
//! Most providers move data only while their queue is polled. Calls of the user poll it, and
//! between calls this thread does. While calls follow each other it leaves the port alone, so a
//! call finds the lock free at no extra cost. About a millisecond after the last call it locks the
//! port, sleeps in the queue and handles completions. The next call wakes it and gets the port
//! right after.
//!
//! Rings in message mode need polling besides the queue. The thread polls without pauses while
//! messages move, and then in intervals that grow to 10 ms.
//!
//! The thread also checks whether the TCP connection has ended.

use std::io::{ErrorKind as IoKind, Read};
use std::net::{SocketAddr, TcpStream};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use threads::lock;

use super::super::{Port, PortEvent};
use super::OPERATION;
use crate::waiting::Backoff;
use crate::{Error, ErrorKind, Result, Waker};

/// How long after the last call the thread locks the port.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);
/// How long the thread waits during one long call, whose end wakes it.
const MAX_CHECK_INTERVAL: Duration = Duration::from_millis(50);
const MAX_SLEEP: Duration = Duration::from_millis(50);
/// Pauses of the thread where the provider has no wait object.
const PAUSE: Duration = Duration::from_millis(1);
/// How long a ring without wake-ups is polled without pauses after its last event.
const ACTIVE_PERIOD: Duration = Duration::from_millis(5);
/// Pauses after that: the first, and the longest.
const SLEEP_STEPS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(10));
/// Steps without an event after which a call may sleep.
const IDLE_POLLS: u32 = 200;
/// How long after the end of the TCP connection data may still arrive over the fabric.
const DISCONNECT_GRACE: Duration = Duration::from_millis(200);
/// How long a call waits before it checks whether the peer has exited.
pub(super) const WAIT_SLICE: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(super) struct ProgressThread {
    // First: it is joined before the port is closed.
    thread: JoinOnDrop,
    shared: Arc<Shared>,
    peer: SocketAddr,
    provider: String,
}

#[derive(Debug)]
struct JoinOnDrop {
    shared: Arc<Shared>,
    handle: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    port: Mutex<Port>,
    waker: Waker,
    /// A call waits for the port, which the thread has locked.
    is_port_wanted: AtomicBool,
    stop_requested: AtomicBool,
    /// Number of calls that have returned.
    calls: AtomicU64,
    /// The thread sleeps for longer than a tick: the end of a call must wake it.
    is_in_long_sleep: AtomicBool,
    /// When the end of the TCP connection was detected.
    disconnected_at: OnceLock<Instant>,
}

#[derive(Debug)]
pub(super) struct PortGuard<'a> {
    port: MutexGuard<'a, Port>,
    progress_thread: &'a ProgressThread,
}

impl ProgressThread {
    pub(super) fn start(
        mut port: Port,
        stream: TcpStream,
        (peer, provider): (SocketAddr, String),
    ) -> Result<Self> {
        let waker = port.parts().1.waker();
        let shared = Arc::new(Shared {
            port: Mutex::new(port),
            waker,
            is_port_wanted: AtomicBool::new(false),
            stop_requested: AtomicBool::new(false),
            calls: AtomicU64::new(0),
            is_in_long_sleep: AtomicBool::new(false),
            disconnected_at: OnceLock::new(),
        });
        let running = Arc::clone(&shared);
        let handle = threads::spawn("fabricast-ring", move || running.run(&stream))
            .map_err(|error| Error::from_io_error(OPERATION, &"its thread", &error))?;
        let thread = JoinOnDrop { shared: Arc::clone(&shared), handle: Some(handle) };
        Ok(Self { thread, shared, peer, provider })
    }

    pub(super) fn peer(&self) -> SocketAddr {
        self.peer
    }

    pub(super) fn provider(&self) -> &str {
        &self.provider
    }

    /// Locks the port for a call. Fails in a forked child, where the thread that may hold the lock
    /// does not exist.
    pub(super) fn lock_port(&self, operation: &'static str) -> Result<PortGuard<'_>> {
        let shared = &*self.shared;
        if shared.waker.is_inherited() {
            let detail =
                "the ring belongs to the parent process. Connect another one in the forked child";
            return Err(self.error(ErrorKind::NotSupported, operation, detail));
        }
        let port = match shared.port.try_lock() {
            Ok(port) => port,
            Err(TryLockError::Poisoned(port)) => port.into_inner(),
            Err(TryLockError::WouldBlock) => {
                shared.is_port_wanted.store(true, Ordering::SeqCst);
                // A thread that cannot be woken checks soon.
                shared.waker.wake_best_effort();
                let port = lock(&shared.port);
                shared.is_port_wanted.store(false, Ordering::SeqCst);
                port
            }
        };
        Ok(PortGuard { port, progress_thread: self })
    }

    /// An error of this operation, with provider and peer.
    pub(super) fn error(
        &self,
        kind: ErrorKind,
        operation: &'static str,
        detail: impl Into<String>,
    ) -> Error {
        let error = Error::new(kind, operation, detail.into());
        error.with_provider(&self.provider).with_peer(self.peer.to_string())
    }

    /// Fails if the peer has exited and none of its data can be in flight any more.
    pub(super) fn check_peer(&self, operation: &'static str) -> Result<()> {
        match self.shared.disconnected_at.get() {
            Some(since) if since.elapsed() >= DISCONNECT_GRACE => Err(self.error(
                ErrorKind::ConnectionLost,
                operation,
                "the peer did not close the ring: its program exited, or the connection broke",
            )),
            _ => Ok(()),
        }
    }

    pub(super) fn close(self) -> Result<()> {
        let Self { thread, shared, .. } = self;
        drop(thread);
        Arc::into_inner(shared).map_or(Ok(()), |shared| {
            shared.port.into_inner().unwrap_or_else(PoisonError::into_inner).close()
        })
    }
}

impl Drop for JoinOnDrop {
    fn drop(&mut self) {
        // A forked child does not have the thread and would wait for it forever.
        if self.shared.waker.is_inherited() {
            std::mem::forget(self.handle.take());
            return;
        }
        self.shared.stop_requested.store(true, Ordering::SeqCst);
        self.shared.waker.wake_best_effort();
        if let Some(handle) = self.handle.take() {
            handle.thread().unpark();
            // It does not panic; if it did, nothing can be done here.
            let _ = handle.join();
        }
    }
}

impl PortGuard<'_> {
    /// Waits for an event: polls first, then sleeps.
    pub(super) fn progress(&mut self, idle: &mut u32, longest: Duration) -> Result<()> {
        let is_idle = *idle >= IDLE_POLLS;
        let progress = if is_idle { self.port.wait(longest)? } else { self.port.progress()? };
        match progress {
            PortEvent::Idle => {
                *idle = idle.saturating_add(1);
                if !is_idle {
                    self.port.pause();
                }
            }
            PortEvent::Ring | PortEvent::Other(_) => *idle = 0,
        }
        Ok(())
    }
}

impl Deref for PortGuard<'_> {
    type Target = Port;

    fn deref(&self) -> &Port {
        &self.port
    }
}

impl DerefMut for PortGuard<'_> {
    fn deref_mut(&mut self) -> &mut Port {
        &mut self.port
    }
}

impl Drop for PortGuard<'_> {
    fn drop(&mut self) {
        let shared = &*self.progress_thread.shared;
        shared.calls.fetch_add(1, Ordering::SeqCst);
        if shared.is_in_long_sleep.load(Ordering::SeqCst)
            && let Some(handle) = &self.progress_thread.thread.handle
        {
            handle.thread().unpark();
        }
    }
}

impl Shared {
    fn run(&self, stream: &TcpStream) {
        let mut tick = CHECK_INTERVAL;
        while !self.stop_requested.load(Ordering::SeqCst) {
            self.is_in_long_sleep.store(tick > CHECK_INTERVAL, Ordering::SeqCst);
            let calls = self.calls.load(Ordering::SeqCst);
            std::thread::park_timeout(tick);
            self.watch(stream);
            if self.calls.load(Ordering::SeqCst) != calls {
                tick = CHECK_INTERVAL;
                continue;
            }
            match self.port.try_lock() {
                // An error occurs again in the user's next call, which reports it.
                Ok(mut port) => {
                    let is_ok = self.drive(&mut port, stream);
                    tick = if is_ok { CHECK_INTERVAL } else { MAX_CHECK_INTERVAL };
                }
                Err(TryLockError::WouldBlock) => tick = (2 * tick).min(MAX_CHECK_INTERVAL),
                Err(TryLockError::Poisoned(_)) => return,
            }
        }
    }

    /// Drives the port until a call needs it. False if the queue has failed.
    fn drive(&self, port: &mut Port, stream: &TcpStream) -> bool {
        let is_port_wanted = || {
            self.is_port_wanted.load(Ordering::SeqCst) || self.stop_requested.load(Ordering::SeqCst)
        };
        port.parts().1.set_max_pause(PAUSE);
        let mut is_ok = true;
        let (mut last, mut sleep) = (Instant::now(), None);
        while is_ok && !is_port_wanted() {
            match port.wait_with_max_sleep(MAX_SLEEP, sleep) {
                Ok(PortEvent::Idle) => {
                    self.watch(stream);
                    if last.elapsed() >= ACTIVE_PERIOD {
                        let longer = |step: Duration| (2 * step).min(SLEEP_STEPS.1);
                        sleep = Some(sleep.map_or(SLEEP_STEPS.0, longer));
                    }
                }
                Ok(PortEvent::Ring | PortEvent::Other(_)) => (last, sleep) = (Instant::now(), None),
                Err(_) => is_ok = false,
            }
        }
        port.parts().1.set_max_pause(Backoff::MAX_PAUSE);
        is_ok
    }

    /// Checks whether the TCP connection has ended. No data is expected, so data counts as its end,
    /// too.
    fn watch(&self, mut stream: &TcpStream) {
        if self.disconnected_at.get().is_some() {
            return;
        }
        match stream.read(&mut [0; 8]) {
            Err(error) if matches!(error.kind(), IoKind::WouldBlock | IoKind::Interrupted) => {}
            _ => drop(self.disconnected_at.set(Instant::now())),
        }
    }
}
