//! Who takes part, who knows whether they live, and in whose name a call is made.

use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

/// One process that takes part, as shared memory knows it: small, never zero, and
/// never given to another process again while anything may still name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Participant(NonZeroU32);

impl Participant {
    /// Places in a roster.
    pub const SLOTS: u32 = 1 << Self::SLOT_BITS;
    /// The last places are those of roles.
    pub const ROLES: u32 = 8;
    const SLOT_BITS: u32 = 8;
    const BITS: u32 = 29;
    /// How often a place can be given away before names repeat.
    pub const MAX_GENERATION: u32 = (1 << (Self::BITS - Self::SLOT_BITS)) - 1;

    /// The name of whoever has this place for the `generation`th time, from 1 on. None if
    /// there is no such place or round.
    #[must_use]
    pub fn new(slot: u32, generation: u32) -> Option<Self> {
        if slot >= Self::SLOTS || generation > Self::MAX_GENERATION || generation == 0 {
            return None;
        }
        NonZeroU32::new(generation << Self::SLOT_BITS | slot).map(Self)
    }

    /// The name of a role: of what one process after the other does for all, and what outlives
    /// each of them. A role is never dead. None from [`ROLES`](Self::ROLES) on.
    ///
    /// ```
    /// use ipc::Participant;
    /// let role = Participant::role(0).unwrap();
    /// assert!(role.is_role() && role != Participant::role(1).unwrap());
    /// ```
    #[must_use]
    pub fn role(number: u32) -> Option<Self> {
        (number < Self::ROLES).then(|| Self::new(Self::SLOTS - 1 - number, 1))?
    }

    /// Is it a role, and no process?
    #[must_use]
    pub fn is_role(self) -> bool {
        self.slot() >= Self::SLOTS - Self::ROLES
    }

    /// The name that a number in shared memory stands for; None if for none.
    #[must_use]
    pub fn from_number(number: u32) -> Option<Self> {
        Self::new(number & (Self::SLOTS - 1), number >> Self::SLOT_BITS)
    }

    /// As shared memory has it: below 2²⁹.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0.get()
    }

    /// Its place in the roster.
    #[must_use]
    pub fn slot(self) -> u32 {
        self.0.get() & (Self::SLOTS - 1)
    }

    /// The how manieth at that place.
    #[must_use]
    pub fn generation(self) -> u32 {
        self.0.get() >> Self::SLOT_BITS
    }
}

impl fmt::Display for Participant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.slot(), self.generation())
    }
}

/// Knows who is dead.
pub trait Liveness {
    /// Is this participant gone for sure, with everything that it had in execution?
    /// Also true of numbers that never named anybody: a scribble is no holder.
    fn is_dead(&self, participant: Option<Participant>) -> bool;
}

/// Nobody ever dies: for participants of one process.
#[derive(Debug, Clone, Copy)]
pub struct AlwaysAlive;

impl Liveness for AlwaysAlive {
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
    pub liveness: &'a dyn Liveness,
    /// How long to wait for a lock that a living one holds.
    pub timeout: Duration,
}

impl fmt::Debug for Caller<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Caller({}, waits {:?})", self.me, self.timeout)
    }
}

impl<'a> Caller<'a> {
    /// Nothing that a lock protects here takes long: who holds it for a second is
    /// stopped, or starved.
    pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);

    /// With the usual patience.
    #[must_use]
    pub fn new(me: Participant, liveness: &'a dyn Liveness) -> Self {
        Self { me, liveness, timeout: Self::DEFAULT_TIMEOUT }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_are_one_to_one() {
        for (slot, generation) in [(0, 1), (1, 1), (255, 7), (255, Participant::MAX_GENERATION)] {
            let name = Participant::new(slot, generation).unwrap();
            assert_eq!((name.slot(), name.generation()), (slot, generation));
            assert_eq!(Participant::from_number(name.number()), Some(name));
            assert!(name.number() < 1 << 29);
        }
        assert_eq!(Participant::new(256, 1), None);
        assert_eq!(Participant::new(0, 0), None);
        assert_eq!(Participant::from_number(0), None);
        assert_eq!(Participant::from_number(u32::MAX), None);
    }
}
