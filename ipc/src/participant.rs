//! Participants, their liveness, and the caller of an operation.

use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

/// A process that takes part, as shared memory names it: a small number, never zero, and not
/// reused while any word may still contain it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Participant(NonZeroU32);

impl Participant {
    /// Slots in a participant table.
    pub const SLOTS: u32 = 1 << Self::SLOT_BITS;
    /// The last slots are reserved for roles.
    pub const ROLES: u32 = 8;
    const SLOT_BITS: u32 = 8;
    const BITS: u32 = 29;
    /// How often a slot can be reused before names repeat.
    pub const MAX_GENERATION: u32 = (1 << (Self::BITS - Self::SLOT_BITS)) - 1;

    /// The name for the `generation`th use of this slot, from 1 on. None if there is no such
    /// slot or generation.
    #[must_use]
    pub fn new(slot: u32, generation: u32) -> Option<Self> {
        if slot >= Self::SLOTS || generation > Self::MAX_GENERATION || generation == 0 {
            return None;
        }
        NonZeroU32::new(generation << Self::SLOT_BITS | slot).map(Self)
    }

    /// The name of a role: of a task that one process after the other does, and of objects that
    /// outlive each of them. A role is never dead. None from [`ROLES`](Self::ROLES) on.
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

    /// Is it a role, not a process?
    #[must_use]
    pub fn is_role(self) -> bool {
        self.slot() >= Self::SLOTS - Self::ROLES
    }

    /// The participant of a number in shared memory; None for an invalid number.
    #[must_use]
    pub fn from_number(number: u32) -> Option<Self> {
        Self::new(number & (Self::SLOTS - 1), number >> Self::SLOT_BITS)
    }

    /// The number for shared memory: below 2²⁹.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0.get()
    }

    /// The participant's slot in the participant table.
    #[must_use]
    pub fn slot(self) -> u32 {
        self.0.get() & (Self::SLOTS - 1)
    }

    /// The participant's generation: how often the slot was used.
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

/// Answers whether participants are dead.
pub trait Liveness {
    /// Is this participant certainly dead, with all of its threads? Also true for invalid
    /// numbers: corruption is not an owner.
    fn is_dead(&self, participant: Option<Participant>) -> bool;
}

/// Reports all participants as living: for participants of one process.
#[derive(Debug, Clone, Copy)]
pub struct AlwaysAlive;

impl Liveness for AlwaysAlive {
    fn is_dead(&self, participant: Option<Participant>) -> bool {
        participant.is_none()
    }
}

/// The caller of an operation that may take a lock, and how it waits.
#[derive(Clone, Copy)]
pub struct Caller<'a> {
    /// The participant of the caller.
    pub me: Participant,
    /// The liveness of other participants.
    pub liveness: &'a dyn Liveness,
    /// How long to wait for a lock that a living participant holds.
    pub timeout: Duration,
}

impl fmt::Debug for Caller<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Caller({}, waits {:?})", self.me, self.timeout)
    }
}

impl<'a> Caller<'a> {
    /// No operation under a lock takes long: an owner that holds it for a second is stopped, or
    /// starved.
    pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);

    /// With the default timeout.
    #[must_use]
    pub fn new(me: Participant, liveness: &'a dyn Liveness) -> Self {
        Self { me, liveness, timeout: Self::DEFAULT_TIMEOUT }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn participant_numbers_are_unique() {
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
