//! Waiting for events of an agent that other threads use meanwhile.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use ipc::WaitStrategy;

use super::Agent;
use super::local_target::LocalTarget;

/// Waits for [events](super::Event) of an [`Agent`] that several threads share by a lock: the
/// thread that waits does not hold the lock.
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use std::time::{Duration, Instant};
/// use transfer::{Agent, AgentOptions, Event};
/// let agent = Agent::start(AgentOptions::new("shared"))?;
/// let (watch, card) = (agent.event_watch(), agent.card().encode()?);
/// let agent = Arc::new(Mutex::new(agent));
/// let waiting = std::thread::spawn({
///     let agent = Arc::clone(&agent);
///     let deadline = Instant::now() + Duration::from_secs(5);
///     move || watch.wait(deadline, || agent.lock().unwrap().poll_event())
/// });
/// let mut other = Agent::start(AgentOptions::new("other"))?;
/// other.connect(&card, Duration::from_secs(5))?;
/// drop(agent.lock().unwrap()); // free, although a thread waits
/// let Some(Event::Joined { label, .. }) = waiting.join().unwrap() else { panic!() };
/// assert_eq!(label, "other");
/// # Ok::<(), transfer::Error>(())
/// ```
#[derive(Clone)]
pub struct EventWatch {
    local_target: Arc<LocalTarget>,
    wait_strategy: WaitStrategy,
}

impl fmt::Debug for EventWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventWatch").field("label", &self.local_target.label).finish()
    }
}

impl Agent {
    /// Waits for events without this agent: see [`EventWatch`].
    #[must_use]
    pub fn event_watch(&self) -> EventWatch {
        let (local_target, wait_strategy) = (Arc::clone(&self.local_target), self.wait_strategy);
        EventWatch { local_target, wait_strategy }
    }
}

impl EventWatch {
    /// Waits until `poll` has a result; None if the deadline passes. It is called at the start, and
    /// when the agent may have a new event.
    ///
    /// Operations in flight do not advance meanwhile: with any, wait for less than a millisecond,
    /// and call [`Agent::progress`].
    pub fn wait<T>(&self, deadline: Instant, poll: impl FnMut() -> Option<T>) -> Option<T> {
        self.local_target.doorbell.wait(&mut { self.wait_strategy }, deadline, poll)
    }

    /// Makes all waits for events of the agent poll once more, in any thread.
    pub fn wake(&self) {
        self.local_target.doorbell.ring();
    }
}
