//! Clients of the service: how they join, and their requests.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipc::{ChannelError, DescriptorLimit, Liveness, Participant, PidFd};

use super::admission::{RECEIVING, out_of_descriptors};
use super::{
    ClientName, JoiningClient, MAX_MESSAGES_PER_TURN, RESERVED_PARTICIPANT_SLOTS, ServedNode,
    Service,
};
use crate::error::{Error, ErrorKind, Result};
use crate::node_segment::NodeSegment;
use crate::pool::{Direction, Piece};
use crate::service::connection::Connection;
use crate::service::protocol::{self, MAX_LABEL, Notice, Refusal, Request};

/// Descriptors that are never used to admit a process.
const RESERVED_DESCRIPTORS: usize = 8;

fn malformed(detail: &'static str) -> Error {
    Error::new(RECEIVING, ErrorKind::Malformed, detail)
}

fn other_node() -> Error {
    let detail = "this is another node: the directory of the former one was removed, or no process kept \
                  it. Join again";
    Error::new(RECEIVING, ErrorKind::Closed, detail)
}

fn only(descriptors: Vec<OwnedFd>) -> Result<OwnedFd> {
    protocol::exactly(RECEIVING, descriptors).map(|[descriptor]| descriptor)
}

/// The pidfd of the process at the other end of the connection.
fn pidfd_of(connection: &Connection, sent: OwnedFd) -> Result<PidFd> {
    PidFd::of_peer(connection.channel(), sent)
        .map_err(|error| Error::because(RECEIVING, ErrorKind::Malformed, error))
}

fn hello(connection: &Connection, label: &str, descriptors: Vec<OwnedFd>) -> Result<PidFd> {
    match label.len() {
        0..=MAX_LABEL => only(descriptors).and_then(|sent| pidfd_of(connection, sent)),
        _ => Err(malformed("its label is too long")),
    }
}

impl Service {
    pub(super) fn handle_first_message(
        &mut self,
        mut connection: Connection,
        request: Request,
        descriptors: Vec<OwnedFd>,
    ) {
        let error = match request {
            Request::Hello { label } => match hello(&connection, &label, descriptors) {
                Ok(pidfd) => {
                    let joining_client = JoiningClient { connection, label, pidfd };
                    return match &mut self.takeover {
                        Some(takeover) => takeover.admit_later(joining_client),
                        None => self.admit(joining_client),
                    };
                }
                Err(error) => error,
            },
            Request::Rejoin { label, participant } => {
                match self.readmit(&mut connection, participant, descriptors) {
                    Ok(member) => return self.broker.add(member, label, connection),
                    Err(error) => error,
                }
            }
            Request::Report { request } => {
                for notice in self.answer_to_report(request) {
                    connection.send(&notice, Vec::new());
                }
                // It may send another request.
                return self.admission.await_message(connection);
            }
            _ => malformed("the first message is not a hello"),
        };
        self.admission.reject(&mut connection, &error);
    }

    /// Makes a process a member, and exchanges pidfds with all others.
    pub(super) fn admit(&mut self, joining_client: JoiningClient) {
        let JoiningClient { mut connection, label, pidfd } = joining_client;
        match self.admit_member(&mut connection, &pidfd) {
            Ok(member) => {
                self.broker.add(member, label, connection);
                if let Some(ClientName { process, label }) = self.broker.name(member) {
                    log_change!(self, %member, process, label, "a process joined");
                }
            }
            Err(error) => self.admission.reject(&mut connection, &error),
        }
    }

    fn admit_member(&mut self, connection: &mut Connection, pidfd: &PidFd) -> Result<Participant> {
        let reserved = 0..self.broker.members().len() + RESERVED_DESCRIPTORS;
        let bell = Arc::clone(&self.bell);
        self.introduce(connection, pidfd, |connection, served_node, known| {
            // Members need some descriptors: for a new participant, to rejoin, for their topics.
            let reserved = reserved.map(|_| bell.as_fd().try_clone_to_owned());
            if reserved.collect::<std::io::Result<Vec<_>>>().is_err() {
                return Err(out_of_descriptors(connection, DescriptorLimit::of_this_process()));
            }
            // Without free slots no service could take over.
            let is_full = served_node.participants.free_slots() <= RESERVED_PARTICIPANT_SLOTS;
            let admitted = if is_full { None } else { served_node.participants.admit(known) };
            admitted.ok_or_else(|| {
                let detail = "the node has the maximum number of members";
                Error::new(RECEIVING, ErrorKind::TooMany, detail)
            })
        })
    }

    /// Adds a member to the participant table, and exchanges pidfds with all others before it is
    /// welcomed.
    fn introduce(
        &mut self,
        connection: &mut Connection,
        pidfd: &PidFd,
        add: impl FnOnce(&Connection, &ServedNode, PidFd) -> Result<Participant>,
    ) -> Result<Participant> {
        let served_node = self.served_node.as_ref().ok_or_else(other_node)?;
        let pidfds = self.reclaimer.pidfd_messages();
        let copies = (pidfd.try_clone(), pidfd.try_clone(), served_node.descriptors(), pidfds);
        let (Ok(known), Ok(watched), Ok(descriptors), Ok(pidfds)) = copies else {
            return Err(out_of_descriptors(connection, DescriptorLimit::of_this_process()));
        };
        let member = add(connection, served_node, known)?;
        self.broker.broadcast_pidfd(member, pidfd);
        for (participants, pidfds) in pidfds {
            connection.send(&Notice::Pidfds { participants }, pidfds);
        }
        connection.send(&Notice::Welcome { participant: member.number() }, descriptors);
        self.reclaimer.watch(member, watched);
        Ok(member)
    }

    /// A member of the node under an earlier service rejoins.
    fn readmit(
        &mut self,
        connection: &mut Connection,
        participant: u32,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Participant> {
        let [pidfd, node_segment] = protocol::exactly(RECEIVING, descriptors)?;
        let pidfd = pidfd_of(connection, pidfd)?;
        let node_segment = NodeSegment::open(node_segment)?;
        let node = node_segment.identity();
        let is_expected = match &self.served_node {
            Some(served_node) => served_node.node_segment.identity() == node,
            None => self.takeover.as_ref().is_none_or(|takeover| takeover.expects(node)),
        };
        if !is_expected {
            return Err(other_node());
        }
        if self.served_node.is_none() {
            self.attach_segment(node_segment)?;
            self.await_members();
        }
        let member = self.introduce(connection, &pidfd, |_, served_node, known| {
            // No process may claim a role, whose end would affect all members.
            let member = Participant::from_number(participant).filter(|it| {
                *it != served_node.me
                    && !it.is_role()
                    && !served_node.participants.is_dead(Some(*it))
            });
            let member = member.ok_or_else(other_node)?;
            served_node.participants.add_pidfd(member, known);
            Ok(member)
        })?;
        // An older connection belongs to the same process, which returns everything again.
        self.handle_disconnect(member);
        self.reclaimer.mark_rejoined(member);
        Ok(member)
    }

    /// The node segment is known, and with it the members that have to rejoin.
    fn await_members(&mut self) {
        let Some(served_node) = &self.served_node else { return };
        let living = served_node.participants.living_participants().into_iter();
        // Neither admitted processes that never became members, nor other services.
        let members = living.filter(|it| served_node.node_segment.is_member(*it)).collect();
        if let Some(takeover) = &mut self.takeover {
            takeover.set_awaited(Instant::now(), members);
        }
    }

    pub(super) fn handle_messages(&mut self, member: Participant) {
        for _ in 0..MAX_MESSAGES_PER_TURN {
            let Some(connection) = self.broker.connection(member) else { return };
            connection.flush();
            let message = match connection.channel().receive(Duration::ZERO) {
                Ok(message) => message,
                Err(ChannelError::DeadlineExceeded { .. }) => return,
                Err(_) => return self.handle_disconnect(member),
            };
            let handled = protocol::decode(RECEIVING, &message.bytes)
                .and_then(|request| self.handle_request(member, request, message.descriptors));
            if let Err(error) = handled {
                tracing::debug!(%error, %member, "a process was rejected");
                if let Some(connection) = self.broker.connection(member) {
                    self.admission.reject(connection, &error);
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
                self.broker.restore_pool(member, pool, only(files)?)?;
            }
            Request::Pieces { pool, first, pieces } => {
                if pieces.len() != files.len() {
                    return Err(malformed("wrong number of descriptors"));
                }
                let pieces = files.into_iter().zip(pieces);
                let pieces = pieces.map(|(memory, (length, name))| Piece { memory, length, name });
                let (end, lacking) = self.broker.restore_pieces(pool, first, pieces)?;
                if self.takeover.is_none() {
                    self.broker.send_new_pieces(lacking, pool);
                }
                self.broker.set_returned(member, pool, first, end);
                if let (None, Some(served_node)) = (&self.takeover, &self.served_node) {
                    self.broker.accept_piece(&served_node.caller(), member, pool);
                }
            }
            Request::Topic { number } => {
                self.broker.restore_topic(member, number, only(files)?)?;
            }
            Request::RejoinDone => {
                let changed_topics = self.broker.drop_unreturned_topics(member);
                if let Some(takeover) = &mut self.takeover {
                    // The topics are handled once all have rejoined.
                    takeover.mark_returned(member);
                } else {
                    self.review_topics(changed_topics);
                    // It rejoins later than the others.
                    self.reclaimer.rescan_owners();
                    self.broker.send_missing(member);
                    for number in self.broker.topics_of(member) {
                        self.topic_changed(number);
                    }
                }
            }
            Request::Hello { .. } | Request::Rejoin { .. } => {
                return Err(malformed("duplicate hello"));
            }
            Request::SeesDevice { device, memory } if files.is_empty() => {
                self.broker.add_device(member, device, memory);
            }
            Request::Leave => self.handle_leave(member),
            Request::TakeOver if files.is_empty() => self.handle_take_over(member),
            other if !files.is_empty() => {
                let detail = format!("descriptors with {other:?}");
                return Err(Error::new(RECEIVING, ErrorKind::Malformed, detail));
            }
            other if self.takeover.is_some() => self.broker.hold(member, other)?,
            other => self.execute(member, other),
        }
        Ok(())
    }

    fn handle_pidfds(&mut self, participants: &[u32], files: Vec<OwnedFd>) -> Result<()> {
        let Some(served_node) = &self.served_node else { return Ok(()) };
        for (member, pidfd) in protocol::pidfds(participants, files)? {
            let is_known = self.reclaimer.watches(member) || member.is_role();
            if is_known || served_node.participants.is_dead(Some(member)) {
                continue;
            }
            let Ok(copy) = pidfd.try_clone() else { continue };
            served_node.participants.add_pidfd(member, copy);
            self.reclaimer.watch(member, pidfd);
        }
        Ok(())
    }

    fn handle_close_topic(&mut self, member: Participant, number: u32, granted: u64) {
        if self.broker.close_topic(member, number, granted) {
            self.review_topics(vec![number]);
        }
    }

    pub(super) fn execute(&mut self, member: Participant, request: Request) {
        let Some(served_node) = &self.served_node else { return };
        match request {
            Request::Open { request, name, settings } => {
                let is_new = !self.broker.registry().has_topic(&name);
                // Of a topic that exists on other nodes only.
                let replicator = self.replication.replicator();
                let replicator = replicator.filter(|_| is_new && settings.is_none());
                let remote_settings = replicator.and_then(|it| it.remote_settings(&name));
                let origin = remote_settings.map_or("", |_| ", with the settings of another node");
                let number = || served_node.node_segment.next_topic_number();
                match self.broker.open(member, &name, settings.or(remote_settings), origin, number)
                {
                    Ok(number) => {
                        // Before another node is told that there is none.
                        self.replication.mark_changed(is_new);
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
                let notice = match self.broker.admit_publisher(member, number, publisher) {
                    Ok(()) => Notice::Admitted { request },
                    Err(error) => Notice::Refused { request, reason: Refusal::of(&error) },
                };
                self.broker.notify(member, &notice, Vec::new());
            }
            Request::CloseTopic { number, granted } => {
                self.handle_close_topic(member, number, granted)
            }
            Request::Grow(request) if self.broker.uses_pool(member, request.pool()) => {
                self.broker.grow_as_requested(&served_node.caller(), request);
            }
            Request::ParticipantsChanged { number } => self.topic_changed(number),
            Request::PublisherBlocked { number } if self.broker.uses_topic(member, number) => {
                self.eviction_monitor.begin(Instant::now(), (number, Direction::Local));
            }
            Request::AcknowledgePieces { ticket } => {
                self.broker.acknowledge(&served_node.caller(), member, ticket);
            }
            Request::PieceRefused { pool, reason } => {
                self.broker.refuse_piece(member, pool, reason)
            }
            Request::Report { request } => {
                for notice in self.answer_to_report(request) {
                    self.broker.notify(member, &notice, Vec::new());
                }
            }
            // Handled earlier, or of a topic or pool that the member does not use.
            _ => {}
        }
    }

    /// Grants a topic to a process, with its pools.
    fn send_topic(&mut self, member: Participant, request: u64, number: u32) {
        let is_new = self.broker.add_user(member, number);
        if is_new {
            // Other nodes may wait for it: messages are retained for them from the first one on.
            self.topic_changed(number);
            self.run_replication();
        }
        match self.prepare_topic(member, number, is_new) {
            Ok(segment) => {
                self.broker.notify(member, &Notice::Topic { request, number }, vec![segment]);
            }
            Err(error) => {
                self.refuse(member, request, &error);
                self.handle_close_topic(member, number, 1);
            }
        }
    }

    /// Sends the pools of a topic, and adds memory for a new one. Returns a copy of its segment.
    fn prepare_topic(&mut self, member: Participant, number: u32, is_new: bool) -> Result<OwnedFd> {
        self.broker.send_pools(member, number)?;
        if let Some(served_node) = self.served_node.as_ref().filter(|_| is_new) {
            self.broker.preallocate(&served_node.caller(), number)?;
        }
        self.broker.registry().segment(number)
    }

    fn refuse(&mut self, member: Participant, request: u64, error: &Error) {
        let Some(connection) = self.broker.connection(member) else { return };
        let reason = self.admission.refusal(connection, error);
        connection.send(&Notice::Refused { request, reason }, Vec::new());
    }
}
