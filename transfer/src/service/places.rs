//! Those that are connected to a service: how many, who is let in, and what each is told.
//!
//! One thread serves them all, in turn, and waits for none: a client that has no room for the one
//! reply that it asked for is let go of. A connection that was admitted stays as long as it likes;
//! only if places run out, the one idle for longest makes room. One that is turned away never has a
//! place.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ipc::{Channel, ChannelError, ChannelListener, Message};

use super::State;
use super::protocol::{Reply, read_request};
use crate::ready::ready;

/// Connections that are served at the same time.
const MOST_PLACES: usize = 64;
/// Of them, those of one user.
const MOST_OF_A_USER: usize = 16;
/// Connections that were turned away, and have not gone yet.
const MOST_LEAVING: usize = 16;
/// How long one that is turned away has to hear why.
const LEAVING: Duration = Duration::from_secs(1);
/// How often it is looked whether it is over.
const LOOK: Duration = Duration::from_millis(100);

/// A connection that is served, and whose it is.
struct Place {
    channel: Channel,
    user: u32,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.channel.end();
    }
}

/// The places that are taken, the one first that is idle for longest.
#[derive(Default)]
struct Places(Vec<Place>);

impl Places {
    /// Gives a connection a place, if need be that of another one.
    fn take(&mut self, channel: Channel, user: u32) {
        let of_user = self.0.iter().filter(|place| place.user == user).count();
        let goes = if of_user >= MOST_OF_A_USER {
            self.0.iter().position(|place| place.user == user)
        } else {
            (self.0.len() >= MOST_PLACES).then_some(0)
        };
        goes.map(|at| self.0.remove(at));
        self.0.push(Place { channel, user });
    }
}

/// Connections that were turned away. Closed with a request unread, its sender would hear
/// of that before the answer; so they are kept for a moment.
#[derive(Default)]
struct Leaving(VecDeque<(Channel, Instant)>);

impl Leaving {
    fn part(&mut self, channel: Channel, reply: &Reply) {
        if self.0.len() >= MOST_LEAVING {
            self.0.pop_front();
        }
        let _ = channel.send(&reply.encode(), &[], Duration::ZERO);
        self.0.push_back((channel, Instant::now() + LEAVING));
    }

    fn sweep(&mut self) {
        self.0.retain(|(channel, end)| {
            let is_closed = matches!(channel.receive(Duration::ZERO), Err(ChannelError::Closed));
            !is_closed && Instant::now() < *end
        });
    }
}

/// Lets in whoever connects and may, and serves them, until it is over.
pub(super) fn serve(listener: &ChannelListener, state: &State) {
    let mut places = Places::default();
    let mut leaving = Leaving::default();
    while !state.is_over.load(Ordering::Relaxed) {
        leaving.sweep();
        let channels = places.0.iter().map(|place| place.channel.as_fd());
        let Some(is_ready) = ready(std::iter::once(listener.as_fd()).chain(channels), LOOK) else {
            // Out of memory, say: not a reason to spin.
            std::thread::sleep(LOOK);
            continue;
        };
        let mut is_ready = is_ready.into_iter();
        let comes = is_ready.next() == Some(true);
        let (asking, idle): (Vec<_>, Vec<_>) =
            std::mem::take(&mut places.0).into_iter().zip(is_ready).partition(|(_, asks)| *asks);
        places.0 = idle.into_iter().map(|(place, _)| place).collect();
        let asking = asking.into_iter().map(|(place, _)| place);
        places.0.extend(asking.filter(|place| reply(&place.channel, state)));
        if comes {
            let_in(listener, &mut places, &mut leaving, state);
        }
    }
}

fn let_in(listener: &ChannelListener, places: &mut Places, leaving: &mut Leaving, state: &State) {
    let channel = match listener.accept(Duration::ZERO) {
        Ok(channel) => channel,
        Err(ChannelError::DeadlineExceeded { .. }) => return,
        // Out of descriptors, say: others may let go of some.
        Err(_) => return std::thread::sleep(LOOK),
    };
    match state.admission.user_of(&channel) {
        Some(user) => places.take(channel, user),
        None => {
            state.counts.denied.fetch_add(1, Ordering::Relaxed);
            leaving.part(channel, &Reply::Denied);
        }
    }
}

/// Answers a request. False if no more shall be answered.
fn reply(channel: &Channel, state: &State) -> bool {
    let counts = &state.counts;
    let message = match channel.receive(Duration::ZERO) {
        Ok(message) => message,
        Err(ChannelError::DeadlineExceeded { .. }) => return true,
        // More than a request can be: thrown away, and told so.
        Err(ChannelError::TooLong { .. }) => Message::default(),
        Err(_) => return false,
    };
    let Some(name) = read_request(&message.bytes) else {
        counts.malformed.fetch_add(1, Ordering::Relaxed);
        let _ = channel.send(&Reply::Malformed.encode(), &[], Duration::ZERO);
        return false;
    };
    let shared = state.shared().get(&name).cloned();
    let (reply, descriptors) = match shared.map(|shared| shared.handle()) {
        Some(Ok(handle)) => {
            counts.handles.fetch_add(1, Ordering::Relaxed);
            (Reply::Handle(handle.facts.encode()), handle.descriptors)
        }
        Some(Err(_)) => (Reply::Failed, Vec::new()),
        None => {
            counts.unknown.fetch_add(1, Ordering::Relaxed);
            (Reply::Unknown, Vec::new())
        }
    };
    let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    channel.send(&reply.encode(), &descriptors, Duration::ZERO).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_closed(channel: &Channel) -> bool {
        matches!(channel.receive(Duration::ZERO), Err(ChannelError::Closed))
    }

    #[test]
    fn the_idlest_of_the_user_goes_first_and_then_the_idlest_of_all() {
        let mut places = Places::default();
        let mut of = |user, count| -> Vec<_> {
            let mut come = || {
                let (here, there) = Channel::pair().unwrap();
                places.take(here, user);
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
        drop(places);
        assert!(all.iter().all(is_closed));
    }

    #[test]
    fn those_turned_away_are_few_and_hear_why() {
        let mut leaving = Leaving::default();
        let all: Vec<_> = (0..MOST_LEAVING + 4)
            .map(|_| {
                let (here, there) = Channel::pair().unwrap();
                leaving.part(here, &Reply::Denied);
                there
            })
            .collect();
        assert_eq!(leaving.0.len(), MOST_LEAVING);
        let denied = Reply::Denied.encode();
        assert!(all.iter().all(|channel| channel.receive(LEAVING).unwrap().bytes == denied));
        drop(all);
        leaving.sweep();
        assert!(leaving.0.is_empty());
    }
}
