//! The thread at an agent's socket: lets visitors in, and gives them what leads to regions.
//!
//! It needs nothing of the agent's owner, who may compute for minutes meanwhile. Every
//! visitor is served in turn, with deadlines, and none of them is believed.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ipc::{Channel, ChannelError, ChannelListener, Life, Message};

use super::home::{Home, Visitor};
use super::protocol::{PIECES_AT_ONCE, Pieces, Refusal, Reply, Request};
use super::visit::Host;
use crate::error::{Error, ErrorKind};
use crate::ready::ready;

/// Visitors at a time.
const MOST_VISITORS: usize = 1024;
/// Connections that have not said yet who they are.
const MOST_STRANGERS: usize = 64;
/// How long one has to say who it is.
const INTRODUCING: Duration = Duration::from_secs(2);
/// How long one has to take an answer before it is given up.
const TAKING: Duration = Duration::from_secs(2);
/// How often the thread looks whether it is over.
const LOOK: Duration = Duration::from_millis(100);

/// Those that came, and are no visitors yet.
struct Stranger {
    channel: Channel,
    since: Instant,
}

struct Reception<'a> {
    home: &'a Home,
    strangers: Vec<Stranger>,
    visitors: HashMap<u64, (Channel, Arc<Visitor>)>,
    next: u64,
}

/// Serves all who come, until it is over.
pub(super) fn receive(listener: &ChannelListener, home: &Home) {
    let mut reception =
        Reception { home, strangers: Vec::new(), visitors: HashMap::new(), next: 0 };
    while !home.is_over.load(Ordering::Acquire) {
        reception.turn(listener);
    }
    for (_, (channel, visitor)) in reception.visitors.drain() {
        channel.end();
        visitor.leave();
    }
}

impl Reception<'_> {
    /// Waits until something happens, and sees to it.
    fn turn(&mut self, listener: &ChannelListener) {
        let is_ready = {
            let descriptors = std::iter::once(listener.as_fd())
                .chain(self.strangers.iter().map(|stranger| stranger.channel.as_fd()))
                .chain(self.visitors.values().map(|(channel, _)| channel.as_fd()));
            ready(descriptors, LOOK)
        };
        let Some(is_ready) = is_ready else {
            // Out of memory, say: not a reason to spin.
            std::thread::sleep(LOOK);
            return;
        };
        let mut is_ready = is_ready.into_iter();
        let comes = is_ready.next() == Some(true);
        let strangers = std::mem::take(&mut self.strangers);
        let spoke: Vec<_> = strangers.into_iter().zip(is_ready.by_ref()).collect();
        let asked: Vec<_> = self.visitors.keys().copied().zip(is_ready).collect();
        for (stranger, has_spoken) in spoke {
            if has_spoken {
                self.introduce(stranger.channel);
            } else if stranger.since.elapsed() < INTRODUCING {
                self.strangers.push(stranger);
            }
        }
        for (number, _) in asked.into_iter().filter(|(_, has_asked)| *has_asked) {
            self.attend(number);
        }
        if comes {
            self.let_in(listener);
        }
    }

    fn let_in(&mut self, listener: &ChannelListener) {
        match listener.accept(Duration::ZERO) {
            Ok(channel) => {
                if self.home.admission.user_of(&channel).is_none() {
                    refuse(&channel, ErrorKind::Denied, "this user is not admitted");
                } else if self.strangers.len() >= MOST_STRANGERS {
                    // The oldest had its time.
                    self.strangers.remove(0);
                    self.strangers.push(Stranger { channel, since: Instant::now() });
                } else {
                    self.strangers.push(Stranger { channel, since: Instant::now() });
                }
            }
            Err(ChannelError::DeadlineExceeded { .. }) => {}
            // Out of descriptors, say: others may let go of some.
            Err(_) => std::thread::sleep(LOOK),
        }
    }

    fn introduce(&mut self, channel: Channel) {
        let message = match channel.receive(Duration::ZERO) {
            Ok(message) => message,
            Err(ChannelError::Closed) => return,
            Err(error) => return refuse(&channel, ErrorKind::Malformed, error.to_string()),
        };
        if self.visitors.len() >= MOST_VISITORS {
            let why = format!("it has {MOST_VISITORS} visitors already");
            return refuse(&channel, ErrorKind::Failed, why);
        }
        match self.admit(&channel, message) {
            Ok(visitor) => {
                self.home.visitors().push(Arc::clone(&visitor));
                self.home.has_changed();
                self.visitors.insert(self.next, (channel, visitor));
                self.next += 1;
            }
            Err(error) => refuse(&channel, error.kind(), error.to_string()),
        }
    }

    fn admit(&self, channel: &Channel, message: Message) -> Result<Arc<Visitor>, Error> {
        let operation = "receive a visitor";
        let failed = |why: &dyn ToString| Error::new(operation, ErrorKind::Failed, why.to_string());
        let (who, life) = Request::read_hello(message)?;
        let life = Life::from_fd(life)
            .map_err(|error| Error::new(operation, ErrorKind::Malformed, error.to_string()))?;
        let visit = Host::create()?;
        let home = self.home;
        let welcome = Reply::Welcome(home.introduction()).encode();
        let descriptors = [home.life.as_fd(), home.board.as_fd(), home.bell.as_fd(), visit.as_fd()];
        channel.send(&welcome, &descriptors, TAKING).map_err(|error| failed(&error))?;
        Ok(Arc::new(Visitor::new(who.identity, who.label, life, visit)))
    }

    /// Answers a visitor, or sees it off.
    fn attend(&mut self, number: u64) {
        let Some((channel, visitor)) = self.visitors.get(&number) else { return };
        let stays = match channel.receive(Duration::ZERO) {
            Ok(message) => answer(self.home, channel, &message),
            Err(ChannelError::DeadlineExceeded { .. }) => true,
            Err(_) => false,
        };
        if !stays {
            channel.end();
            visitor.leave();
            self.visitors.remove(&number);
            self.home.has_changed();
        }
    }
}

fn refuse(channel: &Channel, kind: ErrorKind, why: impl Into<String>) {
    // Who does not take it does not hear it.
    let _ = channel.send(&Reply::Refused(Refusal::new(kind, why)).encode(), &[], Duration::ZERO);
}

/// Answers a request. False if the visitor is to be seen off.
fn answer(home: &Home, channel: &Channel, message: &Message) -> bool {
    let request = match Request::read_open(&message.bytes) {
        Ok(request) => request,
        Err(error) => {
            refuse(channel, error.kind(), error.to_string());
            return false;
        }
    };
    let Some(region) = home.region(request.number, request.ticket) else {
        let why = "the region was withdrawn, or never was";
        let refused = Reply::Refused(Refusal::new(ErrorKind::Stale, why));
        return channel.send(&refused.encode(), &[], TAKING).is_ok();
    };
    let in_all = region.descriptor.pieces;
    let bytes = region.bytes_of_pieces();
    let mut first = 0;
    loop {
        // A few at a time: a process has not so many descriptors.
        let end = in_all.min(first + PIECES_AT_ONCE as u32);
        let exported: Result<Vec<_>, _> =
            (first..end).map(|number| region.export(number)).collect();
        let (descriptors, lengths): (Vec<_>, Vec<_>) = match exported {
            Ok(exported) => exported.into_iter().unzip(),
            Err(error) => {
                let refused = Reply::Refused(Refusal::new(ErrorKind::Failed, error.to_string()));
                return channel.send(&refused.encode(), &[], TAKING).is_ok();
            }
        };
        let pieces = Pieces { number: request.number, in_all, first, bytes, lengths };
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        if channel.send(&Reply::Pieces(pieces).encode(), &borrowed, TAKING).is_err() {
            return false;
        }
        first = end;
        if first >= in_all {
            return true;
        }
    }
}
