//! Those that are connected to a socket of ours: how many, who is let in, and in which order each is
//! heard.
//!
//! One thread serves them all, in turn, and believes none. One that may ask has a place, and keeps it
//! as long as it likes; only if places run out, the one idle for longest makes room. [Guests] need no
//! place any more. One that is turned away never has one.
//!
//! [Guests]: Desk::Guest

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ipc::{Channel, ChannelError, ChannelListener};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::service::Admission;

/// Connections that have a place at the same time.
pub(crate) const MOST_PLACES: usize = 64;
/// Connections that were turned away, and have not gone yet.
const MOST_LEAVING: usize = 16;
/// How long one that is turned away has to hear why.
const LEAVING: Duration = Duration::from_secs(1);
/// How often it is looked whether it is over.
const LOOK: Duration = Duration::from_millis(100);

/// What those that are connected are told.
pub(crate) trait Desk {
    /// What is known of one that stays for good.
    type Guest;

    /// Hears one that has said something, or is gone. False if it is to be let go of.
    fn hear(&mut self, channel: &Channel, guest: &mut Option<Self::Guest>) -> bool;

    /// A guest was let go of.
    fn part(&mut self, _guest: Self::Guest) {}
}

/// Who is let in.
pub(crate) struct House<'a> {
    pub(crate) listener: &'a ChannelListener,
    pub(crate) admission: &'a Admission,
    pub(crate) is_over: &'a AtomicBool,
    /// Places that one user's connections have at the same time, of [all](MOST_PLACES).
    pub(crate) most_of_a_user: usize,
    /// How long one may be connected without being a guest.
    pub(crate) patience: Duration,
    /// What one is told that may not ask.
    pub(crate) denial: Vec<u8>,
}

/// A connection that is served, and whose it is.
struct Door<G> {
    channel: Channel,
    user: u32,
    since: Instant,
    guest: Option<G>,
}

impl<G> Drop for Door<G> {
    fn drop(&mut self) {
        self.channel.end();
    }
}

struct Doors<G> {
    /// The one first that is idle for longest.
    all: Vec<Door<G>>,
    /// Connections that were turned away. Closed with a request unread, its sender would hear
    /// of that before the answer; so they are kept for a moment.
    leaving: VecDeque<(Channel, Instant)>,
    /// Until when nobody is let in: descriptors ran out, and others may let go of some.
    closed_until: Instant,
}

/// Lets in whoever connects and may, and serves them, until it is over.
pub(crate) fn serve<D: Desk>(house: &House<'_>, desk: &mut D) {
    let mut doors = Doors::new();
    while !house.is_over.load(Ordering::Acquire) {
        doors.turn(house, desk);
    }
    doors.all.into_iter().for_each(|door| let_go(door, desk));
}

fn let_go<D: Desk>(mut door: Door<D::Guest>, desk: &mut D) {
    door.channel.end();
    if let Some(guest) = door.guest.take() {
        desk.part(guest);
    }
}

impl<G> Doors<G> {
    fn new() -> Self {
        Self { all: Vec::new(), leaving: VecDeque::new(), closed_until: Instant::now() }
    }

    /// Waits until something happens, and sees to it.
    fn turn<D: Desk<Guest = G>>(&mut self, house: &House<'_>, desk: &mut D) {
        let is_closed = Instant::now() < self.closed_until;
        let channels = self.all.iter().map(|door| door.channel.as_fd());
        let listening = (!is_closed).then(|| house.listener.as_fd());
        let Some(is_ready) = ready(channels.chain(listening)) else {
            // Out of memory, say: not a reason to spin.
            return std::thread::sleep(LOOK);
        };
        let comes = !is_closed && is_ready.last() == Some(&true);
        let (speaking, idle): (Vec<_>, Vec<_>) = std::mem::take(&mut self.all)
            .into_iter()
            .zip(is_ready)
            .partition(|(_, speaks)| *speaks);
        self.all = idle.into_iter().map(|(door, _)| door).collect();
        self.sweep(house.patience);
        for (mut door, _) in speaking {
            match desk.hear(&door.channel, &mut door.guest) {
                true => self.all.push(door),
                false => let_go(door, desk),
            }
        }
        if comes {
            self.let_in(house);
        }
    }

    fn let_in(&mut self, house: &House<'_>) {
        let channel = match house.listener.accept(Duration::ZERO) {
            Ok(channel) => channel,
            Err(ChannelError::DeadlineExceeded { .. }) => return,
            Err(_) => {
                self.closed_until = Instant::now() + LOOK;
                return;
            }
        };
        match house.admission.user_of(&channel) {
            Some(user) => self.seat(channel, user, house.most_of_a_user),
            None => self.turn_away(channel, &house.denial),
        }
    }

    /// Gives a connection a place, if need be that of another one.
    fn seat(&mut self, channel: Channel, user: u32, most_of_a_user: usize) {
        let places = || self.all.iter().enumerate().filter(|(_, door)| door.guest.is_none());
        let of_user = || places().filter(|(_, door)| door.user == user);
        let goes = if of_user().count() >= most_of_a_user {
            of_user().next()
        } else {
            places().next().filter(|_| places().count() >= MOST_PLACES)
        };
        if let Some(at) = goes.map(|(at, _)| at) {
            self.all.remove(at);
        }
        self.all.push(Door { channel, user, since: Instant::now(), guest: None });
    }

    fn turn_away(&mut self, channel: Channel, why: &[u8]) {
        if self.leaving.len() >= MOST_LEAVING {
            self.leaving.pop_front();
        }
        let _ = channel.send(why, &[], Duration::ZERO);
        self.leaving.push_back((channel, Instant::now() + LEAVING));
    }

    fn sweep(&mut self, patience: Duration) {
        self.leaving.retain(|(channel, end)| {
            let is_closed = matches!(channel.receive(Duration::ZERO), Err(ChannelError::Closed));
            !is_closed && Instant::now() < *end
        });
        self.all.retain(|door| door.guest.is_some() || door.since.elapsed() < patience);
    }
}

/// Which of the descriptors can be read, or are at their end? None if that cannot be told.
fn ready<'a>(descriptors: impl Iterator<Item = BorrowedFd<'a>>) -> Option<Vec<bool>> {
    let mut entries: Vec<_> =
        descriptors.map(|descriptor| PollFd::new(descriptor, PollFlags::POLLIN)).collect();
    let timeout = PollTimeout::try_from(LOOK).unwrap_or(PollTimeout::ZERO);
    match poll(&mut entries, timeout) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(_) => return None,
    }
    Some(entries.iter().map(|entry| entry.any().unwrap_or(true)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_closed(channel: &Channel) -> bool {
        matches!(channel.receive(Duration::ZERO), Err(ChannelError::Closed))
    }

    #[test]
    fn the_idlest_of_the_user_goes_first_and_then_the_idlest_of_all() {
        let mut doors = Doors::<()>::new();
        let mut of = |user, count| -> Vec<_> {
            let mut come = || {
                let (here, there) = Channel::pair().unwrap();
                doors.seat(here, user, 16);
                there
            };
            (0..count).map(|_| come()).collect()
        };
        let mut all = of(1, 16);
        all.extend(of(2, 16));
        assert!(!all.iter().any(is_closed));
        // The first of user 2, though those of user 1 are idle for longer.
        all.extend(of(2, 1));
        assert!(is_closed(&all.remove(16)));
        assert!(!all.iter().any(is_closed));
        all.extend(of(3, 16));
        all.extend(of(4, 16));
        assert!(!all.iter().any(is_closed));
        all.extend(of(5, 1));
        assert!(is_closed(&all.remove(0)));
        assert!(!all.iter().any(is_closed));
        // Guests stay, and others are let go of after their time.
        doors.all[0].guest = Some(());
        doors.sweep(Duration::ZERO);
        assert!(!is_closed(&all.remove(0)));
        assert!(all.iter().all(is_closed));
    }

    #[test]
    fn those_turned_away_are_few_and_hear_why() {
        let mut doors = Doors::<()>::new();
        let all: Vec<_> = (0..MOST_LEAVING + 4)
            .map(|_| {
                let (here, there) = Channel::pair().unwrap();
                doors.turn_away(here, b"no");
                there
            })
            .collect();
        assert_eq!(doors.leaving.len(), MOST_LEAVING);
        assert!(all.iter().all(|channel| channel.receive(LEAVING).unwrap().bytes == b"no"));
        drop(all);
        doors.sweep(Duration::MAX);
        assert!(doors.leaving.is_empty());
    }
}
