//! A lock whose holder may die.
//!
//! One word: who holds it, and whether anybody sleeps. Who waits too long asks
//! whether the holder still lives, takes the lock from a dead one, and is told so:
//! what the lock protects may then be half changed, and is for the new holder to
//! repair before anything else. Should that one die, too, the next is told the same.
//!
//! The kernel's own robust futexes are no help here: they know holders by thread
//! number, and two processes in different PID namespaces may have the same one.

use std::fmt;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::participant::{Caller, Participant};
use crate::words::Words;

/// How a lock was come by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Taken {
    /// From nobody: what it protects is whole.
    Whole,
    /// From one that died holding it: repair first.
    FromTheDead,
}

/// A living participant holds the lock, and did not let go of it in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// Who; None for a number that names nobody.
    pub by: Option<Participant>,
    /// How long was waited.
    pub waited: Duration,
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.by {
            Some(by) => write!(f, "participant {by} held the lock for {:?}", self.waited),
            None => write!(f, "the lock was held for {:?}", self.waited),
        }
    }
}

impl std::error::Error for Held {}

/// Somebody sleeps on the word.
const SLEEPERS: u64 = 1 << 31;
const HOLDER: u64 = SLEEPERS - 1;

/// How long to look before sleeping. Most hold the lock for a fraction of a microsecond;
/// going to sleep and being woken costs tens of them, in which eight others that want
/// it have all had their turn.
const LOOKING: Duration = Duration::from_micros(100);
/// The longest rest between two looks, in pauses: who looks less often leaves the line
/// to the one who holds the lock.
const LONGEST_REST: u32 = 64;
/// The first sleep, and the longest: between two of them the holder's life is
/// looked at, so that a death holds nobody up for longer.
const NAP: Duration = Duration::from_millis(1);
const LONGEST_NAP: Duration = Duration::from_millis(20);

fn holder_of(word: u64) -> Option<Participant> {
    Participant::from_number((word & HOLDER) as u32)
}

/// The lock in a word, held. Dropping it lets go.
#[derive(Debug)]
pub(crate) struct Guard<'a, W: Words> {
    words: &'a W,
    at: usize,
    caller: &'a Caller<'a>,
}

impl<'a, W: Words> Guard<'a, W> {
    /// Takes the lock in this word.
    #[inline]
    pub(crate) fn take(
        words: &'a W,
        at: usize,
        caller: &'a Caller<'a>,
    ) -> Result<(Self, Taken), Held> {
        let taken = take(words, at, caller)?;
        Ok((Self { words, at, caller }, taken))
    }
}

impl<W: Words> Drop for Guard<'_, W> {
    #[inline]
    fn drop(&mut self) {
        // False would mean that we were taken for dead: then whoever did so has
        // repaired what we left, and there is nothing to let go.
        release(self.words, self.at, self.caller);
    }
}

#[inline]
fn take<W: Words>(words: &W, at: usize, caller: &Caller<'_>) -> Result<Taken, Held> {
    match words.compare_exchange(at, 0, u64::from(caller.me.number())) {
        Ok(_) => Ok(Taken::Whole),
        Err(_) => take_slowly(words, at, caller),
    }
}

#[cold]
fn take_slowly<W: Words>(words: &W, at: usize, caller: &Caller<'_>) -> Result<Taken, Held> {
    let me = u64::from(caller.me.number());
    let start = Instant::now();
    let mut rest = 1;
    let mut is_looking = true;
    let mut nap = NAP;
    // Once we slept others may sleep, too: whoever let go woke only one.
    let mut mine = me;
    loop {
        let seen = words.load(at, Ordering::Relaxed);
        if seen & HOLDER == 0 {
            if words.compare_exchange(at, seen, mine | (seen & SLEEPERS)).is_ok() {
                return Ok(Taken::Whole);
            }
            continue;
        }
        if is_looking {
            (0..rest).for_each(|_| words.pause());
            if rest < LONGEST_REST {
                rest *= 2;
            } else {
                is_looking = start.elapsed() < LOOKING;
            }
            continue;
        }
        if caller.fate.is_dead(holder_of(seen)) {
            if words.compare_exchange(at, seen, me | SLEEPERS).is_ok() {
                return Ok(Taken::FromTheDead);
            }
            continue;
        }
        let waited = start.elapsed();
        if waited >= caller.patience {
            return Err(Held { by: holder_of(seen), waited });
        }
        if seen & SLEEPERS == 0 && words.compare_exchange(at, seen, seen | SLEEPERS).is_err() {
            continue;
        }
        words.sleep(at, (seen | SLEEPERS) as u32, nap.min(caller.patience - waited));
        nap = (nap * 2).min(LONGEST_NAP);
        mine = me | SLEEPERS;
    }
}

/// False if the lock was not ours any more: somebody took us for dead.
#[inline]
fn release<W: Words>(words: &W, at: usize, caller: &Caller<'_>) -> bool {
    let me = u64::from(caller.me.number());
    let mut expected = me;
    loop {
        match words.compare_exchange(at, expected, 0) {
            Ok(was) => {
                if was & SLEEPERS != 0 {
                    words.wake(at, 1);
                }
                return true;
            }
            Err(found) if found & HOLDER == me => expected = found,
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::participant::{Fate, Immortal};
    use crate::words::LocalWords;

    fn participant(place: u32) -> Participant {
        Participant::new(place, 1).unwrap()
    }

    #[test]
    fn it_keeps_others_out() {
        let words = Arc::new(LocalWords::zeroed(2));
        let threads: Vec<_> = (0..4)
            .map(|place| {
                let words = Arc::clone(&words);
                std::thread::spawn(move || {
                    let caller = Caller::new(participant(place), &Immortal);
                    for _ in 0..2000 {
                        assert_eq!(take(&*words, 0, &caller), Ok(Taken::Whole));
                        // No atomic addition: only the lock makes this right.
                        let count = words.load(1, Ordering::Relaxed);
                        words.store(1, count + 1, Ordering::Relaxed);
                        assert!(release(&*words, 0, &caller));
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(words.load(1, Ordering::Relaxed), 8000);
    }

    struct Grave(Participant, AtomicBool);

    impl Fate for Grave {
        fn is_dead(&self, who: Option<Participant>) -> bool {
            who == Some(self.0) && self.1.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn the_living_are_waited_for_and_the_dead_are_not() {
        let words = LocalWords::zeroed(1);
        let grave = Grave(participant(1), AtomicBool::new(false));
        let first = Caller::new(participant(1), &grave);
        let patience = Duration::from_millis(30);
        let second = Caller { me: participant(2), fate: &grave, patience };
        assert_eq!(take(&words, 0, &first), Ok(Taken::Whole));
        let held = take(&words, 0, &second).unwrap_err();
        assert_eq!(held.by, Some(participant(1)));
        assert!(held.waited >= patience && held.waited < patience * 100, "{held}");
        grave.1.store(true, Ordering::Relaxed);
        assert_eq!(take(&words, 0, &second), Ok(Taken::FromTheDead));
        // Who was taken for dead and was not learns of it.
        assert!(!release(&words, 0, &first));
    }

    #[test]
    fn a_scribbled_holder_is_nobody() {
        let words = LocalWords::zeroed(1);
        words.store(0, 0x7fff_ffff, Ordering::Relaxed);
        let caller = Caller::new(participant(3), &Immortal);
        assert_eq!(take(&words, 0, &caller), Ok(Taken::FromTheDead));
        assert!(release(&words, 0, &caller));
    }
}
