//! A lock whose owner may die, and whose waits always have a bound.
//!
//! One word holds the owner, and a flag that sleepers exist. A waiter that waits too long
//! checks whether the owner lives, takes the lock from a dead one, and gets
//! `Acquired::OwnerDied`. The protected state may then be half changed, and the new owner
//! must repair it first. If it dies, too, the next owner gets the same result.
//!
//! A released lock is free for any process, which is fast: usually the process takes it again
//! whose cache holds the state. A process that has failed to get it for some time becomes a
//! waiter: a second word has a bit for each waiter. A release that sees waiters does not free
//! the lock, but reserves it for the next waiter in turn. The third word holds the waiter that
//! had the last reservation.
//!
//! The waiters are an optimisation only. A reserved lock is free, except that other processes
//! leave it alone for a moment. If it was not taken then (the waiter is asleep or dead, or
//! never existed), any process takes it, and clears the waiter's bit. So the lock changes hands
//! only by a compare-and-exchange of the first word, which alone holds the owner. A wrong bit
//! costs one waiter a reservation, or all processes a moment, and nothing else; a death leaves
//! nothing behind that must be cleaned up.
//!
//! The kernel's robust futexes do not help: they identify owners by thread id, and two
//! processes in different PID namespaces may have the same one.

use std::fmt;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::participant::{Caller, Participant};
use crate::words::Words;

#[cfg(all(test, not(loom)))]
mod tests;

/// The state in which a lock was acquired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Acquired {
    /// The lock was free: the protected state is consistent.
    Clean,
    /// The lock's owner died: repair first.
    OwnerDied,
}

/// A living participant holds the lock, and did not release it in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LockTimeout {
    /// The owner; None for an invalid number.
    pub by: Option<Participant>,
    /// How long the call waited.
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

/// Words of a lock, all in one cache line.
pub(crate) const WORDS: usize = 3;
/// A bit for each waiter.
const WAITERS: usize = 1;
/// The waiter for which the lock was reserved last.
const LAST_SERVED: usize = 2;

/// Threads sleep on the word.
const SLEEPERS: u64 = 1 << 31;
/// The lock is free, but reserved for the waiter in the lower bits.
const RESERVED: u64 = 1 << 30;
/// The owner. It has more bits than a participant number: excess values name no participant.
const HOLDER: u64 = RESERVED - 1;
/// Number of waiters: bits of a word.
const WAITER_SLOTS: u32 = u64::BITS;

/// How long to try before becoming a waiter. Each time the lock moves to another core, all
/// protected state moves, too: the shorter this is, the lower the throughput. And if it were
/// shorter than eight owners take, all processes would always be waiters.
const SPIN_BEFORE_QUEUEING: Duration = Duration::from_micros(15);
/// How long a reserved lock is left alone. A running waiter takes it in less than a
/// microsecond, unless it is interrupted.
const RESERVATION_TIME: Duration = Duration::from_micros(5);
/// How long to poll before sleeping. Most owners hold the lock for a fraction of a microsecond.
/// Going to sleep and being woken takes tens of microseconds, in which eight other processes
/// have all had the lock.
const SPIN_TIME: Duration = Duration::from_micros(100);
/// The longest pause between two polls, as [`Words::rest`] counts: rare polls leave the cache
/// line to the owner. In a model any moment may come next anyway.
const MAX_BACKOFF: u32 = if cfg!(loom) { 1 } else { 32 };
/// The pause of a waiter: all processes wait for it to see its reservation.
const BACKOFF_IN_QUEUE: u32 = 4;
/// The first and the longest sleep: between two of them the owner's liveness is checked, so
/// that a death delays no process longer.
const MIN_SLEEP: Duration = Duration::from_millis(1);
const MAX_SLEEP: Duration = Duration::from_millis(20);

/// A held lock in some words. Dropping it releases the lock.
#[derive(Debug)]
pub(crate) struct Guard<'a, W: Words> {
    words: &'a W,
    at: usize,
    caller: &'a Caller<'a>,
}

impl<'a, W: Words> Guard<'a, W> {
    /// Takes the lock in the [`WORDS`] from here on. Always inlined, with everything that
    /// belongs to it: a guard that is passed in memory costs as much as the lock.
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
        // False means that another process took this one for dead, and has repaired the state:
        // then there is nothing to release.
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

/// A separate function, so that the code for a free lock stays short.
#[cold]
#[inline(never)]
fn acquire_slow<W: Words>(
    words: &W,
    at: usize,
    caller: &Caller<'_>,
) -> Result<Acquired, LockTimeout> {
    let held_word = caller.me.number().into();
    Waiter { words, at, caller, waiter_slot: None, held_word, reserved: None }.take()
}

/// False if the lock no longer belongs to this owner: another process took it for dead.
#[inline(always)]
fn release<W: Words>(words: &W, at: usize, caller: &Caller<'_>) -> bool {
    let me = u64::from(caller.me.number());
    let mut expected = me;
    let next = if words.load(at + WAITERS, Relaxed) == 0 { 0 } else { next_waiter(words, at) };
    loop {
        match words.compare_exchange(at, expected, next) {
            Ok(was) => {
                // Also if it is reserved: a sleeping waiter does not see its reservation.
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

/// The value of the word that reserves the lock for the next waiter, if any. Called by the
/// owner.
#[cold]
fn next_waiter<W: Words>(words: &W, at: usize) -> u64 {
    let line = words.load(at + WAITERS, Relaxed);
    if line == 0 {
        return 0;
    }
    // All other waiters precede the last one.
    let first = (words.load(at + LAST_SERVED, Relaxed) as u32 % WAITER_SLOTS + 1) % WAITER_SLOTS;
    let waiter_slot = (first + line.rotate_right(first).trailing_zeros()) % WAITER_SLOTS;
    words.store(at + LAST_SERVED, waiter_slot.into(), Relaxed);
    RESERVED | u64::from(waiter_slot)
}

/// A process that did not find the lock free.
struct Waiter<'a, W: Words> {
    words: &'a W,
    at: usize,
    caller: &'a Caller<'a>,
    /// The process's waiter bit.
    waiter_slot: Option<u32>,
    /// The value of the word when the lock is taken. After a sleep there may be other sleepers,
    /// too: a release wakes only one.
    held_word: u64,
    /// The value of the word when the lock was reserved for another waiter, and since when.
    reserved: Option<(u64, Instant)>,
}

impl<W: Words> Waiter<'_, W> {
    fn take(mut self) -> Result<Acquired, LockTimeout> {
        let words = self.words;
        let start = words.now();
        // None: polled for long enough.
        let mut looking_since = Some(start);
        let mut spin_limit = SPIN_BEFORE_QUEUEING;
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
                // Usually the lock is free in a moment: do not read the clock.
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
                let polled = now.saturating_duration_since(since);
                if is_late || polled >= SPIN_TIME {
                    // The lock must not be reserved for a process that sleeps or has given up.
                    self.dequeue(0);
                    looking_since = None;
                    continue;
                }
                if polled >= spin_limit {
                    self.enqueue();
                }
                let is_next_soon = self.waiter_slot.is_some() || seen & RESERVED != 0;
                words.rest(if is_next_soon { BACKOFF_IN_QUEUE } else { MAX_BACKOFF });
                continue;
            }
            if is_free(seen) || seen & RESERVED != 0 {
                // Another process was faster, or is about to take it: do not sleep.
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
                // The reservation came after a long wait.
                looking_since = Some(words.now());
                spin_limit = Duration::ZERO;
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

    /// Takes a free lock, if the word still has this value.
    fn try_acquire(&mut self, seen: u64) -> Option<Acquired> {
        let held_word = self.held_word | seen & SLEEPERS;
        self.words.compare_exchange(self.at, seen, held_word).ok()?;
        let waiter_slot = seen & HOLDER;
        if seen & RESERVED == 0 {
            self.dequeue(0);
            Some(Acquired::Clean)
        } else if waiter_slot < WAITER_SLOTS.into() {
            // The waiter did not use its reservation: if it lives, it will become a waiter
            // again.
            self.dequeue(1 << waiter_slot);
            Some(Acquired::Clean)
        } else {
            // No process has such a waiter bit: the word was corrupted.
            self.dequeue(0);
            Some(Acquired::OwnerDied)
        }
    }

    /// Becomes a waiter, unless it is one already, or all bits are in use.
    fn enqueue(&mut self) {
        let line = self.words.load(self.at + WAITERS, Relaxed);
        if self.waiter_slot.is_some_and(|waiter_slot| line >> waiter_slot & 1 == 1)
            || line == u64::MAX
        {
            return;
        }
        // Not set, or cleared because a reservation was not used in time.
        let first = self.caller.me.slot() % WAITER_SLOTS;
        let waiter_slot = (first + (!line).rotate_right(first).trailing_zeros()) % WAITER_SLOTS;
        let was = self.words.fetch_or(self.at + WAITERS, 1 << waiter_slot);
        // Otherwise another process was faster: retry later.
        self.waiter_slot = (was >> waiter_slot & 1 == 0).then_some(waiter_slot);
    }

    /// Clears its waiter bit, and other waiters' with these bits.
    fn dequeue(&mut self, others: u64) {
        let bits = self.waiter_slot.take().map_or(0, |waiter_slot| 1 << waiter_slot) | others;
        if bits != 0 {
            self.words.fetch_and(self.at + WAITERS, !bits);
        }
    }
}

/// The lock is free, and not reserved.
fn is_free(word: u64) -> bool {
    word & (RESERVED | HOLDER) == 0
}

fn holder_of(word: u64) -> Option<Participant> {
    if word & RESERVED != 0 { None } else { Participant::from_number((word & HOLDER) as u32) }
}
