//! A thread that owns endpoints and queues by value.
//!
//! Everything in this crate can be driven inline, through `&mut`. A worker is a
//! thin wrapper for those who want a thread instead: it owns a state, gives it
//! turns, and passes commands in and events out through bounded channels. The
//! data path inside the thread takes no lock.

use std::fmt;
use std::sync::mpsc::{
    Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel,
};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::waiting::Deadline;

/// What a worker drives.
///
/// ```
/// use std::time::Duration;
/// use fabric::{Driven, Worker};
///
/// /// Adds up what it is told, and tells the sum.
/// struct Sum(u64);
///
/// impl Driven for Sum {
///     type Command = u64;
///     type Event = u64;
///     fn command(&mut self, command: u64, tell: &mut dyn FnMut(u64)) {
///         self.0 += command;
///         tell(self.0);
///     }
///     // A real one polls its completion queue here.
///     fn turn(&mut self, _: &mut dyn FnMut(u64)) -> bool {
///         false
///     }
///     // And waits on that queue here.
///     fn rest(&mut self, longest: Duration) {
///         std::thread::sleep(longest);
///     }
/// }
///
/// let worker = Worker::spawn("sum", 16, Sum(0)).unwrap();
/// worker.tell(40).unwrap();
/// worker.tell(2).unwrap();
/// let patience = Duration::from_secs(5);
/// assert_eq!(worker.wait(patience), Ok(40));
/// assert_eq!(worker.wait(patience), Ok(42));
/// assert_eq!(worker.stop(patience).unwrap().0, 42);
/// ```
pub trait Driven: Send + 'static {
    /// What it is told to do.
    type Command: Send + 'static;
    /// What it tells.
    type Event: Send + 'static;

    /// Acts on a command.
    fn command(&mut self, command: Self::Command, tell: &mut dyn FnMut(Self::Event));

    /// Makes progress, a bounded amount; true if there was something to do.
    fn turn(&mut self, tell: &mut dyn FnMut(Self::Event)) -> bool;

    /// Called when several turns had nothing to do: sleeps at most this long
    /// until there may be something. Commands are looked at in between.
    fn rest(&mut self, longest: Duration);
}

/// Turns without work before the worker rests.
const IDLE_TURNS: u32 = 64;
/// Longest rest: bounds how long a command can wait for a sleeping worker.
const LONGEST_REST: Duration = Duration::from_millis(1);

/// A running worker. Dropping it asks the thread to stop and lets go of it.
///
/// The thread stops after the turn it is in. To be sure that it has, and to get
/// the endpoints and queues back, use [`stop`](Self::stop).
#[derive(Debug)]
pub struct Worker<D: Driven> {
    commands: Option<SyncSender<D::Command>>,
    events: Receiver<D::Event>,
    finished: Receiver<()>,
    thread: Option<JoinHandle<D>>,
}

/// Why a worker could not be reached.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum WorkerError {
    /// It has as many commands waiting as its channel holds.
    Busy,
    /// Its thread ended.
    Gone,
    /// It did not answer in time: it may hang inside a provider.
    Late,
}

impl fmt::Display for WorkerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Busy => "the worker's command queue is full",
            Self::Gone => "the worker's thread has ended",
            Self::Late => "the worker did not answer in time; it may hang inside the provider",
        })
    }
}

/// For people, or with `{:#?}` by its name.
impl fmt::Debug for WorkerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !f.alternate() {
            return fmt::Display::fmt(self, f);
        }
        f.write_str(match self {
            Self::Busy => "Busy",
            Self::Gone => "Gone",
            Self::Late => "Late",
        })
    }
}

impl std::error::Error for WorkerError {}

impl<D: Driven> Worker<D> {
    /// Starts a thread with this name that drives the state; `capacity` bounds
    /// both channels. An event that does not fit waits for room, so a caller
    /// that stops reading events stops the worker.
    ///
    /// # Errors
    /// The system's, if it has no more threads.
    pub fn spawn(name: &str, capacity: usize, state: D) -> std::io::Result<Self> {
        let (command_sender, commands) = sync_channel(capacity.max(1));
        let (event_sender, events) = sync_channel(capacity.max(1));
        let (finish, finished) = sync_channel(1);
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            let state = run(state, &commands, &event_sender);
            let _ = finish.try_send(());
            state
        })?;
        Ok(Self { commands: Some(command_sender), events, finished, thread: Some(thread) })
    }

    /// Gives it a command, without waiting.
    ///
    /// # Errors
    /// Gives the command back with the reason.
    pub fn tell(&self, command: D::Command) -> Result<(), (D::Command, WorkerError)> {
        let Some(commands) = &self.commands else {
            return Err((command, WorkerError::Gone));
        };
        commands.try_send(command).map_err(|refused| match refused {
            TrySendError::Full(command) => (command, WorkerError::Busy),
            TrySendError::Disconnected(command) => (command, WorkerError::Gone),
        })
    }

    /// The next event, if there is one.
    ///
    /// # Errors
    /// `Gone`.
    pub fn poll(&self) -> Result<Option<D::Event>, WorkerError> {
        match self.events.try_recv() {
            Ok(event) => Ok(Some(event)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(WorkerError::Gone),
        }
    }

    /// Waits for the next event.
    ///
    /// # Errors
    /// `Late` after the timeout, `Gone`.
    pub fn wait(&self, timeout: Duration) -> Result<D::Event, WorkerError> {
        self.events.recv_timeout(timeout).map_err(|error| match error {
            RecvTimeoutError::Timeout => WorkerError::Late,
            RecvTimeoutError::Disconnected => WorkerError::Gone,
        })
    }

    /// Asks it to stop and takes the state back. A thread that hangs inside a
    /// provider is given up after the timeout: it, and what it owns, stay behind.
    ///
    /// # Errors
    /// `Late` if it was given up, `Gone` if it had panicked.
    pub fn stop(mut self, timeout: Duration) -> Result<D, WorkerError> {
        self.commands = None;
        let deadline = Deadline::after(timeout);
        loop {
            let left = deadline.left();
            match self.finished.recv_timeout(left.min(Duration::from_millis(1))) {
                Err(RecvTimeoutError::Timeout) if left.is_zero() => return Err(WorkerError::Late),
                // A worker that waits for room to tell something must not wait for ever.
                Err(RecvTimeoutError::Timeout) => while self.events.try_recv().is_ok() {},
                Ok(()) | Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        let thread = self.thread.take().ok_or(WorkerError::Gone)?;
        thread.join().map_err(|_| WorkerError::Gone)
    }
}

fn run<D: Driven>(
    mut state: D,
    commands: &Receiver<D::Command>,
    events: &SyncSender<D::Event>,
) -> D {
    let mut idle = 0;
    loop {
        let mut tell = |event| {
            // Nobody listens any more: the commands end soon, too.
            let _ = events.send(event);
        };
        match commands.try_recv() {
            Ok(command) => {
                state.command(command, &mut tell);
                idle = 0;
            }
            Err(TryRecvError::Disconnected) => return state,
            Err(TryRecvError::Empty) => {}
        }
        if state.turn(&mut tell) {
            idle = 0;
            continue;
        }
        idle += 1;
        if idle >= IDLE_TURNS {
            state.rest(LONGEST_REST);
        } else {
            std::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Echo {
        rests: usize,
    }

    impl Driven for Echo {
        type Command = u32;
        type Event = u32;
        fn command(&mut self, command: u32, tell: &mut dyn FnMut(u32)) {
            if command == 0 {
                std::thread::sleep(Duration::from_millis(300));
            }
            tell(command + 1);
        }
        fn turn(&mut self, _: &mut dyn FnMut(u32)) -> bool {
            false
        }
        fn rest(&mut self, longest: Duration) {
            self.rests += 1;
            std::thread::sleep(longest);
        }
    }

    #[test]
    fn commands_go_in_events_come_out_and_the_state_comes_back() {
        let worker = Worker::spawn("echo", 4, Echo { rests: 0 }).unwrap();
        worker.tell(41).unwrap();
        assert_eq!(worker.wait(Duration::from_secs(5)), Ok(42));
        std::thread::sleep(Duration::from_millis(20));
        let echo = worker.stop(Duration::from_secs(5)).unwrap();
        assert!(echo.rests > 0, "an idle worker rests");
    }

    #[test]
    fn a_worker_that_hangs_is_given_up() {
        let worker = Worker::spawn("hangs", 4, Echo { rests: 0 }).unwrap();
        worker.tell(0).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert!(matches!(worker.stop(Duration::from_millis(20)), Err(WorkerError::Late)));
    }
}
