//! Knowing that a process is dead, for sure.
//!
//! A process opens a descriptor that stands for itself (a pidfd) and sends it along
//! when it joins. The descriptor becomes readable when the process is gone, with all
//! its threads, its memory and its device contexts. That holds across PID namespaces,
//! where process numbers mean nothing and may be the same for two processes, and no
//! number can be given to somebody else while the descriptor is held.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Once, PoisonError, RwLock};

use crate::channel::Channel;
use crate::participant::{Liveness, Participant};
use crate::words::Words;

/// Asks a Unix socket for the process at the other end; since Linux 6.5.
const SO_PEERPIDFD: libc::c_int = 77;

/// Stands for a process, this one or another.
///
/// ```
/// use ipc::PidFd;
/// let me = PidFd::of_this_process()?;
/// assert!(!me.is_over());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct PidFd(OwnedFd);

impl PidFd {
    /// This process, to be sent to others. Needs Linux 5.3.
    ///
    /// # Errors
    /// What the system says.
    pub fn of_this_process() -> io::Result<Self> {
        // SAFETY: no pointers; what comes back is checked.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened, close-on-exec as all of its kind, and nobody else's.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd as RawFd) }))
    }

    /// What another process sent of itself.
    ///
    /// # Errors
    /// `InvalidData` if it is no such descriptor: others become readable for other
    /// reasons, or never.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
        let link = link.to_string_lossy();
        if link != "anon_inode:[pidfd]" && !link.starts_with("pidfd:[") {
            let why = format!("{link} is not the descriptor of a process");
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        Ok(Self(fd))
    }

    /// The process at the other end of a channel, which sent this descriptor of itself.
    ///
    /// Since Linux 6.5 the kernel says which process connected, whichever process was sent. Before, the process of the descriptor has to have the number that the kernel gives for the
    /// other end. A process of a PID namespace that this one does not see has the number 0 in both
    /// answers, so among these any is accepted. Where /proc is not of this process's own namespace, the
    /// two are not comparable, and nothing is compared.
    ///
    /// ```
    /// use std::os::fd::AsFd;
    /// use ipc::{Channel, PidFd};
    /// let (here, _there) = Channel::pair()?;
    /// let sent = PidFd::of_this_process()?.as_fd().try_clone_to_owned()?;
    /// assert!(!PidFd::of_peer(&here, sent)?.is_over());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidData` if the descriptor is not of a process, or of another one than that at the other
    /// end, or of one that has ended; what the system says.
    pub fn of_peer(channel: &Channel, sent: OwnedFd) -> io::Result<Self> {
        let sent = Self::from_fd(sent)?;
        match Self::by_kernel(channel) {
            Some(pidfd) => Ok(pidfd),
            None => Self::by_number(channel, sent),
        }
    }

    /// As the kernel knows it. None if it does not tell.
    fn by_kernel(channel: &Channel) -> Option<Self> {
        let mut fd: RawFd = -1;
        let mut length = size_of::<RawFd>() as libc::socklen_t;
        let socket = channel.as_fd().as_raw_fd();
        // SAFETY: room for the answer, with its length.
        let code = unsafe {
            libc::getsockopt(
                socket,
                libc::SOL_SOCKET,
                SO_PEERPIDFD,
                (&raw mut fd).cast(),
                &raw mut length,
            )
        };
        // SAFETY: just opened, close-on-exec as all of its kind, and nobody else's.
        (code == 0 && fd >= 0).then(|| Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// What was sent, if it stands for a process with the number of the other end.
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

    /// The number of the process in the namespace of /proc: 0 if it has none there, -1 if it is gone.
    fn number(&self) -> io::Result<i64> {
        let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", self.0.as_raw_fd()))?;
        let found = text.lines().find_map(|line| line.strip_prefix("Pid:")?.trim().parse().ok());
        found.ok_or_else(|| io::Error::other("/proc does not tell the process of a descriptor"))
    }

    /// One more that stands for the same process.
    ///
    /// # Errors
    /// What the system says: that there can be no more descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Is the process gone?
    #[must_use]
    pub fn is_over(&self) -> bool {
        let mut entry = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid entry. An interruption looks like "still there": so it was.
        unsafe { libc::poll(&raw mut entry, 1, 0) == 1 && entry.revents & libc::POLLIN != 0 }
    }
}

impl AsFd for PidFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Which process this is, in a way that a fork changes.
///
/// A handle that was made before a fork belongs to the parent: its names in shared
/// memory are the parent's, and two processes under one name would undo each other.
/// It remembers this, and says so when it is used in the child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForkGeneration(u32);

static INCARNATION: AtomicU32 = AtomicU32::new(0);

extern "C" fn after_fork_in_child() {
    INCARNATION.fetch_add(1, Relaxed);
}

impl ForkGeneration {
    /// This one.
    #[inline]
    #[must_use]
    pub fn current() -> Self {
        static WATCH: Once = Once::new();
        WATCH.call_once(|| {
            // SAFETY: the handler does nothing but an atomic addition.
            unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
        });
        Self(INCARNATION.load(Relaxed))
    }

    /// Is this still the same process?
    #[inline]
    #[must_use]
    pub fn is_current(self) -> bool {
        self.0 == INCARNATION.load(Relaxed)
    }
}

/// Phases of a place: nobody's; somebody's; a dead one's, who is not cleaned up after.
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

/// Who takes part: names in shared memory, and this process's knowledge of the lives
/// behind them.
///
/// One process, the one that others join at, [admits](Self::admit) them. Others
/// [learn](Self::learn) of each other's lives as they are sent to them; of those that
/// they know nothing of they see what somebody else has noticed.
#[derive(Debug)]
pub struct ParticipantTable<W> {
    words: W,
    pidfds: RwLock<Vec<Option<(u32, PidFd)>>>,
}

impl<W: Words> ParticipantTable<W> {
    /// Words that it takes; zeroed, they are a roster of nobody.
    pub const WORDS: usize = Participant::SLOTS as usize;

    /// A roster in these words; None if there are too few.
    #[must_use]
    pub fn new(words: W) -> Option<Self> {
        let pidfds = RwLock::new((0..Participant::SLOTS).map(|_| None).collect());
        (words.count() >= Self::WORDS).then_some(Self { words, pidfds })
    }

    /// Gives a process a name. None if all places are taken.
    pub fn admit(&self, pidfd: PidFd) -> Option<Participant> {
        for slot in 0..Participant::SLOTS - Participant::ROLES {
            let word = self.words.load(slot as usize, Acquire);
            let (generation, phase) = decode_slot(word);
            // A place whose names are used up is never given away again.
            let Some(name) = Participant::new(slot, generation.saturating_add(1)) else { continue };
            let new = encode_slot(name.generation(), LIVING);
            if phase == EMPTY && self.words.compare_exchange(slot as usize, word, new).is_ok() {
                self.add_pidfd(name, pidfd);
                return Some(name);
            }
        }
        None
    }

    /// How many more can be admitted now.
    pub fn free_slots(&self) -> usize {
        let is_free = |slot: &u32| {
            let (generation, phase) = decode_slot(self.words.load(*slot as usize, Acquire));
            phase == EMPTY && generation < Participant::MAX_GENERATION
        };
        (0..Participant::SLOTS - Participant::ROLES).filter(is_free).count()
    }

    /// Gives up one's own name, in which nothing is done any more: it is cleaned up after like
    /// one of the dead. False if the name was not one of the living.
    pub fn leave(&self, who: Participant) -> bool {
        let living = encode_slot(who.generation(), LIVING);
        let dead = encode_slot(who.generation(), DEAD);
        !who.is_role() && self.words.compare_exchange(who.slot() as usize, living, dead).is_ok()
    }

    /// Lets a [role](Participant::role) take part: not a process, but what one after the other
    /// does. It has the same name whoever admits it, and however often. None if there is no
    /// such role.
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

    /// The lives that are known here, to be handed on.
    ///
    /// # Errors
    /// What the system says: that there can be no more descriptors.
    pub fn pidfds(&self) -> io::Result<Vec<(Participant, OwnedFd)>> {
        let pidfds = self.pidfds.read().unwrap_or_else(PoisonError::into_inner);
        let named = pidfds.iter().zip(0..).filter_map(|(known, slot)| {
            let (generation, pidfd) = known.as_ref()?;
            Some((Participant::new(slot, *generation)?, pidfd))
        });
        named.map(|(who, pidfd)| Ok((who, pidfd.0.try_clone()?))).collect()
    }

    /// Takes note of the life behind a name. A role has none.
    pub fn add_pidfd(&self, who: Participant, pidfd: PidFd) {
        if who.is_role() {
            return;
        }
        let mut pidfds = self.pidfds.write().unwrap_or_else(PoisonError::into_inner);
        pidfds[who.slot() as usize] = Some((who.generation(), pidfd));
    }

    /// Lets go of the lives behind names that nobody has any more, which somebody else struck
    /// off: each is a descriptor. Those that are dead and not yet cleaned up after are kept.
    ///
    /// ```
    /// use ipc::{Liveness, PidFd, LocalWords, ParticipantTable};
    /// let words = || LocalWords::zeroed(ParticipantTable::<LocalWords>::WORDS);
    /// let participants = ParticipantTable::new(words()).unwrap();
    /// let who = participants.admit(PidFd::of_this_process()?).unwrap();
    /// participants.drop_unused_pidfds();
    /// assert_eq!(participants.pidfds()?.len(), 1);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn drop_unused_pidfds(&self) {
        let is_gone = |(slot, known): (usize, &Option<(u32, PidFd)>)| {
            let (generation, phase) = decode_slot(self.words.load(slot, Acquire));
            known.as_ref().is_some_and(|(known, _)| *known != generation || phase == EMPTY)
        };
        // Mostly there are none, and others may go on looking.
        let pidfds = self.pidfds.read().unwrap_or_else(PoisonError::into_inner);
        if !pidfds.iter().enumerate().any(is_gone) {
            return;
        }
        drop(pidfds);
        let mut pidfds = self.pidfds.write().unwrap_or_else(PoisonError::into_inner);
        let gone: Vec<_> = pidfds
            .iter_mut()
            .enumerate()
            .filter_map(|(slot, known)| is_gone((slot, known)).then(|| known.take()))
            .collect();
        drop(pidfds);
        // Closed when nobody waits for it.
        drop(gone);
    }

    /// Those that are dead and not yet cleaned up after.
    pub fn dead_participants(&self) -> Vec<Participant> {
        self.named(|phase| phase != EMPTY).filter(|who| self.is_dead(Some(*who))).collect()
    }

    /// Those that live, as far as is known.
    pub fn living_participants(&self) -> Vec<Participant> {
        self.named(|phase| phase == LIVING).filter(|who| !self.is_dead(Some(*who))).collect()
    }

    fn named(&self, is_meant: impl Fn(u64) -> bool) -> impl Iterator<Item = Participant> {
        (0..Participant::SLOTS).filter_map(move |slot| {
            let (generation, phase) = decode_slot(self.words.load(slot as usize, Acquire));
            is_meant(phase).then(|| Participant::new(slot, generation))?
        })
    }

    /// Gives the place of one that left, or that is dead and cleaned up after, to the
    /// next. Nothing may name it any more. False if it was done already, and for a role.
    pub fn free_slot(&self, who: Participant) -> bool {
        if who.is_role() {
            return false;
        }
        let slot = who.slot() as usize;
        let empty = encode_slot(who.generation(), EMPTY);
        let done = [LIVING, DEAD].into_iter().any(|phase| {
            let word = encode_slot(who.generation(), phase);
            self.words.compare_exchange(slot, word, empty).is_ok()
        });
        let mut pidfds = self.pidfds.write().unwrap_or_else(PoisonError::into_inner);
        if pidfds[slot].as_ref().is_some_and(|(generation, _)| *generation == who.generation()) {
            pidfds[slot] = None;
        }
        done
    }
}

impl<W: Words> Liveness for ParticipantTable<W> {
    fn is_dead(&self, participant: Option<Participant>) -> bool {
        let Some(who) = participant else { return true };
        let slot = who.slot() as usize;
        let word = self.words.load(slot, Acquire);
        let (generation, phase) = decode_slot(word);
        if generation != who.generation() || phase != LIVING {
            // Struck off, noticed by somebody, or never admitted: a scribble.
            return true;
        }
        let pidfds = self.pidfds.read().unwrap_or_else(PoisonError::into_inner);
        let is_over = match &pidfds[slot] {
            Some((generation, pidfd)) if *generation == who.generation() => pidfd.is_over(),
            _ => false,
        };
        drop(pidfds);
        if is_over {
            // For those that do not have its life at hand.
            let _ = self.words.compare_exchange(slot, word, encode_slot(generation, DEAD));
        }
        is_over
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::words::LocalWords;

    /// A child that waits to be killed.
    fn child() -> (libc::pid_t, PidFd) {
        // SAFETY: the child does nothing but wait, by a call that is safe after a fork.
        let number = unsafe { libc::fork() };
        assert!(number >= 0);
        if number == 0 {
            loop {
                // SAFETY: no pointers.
                unsafe { libc::pause() };
            }
        }
        // SAFETY: no pointers; the child is not reaped, so the number is its own.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, number, 0) };
        // SAFETY: checked by its use.
        (number, PidFd::from_fd(unsafe { OwnedFd::from_raw_fd(fd as RawFd) }).unwrap())
    }

    fn kill(number: libc::pid_t) {
        // SAFETY: a child of ours, not yet reaped.
        unsafe { libc::kill(number, libc::SIGKILL) };
    }

    fn reap(number: libc::pid_t) {
        // SAFETY: a child of ours; no status is asked for.
        unsafe { libc::waitpid(number, std::ptr::null_mut(), 0) };
    }

    #[test]
    fn the_end_of_a_process_is_seen_and_remembered() {
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
            assert!(Instant::now() < end, "its end was not seen");
            std::thread::sleep(Duration::from_millis(1));
        }
        reap(number);
        assert!(participants.free_slot(other));
        assert!(!participants.free_slot(other));
        assert!(participants.is_dead(Some(other)), "also when its place is free");
        let next = participants.admit(PidFd::of_this_process().unwrap()).unwrap();
        assert_eq!(next.slot(), other.slot());
        assert_ne!(next, other);
        assert!(participants.is_dead(Some(other)) && !participants.is_dead(Some(next)));
    }

    #[test]
    fn who_was_never_admitted_is_no_holder_of_anything() {
        let participants = ParticipantTable::new(LocalWords::zeroed(256)).unwrap();
        assert!(participants.is_dead(Participant::new(3, 1)));
        assert!(participants.is_dead(None));
        assert!(ParticipantTable::new(LocalWords::zeroed(255)).is_none());
    }

    #[test]
    fn a_role_outlives_everybody_and_no_process_gets_its_name() {
        let participants = ParticipantTable::new(LocalWords::zeroed(256)).unwrap();
        let role = participants.admit_role(1).unwrap();
        assert!(role.is_role() && participants.admit_role(Participant::ROLES).is_none());
        let mut admitted = Vec::new();
        while let Some(who) = participants.admit(PidFd::of_this_process().unwrap()) {
            admitted.push(who);
        }
        assert_eq!(admitted.len(), (Participant::SLOTS - Participant::ROLES) as usize);
        assert!(admitted.iter().all(|who| !who.is_role()));
        let known: Vec<_> =
            participants.pidfds().unwrap().into_iter().map(|(who, _)| who).collect();
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
    fn one_who_resigns_is_cleaned_up_after() {
        let participants = ParticipantTable::new(LocalWords::zeroed(256)).unwrap();
        let most = participants.free_slots();
        assert_eq!(most, (Participant::SLOTS - Participant::ROLES) as usize);
        let who = participants.admit(PidFd::of_this_process().unwrap()).unwrap();
        assert_eq!(participants.free_slots(), most - 1);
        assert!(participants.leave(who) && !participants.leave(who));
        assert!(participants.is_dead(Some(who)) && participants.dead_participants() == [who]);
        assert_eq!(participants.free_slots(), most - 1);
        assert!(participants.free_slot(who));
        assert_eq!(participants.free_slots(), most);
        let role = participants.admit_role(0).unwrap();
        assert!(!participants.leave(role));
    }

    #[test]
    fn lives_of_those_that_were_struck_off_elsewhere_are_let_go_of() {
        let words = LocalWords::zeroed(256);
        let (here, there) =
            (ParticipantTable::new(&words).unwrap(), ParticipantTable::new(&words).unwrap());
        let pidfd = || PidFd::of_this_process().unwrap();
        let known = |participants: &ParticipantTable<&LocalWords>| -> Vec<_> {
            participants.pidfds().unwrap().into_iter().map(|(who, _)| who).collect()
        };
        let [stays, leaves, goes, replaced] = std::array::from_fn(|_| {
            let who = here.admit(pidfd()).unwrap();
            there.add_pidfd(who, pidfd());
            who
        });
        // Still to be cleaned up after.
        assert!(here.leave(leaves));
        assert!(here.free_slot(goes) && here.free_slot(replaced));
        assert_eq!(known(&there), [stays, leaves, goes, replaced]);
        let next = here.admit(pidfd()).unwrap();
        assert_eq!(next.slot(), goes.slot());
        there.drop_unused_pidfds();
        assert_eq!(known(&there), [stays, leaves]);
        // One of whom nothing is known but that it is there is none that is gone.
        there.add_pidfd(next, pidfd());
        there.drop_unused_pidfds();
        assert_eq!(known(&there), [stays, leaves, next]);
        assert!(here.free_slot(leaves));
        there.drop_unused_pidfds();
        assert_eq!(known(&there), [stays, next]);
        assert!(there.is_dead(Some(leaves)) && !there.is_dead(Some(stays)));
    }

    #[test]
    fn other_descriptors_are_no_lives() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let error = PidFd::from_fd(null.into()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn only_the_process_at_the_other_end_is_the_peer() {
        let (here, _there) = Channel::pair().unwrap();
        let (number, other) = child();
        let sent = |pidfd: &PidFd| pidfd.as_fd().try_clone_to_owned().unwrap();
        let own = PidFd::of_this_process().unwrap();
        assert_eq!(own.number().unwrap(), i64::from(std::process::id()));
        assert_eq!(other.number().unwrap(), i64::from(number));
        assert!(!PidFd::by_number(&here, own.try_clone().unwrap()).unwrap().is_over());
        let error = PidFd::by_number(&here, other.try_clone().unwrap()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(error.to_string().contains(&number.to_string()), "{error}");
        let by_kernel = PidFd::by_kernel(&here);
        let found = PidFd::of_peer(&here, sent(&other));
        kill(number);
        let end = Instant::now() + Duration::from_secs(20);
        while !other.is_over() {
            assert!(Instant::now() < end, "its end was not seen");
            std::thread::sleep(Duration::from_millis(1));
        }
        reap(number);
        // A process that has ended is not at the other end.
        assert_eq!(other.number().unwrap(), -1);
        assert!(PidFd::by_number(&here, other.try_clone().unwrap()).is_err());
        // The child's end is not that of the peer, which is this process.
        match by_kernel {
            Some(peer) => {
                assert_eq!(peer.number().unwrap(), i64::from(std::process::id()));
                assert!(!found.unwrap().is_over());
            }
            None => assert_eq!(found.unwrap_err().kind(), io::ErrorKind::InvalidData),
        }
    }

    #[test]
    fn a_fork_is_noticed() {
        let before = ForkGeneration::current();
        assert!(before.is_current());
        // SAFETY: the child only compares and ends.
        let number = unsafe { libc::fork() };
        if number == 0 {
            let code = i32::from(before.is_current());
            // SAFETY: ends the child at once, without running anything of the parent's.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: a child of ours.
        unsafe { libc::waitpid(number, &raw mut status, 0) };
        assert_eq!(libc::WEXITSTATUS(status), 0, "the child took itself for its parent");
        assert!(before.is_current());
    }
}
