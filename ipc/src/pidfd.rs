//! Detecting the death of a process reliably.
//!
//! A process opens a file descriptor for itself (a pidfd) and sends it when it joins. The
//! descriptor becomes readable when the process is gone, with all its threads, its memory and
//! its device contexts. That works across PID namespaces, where process ids mean nothing and
//! two processes may have the same one. And the id of a process is not reused for another one
//! in the view of the descriptor.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use errors::limits::LimitReached;

use crate::channel::{Channel, socket_option};
use crate::participant::{Liveness, Participant};
use crate::words::Words;

/// Queries the process at the other end of a Unix socket; since Linux 6.5.
const SO_PEERPIDFD: libc::c_int = 77;

/// A handle of a process, this one or another.
///
/// ```
/// use ipc::PidFd;
/// let me = PidFd::of_this_process()?;
/// assert!(!me.has_exited());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct PidFd(OwnedFd);

impl PidFd {
    /// A pidfd of this process, to send to others. Needs Linux 5.3.
    ///
    /// # Errors
    /// The system's error.
    pub fn of_this_process() -> io::Result<Self> {
        // SAFETY: no pointers; the result is checked.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0) };
        if fd < 0 {
            return Err(LimitReached::explain(io::Error::last_os_error()));
        }
        // SAFETY: just opened, close-on-exec like all pidfds, and not shared.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd as RawFd) }))
    }

    /// A file descriptor that another process sent for itself.
    ///
    /// # Errors
    /// `InvalidData` if it is not a pidfd: other descriptors become readable for other reasons,
    /// or never.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
        let link = link.to_string_lossy();
        if link != "anon_inode:[pidfd]" && !link.starts_with("pidfd:[") {
            let why = format!("{link} is not the descriptor of a process");
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        Ok(Self(fd))
    }

    /// A pidfd that the peer of a channel sent for itself.
    ///
    /// Since Linux 6.5 the kernel reports which process connected, so the two can be compared.
    /// Before, the pidfd's process id must equal the peer's id from the kernel. A process of an
    /// invisible PID namespace has id 0 in both, so any of these is accepted. If /proc belongs
    /// to another namespace, the two are not comparable, and nothing is compared.
    ///
    /// ```
    /// use std::os::fd::AsFd;
    /// use ipc::{Channel, PidFd};
    /// let (here, _there) = Channel::pair()?;
    /// let sent = PidFd::of_this_process()?.as_fd().try_clone_to_owned()?;
    /// assert!(!PidFd::of_peer(&here, sent)?.has_exited());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidData` if the descriptor is not a pidfd, or belongs to another process than the
    /// peer, or to one that has exited; the system's error.
    pub fn of_peer(channel: &Channel, sent: OwnedFd) -> io::Result<Self> {
        let sent = Self::from_fd(sent)?;
        match Self::by_kernel(channel) {
            Some(pidfd) => Ok(pidfd),
            None => Self::by_number(channel, sent),
        }
    }

    /// The pidfd of the peer, from the kernel. None if the kernel does not support that.
    fn by_kernel(channel: &Channel) -> Option<Self> {
        let mut fd: [RawFd; 1] = [-1];
        let (is_known, _) = socket_option(channel.as_fd(), SO_PEERPIDFD, &mut fd);
        // SAFETY: just opened, close-on-exec like all pidfds, and not shared.
        (is_known && fd[0] >= 0).then(|| Self(unsafe { OwnedFd::from_raw_fd(fd[0]) }))
    }

    /// The descriptor that was sent, if its process has the id of the peer.
    fn by_number(channel: &Channel, sent: Self) -> io::Result<Self> {
        if Self::of_this_process()?.number()? != i64::from(std::process::id()) {
            return Ok(sent);
        }
        let peer = channel.credentials().map_err(io::Error::other)?.process.unwrap_or(0);
        match sent.number()? {
            number if number == i64::from(peer) => Ok(sent),
            number => {
                let why = format!("a descriptor of process {number} was sent by process {peer}");
                Err(io::Error::new(io::ErrorKind::InvalidData, why))
            }
        }
    }

    /// The process id in the namespace of /proc: 0 if the process is not visible there, -1 if
    /// it has exited.
    fn number(&self) -> io::Result<i64> {
        let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", self.0.as_raw_fd()))?;
        let found = text.lines().find_map(|line| line.strip_prefix("Pid:")?.trim().parse().ok());
        found.ok_or_else(|| io::Error::other("/proc has no process id for a pidfd"))
    }

    /// Another pidfd of the same process.
    ///
    /// # Errors
    /// The system's error, for example that no more descriptors can be opened.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self).map_err(LimitReached::explain)
    }

    /// Has the process exited?
    #[must_use]
    pub fn has_exited(&self) -> bool {
        self.exits_within(Duration::ZERO)
    }

    /// Has the exit of the process begun, or has it exited? None if that is unknown: the process is of
    /// another PID namespace, or `/proc` does not show it.
    #[must_use]
    pub fn is_exiting(&self) -> Option<bool> {
        /// `PF_EXITING` of Linux.
        const EXITING: u64 = 4;
        if self.has_exited() {
            return Some(true);
        }
        let about = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", self.0.as_raw_fd()));
        let about = about.ok()?;
        let number = about.lines().find_map(|line| line.strip_prefix("Pid:"))?;
        let number = number.trim().parse::<u32>().ok().filter(|number| *number > 0)?;
        let status = std::fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
        // Behind the name, which may have any letters: state, parent, group, session, terminal and
        // its group, then the flags.
        let (_, status) = status.rsplit_once(')')?;
        let flags = status.split_ascii_whitespace().nth(6)?.parse::<u64>().ok()?;
        Some(flags & EXITING != 0)
    }

    /// Waits for the exit of the process: of one that is killed, sockets are closed before. False if
    /// it runs after the timeout, or a signal ended the wait.
    #[must_use]
    pub fn exits_within(&self, timeout: Duration) -> bool {
        let mut entry = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let timeout = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: one valid entry. An interruption reads as "running", which was true.
        unsafe { libc::poll(&raw mut entry, 1, timeout) == 1 && entry.revents & libc::POLLIN != 0 }
    }
}

impl AsFd for PidFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Phases of a slot: free; in use; dead, not reclaimed yet.
const EMPTY: u64 = 0;
const LIVING: u64 = 1;
const DEAD: u64 = 2;
const PHASE_BITS: u32 = 2;

fn encode_slot(generation: u32, phase: u64) -> u64 {
    u64::from(generation) << PHASE_BITS | phase
}

fn decode_slot(word: u64) -> (u32, u64) {
    ((word >> PHASE_BITS) as u32, word & ((1 << PHASE_BITS) - 1))
}

/// The participants: their names in shared memory, and this process's pidfds of them.
///
/// One process, at which the others join, [admits](Self::admit) them. It sends their pidfds to
/// the others, which [add](Self::add_pidfd) them. For participants without a pidfd, a process
/// only sees deaths that other processes have recorded.
#[derive(Debug)]
pub struct ParticipantTable<W> {
    words: W,
    pidfds: RwLock<Vec<Option<(u32, PidFd)>>>,
}

impl<W: Words> ParticipantTable<W> {
    /// Number of words; zeroed words are an empty table.
    pub const WORDS: usize = Participant::SLOTS as usize;

    /// A table in these words; None if there are too few.
    #[must_use]
    pub fn new(words: W) -> Option<Self> {
        let pidfds = RwLock::new((0..Participant::SLOTS).map(|_| None).collect());
        (words.count() >= Self::WORDS).then_some(Self { words, pidfds })
    }

    /// Admits a process, and assigns a name. None if all slots are in use.
    pub fn admit(&self, pidfd: PidFd) -> Option<Participant> {
        for slot in 0..Participant::SLOTS - Participant::ROLES {
            let word = self.words.load(slot as usize, Acquire);
            let (generation, phase) = decode_slot(word);
            // A slot whose generations are used up is never assigned again.
            let Some(name) = Participant::new(slot, generation.saturating_add(1)) else { continue };
            let new = encode_slot(name.generation(), LIVING);
            if phase == EMPTY && self.words.compare_exchange(slot as usize, word, new).is_ok() {
                self.add_pidfd(name, pidfd);
                return Some(name);
            }
        }
        None
    }

    /// How many more processes can be admitted now.
    pub fn free_slots(&self) -> usize {
        let is_free = |slot: &u32| {
            let (generation, phase) = decode_slot(self.words.load(*slot as usize, Acquire));
            phase == EMPTY && generation < Participant::MAX_GENERATION
        };
        (0..Participant::SLOTS - Participant::ROLES).filter(is_free).count()
    }

    /// Resigns a participant of this process that is no longer used: it is reclaimed like a
    /// dead one. False if the participant was not in use.
    pub fn leave(&self, participant: Participant) -> bool {
        let living = encode_slot(participant.generation(), LIVING);
        let dead = encode_slot(participant.generation(), DEAD);
        !participant.is_role()
            && self.words.compare_exchange(participant.slot() as usize, living, dead).is_ok()
    }

    /// Admits a [role](Participant::role): not a process, but a task of one process after the
    /// other. Its name is always the same. None if there is no such role.
    ///
    /// ```
    /// use ipc::{Liveness, LocalWords, ParticipantTable};
    /// let participants = ParticipantTable::new(LocalWords::zeroed(ParticipantTable::<LocalWords>::WORDS)).unwrap();
    /// let role = participants.admit_role(0).unwrap();
    /// assert_eq!(participants.admit_role(0), Some(role));
    /// assert!(!participants.is_dead(Some(role)));
    /// ```
    pub fn admit_role(&self, number: u32) -> Option<Participant> {
        let role = Participant::role(number)?;
        let word = encode_slot(role.generation(), LIVING);
        self.words.store(role.slot() as usize, word, Release);
        Some(role)
    }

    /// The known pidfds, to send to another process.
    ///
    /// # Errors
    /// The system's error, for example that no more descriptors can be opened.
    pub fn pidfds(&self) -> io::Result<Vec<(Participant, OwnedFd)>> {
        let pidfds = self.pidfds.read().unwrap_or_else(PoisonError::into_inner);
        let named = pidfds.iter().zip(0..).filter_map(|(known, slot)| {
            let (generation, pidfd) = known.as_ref()?;
            Some((Participant::new(slot, *generation)?, pidfd))
        });
        named.map(|(participant, pidfd)| Ok((participant, pidfd.0.try_clone()?))).collect()
    }

    /// Adds the pidfd of a participant. A role has none.
    pub fn add_pidfd(&self, participant: Participant, pidfd: PidFd) {
        if participant.is_role() {
            return;
        }
        let mut pidfds = self.pidfds.write().unwrap_or_else(PoisonError::into_inner);
        pidfds[participant.slot() as usize] = Some((participant.generation(), pidfd));
    }

    /// Closes the pidfds of participants that another process has freed. Those of dead
    /// participants that are not reclaimed yet are kept.
    ///
    /// ```
    /// use ipc::{Liveness, PidFd, LocalWords, ParticipantTable};
    /// let words = || LocalWords::zeroed(ParticipantTable::<LocalWords>::WORDS);
    /// let participants = ParticipantTable::new(words()).unwrap();
    /// let participant = participants.admit(PidFd::of_this_process()?).unwrap();
    /// participants.drop_unused_pidfds();
    /// assert_eq!(participants.pidfds()?.len(), 1);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn drop_unused_pidfds(&self) {
        let is_gone = |(slot, known): (usize, &Option<(u32, PidFd)>)| {
            let (generation, phase) = decode_slot(self.words.load(slot, Acquire));
            known.as_ref().is_some_and(|(known, _)| *known != generation || phase == EMPTY)
        };
        // Usually there are none, and other threads may continue reading.
        let pidfds = self.pidfds.read().unwrap_or_else(PoisonError::into_inner);
        if !pidfds.iter().enumerate().any(is_gone) {
            return;
        }
        drop(pidfds);
        let mut pidfds = self.pidfds.write().unwrap_or_else(PoisonError::into_inner);
        let mut take = |slot| is_gone((slot, &pidfds[slot])).then(|| pidfds[slot].take());
        let gone: Vec<_> = (0..Participant::SLOTS as usize).filter_map(&mut take).collect();
        drop(pidfds);
        // Closed after the lock is released.
        drop(gone);
    }

    /// The dead participants that are not reclaimed yet.
    pub fn dead_participants(&self) -> Vec<Participant> {
        self.named(|phase| phase != EMPTY)
            .filter(|participant| self.is_dead(Some(*participant)))
            .collect()
    }

    /// The living participants, as far as is known.
    pub fn living_participants(&self) -> Vec<Participant> {
        self.named(|phase| phase == LIVING)
            .filter(|participant| !self.is_dead(Some(*participant)))
            .collect()
    }

    fn named(&self, is_meant: impl Fn(u64) -> bool) -> impl Iterator<Item = Participant> {
        (0..Participant::SLOTS).filter_map(move |slot| {
            let (generation, phase) = decode_slot(self.words.load(slot as usize, Acquire));
            is_meant(phase).then(|| Participant::new(slot, generation))?
        })
    }

    /// Frees the slot of a participant that left, or that is dead and reclaimed. No word may
    /// contain its name any more. False if the slot was already freed, and for a role.
    pub fn free_slot(&self, participant: Participant) -> bool {
        if participant.is_role() {
            return false;
        }
        let slot = participant.slot() as usize;
        let empty = encode_slot(participant.generation(), EMPTY);
        let done = [LIVING, DEAD].into_iter().any(|phase| {
            let word = encode_slot(participant.generation(), phase);
            self.words.compare_exchange(slot, word, empty).is_ok()
        });
        let mut pidfds = self.pidfds.write().unwrap_or_else(PoisonError::into_inner);
        pidfds[slot].take_if(|(generation, _)| *generation == participant.generation());
        done
    }
}

impl<W: Words> Liveness for ParticipantTable<W> {
    fn is_dead(&self, participant: Option<Participant>) -> bool {
        let Some(participant) = participant else { return true };
        let slot = participant.slot() as usize;
        let word = self.words.load(slot, Acquire);
        let (generation, phase) = decode_slot(word);
        if generation != participant.generation() || phase != LIVING {
            // Freed, recorded as dead, or never admitted (corruption).
            return true;
        }
        let pidfds = self.pidfds.read().unwrap_or_else(PoisonError::into_inner);
        let has_exited = match &pidfds[slot] {
            Some((generation, pidfd)) if *generation == participant.generation() => {
                pidfd.has_exited()
            }
            _ => false,
        };
        drop(pidfds);
        if has_exited {
            // For processes that do not have its pidfd.
            let _ = self.words.compare_exchange(slot, word, encode_slot(generation, DEAD));
        }
        has_exited
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::words::LocalWords;

    #[test]
    fn exit_of_a_process_is_seen() {
        let child = testkit::children::ForkedChild::new(|| {
            std::thread::sleep(Duration::from_secs(30));
        });
        let pidfd = PidFd::from_fd(child.pidfd()).unwrap();
        assert_eq!((pidfd.is_exiting(), pidfd.has_exited()), (Some(false), false));
        assert!(!pidfd.exits_within(Duration::from_millis(20)));
        let begin = Instant::now();
        drop(child);
        assert!(pidfd.exits_within(Duration::from_secs(10)));
        assert!(begin.elapsed() < Duration::from_secs(5));
        assert_eq!((pidfd.is_exiting(), pidfd.has_exited()), (Some(true), true));
    }

    #[test]
    fn clone_of_a_pidfd_is_closed_with_it() {
        let child = testkit::children::ForkedChild::new(|| {
            let pidfd = PidFd::of_this_process().unwrap();
            let before = testkit::processes::open_descriptors();
            let clone = pidfd.try_clone().unwrap();
            assert_eq!(testkit::processes::open_descriptors(), before + 1);
            drop(clone);
            assert_eq!(testkit::processes::open_descriptors(), before);
        });
        assert!(child.wait().success());
    }

    /// A child that waits to be killed.
    fn child() -> (libc::pid_t, PidFd) {
        // SAFETY: the child only waits, by a call that is safe after a fork.
        let number = unsafe { libc::fork() };
        assert!(number >= 0);
        if number == 0 {
            loop {
                // SAFETY: no pointers.
                unsafe { libc::pause() };
            }
        }
        // SAFETY: no pointers; the child is not reaped, so the id is its own.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, number, 0) };
        // SAFETY: its use checks it.
        (number, PidFd::from_fd(unsafe { OwnedFd::from_raw_fd(fd as RawFd) }).unwrap())
    }

    fn kill(number: libc::pid_t) {
        // SAFETY: a child of this process, not yet reaped.
        unsafe { libc::kill(number, libc::SIGKILL) };
    }

    fn reap(number: libc::pid_t) {
        // SAFETY: a child of this process; no status is requested.
        unsafe { libc::waitpid(number, std::ptr::null_mut(), 0) };
    }

    #[test]
    fn process_exit_is_detected_and_recorded() {
        let participants = ParticipantTable::new(LocalWords::zeroed(256)).unwrap();
        let me = participants.admit(PidFd::of_this_process().unwrap()).unwrap();
        let (number, pidfd) = child();
        let other = participants.admit(pidfd).unwrap();
        assert_ne!(me, other);
        assert_eq!(participants.living_participants(), [me, other]);
        assert!(participants.dead_participants().is_empty());
        kill(number);
        let end = Instant::now() + Duration::from_secs(20);
        while participants.dead_participants() != [other] {
            assert!(Instant::now() < end, "its exit was not detected");
            std::thread::sleep(Duration::from_millis(1));
        }
        reap(number);
        assert!(participants.free_slot(other));
        assert!(!participants.free_slot(other));
        assert!(participants.is_dead(Some(other)), "dead also after its slot is freed");
        let next = participants.admit(PidFd::of_this_process().unwrap()).unwrap();
        assert_eq!(next.slot(), other.slot());
        assert_ne!(next, other);
        assert!(participants.is_dead(Some(other)) && !participants.is_dead(Some(next)));
    }

    #[test]
    fn never_admitted_participant_counts_as_dead() {
        let participants = ParticipantTable::new(LocalWords::zeroed(256)).unwrap();
        assert!(participants.is_dead(Participant::new(3, 1)));
        assert!(participants.is_dead(None));
        assert!(ParticipantTable::new(LocalWords::zeroed(255)).is_none());
    }

    #[test]
    fn role_name_is_permanent_and_reserved() {
        let participants = ParticipantTable::new(LocalWords::zeroed(256)).unwrap();
        let role = participants.admit_role(1).unwrap();
        assert!(role.is_role() && participants.admit_role(Participant::ROLES).is_none());
        let mut admitted = Vec::new();
        while let Some(participant) = participants.admit(PidFd::of_this_process().unwrap()) {
            admitted.push(participant);
        }
        assert_eq!(admitted.len(), (Participant::SLOTS - Participant::ROLES) as usize);
        assert!(admitted.iter().all(|participant| !participant.is_role()));
        let known: Vec<_> = participants
            .pidfds()
            .unwrap()
            .into_iter()
            .map(|(participant, _)| participant)
            .collect();
        assert_eq!(known, admitted);
        assert!(!participants.free_slot(role) && !participants.is_dead(Some(role)));
        let (number, pidfd) = child();
        participants.add_pidfd(role, pidfd);
        kill(number);
        reap(number);
        assert!(
            !participants.is_dead(Some(role)) && participants.living_participants().contains(&role)
        );
    }

    #[test]
    fn resigned_participant_is_reclaimed() {
        let participants = ParticipantTable::new(LocalWords::zeroed(256)).unwrap();
        let most = participants.free_slots();
        assert_eq!(most, (Participant::SLOTS - Participant::ROLES) as usize);
        let participant = participants.admit(PidFd::of_this_process().unwrap()).unwrap();
        assert_eq!(participants.free_slots(), most - 1);
        assert!(participants.leave(participant) && !participants.leave(participant));
        assert!(
            participants.is_dead(Some(participant))
                && participants.dead_participants() == [participant]
        );
        assert_eq!(participants.free_slots(), most - 1);
        assert!(participants.free_slot(participant));
        assert_eq!(participants.free_slots(), most);
        let role = participants.admit_role(0).unwrap();
        assert!(!participants.leave(role));
    }

    #[test]
    fn pidfds_of_freed_participants_are_closed() {
        let words = LocalWords::zeroed(256);
        let (here, there) =
            (ParticipantTable::new(&words).unwrap(), ParticipantTable::new(&words).unwrap());
        let pidfd = || PidFd::of_this_process().unwrap();
        let known = |participants: &ParticipantTable<&LocalWords>| -> Vec<_> {
            participants.pidfds().unwrap().into_iter().map(|(participant, _)| participant).collect()
        };
        let [stays, leaves, goes, replaced] = std::array::from_fn(|_| {
            let participant = here.admit(pidfd()).unwrap();
            there.add_pidfd(participant, pidfd());
            participant
        });
        // Not reclaimed yet.
        assert!(here.leave(leaves));
        assert!(here.free_slot(goes) && here.free_slot(replaced));
        assert_eq!(known(&there), [stays, leaves, goes, replaced]);
        let next = here.admit(pidfd()).unwrap();
        assert_eq!(next.slot(), goes.slot());
        there.drop_unused_pidfds();
        assert_eq!(known(&there), [stays, leaves]);
        // A participant without a known pidfd counts as living.
        there.add_pidfd(next, pidfd());
        there.drop_unused_pidfds();
        assert_eq!(known(&there), [stays, leaves, next]);
        assert!(here.free_slot(leaves));
        there.drop_unused_pidfds();
        assert_eq!(known(&there), [stays, next]);
        assert!(there.is_dead(Some(leaves)) && !there.is_dead(Some(stays)));
    }

    #[test]
    fn other_descriptors_are_not_pidfds() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let error = PidFd::from_fd(null.into()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn only_the_pidfd_of_the_peer_is_accepted() {
        let (here, _there) = Channel::pair().unwrap();
        let (number, other) = child();
        let sent = |pidfd: &PidFd| pidfd.as_fd().try_clone_to_owned().unwrap();
        let own = PidFd::of_this_process().unwrap();
        assert_eq!(own.number().unwrap(), i64::from(std::process::id()));
        assert_eq!(other.number().unwrap(), i64::from(number));
        assert!(!PidFd::by_number(&here, own.try_clone().unwrap()).unwrap().has_exited());
        let error = PidFd::by_number(&here, other.try_clone().unwrap()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(error.to_string().contains(&number.to_string()), "{error}");
        let by_kernel = PidFd::by_kernel(&here);
        let found = PidFd::of_peer(&here, sent(&other));
        kill(number);
        let end = Instant::now() + Duration::from_secs(20);
        while !other.has_exited() {
            assert!(Instant::now() < end, "its exit was not detected");
            std::thread::sleep(Duration::from_millis(1));
        }
        reap(number);
        // A process that has exited is not the peer.
        assert_eq!(other.number().unwrap(), -1);
        assert!(PidFd::by_number(&here, other.try_clone().unwrap()).is_err());
        // The child's pidfd is not that of the peer, which is this process.
        match by_kernel {
            Some(peer) => {
                assert_eq!(peer.number().unwrap(), i64::from(std::process::id()));
                assert!(!found.unwrap().has_exited());
            }
            None => assert_eq!(found.unwrap_err().kind(), io::ErrorKind::InvalidData),
        }
    }
}
