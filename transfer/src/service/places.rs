//! Those that are connected to a service: how many, who is let in, and what each is told.
//!
//! A connection that was admitted has a place and a thread, and keeps both as long as it
//! likes; only if places run out, the one idle for longest gives up its own. One that is
//! turned away never has a place.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ipc::{Channel, ChannelError, ChannelListener, Message};

use super::State;
use super::protocol::{Reply, read_request};

/// Connections that are served at the same time.
const MOST_PLACES: usize = 64;
/// Of them, those of one user.
const MOST_OF_A_USER: usize = 16;
/// Connections that were turned away, and have not gone yet.
const MOST_LEAVING: usize = 16;
/// How long one that is turned away has to hear why.
const LEAVING: Duration = Duration::from_secs(1);
/// How long a client has to take its answer.
const TAKING: Duration = Duration::from_secs(10);
/// How long a thread sleeps at most for a request; ending the connection wakes it.
const SLEEP: Duration = Duration::from_secs(60);
/// How often the thread that accepts looks whether it is over.
const LOOK: Duration = Duration::from_millis(100);

/// A connection that is served.
struct Place {
    channel: Channel,
    user: u32,
    /// None while a request is answered.
    idle_since: Mutex<Option<Instant>>,
}

impl Place {
    fn idle_since(&self) -> MutexGuard<'_, Option<Instant>> {
        self.idle_since.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The places that are taken, each with its thread.
#[derive(Default)]
struct Places(Vec<(Arc<Place>, JoinHandle<()>)>);

impl Places {
    /// Gives up the places of those that have gone.
    fn sweep(&mut self) {
        self.0.retain(|(_, thread)| !thread.is_finished());
    }

    /// Is there a place for this user, if need be that of another connection? The thread
    /// of that one is told, and ends at once.
    fn make_room(&mut self, user: u32) -> bool {
        let of_user = self.0.iter().filter(|(place, _)| place.user == user).count();
        let is_in_the_way = |place: &Place| match of_user >= MOST_OF_A_USER {
            true => place.user == user,
            false => self.0.len() >= MOST_PLACES,
        };
        if of_user < MOST_OF_A_USER && self.0.len() < MOST_PLACES {
            return true;
        }
        let idle = self.0.iter().enumerate().filter_map(|(at, (place, _))| {
            let since = *place.idle_since();
            since.filter(|_| is_in_the_way(place)).map(|since| (since, at))
        });
        let Some((_, at)) = idle.min() else { return false };
        let (place, thread) = self.0.swap_remove(at);
        place.channel.end();
        let _ = thread.join();
        true
    }

    /// Serves a connection in a thread of its own.
    fn take(&mut self, channel: Channel, user: u32, state: &Arc<State>) {
        let idle_since = Mutex::new(Some(Instant::now()));
        let place = Arc::new(Place { channel, user, idle_since });
        let (its, theirs) = (Arc::clone(&place), Arc::clone(state));
        let thread = std::thread::Builder::new().name("fabricast-share-client".to_owned());
        // Without a thread to be had the connection is closed, and may be tried again.
        if let Ok(thread) = thread.spawn(move || serve(&its, &theirs)) {
            self.0.push((place, thread));
        }
    }

    fn end(self) {
        self.0.iter().for_each(|(place, _)| place.channel.end());
        self.0.into_iter().for_each(|(_, thread)| drop(thread.join()));
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

/// Lets in whoever connects and may, until it is over.
pub(super) fn accept(listener: &ChannelListener, state: &Arc<State>) {
    let mut places = Places::default();
    let mut leaving = Leaving::default();
    while !state.is_over.load(Ordering::Relaxed) {
        places.sweep();
        leaving.sweep();
        let channel = match listener.accept(LOOK) {
            Ok(channel) => channel,
            Err(ChannelError::DeadlineExceeded { .. }) => continue,
            Err(_) => {
                // Out of descriptors, say: others may let go of some.
                std::thread::sleep(LOOK);
                continue;
            }
        };
        match state.admission.user_of(&channel) {
            None => {
                state.counts.denied.fetch_add(1, Ordering::Relaxed);
                leaving.part(channel, &Reply::Denied);
            }
            Some(user) if places.make_room(user) => places.take(channel, user, state),
            Some(_) => leaving.part(channel, &Reply::Full),
        }
    }
    places.end();
}

/// Answers one connection until it is over, or up to no good.
fn serve(place: &Place, state: &State) {
    while !state.is_over.load(Ordering::Relaxed) {
        let message = match place.channel.receive(SLEEP) {
            Ok(message) => message,
            Err(ChannelError::DeadlineExceeded { .. }) => continue,
            // More than a request can be: thrown away, and told so.
            Err(ChannelError::TooLong { .. }) => Message::default(),
            Err(_) => break,
        };
        *place.idle_since() = None;
        if !reply(&place.channel, &message, state) {
            break;
        }
        *place.idle_since() = Some(Instant::now());
    }
    // The other side is to know at once, not when the place is given up.
    place.channel.end();
}

/// Answers a request. False if no more shall be answered.
fn reply(channel: &Channel, message: &Message, state: &State) -> bool {
    let counts = &state.counts;
    let Some(name) = read_request(&message.bytes) else {
        counts.malformed.fetch_add(1, Ordering::Relaxed);
        let _ = channel.send(&Reply::Malformed.encode(), &[], LOOK);
        return false;
    };
    let shared = state.shared().get(&name).cloned();
    let handle = shared.map(|shared| shared.handle());
    let (reply, descriptors) = match handle {
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
    channel.send(&reply.encode(), &descriptors, TAKING).is_ok()
}

#[cfg(test)]
mod tests {
    use super::super::Admission;
    use super::*;

    /// Lets one in and gives its other end, if there is a place.
    fn come(places: &mut Places, user: u32, state: &Arc<State>) -> Option<Channel> {
        let (here, there) = Channel::pair().unwrap();
        places.make_room(user).then(|| {
            places.take(here, user, state);
            there
        })
    }

    fn is_closed(channel: &Channel) -> bool {
        matches!(channel.receive(Duration::ZERO), Err(ChannelError::Closed))
    }

    #[test]
    fn the_idlest_of_the_user_goes_first_and_then_the_idlest_of_all() {
        let state = Arc::new(State::new(Admission::own_user()));
        let mut places = Places::default();
        let mut of = |user, count| -> Vec<_> {
            (0..count).map(|_| come(&mut places, user, &state).unwrap()).collect()
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
        // A busy one keeps its place; a user with nothing but busy ones gets no other.
        let busy = |user| {
            move |(place, _): &(Arc<Place>, JoinHandle<()>)| {
                if place.user == user {
                    *place.idle_since() = None;
                }
            }
        };
        places.0.iter().for_each(busy(2));
        assert!(come(&mut places, 2, &state).is_none());
        assert!(come(&mut places, 5, &state).is_some());
        assert_eq!(places.0.len(), MOST_PLACES);
        (1..6).for_each(|user| places.0.iter().for_each(busy(user)));
        assert!(come(&mut places, 6, &state).is_none());
        let start = Instant::now();
        places.end();
        assert!(start.elapsed() < SLEEP / 4, "they are woken");
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
