//! Who waits for room, and since when: so that who is in the way can be asked to leave.

use std::sync::atomic::Ordering::Relaxed;

use ipc::Words;

use crate::clock;

/// The word in which one who waits for room says since when; 0 while it does not.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pressure<'a, W> {
    pub(super) words: &'a W,
    pub(super) at: usize,
}

impl<W: Words> Pressure<'_, W> {
    pub(crate) fn begin(&self) {
        self.words.store(self.at, clock::now().max(1), Relaxed);
    }

    pub(crate) fn end(&self) {
        self.words.store(self.at, 0, Relaxed);
    }

    pub(crate) fn since(&self) -> Option<u64> {
        Some(self.words.load(self.at, Relaxed)).filter(|since| *since != 0)
    }
}
