//! Clients of the service: how they join, and their requests.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use ipc::{ChannelError, DescriptorLimit, Liveness, Message, Participant, PidFd};

use super::{Client, MAX_MESSAGES_PER_TURN, RESERVED_ROSTER_SLOTS, Service};
use crate::error::{Error, ErrorKind, Result};
use crate::node_segment::NodeSegment;
use crate::pool::{Direction, Piece};
use crate::service::connection::Connection;
use crate::service::protocol::{self, MAX_LABEL, MAX_PIDFDS_PER_MESSAGE, Notice, Refusal, Request};
use crate::settings::SharedSettings;

const RECEIVING: &str = "accept a process";
/// Descriptors that are never used to admit a process.
const RESERVED_DESCRIPTORS: usize = 8;
/// Requests of a client that are held during a takeover.
const MAX_HELD_REQUESTS: usize = 4096;

/// A client whose hello was received.
#[derive(Debug)]
pub(super) struct JoiningClient {
    connection: Connection,
    label: String,
    pidfd: PidFd,
}

impl JoiningClient {
    pub(super) fn into_connection(self) -> Connection {
        self.connection
    }
}

/// Tells a process that it is a member, after the pidfds of all others.
fn welcome(
    connection: &mut Connection,
    member: Participant,
    descriptors: Vec<OwnedFd>,
    pidfds: Vec<(Vec<u32>, Vec<OwnedFd>)>,
) {
    for (participants, pidfds) in pidfds {
        connection.send(&Notice::Pidfds { participants }, pidfds);
    }
    connection.send(&Notice::Welcome { participant: member.number() }, descriptors);
}

fn malformed(detail: &'static str) -> Error {
    Error::new(RECEIVING, ErrorKind::Malformed, detail)
}

/// The only descriptor of a message.
fn only(descriptors: Vec<OwnedFd>) -> Result<OwnedFd> {
    let [descriptor] = <[OwnedFd; 1]>::try_from(descriptors)
        .map_err(|_| malformed("wrong number of descriptors"))?;
    Ok(descriptor)
}

/// The pidfd of the process at the other end of the connection.
fn pidfd_of(connection: &Connection, sent: OwnedFd) -> Result<PidFd> {
    PidFd::of_peer(connection.channel(), sent)
        .map_err(|error| Error::because(RECEIVING, ErrorKind::Malformed, error))
}

impl Service {
    /// Handles the first message of a pending client.
    pub(super) fn handle_first_message(&mut self, pending_client: super::PendingClient) {
        let super::PendingClient { mut connection, since } = pending_client;
        let since = if connection.flush() { Instant::now() } else { since };
        let message = match connection.channel().receive(Duration::ZERO) {
            Ok(message) => message,
            Err(ChannelError::DeadlineExceeded { .. }) => {
                if !connection.is_broken() {
                    self.pending_clients.push(super::PendingClient { connection, since });
                }
                return;
            }
            Err(ChannelError::Closed) => return,
            Err(ChannelError::DescriptorsLost { limit, .. }) => {
                return self.refusals.reject_out_of_descriptors(&mut connection, limit);
            }
            Err(error) => {
                return self.refusals.reject(
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
                return self.refusals.reject(&mut connection, error.kind(), error.to_string());
            }
        };
        match request {
            Request::Hello { label } => self.handle_hello(connection, label, descriptors),
            Request::Rejoin { label, participant } => {
                self.handle_rejoin(connection, label, participant, descriptors);
            }
            Request::Report { request } => {
                for notice in self.answer_to_report(request) {
                    connection.send(&notice, Vec::new());
                }
                // It may send another request.
                self.pending_clients
                    .push(super::PendingClient { connection, since: Instant::now() });
            }
            _ => {
                let reason = "the first message is not a hello";
                self.refusals.reject(&mut connection, ErrorKind::Malformed, reason);
            }
        }
    }

    fn handle_hello(&mut self, mut connection: Connection, label: String, files: Vec<OwnedFd>) {
        let pidfd = match label.len() {
            0..=MAX_LABEL => only(files).and_then(|sent| pidfd_of(&connection, sent)),
            _ => Err(malformed("its label is too long")),
        };
        let pidfd = match pidfd {
            Ok(pidfd) => pidfd,
            Err(error) => return self.refusals.reject_with_error(&mut connection, &error),
        };
        let joining_client = JoiningClient { connection, label, pidfd };
        match &mut self.takeover {
            Some(takeover) => takeover.joining_clients.push(joining_client),
            None => self.admit(joining_client),
        }
    }

    /// Makes a process a member, and exchanges pidfds with all others.
    pub(super) fn admit(&mut self, joining_client: JoiningClient) {
        let JoiningClient { mut connection, label, pidfd } = joining_client;
        let Some(served_node) = &self.served_node else { return };
        let copies =
            (pidfd.try_clone(), pidfd.try_clone(), served_node.descriptors(), self.known_pidfds());
        let (Ok(known), Ok(watched), Ok(descriptors), Ok(pidfds)) = copies else {
            return self
                .refusals
                .reject_out_of_descriptors(&mut connection, DescriptorLimit::of_this_process());
        };
        // Members need some descriptors: for a new participant, to rejoin, for their topics.
        if !self.has_descriptors(self.clients.len() + RESERVED_DESCRIPTORS) {
            return self
                .refusals
                .reject_out_of_descriptors(&mut connection, DescriptorLimit::of_this_process());
        }
        // Without free slots no service could take over.
        let is_full = served_node.roster.free_slots() <= RESERVED_ROSTER_SLOTS;
        let admitted = if is_full { None } else { served_node.roster.admit(known) };
        let Some(member) = admitted else {
            let reason = "the node has the maximum number of members";
            return self.refusals.reject(&mut connection, ErrorKind::TooMany, reason);
        };
        // The pidfds are exchanged before it is welcomed.
        self.broadcast_pidfd(member, &pidfd);
        welcome(&mut connection, member, descriptors, pidfds);
        self.pidfds.insert(member, watched);
        let client = Client::new(label, connection);
        log_change!(
            self,
            %member,
            process = client.process,
            label = client.label,
            "a process joined"
        );
        self.clients.insert(member, client);
    }

    /// Whether this many descriptors can still be opened.
    fn has_descriptors(&self, count: usize) -> bool {
        let copies = (0..count).map(|_| self.bell.as_fd().try_clone_to_owned());
        copies.collect::<std::io::Result<Vec<_>>>().is_ok()
    }

    /// All pidfds, split into messages.
    fn known_pidfds(&self) -> std::io::Result<Vec<(Vec<u32>, Vec<OwnedFd>)>> {
        let named = |(member, pidfd): (&Participant, &PidFd)| {
            Ok((member.number(), pidfd.as_fd().try_clone_to_owned()?))
        };
        let all: Vec<_> = self.pidfds.iter().map(named).collect::<std::io::Result<_>>()?;
        let mut all = all.into_iter().peekable();
        let mut messages = Vec::new();
        while all.peek().is_some() {
            messages.push(all.by_ref().take(MAX_PIDFDS_PER_MESSAGE).unzip());
        }
        Ok(messages)
    }

    fn broadcast_pidfd(&mut self, member: Participant, pidfd: &PidFd) {
        let others = self.clients.iter_mut().filter(|(other, _)| **other != member);
        for (_, client) in others {
            let notice = Notice::Pidfds { participants: vec![member.number()] };
            match pidfd.as_fd().try_clone_to_owned() {
                Ok(copy) => client.connection.send(&notice, vec![copy]),
                Err(_) => client.connection.mark_broken(),
            }
        }
    }

    /// A member of the node under an earlier service rejoins.
    fn handle_rejoin(
        &mut self,
        mut connection: Connection,
        label: String,
        participant: u32,
        descriptors: Vec<OwnedFd>,
    ) {
        let received = <[OwnedFd; 2]>::try_from(descriptors)
            .map_err(|_| malformed("wrong number of descriptors"))
            .and_then(|[pidfd, node_segment]| {
                Ok((pidfd_of(&connection, pidfd)?, NodeSegment::open(node_segment)?))
            });
        let (pidfd, node_segment) = match received {
            Ok(received) => received,
            Err(error) => return self.refusals.reject_with_error(&mut connection, &error),
        };
        let node = node_segment.identity();
        let is_expected = self.takeover.as_ref().is_none_or(|takeover| takeover.expects(node));
        if self.served_node.is_none() && !is_expected {
            return self.reject_other_node(&mut connection);
        }
        if self.served_node.is_none() {
            if let Err(error) = self.attach_segment(node_segment) {
                return self.refusals.reject_with_error(&mut connection, &error);
            }
            self.await_members();
        } else if self
            .served_node
            .as_ref()
            .is_some_and(|served_node| served_node.node_segment.identity() != node)
        {
            return self.reject_other_node(&mut connection);
        }
        let Some(served_node) = &self.served_node else { return };
        // No process may claim a role, whose end would affect all members.
        let member = Participant::from_number(participant).filter(|it| {
            *it != served_node.me && !it.is_role() && !served_node.roster.is_dead(Some(*it))
        });
        let Some(member) = member else {
            return self.reject_other_node(&mut connection);
        };
        let copies =
            (pidfd.try_clone(), pidfd.try_clone(), served_node.descriptors(), self.known_pidfds());
        let (Ok(known), Ok(watched), Ok(descriptors), Ok(pidfds)) = copies else {
            return self
                .refusals
                .reject_out_of_descriptors(&mut connection, DescriptorLimit::of_this_process());
        };
        served_node.roster.add_pidfd(member, known);
        self.broadcast_pidfd(member, &pidfd);
        welcome(&mut connection, member, descriptors, pidfds);
        self.pidfds.insert(member, watched);
        // An older connection belongs to the same process, which returns everything again.
        self.handle_disconnect(member);
        self.disconnected.remove(&member);
        self.clients.insert(member, Client::new(label, connection));
    }

    /// The node segment is known, and with it the members that have to rejoin.
    fn await_members(&mut self) {
        let Some(served_node) = &self.served_node else { return };
        let living = served_node.roster.living_participants().into_iter();
        // Neither admitted processes that never became members, nor other services.
        let members = living.filter(|it| served_node.node_segment.is_member(*it)).collect();
        if let Some(takeover) = &mut self.takeover {
            takeover.set_awaited(Instant::now(), members);
        }
    }

    /// Handles messages of a member.
    pub(super) fn handle_messages(&mut self, member: Participant) {
        for _ in 0..MAX_MESSAGES_PER_TURN {
            let Some(client) = self.clients.get_mut(&member) else { return };
            client.connection.flush();
            let message = match client.connection.channel().receive(Duration::ZERO) {
                Ok(message) => message,
                Err(ChannelError::DeadlineExceeded { .. }) => return,
                Err(_) => return self.handle_disconnect(member),
            };
            let handled = protocol::decode(RECEIVING, &message.bytes)
                .and_then(|request| self.handle_request(member, request, message.descriptors));
            if let Err(error) = handled {
                tracing::debug!(%error, %member, "a process was rejected");
                if let Some(client) = self.clients.get_mut(&member) {
                    self.refusals.reject_with_error(&mut client.connection, &error);
                }
                return self.handle_disconnect(member);
            }
        }
    }

    fn handle_request(
        &mut self,
        member: Participant,
        request: Request,
        files: Vec<OwnedFd>,
    ) -> Result<()> {
        match request {
            Request::Pidfds { participants } => self.handle_pidfds(&participants, files)?,
            Request::Pool { pool } => {
                self.registry.restore_pool(pool, only(files)?)?;
                if let Some(client) = self.clients.get_mut(&member) {
                    client.pools.entry(pool).or_insert(0);
                }
            }
            Request::Pieces { pool, first, pieces } => {
                if pieces.len() != files.len() {
                    return Err(malformed("wrong number of descriptors"));
                }
                let pieces = files.into_iter().zip(pieces);
                let pieces = pieces.map(|(memory, (length, name))| Piece { memory, length, name });
                let (end, replaced) = self.registry.restore_pieces(pool, first, pieces)?;
                if let Some(replaced) = replaced {
                    self.handle_replaced_pieces(pool, replaced);
                }
                let has = self.clients.get_mut(&member).and_then(|it| it.pools.get_mut(&pool));
                // Without a gap: pieces behind a wrong one are sent again.
                if let Some(has) = has.filter(|has| **has >= first as usize) {
                    *has = (*has).max(end);
                }
            }
            Request::Topic { number } => {
                self.registry.restore_topic(number, only(files)?)?;
                self.add_user(member, number);
            }
            Request::RejoinDone => {
                self.drop_unreturned_topics(member);
                if let Some(takeover) = &mut self.takeover {
                    takeover.mark_returned(member);
                } else {
                    // It rejoins later than the others.
                    self.must_rescan_owners = true;
                    self.send_missing(member);
                    let topics = self.clients.get(&member).map(|client| &client.topics);
                    for number in
                        topics.into_iter().flat_map(|it| it.keys().copied()).collect::<Vec<_>>()
                    {
                        self.topic_changed(number);
                    }
                }
            }
            Request::Hello { .. } | Request::Rejoin { .. } => {
                return Err(malformed("duplicate hello"));
            }
            Request::Leave => self.handle_leave(member),
            Request::TakeOver if files.is_empty() => self.handle_take_over(member),
            other if !files.is_empty() => {
                let detail = format!("descriptors with {other:?}");
                return Err(Error::new(RECEIVING, ErrorKind::Malformed, detail));
            }
            other => match self.clients.get_mut(&member) {
                Some(client) if self.takeover.is_some() => {
                    if client.held.len() >= MAX_HELD_REQUESTS {
                        let detail = "too many requests during the takeover";
                        return Err(Error::new(RECEIVING, ErrorKind::TooMany, detail));
                    }
                    client.held.push(other);
                }
                _ => self.execute(member, other),
            },
        }
        Ok(())
    }

    /// Adds pidfds that a member knew.
    fn handle_pidfds(&mut self, participants: &[u32], files: Vec<OwnedFd>) -> Result<()> {
        let Some(served_node) = &self.served_node else { return Ok(()) };
        for (member, pidfd) in protocol::pidfds(participants, files)? {
            let is_known = self.pidfds.contains_key(&member) || member.is_role();
            if is_known || served_node.roster.is_dead(Some(member)) {
                continue;
            }
            let Ok(copy) = pidfd.try_clone() else { continue };
            served_node.roster.add_pidfd(member, copy);
            self.pidfds.insert(member, pidfd);
        }
        Ok(())
    }

    fn add_user(&mut self, member: Participant, number: u32) {
        self.registry.add_user(number, member);
        if let Some(client) = self.clients.get_mut(&member) {
            *client.topics.entry(number).or_insert(0) += 1;
        }
    }

    /// A rejoined member has returned all its topics, perhaps fewer than before its connection was
    /// lost.
    fn drop_unreturned_topics(&mut self, member: Participant) {
        let Some(client) = self.clients.get(&member) else { return };
        let mut changed_topics: Vec<_> = client.topics.keys().copied().collect();
        let is_not_returned = |number| !client.topics.contains_key(&number);
        changed_topics.extend(self.registry.remove_user_from(member, is_not_returned));
        if self.takeover.is_some() {
            // Handled once all have rejoined.
            return;
        }
        for number in changed_topics {
            self.topic_changed(number);
            self.remove_unused(number);
        }
    }

    /// Ends uses of a topic. The topic may have been granted again in the meantime.
    fn handle_close_topic(&mut self, member: Participant, number: u32, granted: u64) {
        let Some(client) = self.clients.get_mut(&member) else { return };
        let Some(left) = client.topics.get_mut(&number) else { return };
        *left = left.saturating_sub(granted);
        if *left > 0 {
            return;
        }
        client.topics.remove(&number);
        self.registry.remove_user(number, member);
        self.topic_changed(number);
        self.remove_unused(number);
    }

    /// Executes the request of a member.
    pub(super) fn execute(&mut self, member: Participant, request: Request) {
        match request {
            Request::Open { request, name, settings } => {
                let Some(served_node) = &self.served_node else { return };
                let remote_settings =
                    settings.is_none().then(|| self.remote_settings(&name)).flatten();
                let is_new = self.registry.named(&name).is_none();
                let number = || served_node.node_segment.next_topic_number();
                match self.registry.open(&name, settings.or(remote_settings), number) {
                    Ok(number) => {
                        if is_new && let Some(client) = self.clients.get(&member) {
                            let (process, label) = (client.process, client.label.escape_debug());
                            let origin = if remote_settings.is_some() {
                                ", with the settings of another node"
                            } else {
                                ""
                            };
                            let creator = format!("process {process} (\"{label}\"){origin}");
                            self.registry.set_creator(number, creator);
                        }
                        match (remote_settings, settings) {
                            (Some(remote_settings), _) => tracing::info!(
                                topic = name, settings = %remote_settings,
                                "a topic was created with the settings of another node"
                            ),
                            (None, Some(settings)) if is_new => {
                                log_change!(self, topic = name, %settings, "a topic was created");
                            }
                            _ => {}
                        }
                        self.send_topic(member, request, number);
                    }
                    Err(error) => self.refuse(member, request, &error),
                }
            }
            Request::AdmitPublisher { request, number, publisher } => {
                let notice = match self.admit_publisher(member, number, publisher) {
                    Ok(()) => Notice::Admitted { request },
                    Err(error) => Notice::Refused { request, reason: Refusal::of(&error) },
                };
                self.notify(member, &notice, Vec::new());
            }
            Request::CloseTopic { number, granted } => {
                self.handle_close_topic(member, number, granted)
            }
            Request::Grow { pool, bytes } => {
                let is_user = self
                    .clients
                    .get(&member)
                    .is_some_and(|client| client.pools.contains_key(&pool));
                if is_user {
                    self.grow(pool, bytes);
                }
            }
            Request::ParticipantsChanged { number } => self.topic_changed(number),
            // Ignored for a topic that it does not use.
            Request::PublisherBlocked { number }
                if self.clients.get(&member).is_some_and(|it| it.topics.contains_key(&number)) =>
            {
                self.eviction_monitor.begin(Instant::now(), (number, Direction::Local));
            }
            Request::AcknowledgePieces { ticket } => self.handle_acknowledge_pieces(member, ticket),
            Request::Report { request } => {
                for notice in self.answer_to_report(request) {
                    self.notify(member, &notice, Vec::new());
                }
            }
            // Handled earlier.
            _ => {}
        }
    }

    /// Admits a publisher of a topic that the process uses.
    fn admit_publisher(&self, member: Participant, number: u32, publisher: u64) -> Result<()> {
        if !self.clients.get(&member).is_some_and(|client| client.topics.contains_key(&number)) {
            let detail = "this process does not use the topic";
            return Err(Error::new("create a publisher", ErrorKind::NotFound, detail));
        }
        self.registry.admit_publisher(number, member, publisher)
    }

    /// The settings of a topic that exists on other nodes only.
    fn remote_settings(&self, name: &str) -> Option<SharedSettings> {
        match self.registry.named(name) {
            Some(_) => None,
            None => self.replication.replicator.as_ref()?.remote_settings(name),
        }
    }

    /// Grants a topic to a process, with its pools.
    fn send_topic(&mut self, member: Participant, request: u64, number: u32) {
        let is_new = self.registry.is_unused(number);
        self.add_user(member, number);
        if is_new {
            // Other nodes may wait for it: messages are retained for them from the first one on.
            self.topic_changed(number);
            self.run_replication();
        }
        let ready = self.send_pools(member, number).and_then(|()| match is_new {
            true => self.preallocate(number),
            false => Ok(()),
        });
        match ready.and_then(|()| self.registry.segment(number)) {
            Ok(segment) => self.notify(member, &Notice::Topic { request, number }, vec![segment]),
            Err(error) => {
                self.refuse(member, request, &error);
                self.handle_close_topic(member, number, 1);
            }
        }
    }

    fn refuse(&mut self, member: Participant, request: u64, error: &Error) {
        let Some(client) = self.clients.get(&member) else { return };
        let reason = self.refusals.refusal(&client.connection, error);
        self.notify(member, &Notice::Refused { request, reason }, Vec::new());
    }

    /// Adds memory for a topic that gets its first user, so that the first message need not wait.
    /// Fails if a limit of this process prevents that.
    fn preallocate(&mut self, number: u32) -> Result<()> {
        let Some((topic, [local, _])) = self.registry.topic_and_pools(number) else {
            return Ok(());
        };
        let (id, first) = (local.id(), topic.settings().largest);
        let Some(served_node) = &self.served_node else { return Ok(()) };
        // If it is unknown now, a publisher will request memory.
        let free =
            local.statistics(&served_node.caller()).map_or(first, |found| found.largest_free);
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

    /// Publishers or subscribers of a topic joined or left.
    pub(super) fn topic_changed(&mut self, number: u32) {
        if let Some(entry) = self.registry.topics.get_mut(&number) {
            (entry.publishes, entry.subscribes) = entry.topic.activity();
            self.changed_topics.insert(number);
        }
        self.monitor_topic(number);
        self.replicator_needs_topics = true;
    }
}
