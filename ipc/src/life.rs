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
use crate::participant::{Fate, Participant};
use crate::words::Words;

/// Asks a Unix socket for the process at the other end; since Linux 6.5.
const SO_PEERPIDFD: libc::c_int = 77;

/// Stands for a process, this one or another.
///
/// ```
/// use ipc::Life;
/// let me = Life::of_this_process()?;
/// assert!(!me.is_over());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Life(OwnedFd);

impl Life {
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
    /// use ipc::{Channel, Life};
    /// let (here, _there) = Channel::pair()?;
    /// let sent = Life::of_this_process()?.as_fd().try_clone_to_owned()?;
    /// assert!(!Life::of_peer(&here, sent)?.is_over());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidData` if the descriptor is not of a process, or of another one than that at the other
    /// end, or of one that has ended; what the system says.
    pub fn of_peer(channel: &Channel, sent: OwnedFd) -> io::Result<Self> {
        let sent = Self::from_fd(sent)?;
        match Self::by_kernel(channel) {
            Some(life) => Ok(life),
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

impl AsFd for Life {
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
pub struct Incarnation(u32);

static INCARNATION: AtomicU32 = AtomicU32::new(0);

extern "C" fn after_fork_in_child() {
    INCARNATION.fetch_add(1, Relaxed);
}

impl Incarnation {
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

fn place_word(round: u32, phase: u64) -> u64 {
    u64::from(round) << PHASE_BITS | phase
}

fn taken_apart(word: u64) -> (u32, u64) {
    ((word >> PHASE_BITS) as u32, word & ((1 << PHASE_BITS) - 1))
}

/// Who takes part: names in shared memory, and this process's knowledge of the lives
/// behind them.
///
/// One process, the one that others join at, [admits](Self::admit) them. Others
/// [learn](Self::learn) of each other's lives as they are sent to them; of those that
/// they know nothing of they see what somebody else has noticed.
#[derive(Debug)]
pub struct Roster<W> {
    words: W,
    lives: RwLock<Vec<Option<(u32, Life)>>>,
}

impl<W: Words> Roster<W> {
    /// Words that it takes; zeroed, they are a roster of nobody.
    pub const WORDS: usize = Participant::PLACES as usize;

    /// A roster in these words; None if there are too few.
    #[must_use]
    pub fn new(words: W) -> Option<Self> {
        let lives = RwLock::new((0..Participant::PLACES).map(|_| None).collect());
        (words.count() >= Self::WORDS).then_some(Self { words, lives })
    }

    /// Gives a process a name. None if all places are taken.
    pub fn admit(&self, life: Life) -> Option<Participant> {
        for place in 0..Participant::PLACES - Participant::ROLES {
            let word = self.words.load(place as usize, Acquire);
            let (round, phase) = taken_apart(word);
            // A place whose names are used up is never given away again.
            let Some(name) = Participant::new(place, round.saturating_add(1)) else { continue };
            let new = place_word(name.round(), LIVING);
            if phase == EMPTY && self.words.compare_exchange(place as usize, word, new).is_ok() {
                self.learn(name, life);
                return Some(name);
            }
        }
        None
    }

    /// How many more can be admitted now.
    pub fn vacancies(&self) -> usize {
        let is_free = |place: &u32| {
            let (round, phase) = taken_apart(self.words.load(*place as usize, Acquire));
            phase == EMPTY && round < Participant::ROUNDS
        };
        (0..Participant::PLACES - Participant::ROLES).filter(is_free).count()
    }

    /// Gives up one's own name, in which nothing is done any more: it is cleaned up after like
    /// one of the dead. False if the name was not one of the living.
    pub fn resign(&self, who: Participant) -> bool {
        let living = place_word(who.round(), LIVING);
        let dead = place_word(who.round(), DEAD);
        !who.is_role() && self.words.compare_exchange(who.place() as usize, living, dead).is_ok()
    }

    /// Lets a [role](Participant::role) take part: not a process, but what one after the other
    /// does. It has the same name whoever admits it, and however often. None if there is no
    /// such role.
    ///
    /// ```
    /// use ipc::{Fate, LocalWords, Roster};
    /// let roster = Roster::new(LocalWords::zeroed(Roster::<LocalWords>::WORDS)).unwrap();
    /// let role = roster.admit_role(0).unwrap();
    /// assert_eq!(roster.admit_role(0), Some(role));
    /// assert!(!roster.is_dead(Some(role)));
    /// ```
    pub fn admit_role(&self, number: u32) -> Option<Participant> {
        let role = Participant::role(number)?;
        let word = place_word(role.round(), LIVING);
        self.words.store(role.place() as usize, word, Release);
        Some(role)
    }

    /// The lives that are known here, to be handed on.
    ///
    /// # Errors
    /// What the system says: that there can be no more descriptors.
    pub fn lives(&self) -> io::Result<Vec<(Participant, OwnedFd)>> {
        let lives = self.lives.read().unwrap_or_else(PoisonError::into_inner);
        let named = lives.iter().zip(0..).filter_map(|(known, place)| {
            let (round, life) = known.as_ref()?;
            Some((Participant::new(place, *round)?, life))
        });
        named.map(|(who, life)| Ok((who, life.0.try_clone()?))).collect()
    }

    /// Takes note of the life behind a name. A role has none.
    pub fn learn(&self, who: Participant, life: Life) {
        if who.is_role() {
            return;
        }
        let mut lives = self.lives.write().unwrap_or_else(PoisonError::into_inner);
        lives[who.place() as usize] = Some((who.round(), life));
    }

    /// Lets go of the lives behind names that nobody has any more, which somebody else struck
    /// off: each is a descriptor. Those that are dead and not yet cleaned up after are kept.
    ///
    /// ```
    /// use ipc::{Fate, Life, LocalWords, Roster};
    /// let words = || LocalWords::zeroed(Roster::<LocalWords>::WORDS);
    /// let roster = Roster::new(words()).unwrap();
    /// let who = roster.admit(Life::of_this_process()?).unwrap();
    /// roster.forget_the_gone();
    /// assert_eq!(roster.lives()?.len(), 1);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn forget_the_gone(&self) {
        let is_gone = |(place, known): (usize, &Option<(u32, Life)>)| {
            let (round, phase) = taken_apart(self.words.load(place, Acquire));
            known.as_ref().is_some_and(|(known, _)| *known != round || phase == EMPTY)
        };
        // Mostly there are none, and others may go on looking.
        let lives = self.lives.read().unwrap_or_else(PoisonError::into_inner);
        if !lives.iter().enumerate().any(is_gone) {
            return;
        }
        drop(lives);
        let mut lives = self.lives.write().unwrap_or_else(PoisonError::into_inner);
        let gone: Vec<_> = lives
            .iter_mut()
            .enumerate()
            .filter_map(|(place, known)| is_gone((place, known)).then(|| known.take()))
            .collect();
        drop(lives);
        // Closed when nobody waits for it.
        drop(gone);
    }

    /// Those that are dead and not yet cleaned up after.
    pub fn the_dead(&self) -> Vec<Participant> {
        self.named(|phase| phase != EMPTY).filter(|who| self.is_dead(Some(*who))).collect()
    }

    /// Those that live, as far as is known.
    pub fn the_living(&self) -> Vec<Participant> {
        self.named(|phase| phase == LIVING).filter(|who| !self.is_dead(Some(*who))).collect()
    }

    fn named(&self, is_meant: impl Fn(u64) -> bool) -> impl Iterator<Item = Participant> {
        (0..Participant::PLACES).filter_map(move |place| {
            let (round, phase) = taken_apart(self.words.load(place as usize, Acquire));
            is_meant(phase).then(|| Participant::new(place, round))?
        })
    }

    /// Gives the place of one that left, or that is dead and cleaned up after, to the
    /// next. Nothing may name it any more. False if it was done already, and for a role.
    pub fn strike_off(&self, who: Participant) -> bool {
        if who.is_role() {
            return false;
        }
        let place = who.place() as usize;
        let empty = place_word(who.round(), EMPTY);
        let done = [LIVING, DEAD].into_iter().any(|phase| {
            let word = place_word(who.round(), phase);
            self.words.compare_exchange(place, word, empty).is_ok()
        });
        let mut lives = self.lives.write().unwrap_or_else(PoisonError::into_inner);
        if lives[place].as_ref().is_some_and(|(round, _)| *round == who.round()) {
            lives[place] = None;
        }
        done
    }
}

impl<W: Words> Fate for Roster<W> {
    fn is_dead(&self, participant: Option<Participant>) -> bool {
        let Some(who) = participant else { return true };
        let place = who.place() as usize;
        let word = self.words.load(place, Acquire);
        let (round, phase) = taken_apart(word);
        if round != who.round() || phase != LIVING {
            // Struck off, noticed by somebody, or never admitted: a scribble.
            return true;
        }
        let lives = self.lives.read().unwrap_or_else(PoisonError::into_inner);
        let is_over = match &lives[place] {
            Some((round, life)) if *round == who.round() => life.is_over(),
            _ => false,
        };
        drop(lives);
        if is_over {
            // For those that do not have its life at hand.
            let _ = self.words.compare_exchange(place, word, place_word(round, DEAD));
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
    fn child() -> (libc::pid_t, Life) {
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
        (number, Life::from_fd(unsafe { OwnedFd::from_raw_fd(fd as RawFd) }).unwrap())
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
        let roster = Roster::new(LocalWords::zeroed(256)).unwrap();
        let me = roster.admit(Life::of_this_process().unwrap()).unwrap();
        let (number, life) = child();
        let other = roster.admit(life).unwrap();
        assert_ne!(me, other);
        assert_eq!(roster.the_living(), [me, other]);
        assert!(roster.the_dead().is_empty());
        kill(number);
        let end = Instant::now() + Duration::from_secs(20);
        while roster.the_dead() != [other] {
            assert!(Instant::now() < end, "its end was not seen");
            std::thread::sleep(Duration::from_millis(1));
        }
        reap(number);
        assert!(roster.strike_off(other));
        assert!(!roster.strike_off(other));
        assert!(roster.is_dead(Some(other)), "also when its place is free");
        let next = roster.admit(Life::of_this_process().unwrap()).unwrap();
        assert_eq!(next.place(), other.place());
        assert_ne!(next, other);
        assert!(roster.is_dead(Some(other)) && !roster.is_dead(Some(next)));
    }

    #[test]
    fn who_was_never_admitted_is_no_holder_of_anything() {
        let roster = Roster::new(LocalWords::zeroed(256)).unwrap();
        assert!(roster.is_dead(Participant::new(3, 1)));
        assert!(roster.is_dead(None));
        assert!(Roster::new(LocalWords::zeroed(255)).is_none());
    }

    #[test]
    fn a_role_outlives_everybody_and_no_process_gets_its_name() {
        let roster = Roster::new(LocalWords::zeroed(256)).unwrap();
        let role = roster.admit_role(1).unwrap();
        assert!(role.is_role() && roster.admit_role(Participant::ROLES).is_none());
        let mut admitted = Vec::new();
        while let Some(who) = roster.admit(Life::of_this_process().unwrap()) {
            admitted.push(who);
        }
        assert_eq!(admitted.len(), (Participant::PLACES - Participant::ROLES) as usize);
        assert!(admitted.iter().all(|who| !who.is_role()));
        let known: Vec<_> = roster.lives().unwrap().into_iter().map(|(who, _)| who).collect();
        assert_eq!(known, admitted);
        assert!(!roster.strike_off(role) && !roster.is_dead(Some(role)));
        let (number, life) = child();
        roster.learn(role, life);
        kill(number);
        reap(number);
        assert!(!roster.is_dead(Some(role)) && roster.the_living().contains(&role));
    }

    #[test]
    fn one_who_resigns_is_cleaned_up_after() {
        let roster = Roster::new(LocalWords::zeroed(256)).unwrap();
        let most = roster.vacancies();
        assert_eq!(most, (Participant::PLACES - Participant::ROLES) as usize);
        let who = roster.admit(Life::of_this_process().unwrap()).unwrap();
        assert_eq!(roster.vacancies(), most - 1);
        assert!(roster.resign(who) && !roster.resign(who));
        assert!(roster.is_dead(Some(who)) && roster.the_dead() == [who]);
        assert_eq!(roster.vacancies(), most - 1);
        assert!(roster.strike_off(who));
        assert_eq!(roster.vacancies(), most);
        let role = roster.admit_role(0).unwrap();
        assert!(!roster.resign(role));
    }

    #[test]
    fn lives_of_those_that_were_struck_off_elsewhere_are_let_go_of() {
        let words = LocalWords::zeroed(256);
        let (here, there) = (Roster::new(&words).unwrap(), Roster::new(&words).unwrap());
        let life = || Life::of_this_process().unwrap();
        let known = |roster: &Roster<&LocalWords>| -> Vec<_> {
            roster.lives().unwrap().into_iter().map(|(who, _)| who).collect()
        };
        let [stays, leaves, goes, replaced] = std::array::from_fn(|_| {
            let who = here.admit(life()).unwrap();
            there.learn(who, life());
            who
        });
        // Still to be cleaned up after.
        assert!(here.resign(leaves));
        assert!(here.strike_off(goes) && here.strike_off(replaced));
        assert_eq!(known(&there), [stays, leaves, goes, replaced]);
        let next = here.admit(life()).unwrap();
        assert_eq!(next.place(), goes.place());
        there.forget_the_gone();
        assert_eq!(known(&there), [stays, leaves]);
        // One of whom nothing is known but that it is there is none that is gone.
        there.learn(next, life());
        there.forget_the_gone();
        assert_eq!(known(&there), [stays, leaves, next]);
        assert!(here.strike_off(leaves));
        there.forget_the_gone();
        assert_eq!(known(&there), [stays, next]);
        assert!(there.is_dead(Some(leaves)) && !there.is_dead(Some(stays)));
    }

    #[test]
    fn other_descriptors_are_no_lives() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let error = Life::from_fd(null.into()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn only_the_process_at_the_other_end_is_the_peer() {
        let (here, _there) = Channel::pair().unwrap();
        let (number, other) = child();
        let sent = |life: &Life| life.as_fd().try_clone_to_owned().unwrap();
        let own = Life::of_this_process().unwrap();
        assert_eq!(own.number().unwrap(), i64::from(std::process::id()));
        assert_eq!(other.number().unwrap(), i64::from(number));
        assert!(!Life::by_number(&here, own.try_clone().unwrap()).unwrap().is_over());
        let error = Life::by_number(&here, other.try_clone().unwrap()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(error.to_string().contains(&number.to_string()), "{error}");
        let by_kernel = Life::by_kernel(&here);
        let found = Life::of_peer(&here, sent(&other));
        kill(number);
        let end = Instant::now() + Duration::from_secs(20);
        while !other.is_over() {
            assert!(Instant::now() < end, "its end was not seen");
            std::thread::sleep(Duration::from_millis(1));
        }
        reap(number);
        // A process that has ended is not at the other end.
        assert_eq!(other.number().unwrap(), -1);
        assert!(Life::by_number(&here, other.try_clone().unwrap()).is_err());
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
        let before = Incarnation::current();
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
