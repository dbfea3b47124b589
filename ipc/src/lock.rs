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
use std::num::NonZeroU32;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::words::Words;

/// One process that takes part, as shared memory knows it: small, never zero, and
/// never given to another process again while anything may still name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Participant(NonZeroU32);

impl Participant {
    /// Places in a roster.
    pub const PLACES: u32 = 1 << Self::PLACE_BITS;
    const PLACE_BITS: u32 = 8;
    const BITS: u32 = 29;
    /// How often a place can be given away before names repeat.
    pub const ROUNDS: u32 = (1 << (Self::BITS - Self::PLACE_BITS)) - 1;

    /// The name of whoever has this place for the `round`th time, from 1 on. None if
    /// there is no such place or round.
    #[must_use]
    pub fn new(place: u32, round: u32) -> Option<Self> {
        if place >= Self::PLACES || round > Self::ROUNDS || round == 0 {
            return None;
        }
        NonZeroU32::new(round << Self::PLACE_BITS | place).map(Self)
    }

    /// The name that a number in shared memory stands for; None if for none.
    #[must_use]
    pub fn from_number(number: u32) -> Option<Self> {
        Self::new(number & (Self::PLACES - 1), number >> Self::PLACE_BITS)
    }

    /// As shared memory has it: below 2²⁹.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0.get()
    }

    /// Its place in the roster.
    #[must_use]
    pub fn place(self) -> u32 {
        self.0.get() & (Self::PLACES - 1)
    }

    /// The how manieth at that place.
    #[must_use]
    pub fn round(self) -> u32 {
        self.0.get() >> Self::PLACE_BITS
    }
}

impl fmt::Display for Participant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.place(), self.round())
    }
}

/// Knows who is dead.
pub trait Fate {
    /// Is this participant gone for sure, with everything that it had in execution?
    /// Also true of numbers that never named anybody: a scribble is no holder.
    fn is_dead(&self, participant: Option<Participant>) -> bool;
}

/// Nobody ever dies: for participants of one process.
#[derive(Debug, Clone, Copy)]
pub struct Immortal;

impl Fate for Immortal {
    fn is_dead(&self, participant: Option<Participant>) -> bool {
        participant.is_none()
    }
}

/// Who calls, and how it waits: given to every operation that may take a lock.
#[derive(Clone, Copy)]
pub struct Caller<'a> {
    /// In whose name.
    pub me: Participant,
    /// Who tells whether others live.
    pub fate: &'a dyn Fate,
    /// How long to wait for a lock that a living one holds.
    pub patience: Duration,
}

impl fmt::Debug for Caller<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Caller({}, waits {:?})", self.me, self.patience)
    }
}

impl<'a> Caller<'a> {
    /// Nothing that a lock protects here takes long: who holds it for a second is
    /// stopped, or starved.
    pub const PATIENCE: Duration = Duration::from_secs(5);

    /// With the usual patience.
    #[must_use]
    pub fn new(me: Participant, fate: &'a dyn Fate) -> Self {
        Self { me, fate, patience: Self::PATIENCE }
    }
}

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

/// Takes the lock in this word.
#[inline]
pub(crate) fn take<W: Words>(words: &W, at: usize, caller: &Caller<'_>) -> Result<Taken, Held> {
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

/// Lets go. False if the lock was not ours any more: somebody took us for dead.
#[inline]
pub(crate) fn release<W: Words>(words: &W, at: usize, caller: &Caller<'_>) -> bool {
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
    use crate::words::LocalWords;

    fn participant(place: u32) -> Participant {
        Participant::new(place, 1).unwrap()
    }

    #[test]
    fn numbers_and_names_are_one_to_one() {
        for (place, round) in [(0, 1), (1, 1), (255, 7), (255, Participant::ROUNDS)] {
            let name = Participant::new(place, round).unwrap();
            assert_eq!((name.place(), name.round()), (place, round));
            assert_eq!(Participant::from_number(name.number()), Some(name));
            assert!(name.number() < 1 << 29);
        }
        assert_eq!(Participant::new(256, 1), None);
        assert_eq!(Participant::new(0, 0), None);
        assert_eq!(Participant::from_number(0), None);
        assert_eq!(Participant::from_number(u32::MAX), None);
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
