//! A lock whose holder may die, and for which nobody waits for ever.
//!
//! One word says who holds it, and whether anybody sleeps. Who waits too long asks
//! whether the holder still lives, takes the lock from a dead one, and is told so:
//! what the lock protects may then be half changed, and is for the new holder to
//! repair before anything else. Should that one die, too, the next is told the same.
//!
//! A lock that is let go is anybody's, which is fast: mostly the one takes it again in
//! whose cache everything is. Who has had no luck for some time stands in line. For
//! that there is a second word, with a bit for each that stands there. Whoever lets go
//! and sees that somebody stands in line does not free the lock but keeps it for the
//! next one in line, in turn; the third word knows who had it last in this way.
//!
//! The line is a courtesy and no more. A lock that is kept for somebody is free, but
//! that the others leave it alone for a moment: if it was not taken then, since the one
//! in turn is asleep, or dead, or there never was one, anybody takes it, and
//! strikes the spot off the line. So the lock changes hands by a compare-and-exchange
//! of the first word only, and that alone says who holds it. A bit that is wrong,
//! whoever left it there, costs somebody a turn or all a moment, and nothing else; a
//! death leaves nothing behind that anybody would have to look for.
//!
//! The kernel's own robust futexes are no help here: they know holders by thread
//! number, and two processes in different PID namespaces may have the same one.

use std::fmt;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::participant::{Caller, Participant};
use crate::words::Words;

#[cfg(all(test, not(loom)))]
mod tests;

/// How a lock was come by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Acquired {
    /// From nobody: what it protects is whole.
    Clean,
    /// From one that died holding it: repair first.
    OwnerDied,
}

/// A living participant holds the lock, and did not let go of it in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LockTimeout {
    /// Who; None for a number that names nobody.
    pub by: Option<Participant>,
    /// How long was waited.
    pub waited: Duration,
}

impl fmt::Display for LockTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.by {
            Some(by) => {
                write!(f, "the lock timed out: participant {by} has held it for {:?}", self.waited)
            }
            None => write!(f, "the lock timed out after {:?}", self.waited),
        }
    }
}

impl std::error::Error for LockTimeout {}

/// Words of a lock, all of them in one cache line.
pub(crate) const WORDS: usize = 3;
/// A bit for each that stands in line.
const WAITERS: usize = 1;
/// The spot in line that the lock was kept for last.
const LAST_SERVED: usize = 2;

/// Somebody sleeps on the word.
const SLEEPERS: u64 = 1 << 31;
/// Nobody holds the lock; it is kept for whoever stands at the spot that the lower
/// bits tell.
const RESERVED: u64 = 1 << 30;
/// Who holds it. Some bits more than a number has: those name nobody.
const HOLDER: u64 = RESERVED - 1;
/// Spots in line: bits of a word.
const WAITER_SLOTS: u32 = u64::BITS;

/// How long to try one's luck before standing in line. Each time the lock goes to another
/// core all that it protects goes there, too: the shorter this is, the less gets done.
/// And if it were shorter than it takes eight to have their turn, all would always
/// stand in line.
const SPIN_BEFORE_QUEUEING: Duration = Duration::from_micros(15);
/// How long a lock that is kept for somebody is left alone. Who is about to take it
/// takes it in less than one, but for an interruption.
const RESERVATION_TIME: Duration = Duration::from_micros(5);
/// How long to look before sleeping. Most hold the lock for a fraction of a microsecond;
/// going to sleep and being woken costs tens of them, in which eight others that want
/// it have all had their turn.
const SPIN_TIME: Duration = Duration::from_micros(100);
/// The longest rest between two looks, as [`Words::rest`] counts: who looks less often
/// leaves the cache line to the one who holds the lock. In a model any moment may come
/// next anyway.
const MAX_BACKOFF: u32 = if cfg!(loom) { 1 } else { 32 };
/// The rest of one who stands in line: all wait for it to see that it is in turn.
const BACKOFF_IN_QUEUE: u32 = 4;
/// The first sleep, and the longest: between two of them the holder's life is
/// looked at, so that a death holds nobody up for longer.
const MIN_SLEEP: Duration = Duration::from_millis(1);
const MAX_SLEEP: Duration = Duration::from_millis(20);

/// The lock in some words, held. Dropping it lets go.
#[derive(Debug)]
pub(crate) struct Guard<'a, W: Words> {
    words: &'a W,
    at: usize,
    caller: &'a Caller<'a>,
}

impl<'a, W: Words> Guard<'a, W> {
    /// Takes the lock in the [`WORDS`] from here on. Inlined, come what may, with all that
    /// belongs to it: a guard that is handed on in memory costs as much as the lock.
    #[inline(always)]
    pub(crate) fn take(
        words: &'a W,
        at: usize,
        caller: &'a Caller<'a>,
    ) -> Result<(Self, Acquired), LockTimeout> {
        let taken = take(words, at, caller)?;
        Ok((Self { words, at, caller }, taken))
    }
}

impl<W: Words> Drop for Guard<'_, W> {
    #[inline(always)]
    fn drop(&mut self) {
        // False would mean that we were taken for dead: then whoever did so has
        // repaired what we left, and there is nothing to let go.
        release(self.words, self.at, self.caller);
    }
}

#[inline(always)]
fn take<W: Words>(words: &W, at: usize, caller: &Caller<'_>) -> Result<Acquired, LockTimeout> {
    match words.compare_exchange(at, 0, u64::from(caller.me.number())) {
        Ok(_) => Ok(Acquired::Clean),
        Err(_) => acquire_slow(words, at, caller),
    }
}

/// Apart, so that the code for one who finds it free stays short.
#[cold]
#[inline(never)]
fn acquire_slow<W: Words>(
    words: &W,
    at: usize,
    caller: &Caller<'_>,
) -> Result<Acquired, LockTimeout> {
    Waiter::new(words, at, caller).take()
}

/// False if the lock was not ours any more: somebody took us for dead.
#[inline(always)]
fn release<W: Words>(words: &W, at: usize, caller: &Caller<'_>) -> bool {
    let me = u64::from(caller.me.number());
    let mut expected = me;
    let next = if words.load(at + WAITERS, Relaxed) == 0 { 0 } else { next_waiter(words, at) };
    loop {
        match words.compare_exchange(at, expected, next) {
            Ok(was) => {
                // Also if it is kept for another one: that one will not know.
                if was & SLEEPERS != 0 {
                    words.wake(at, 1);
                }
                return true;
            }
            Err(found) if found & (RESERVED | HOLDER) == me => expected = found,
            Err(_) => return false,
        }
    }
}

/// What the word is to say so that the lock is kept for the next in line, if any. Called
/// by the holder.
#[cold]
fn next_waiter<W: Words>(words: &W, at: usize) -> u64 {
    let line = words.load(at + WAITERS, Relaxed);
    if line == 0 {
        return 0;
    }
    // All others in line come before the last one comes again.
    let first = (words.load(at + LAST_SERVED, Relaxed) as u32 % WAITER_SLOTS + 1) % WAITER_SLOTS;
    let waiter_slot = (first + line.rotate_right(first).trailing_zeros()) % WAITER_SLOTS;
    words.store(at + LAST_SERVED, waiter_slot.into(), Relaxed);
    RESERVED | u64::from(waiter_slot)
}

/// One that did not find the lock free.
struct Waiter<'a, W: Words> {
    words: &'a W,
    at: usize,
    caller: &'a Caller<'a>,
    /// Where it stands in line.
    waiter_slot: Option<u32>,
    /// What the word will say when the lock is ours. Once we slept others may sleep,
    /// too: whoever let go woke only one.
    held_word: u64,
    /// What the word said when the lock was kept for another, and since when.
    reserved: Option<(u64, Instant)>,
}

impl<'a, W: Words> Waiter<'a, W> {
    fn new(words: &'a W, at: usize, caller: &'a Caller<'a>) -> Self {
        Self {
            words,
            at,
            caller,
            waiter_slot: None,
            held_word: caller.me.number().into(),
            reserved: None,
        }
    }

    fn take(mut self) -> Result<Acquired, LockTimeout> {
        let words = self.words;
        let start = words.now();
        // None: we have looked for long enough.
        let mut looking_since = Some(start);
        let mut luck = SPIN_BEFORE_QUEUEING;
        let mut rest = 1;
        let mut nap = MIN_SLEEP;
        loop {
            let seen = words.load(self.at, Relaxed);
            if (is_free(seen) || self.is_for_us(seen))
                && let Some(taken) = self.try_acquire(seen)
            {
                return Ok(taken);
            }
            if rest < MAX_BACKOFF && seen & RESERVED == 0 {
                // Mostly it is free in a moment: no time for the clock.
                self.reserved = None;
                words.rest(rest);
                rest *= 2;
                continue;
            }
            let now = words.now();
            let waited = now.saturating_duration_since(start);
            let is_late = waited >= self.caller.timeout;
            if (self.reservation_expired(seen, now) || is_late && seen & RESERVED != 0)
                && let Some(taken) = self.try_acquire(seen)
            {
                return Ok(taken);
            }
            if let Some(since) = looking_since {
                let looked = now.saturating_duration_since(since);
                if is_late || looked >= SPIN_TIME {
                    // Nobody is to wait for one who sleeps, or is gone.
                    self.dequeue(0);
                    looking_since = None;
                    continue;
                }
                if looked >= luck {
                    self.enqueue();
                }
                let is_next_soon = self.waiter_slot.is_some() || seen & RESERVED != 0;
                words.rest(if is_next_soon { BACKOFF_IN_QUEUE } else { MAX_BACKOFF });
                continue;
            }
            if is_free(seen) || seen & RESERVED != 0 {
                // Somebody was faster, or is about to take it: no time to sleep.
                words.rest(BACKOFF_IN_QUEUE);
            } else if self.caller.liveness.is_dead(holder_of(seen)) {
                if words.compare_exchange(self.at, seen, self.held_word | SLEEPERS).is_ok() {
                    return Ok(Acquired::OwnerDied);
                }
            } else if !is_late
                && (seen & SLEEPERS != 0
                    || words.compare_exchange(self.at, seen, seen | SLEEPERS).is_ok())
            {
                let timeout = nap.min(self.caller.timeout - waited);
                words.sleep(self.at, (seen | SLEEPERS) as u32, timeout);
                nap = (nap * 2).min(MAX_SLEEP);
                self.held_word |= SLEEPERS;
                // Our turn, after so long.
                looking_since = Some(words.now());
                luck = Duration::ZERO;
            }
            if is_late {
                return Err(LockTimeout { by: holder_of(seen), waited });
            }
        }
    }

    fn is_for_us(&self, seen: u64) -> bool {
        self.waiter_slot.is_some_and(|waiter_slot| {
            seen & (RESERVED | HOLDER) == RESERVED | u64::from(waiter_slot)
        })
    }

    fn reservation_expired(&mut self, seen: u64, now: Instant) -> bool {
        match self.reserved {
            _ if seen & RESERVED == 0 => self.reserved = None,
            Some((word, since)) if word == seen => {
                return now.saturating_duration_since(since) >= RESERVATION_TIME;
            }
            _ => self.reserved = Some((seen, now)),
        }
        false
    }

    /// Takes the lock that nobody holds, if the word still says so.
    fn try_acquire(&mut self, seen: u64) -> Option<Acquired> {
        let held_word = self.held_word | seen & SLEEPERS;
        self.words.compare_exchange(self.at, seen, held_word).ok()?;
        let waiter_slot = seen & HOLDER;
        if seen & RESERVED == 0 {
            self.dequeue(0);
            Some(Acquired::Clean)
        } else if waiter_slot < WAITER_SLOTS.into() {
            // It was in turn, and did not come: if it lives, it will stand in line anew.
            self.dequeue(1 << waiter_slot);
            Some(Acquired::Clean)
        } else {
            // Nobody keeps it for such a spot: a scribble, over who knows what.
            self.dequeue(0);
            Some(Acquired::OwnerDied)
        }
    }

    /// Stands in line, if we do not, and if there is a spot.
    fn enqueue(&mut self) {
        let line = self.words.load(self.at + WAITERS, Relaxed);
        if self.waiter_slot.is_some_and(|waiter_slot| line >> waiter_slot & 1 == 1)
            || line == u64::MAX
        {
            return;
        }
        // Not there, or struck off since we did not come when we were in turn.
        let first = self.caller.me.slot() % WAITER_SLOTS;
        let waiter_slot = (first + (!line).rotate_right(first).trailing_zeros()) % WAITER_SLOTS;
        let was = self.words.fetch_or(self.at + WAITERS, 1 << waiter_slot);
        // Else another was faster: next time.
        self.waiter_slot = (was >> waiter_slot & 1 == 0).then_some(waiter_slot);
    }

    /// Leaves the line, and strikes off others with these bits.
    fn dequeue(&mut self, others: u64) {
        let bits = self.waiter_slot.take().map_or(0, |waiter_slot| 1 << waiter_slot) | others;
        if bits != 0 {
            self.words.fetch_and(self.at + WAITERS, !bits);
        }
    }
}

/// Nobody holds it, and it is kept for nobody.
fn is_free(word: u64) -> bool {
    word & (RESERVED | HOLDER) == 0
}

fn holder_of(word: u64) -> Option<Participant> {
    if word & RESERVED != 0 { None } else { Participant::from_number((word & HOLDER) as u32) }
}
