//! Messages that are said until they are heard, and taken once, in the order in which they were said.
//!
//! A connection that breaks and comes back may have lost what was on its way, and says nothing of it.
//! So the two sides of a session number what they say, from one on, and say with everything up to
//! which number they have heard the other. What is not known to be heard is said again, after pauses
//! that grow. What comes twice is left aside; what comes early waits for what is missing.
//!
//! Nothing here knows a fabric, and the time is told by who asks.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

#[cfg(test)]
mod tests;

/// Messages that may be said and not yet heard.
pub(super) const MOST_UNHEARD: usize = 512;
/// So many may come before the other side is told so.
const MOST_OWED: u32 = 16;
/// It is told so after so long at the latest, if there is nothing else to say.
const LONGEST_OWED: Duration = Duration::from_millis(20);

/// Why the other side is not to be believed any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lie {
    /// It heard what was not said.
    Heard,
    /// It said more than may be on its way.
    Said,
}

#[derive(Debug)]
struct Said<M> {
    message: M,
    /// When it is said again, and how long it is waited then.
    next: Instant,
    pause: Duration,
}

/// One side of a session.
#[derive(Debug)]
pub(super) struct Hearing<M> {
    /// The number of what is said next.
    next: u64,
    /// What was said last, and is not known to be heard: the oldest first.
    unheard: VecDeque<Said<M>>,
    /// First pause before something is said again, and the longest.
    pauses: (Duration, Duration),
    /// All up to this number was taken from the other side.
    heard: u64,
    early: BTreeMap<u64, M>,
    /// What came and the other side was not told of, and since when.
    owed: u32,
    owed_since: Option<Instant>,
}

impl<M> Hearing<M> {
    pub(super) fn new(first_pause: Duration, longest_pause: Duration) -> Self {
        Self {
            next: 1,
            unheard: VecDeque::new(),
            pauses: (first_pause, longest_pause.max(first_pause)),
            heard: 0,
            early: BTreeMap::new(),
            owed: 0,
            owed_since: None,
        }
    }

    /// Something is said; its number. None if too much is not heard yet.
    pub(super) fn say(&mut self, message: M, now: Instant) -> Option<u64> {
        if self.unheard.len() >= MOST_UNHEARD {
            return None;
        }
        let pause = self.pauses.0;
        self.unheard.push_back(Said { message, next: now + pause, pause });
        self.next += 1;
        Some(self.next - 1)
    }

    /// May something be said that can wait? Most of what may be said and not yet heard is for what
    /// cannot; the other side answers, too, and has the same limit.
    pub(super) fn has_room(&self) -> bool {
        self.unheard.len() < MOST_UNHEARD / 4
    }

    /// Up to which number the other side was heard: it is told so now.
    pub(super) fn answer(&mut self) -> u64 {
        self.owed = 0;
        self.owed_since = None;
        self.heard
    }

    /// The other side says that it heard all up to this number.
    pub(super) fn is_heard(&mut self, up_to: u64) -> Result<(), Lie> {
        if up_to >= self.next {
            return Err(Lie::Heard);
        }
        // An older one may come later.
        let open = (self.next - 1 - up_to) as usize;
        while self.unheard.len() > open {
            self.unheard.pop_front();
        }
        Ok(())
    }

    /// Something came: it is given back if it is the next one. Behind it others may be
    /// [taken](Self::take).
    pub(super) fn hear(&mut self, number: u64, message: M, now: Instant) -> Result<Option<M>, Lie> {
        if number > self.heard + MOST_UNHEARD as u64 {
            return Err(Lie::Said);
        }
        // Also of what came before: the answer may have been lost.
        self.owed += 1;
        self.owed_since.get_or_insert(now);
        if number == self.heard + 1 {
            self.heard = number;
            self.early.remove(&number);
            return Ok(Some(message));
        }
        if number > self.heard {
            self.early.entry(number).or_insert(message);
        }
        Ok(None)
    }

    /// The next one of those that came early.
    pub(super) fn take(&mut self) -> Option<M> {
        let message = self.early.remove(&(self.heard + 1))?;
        self.heard += 1;
        Some(message)
    }

    /// Is it time to tell the other side what came?
    pub(super) fn owes(&self, now: Instant) -> bool {
        self.owed >= MOST_OWED || self.owed_since.is_some_and(|since| now - since >= LONGEST_OWED)
    }

    /// What is to be said again, with its number.
    pub(super) fn again(&mut self, now: Instant) -> impl Iterator<Item = (u64, &M)> {
        let first = self.next - self.unheard.len() as u64;
        let longest = self.pauses.1;
        (first..).zip(&mut self.unheard).filter(move |(_, said)| said.next <= now).map(
            move |(number, said)| {
                said.pause = (2 * said.pause).min(longest);
                said.next = now + said.pause;
                (number, &said.message)
            },
        )
    }

    /// Something is known to be lost: all is said again without a long pause.
    pub(super) fn hurry(&mut self, next: Instant) {
        for said in &mut self.unheard {
            said.next = said.next.min(next);
        }
    }
}
