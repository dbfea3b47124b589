//! The thread that drives a ring while its user does not.
//!
//! Most providers move data only while their queue is looked at. A user of the ring does that in its
//! calls; between them this thread does. It leaves the port alone while calls follow each other: so a
//! call finds the lock free and costs what it costs without the thread. About a millisecond after the
//! last call it takes the port, sleeps in the queue, and goes on with what comes; the next call wakes
//! it, and has the port as soon as that is done.
//!
//! Some rings have to be looked after though the queue has nothing: those that are told of by messages.
//! The thread does so all the time while they move, and in pauses that grow to 10 ms once they do not.
//!
//! It also looks whether the TCP connection to the other side has ended.

use std::io::{ErrorKind as IoKind, Read};
use std::net::{SocketAddr, TcpStream};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::super::port::{Port, Turn};
use super::OPERATION;
use crate::waiting::Backoff;
use crate::{Error, ErrorKind, Result, Waker};

/// How long after the last call the thread takes the port.
const TICK: Duration = Duration::from_millis(1);
/// The same while one call goes on and on: its end wakes the thread.
const LONGEST_TICK: Duration = Duration::from_millis(50);
/// How long a sleep in the queue is, at most.
const SLEEP: Duration = Duration::from_millis(50);
/// Pauses of the thread where a provider has nothing to sleep on.
const PAUSE: Duration = Duration::from_millis(1);
/// How long a ring that nothing wakes the thread for is looked after without pauses, once nothing of it
/// moves any more.
const ATTENTION: Duration = Duration::from_millis(5);
/// Pauses after that: the first one, and the longest.
const NAPS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(10));
/// Turns without anything after which a call that waits may sleep.
const QUIET: u32 = 200;
/// How long after the end of the TCP connection something may still come by the fabric.
const GRACE: Duration = Duration::from_millis(200);
/// How long a call waits in one go, before it looks whether the other side is gone.
pub(super) const SLICE: Duration = Duration::from_millis(20);

/// A port with its thread.
#[derive(Debug)]
pub(super) struct Driver {
    // First: it is joined before the port is closed.
    thread: Thread,
    shared: Arc<Shared>,
    peer: SocketAddr,
    provider: String,
}

#[derive(Debug)]
struct Thread {
    shared: Arc<Shared>,
    handle: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    port: Mutex<Port>,
    waker: Waker,
    /// A call waits for the port that the thread has.
    is_wanted: AtomicBool,
    stops: AtomicBool,
    /// Calls that have ended.
    calls: AtomicU64,
    /// The thread sleeps for longer than a tick, and wants to know of the end of a call.
    sleeps_long: AtomicBool,
    /// Since when the TCP connection is known to have ended.
    gone: OnceLock<Instant>,
}

/// The port, during a call.
#[derive(Debug)]
pub(super) struct Call<'a> {
    port: MutexGuard<'a, Port>,
    driver: &'a Driver,
}

impl Driver {
    pub(super) fn start(
        mut port: Port,
        stream: TcpStream,
        peer: SocketAddr,
        provider: String,
    ) -> Result<Self> {
        let waker = port.parts().1.waker();
        let shared = Arc::new(Shared {
            port: Mutex::new(port),
            waker,
            is_wanted: AtomicBool::new(false),
            stops: AtomicBool::new(false),
            calls: AtomicU64::new(0),
            sleeps_long: AtomicBool::new(false),
            gone: OnceLock::new(),
        });
        let run = {
            let shared = Arc::clone(&shared);
            move || shared.run(&stream)
        };
        let spawned = std::thread::Builder::new().name("fabricast-ring".into()).spawn(run);
        let handle = spawned.map_err(|error| Error::of_system(OPERATION, &"its thread", &error))?;
        let thread = Thread { shared: Arc::clone(&shared), handle: Some(handle) };
        Ok(Self { thread, shared, peer, provider })
    }

    pub(super) fn peer(&self) -> SocketAddr {
        self.peer
    }

    pub(super) fn provider(&self) -> &str {
        &self.provider
    }

    /// Takes the port for a call.
    ///
    /// # Errors
    /// `NotSupported` in a forked child: it does not have the thread that may hold the port, so it would
    /// wait for it without end.
    pub(super) fn call(&self, operation: &'static str) -> Result<Call<'_>> {
        let shared = &*self.shared;
        if shared.waker.is_parents() {
            let detail = "the ring is the parent process': a forked child connects one of its own";
            return Err(self.error(ErrorKind::NotSupported, operation, detail));
        }
        let port = match shared.port.try_lock() {
            Ok(port) => port,
            Err(TryLockError::Poisoned(port)) => port.into_inner(),
            Err(TryLockError::WouldBlock) => {
                shared.is_wanted.store(true, Ordering::SeqCst);
                // Where the thread cannot be woken it looks soon.
                shared.waker.nudge();
                let port = shared.port.lock().unwrap_or_else(PoisonError::into_inner);
                shared.is_wanted.store(false, Ordering::SeqCst);
                port
            }
        };
        Ok(Call { port, driver: self })
    }

    /// An error of this operation, about the other side.
    pub(super) fn error(
        &self,
        kind: ErrorKind,
        operation: &'static str,
        detail: impl Into<String>,
    ) -> Error {
        let error = Error::new(kind, operation, detail.into());
        error.with_provider(&self.provider).with_peer(self.peer.to_string())
    }

    /// Refuses to wait for a side that is gone, once nothing of it can be on its way any more.
    pub(super) fn check_peer(&self, operation: &'static str) -> Result<()> {
        match self.shared.gone.get() {
            Some(since) if since.elapsed() >= GRACE => Err(self.error(
                ErrorKind::ConnectionLost,
                operation,
                "the other side is gone and did not close the ring: its program ended, or its \
                 connection broke",
            )),
            _ => Ok(()),
        }
    }

    /// Ends the thread, and closes the endpoint.
    pub(super) fn close(self) -> Result<()> {
        let Self { thread, shared, .. } = self;
        drop(thread);
        match Arc::into_inner(shared) {
            Some(shared) => {
                shared.port.into_inner().unwrap_or_else(PoisonError::into_inner).close()
            }
            None => Ok(()),
        }
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        // A forked child has no such thread, which it would wait for without end.
        if self.shared.waker.is_parents() {
            std::mem::forget(self.handle.take());
            return;
        }
        self.shared.stops.store(true, Ordering::SeqCst);
        self.shared.waker.nudge();
        if let Some(handle) = self.handle.take() {
            handle.thread().unpark();
            // It does not panic; if it did, there is nothing to be done for it here.
            let _ = handle.join();
        }
    }
}

impl Call<'_> {
    /// Waits for something to do, by turns: first it looks, then it sleeps.
    pub(super) fn turn(&mut self, idle: &mut u32, longest: Duration) -> Result<()> {
        let is_quiet = *idle >= QUIET;
        let turn = if is_quiet { self.port.rest(longest)? } else { self.port.turn()? };
        match turn {
            Turn::Idle => {
                *idle = idle.saturating_add(1);
                if !is_quiet {
                    self.port.pause();
                }
            }
            Turn::Ring | Turn::Other(_) => *idle = 0,
        }
        Ok(())
    }
}

impl Deref for Call<'_> {
    type Target = Port;

    fn deref(&self) -> &Port {
        &self.port
    }
}

impl DerefMut for Call<'_> {
    fn deref_mut(&mut self) -> &mut Port {
        &mut self.port
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        let shared = &*self.driver.shared;
        shared.calls.fetch_add(1, Ordering::SeqCst);
        if shared.sleeps_long.load(Ordering::SeqCst)
            && let Some(handle) = &self.driver.thread.handle
        {
            handle.thread().unpark();
        }
    }
}

impl Shared {
    fn run(&self, stream: &TcpStream) {
        let mut tick = TICK;
        while !self.stops.load(Ordering::SeqCst) {
            self.sleeps_long.store(tick > TICK, Ordering::SeqCst);
            let calls = self.calls.load(Ordering::SeqCst);
            std::thread::park_timeout(tick);
            self.watch(stream);
            if self.calls.load(Ordering::SeqCst) != calls {
                tick = TICK;
                continue;
            }
            match self.port.try_lock() {
                // What failed fails again, and is told to the user by its next call.
                Ok(mut port) => {
                    tick = if self.drive(&mut port, stream) { TICK } else { LONGEST_TICK }
                }
                Err(TryLockError::WouldBlock) => tick = (2 * tick).min(LONGEST_TICK),
                Err(TryLockError::Poisoned(_)) => return,
            }
        }
    }

    /// Drives the port until a call wants it. False if the queue is of no use.
    fn drive(&self, port: &mut Port, stream: &TcpStream) -> bool {
        let is_wanted =
            || self.is_wanted.load(Ordering::SeqCst) || self.stops.load(Ordering::SeqCst);
        port.parts().1.pause_at_most(PAUSE);
        let mut works = true;
        let (mut moved, mut nap) = (Instant::now(), None);
        while works && !is_wanted() {
            match port.rest_with_naps(SLEEP, nap) {
                Ok(Turn::Idle) => {
                    self.watch(stream);
                    if moved.elapsed() >= ATTENTION {
                        nap = Some(nap.map_or(NAPS.0, |nap: Duration| (2 * nap).min(NAPS.1)));
                    }
                }
                Ok(Turn::Ring | Turn::Other(_)) => (moved, nap) = (Instant::now(), None),
                Err(_) => works = false,
            }
        }
        port.parts().1.pause_at_most(Backoff::LONGEST);
        works
    }

    /// Looks whether the TCP connection has ended. Nothing comes by it, so that whatever does is an end,
    /// too.
    fn watch(&self, mut stream: &TcpStream) {
        if self.gone.get().is_some() {
            return;
        }
        match stream.read(&mut [0; 8]) {
            Err(error) if matches!(error.kind(), IoKind::WouldBlock | IoKind::Interrupted) => {}
            Ok(_) | Err(_) => {
                let _ = self.gone.set(Instant::now());
            }
        }
    }
}
