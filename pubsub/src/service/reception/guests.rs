//! Those that come: who they are, and what they ask for.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use ipc::{ChannelError, DescriptorLimit, Fate, Life, Message, Participant};

use super::{Guest, IN_A_ROW, KEPT_PLACES, Reception};
use crate::error::{Error, ErrorKind, Result};
use crate::hall::Hall;
use crate::pool::{Direction, Piece};
use crate::service::connection::Connection;
use crate::service::protocol::{self, LIVES_AT_ONCE, LONGEST_LABEL, Notice, Refusal, Request};
use crate::settings::SharedSettings;

const RECEIVING: &str = "receive a process";
/// Descriptors that are not used to let one more process in.
const KEPT_DESCRIPTORS: usize = 8;
/// What one may ask for while the others are still handing over.
const MOST_HELD: usize = 4096;

/// One who wants to join.
#[derive(Debug)]
pub(super) struct Newcomer {
    connection: Connection,
    label: String,
    life: Life,
}

impl Newcomer {
    pub(super) fn into_connection(self) -> Connection {
        self.connection
    }
}

/// Tells a process that it is a member, when it knows the lives of all others.
fn welcome(
    connection: &mut Connection,
    who: Participant,
    keys: Vec<OwnedFd>,
    lives: Vec<(Vec<u32>, Vec<OwnedFd>)>,
) {
    for (participants, lives) in lives {
        connection.send(&Notice::Lives { participants }, lives);
    }
    connection.send(&Notice::Welcome { participant: who.number() }, keys);
}

fn malformed(detail: &'static str) -> Error {
    Error::new(RECEIVING, ErrorKind::Malformed, detail)
}

/// The one descriptor of a message.
fn only(descriptors: Vec<OwnedFd>) -> Result<OwnedFd> {
    let [descriptor] = <[OwnedFd; 1]>::try_from(descriptors)
        .map_err(|_| malformed("another number of descriptors than it speaks of"))?;
    Ok(descriptor)
}

/// The process at the other end, whichever one it says it is.
fn life_of(connection: &Connection, sent: OwnedFd) -> Result<Life> {
    Life::of_peer(connection.channel(), sent)
        .map_err(|error| Error::because(RECEIVING, ErrorKind::Malformed, error))
}

impl Reception {
    /// Hears the first that one says, and goes on with what it is told.
    pub(super) fn introduce(&mut self, stranger: super::Stranger) {
        let super::Stranger { mut connection, since } = stranger;
        let since = if connection.flush() { Instant::now() } else { since };
        let message = match connection.channel().receive(Duration::ZERO) {
            Ok(message) => message,
            Err(ChannelError::DeadlineExceeded { .. }) => {
                if !connection.is_broken() {
                    self.strangers.push(super::Stranger { connection, since });
                }
                return;
            }
            Err(ChannelError::Closed) => return,
            Err(ChannelError::DescriptorsLost { limit, .. }) => {
                return self.refusals.lacks_descriptors(&mut connection, limit);
            }
            Err(error) => {
                return self.refusals.see_off(
                    &mut connection,
                    ErrorKind::Malformed,
                    error.to_string(),
                );
            }
        };
        let Message { bytes, descriptors } = message;
        let request = match protocol::decode::<Request>(RECEIVING, &bytes) {
            Ok(request) => request,
            Err(error) => {
                return self.refusals.see_off(&mut connection, error.kind(), error.to_string());
            }
        };
        match request {
            Request::Hello { label } => self.hears_hello(connection, label, descriptors),
            Request::Again { label, participant } => {
                self.takes_back(connection, label, participant, descriptors);
            }
            Request::Report { request } => {
                for notice in self.answer_to_report(request) {
                    connection.send(&notice, Vec::new());
                }
                // It may ask again.
                self.strangers.push(super::Stranger { connection, since: Instant::now() });
            }
            _ => {
                let why = "it does not say who it is";
                self.refusals.see_off(&mut connection, ErrorKind::Malformed, why);
            }
        }
    }

    fn hears_hello(&mut self, mut connection: Connection, label: String, files: Vec<OwnedFd>) {
        let life = match label.len() {
            0..=LONGEST_LABEL => only(files).and_then(|sent| life_of(&connection, sent)),
            _ => Err(malformed("its label is too long")),
        };
        let life = match life {
            Ok(life) => life,
            Err(error) => return self.refusals.turn_away(&mut connection, &error),
        };
        let newcomer = Newcomer { connection, label, life };
        match &mut self.gathering {
            Some(gathering) => gathering.newcomers.push(newcomer),
            None => self.admit(newcomer),
        }
    }

    /// Makes a process a member, and lets it and the others know each other's lives.
    pub(super) fn admit(&mut self, newcomer: Newcomer) {
        let Newcomer { mut connection, label, life } = newcomer;
        let Some(seat) = &self.seat else { return };
        let copies = (life.try_clone(), life.try_clone(), seat.keys(), self.known_lives());
        let (Ok(known), Ok(watched), Ok(keys), Ok(lives)) = copies else {
            return self
                .refusals
                .lacks_descriptors(&mut connection, DescriptorLimit::of_this_process());
        };
        // Those that are there need some: to be told of one more, to come back, for their topics.
        if !self.has_descriptors(self.guests.len() + KEPT_DESCRIPTORS) {
            return self
                .refusals
                .lacks_descriptors(&mut connection, DescriptorLimit::of_this_process());
        }
        // Without some places nobody could take over.
        let is_full = seat.roster.vacancies() <= KEPT_PLACES;
        let admitted = if is_full { None } else { seat.roster.admit(known) };
        let Some(who) = admitted else {
            let why = "the node has as many members already as it can have";
            return self.refusals.see_off(&mut connection, ErrorKind::TooMany, why);
        };
        // First all have to know of its life, and it of theirs.
        self.tell_of_a_life(who, &life);
        welcome(&mut connection, who, keys, lives);
        self.lives.insert(who, watched);
        let guest = Guest::new(label, connection);
        log_change!(self, %who, process = guest.process, label = guest.label, "a process joins");
        self.guests.insert(who, guest);
    }

    /// Could so many descriptors more be opened?
    fn has_descriptors(&self, count: usize) -> bool {
        let copies = (0..count).map(|_| self.bell.as_fd().try_clone_to_owned());
        copies.collect::<std::io::Result<Vec<_>>>().is_ok()
    }

    /// All lives, in as many messages as it takes.
    fn known_lives(&self) -> std::io::Result<Vec<(Vec<u32>, Vec<OwnedFd>)>> {
        let named = |(who, life): (&Participant, &Life)| {
            Ok((who.number(), life.as_fd().try_clone_to_owned()?))
        };
        let all: Vec<_> = self.lives.iter().map(named).collect::<std::io::Result<_>>()?;
        let mut all = all.into_iter().peekable();
        let mut messages = Vec::new();
        while all.peek().is_some() {
            messages.push(all.by_ref().take(LIVES_AT_ONCE).unzip());
        }
        Ok(messages)
    }

    fn tell_of_a_life(&mut self, who: Participant, life: &Life) {
        let others = self.guests.iter_mut().filter(|(other, _)| **other != who);
        for (_, guest) in others {
            let notice = Notice::Lives { participants: vec![who.number()] };
            match life.as_fd().try_clone_to_owned() {
                Ok(copy) => guest.connection.send(&notice, vec![copy]),
                Err(_) => guest.connection.give_up(),
            }
        }
    }

    /// A member of the node that another service served has come.
    fn takes_back(
        &mut self,
        mut connection: Connection,
        label: String,
        participant: u32,
        descriptors: Vec<OwnedFd>,
    ) {
        let taken = <[OwnedFd; 2]>::try_from(descriptors)
            .map_err(|_| malformed("another number of descriptors than it speaks of"))
            .and_then(|[life, hall]| Ok((life_of(&connection, life)?, Hall::open(hall)?)));
        let (life, hall) = match taken {
            Ok(taken) => taken,
            Err(error) => return self.refusals.turn_away(&mut connection, &error),
        };
        let node = hall.identity();
        let is_expected = self.gathering.as_ref().is_none_or(|gathering| gathering.expects(node));
        if self.seat.is_none() && !is_expected {
            return self.is_of_another_hall(&mut connection);
        }
        if self.seat.is_none() {
            if let Err(error) = self.take_seat(hall) {
                return self.refusals.turn_away(&mut connection, &error);
            }
            self.await_members();
        } else if self.seat.as_ref().is_some_and(|seat| seat.hall.identity() != node) {
            return self.is_of_another_hall(&mut connection);
        }
        let Some(seat) = &self.seat else { return };
        // Nobody is a role, whose end would be that of what it does for all.
        let who = Participant::from_number(participant)
            .filter(|who| *who != seat.me && !who.is_role() && !seat.roster.is_dead(Some(*who)));
        let Some(who) = who else {
            return self.is_of_another_hall(&mut connection);
        };
        let copies = (life.try_clone(), life.try_clone(), seat.keys(), self.known_lives());
        let (Ok(known), Ok(watched), Ok(keys), Ok(lives)) = copies else {
            return self
                .refusals
                .lacks_descriptors(&mut connection, DescriptorLimit::of_this_process());
        };
        seat.roster.learn(who, known);
        self.tell_of_a_life(who, &life);
        welcome(&mut connection, who, keys, lives);
        self.lives.insert(who, watched);
        // Whoever it was connected as before is the same process, and says anew what it has.
        self.loses(who);
        self.disconnected.remove(&who);
        self.guests.insert(who, Guest::new(label, connection));
    }

    /// The hall is known, and with it who is still to come back.
    fn await_members(&mut self) {
        let Some(seat) = &self.seat else { return };
        let living = seat.roster.the_living().into_iter();
        // Not those that were let in and never came to have anything, nor other services.
        let members = living.filter(|who| seat.hall.attends(*who)).collect();
        if let Some(gathering) = &mut self.gathering {
            gathering.awaits(Instant::now(), members);
        }
    }

    /// Hears what a member says.
    pub(super) fn attend(&mut self, who: Participant) {
        for _ in 0..IN_A_ROW {
            let Some(guest) = self.guests.get_mut(&who) else { return };
            guest.connection.flush();
            let message = match guest.connection.channel().receive(Duration::ZERO) {
                Ok(message) => message,
                Err(ChannelError::DeadlineExceeded { .. }) => return,
                Err(_) => return self.loses(who),
            };
            let heard = protocol::decode(RECEIVING, &message.bytes)
                .and_then(|request| self.hears(who, request, message.descriptors));
            if let Err(error) = heard {
                tracing::debug!(%error, %who, "a process is seen off");
                if let Some(guest) = self.guests.get_mut(&who) {
                    self.refusals.turn_away(&mut guest.connection, &error);
                }
                return self.loses(who);
            }
        }
    }

    fn hears(&mut self, who: Participant, request: Request, files: Vec<OwnedFd>) -> Result<()> {
        match request {
            Request::Lives { participants } => self.learn(&participants, files)?,
            Request::Pool { pool } => {
                self.registry.return_pool(pool, only(files)?)?;
                if let Some(guest) = self.guests.get_mut(&who) {
                    guest.pools.entry(pool).or_insert(0);
                }
            }
            Request::Pieces { pool, first, pieces } => {
                if pieces.len() != files.len() {
                    return Err(malformed("another number of descriptors than it speaks of"));
                }
                let pieces = files.into_iter().zip(pieces);
                let pieces = pieces.map(|(memory, (length, name))| Piece { memory, length, name });
                let (end, replaced) = self.registry.return_pieces(pool, first, pieces)?;
                if let Some(replaced) = replaced {
                    self.are_replaced(pool, replaced);
                }
                let has = self.guests.get_mut(&who).and_then(|it| it.pools.get_mut(&pool));
                // Without a gap: what comes behind a wrong one is sent anew.
                if let Some(has) = has.filter(|has| **has >= first as usize) {
                    *has = (*has).max(end);
                }
            }
            Request::Topic { number } => {
                self.registry.return_topic(number, only(files)?)?;
                self.uses(who, number);
            }
            Request::Returned => {
                self.uses_only_what_it_brought(who);
                if let Some(gathering) = &mut self.gathering {
                    gathering.is_back(who);
                } else {
                    // It comes later than the others.
                    self.has_news = true;
                    self.send_missing(who);
                    let topics = self.guests.get(&who).map(|guest| &guest.topics);
                    for number in
                        topics.into_iter().flat_map(|it| it.keys().copied()).collect::<Vec<_>>()
                    {
                        self.has_changed(number);
                    }
                }
            }
            Request::Hello { .. } | Request::Again { .. } => {
                return Err(malformed("it has said already who it is"));
            }
            Request::Leave => self.leaves(who),
            Request::TakeOver if files.is_empty() => self.gives_way(who),
            other if !files.is_empty() => {
                let detail = format!("descriptors with {other:?}");
                return Err(Error::new(RECEIVING, ErrorKind::Malformed, detail));
            }
            other => match self.guests.get_mut(&who) {
                Some(guest) if self.gathering.is_some() => {
                    if guest.held.len() >= MOST_HELD {
                        let detail = "it asks for too much before all are back";
                        return Err(Error::new(RECEIVING, ErrorKind::TooMany, detail));
                    }
                    guest.held.push(other);
                }
                _ => self.fulfil(who, other),
            },
        }
        Ok(())
    }

    /// Takes note of lives that somebody knew.
    fn learn(&mut self, participants: &[u32], files: Vec<OwnedFd>) -> Result<()> {
        let Some(seat) = &self.seat else { return Ok(()) };
        for (who, life) in protocol::lives(participants, files)? {
            let is_known = self.lives.contains_key(&who) || who.is_role();
            if is_known || seat.roster.is_dead(Some(who)) {
                continue;
            }
            let Ok(copy) = life.try_clone() else { continue };
            seat.roster.learn(who, copy);
            self.lives.insert(who, life);
        }
        Ok(())
    }

    fn uses(&mut self, who: Participant, number: u32) {
        self.registry.uses(number, who);
        if let Some(guest) = self.guests.get_mut(&who) {
            *guest.topics.entry(number).or_insert(0) += 1;
        }
    }

    /// One that came back has handed over all that it has, which may be less than it had when
    /// its connection was lost.
    fn uses_only_what_it_brought(&mut self, who: Participant) {
        let Some(guest) = self.guests.get(&who) else { return };
        let mut changed: Vec<_> = guest.topics.keys().copied().collect();
        let is_not_brought = |number| !guest.topics.contains_key(&number);
        changed.extend(self.registry.uses_none(who, is_not_brought));
        if self.gathering.is_some() {
            // It is seen to when all are back.
            return;
        }
        for number in changed {
            self.has_changed(number);
            self.forget_unused(number);
        }
    }

    /// A process needs a topic so many times less than it was given to it. It may have been
    /// given to it again meanwhile.
    fn forgets(&mut self, who: Participant, number: u32, given: u64) {
        let Some(guest) = self.guests.get_mut(&who) else { return };
        let Some(left) = guest.topics.get_mut(&number) else { return };
        *left = left.saturating_sub(given);
        if *left > 0 {
            return;
        }
        guest.topics.remove(&number);
        self.registry.uses_no_more(number, who);
        self.has_changed(number);
        self.forget_unused(number);
    }

    /// Does what a member asks for.
    pub(super) fn fulfil(&mut self, who: Participant, request: Request) {
        match request {
            Request::Open { request, name, settings } => {
                let Some(seat) = &self.seat else { return };
                let like = settings.is_none().then(|| self.is_like(&name)).flatten();
                let is_new = self.registry.named(&name).is_none();
                let number = || seat.hall.number_a_topic();
                match self.registry.open(&name, settings.or(like), number) {
                    Ok(number) => {
                        if is_new && let Some(guest) = self.guests.get(&who) {
                            let (process, label) = (guest.process, guest.label.escape_debug());
                            let as_elsewhere =
                                if like.is_some() { ", as another node has it" } else { "" };
                            let creator = format!("process {process} (\"{label}\"){as_elsewhere}");
                            self.registry.set_creator(number, creator);
                        }
                        match (like, settings) {
                            (Some(like), _) => tracing::info!(
                                topic = name, settings = %like,
                                "a topic is made as another node has it"
                            ),
                            (None, Some(settings)) if is_new => {
                                log_change!(self, topic = name, %settings, "a topic is made");
                            }
                            _ => {}
                        }
                        self.give(who, request, number);
                    }
                    Err(error) => self.refuse(who, request, &error),
                }
            }
            Request::Publish { request, number, publisher } => {
                let notice = match self.admit_publisher(who, number, publisher) {
                    Ok(()) => Notice::Admitted { request },
                    Err(error) => Notice::Refused { request, why: Refusal::of(&error) },
                };
                self.tell(who, &notice, Vec::new());
            }
            Request::Forget { number, given } => self.forgets(who, number, given),
            Request::Grow { pool, bytes } => {
                let uses =
                    self.guests.get(&who).is_some_and(|guest| guest.pools.contains_key(&pool));
                if uses {
                    self.grow(pool, bytes);
                }
            }
            Request::Changed { number } => self.has_changed(number),
            // One that it does not use is none of its business.
            Request::Waits { number }
                if self.guests.get(&who).is_some_and(|it| it.topics.contains_key(&number)) =>
            {
                self.watches.begin(Instant::now(), (number, Direction::Here));
            }
            Request::Mapped { ticket } => self.has_mapped(who, ticket),
            Request::Report { request } => {
                for notice in self.answer_to_report(request) {
                    self.tell(who, &notice, Vec::new());
                }
            }
            // Heard before it comes here.
            _ => {}
        }
    }

    /// A process has made a publisher of a topic that it uses.
    fn admit_publisher(&self, who: Participant, number: u32, publisher: u64) -> Result<()> {
        if !self.guests.get(&who).is_some_and(|guest| guest.topics.contains_key(&number)) {
            let detail = "this process does not use the topic";
            return Err(Error::new("make a publisher", ErrorKind::Unknown, detail));
        }
        self.registry.admit_publisher(number, who, publisher)
    }

    /// What a topic is like that is not here, but at other nodes.
    fn is_like(&self, name: &str) -> Option<SharedSettings> {
        match self.registry.named(name) {
            Some(_) => None,
            None => self.carrying.carrier.as_ref()?.like(name),
        }
    }

    /// Gives a process a topic, with the pools that it draws from.
    fn give(&mut self, who: Participant, request: u64, number: u32) {
        let is_new = self.registry.is_unused(number);
        self.uses(who, number);
        if is_new {
            // Other nodes may have been waiting for it: what is published is kept for them from
            // the first message on.
            self.has_changed(number);
            self.carry_on();
        }
        let ready = self.send_pools(who, number).and_then(|()| match is_new {
            true => self.prepare(number),
            false => Ok(()),
        });
        match ready.and_then(|()| self.registry.segment(number)) {
            Ok(segment) => self.tell(who, &Notice::Topic { request, number }, vec![segment]),
            Err(error) => {
                self.refuse(who, request, &error);
                self.forgets(who, number, 1);
            }
        }
    }

    fn refuse(&mut self, who: Participant, request: u64, error: &Error) {
        let Some(guest) = self.guests.get(&who) else { return };
        let why = self.refusals.refusal(&guest.connection, error);
        self.tell(who, &Notice::Refused { request, why }, Vec::new());
    }

    /// Some memory for a topic that somebody begins to use, so that the first message does not
    /// wait for it. Fails where a limit of the service's process does not let it have any.
    fn prepare(&mut self, number: u32) -> Result<()> {
        let Some((topic, [here, _])) = self.registry.desk(number) else { return Ok(()) };
        let (id, first) = (here.id(), topic.settings().largest);
        let Some(seat) = &self.seat else { return Ok(()) };
        // If nobody can tell now, whoever needs it asks for it.
        let free = here.statistics(&seat.caller()).map_or(first, |found| found.largest_free);
        if free >= first {
            return Ok(());
        }
        match self.try_to_grow(id, first) {
            Err(error) if error.limit_reached().is_some() => Err(error),
            Err(error) => {
                tracing::warn!(%error, first, "a pool cannot grow");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Publishers or subscribers of a topic came or went.
    pub(super) fn has_changed(&mut self, number: u32) {
        if let Some(kept) = self.registry.topics.get_mut(&number) {
            (kept.publishes, kept.subscribes) = kept.topic.takes_part();
            self.changed.insert(number);
        }
        self.watch(number);
        self.tell_carrier = true;
    }
}
