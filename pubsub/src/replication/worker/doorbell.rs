//! How other threads tell a worker that there is something to do.

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex};

use fabric::Waker;

use super::TopicKey;
use crate::lock::lock;

/// What wakes a worker.
#[derive(Debug)]
pub(super) struct Doorbell {
    announced: Mutex<Vec<Announcement>>,
    is_asleep: AtomicBool,
    waker: Mutex<Waker>,
}

#[derive(Debug)]
pub(super) struct Announcement {
    pub(super) key: TopicKey,
    is_listed: Arc<AtomicBool>,
}

impl Announcement {
    /// Whoever announces it from now on lists it again. An exchange, not a store: what was put there
    /// by whoever announced it before, and found it listed, is seen by the look that follows.
    pub(super) fn clear_listed(&self) {
        self.is_listed.swap(false, Ordering::AcqRel);
    }
}

impl Doorbell {
    pub(super) fn new(waker: Waker) -> Self {
        let (is_asleep, waker) = (AtomicBool::new(false), Mutex::new(waker));
        Self { announced: Mutex::default(), is_asleep, waker }
    }

    /// Takes what was announced, in exchange for an empty list.
    pub(super) fn take(&self, into: &mut Vec<Announcement>) {
        std::mem::swap(&mut *lock(&self.announced), into);
    }

    pub(super) fn is_empty(&self) -> bool {
        lock(&self.announced).is_empty()
    }

    /// Says that the worker sleeps. It looks once more at everything after this.
    pub(super) fn sleeps(&self, is_asleep: bool) {
        self.is_asleep.store(is_asleep, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// After something was put where the worker looks.
    pub(super) fn ring(&self) {
        // Either this sees that it sleeps, or it sees what was put there before it does.
        fence(Ordering::SeqCst);
        if self.is_asleep.swap(false, Ordering::SeqCst) {
            // If that fails it wakes by itself, a little later.
            let _ = lock(&self.waker).wake();
        }
    }

    /// The worker sleeps elsewhere from now on. It is awake.
    pub(super) fn set_waker(&self, waker: Waker) {
        *lock(&self.waker) = waker;
    }
}

/// Says that a topic's source has messages. Cheap while the worker is awake, and it may be said too
/// often.
#[derive(Debug, Clone)]
pub struct Announcer {
    doorbell: Arc<Doorbell>,
    key: TopicKey,
    is_listed: Arc<AtomicBool>,
}

impl Announcer {
    pub(super) fn new(doorbell: &Arc<Doorbell>, key: TopicKey) -> Self {
        let is_listed = Arc::new(AtomicBool::new(false));
        Self { doorbell: Arc::clone(doorbell), key, is_listed }
    }

    /// Says so.
    pub fn announce_waiter(&self) {
        if self.is_listed.swap(true, Ordering::AcqRel) {
            return;
        }
        let is_listed = Arc::clone(&self.is_listed);
        lock(&self.doorbell.announced).push(Announcement { key: self.key, is_listed });
        self.doorbell.ring();
    }
}

#[cfg(test)]
#[path = "doorbell_tests.rs"]
mod tests;
