//! The clients, the topics and pools of the node, and what each client uses of them.

mod piece_distribution;
mod piece_requests;

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use ipc::{Participant, PidFd};

use self::piece_distribution::Growth;
use self::piece_requests::PieceRequests;
use super::ClientName;
use super::admission::RECEIVING;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::{Piece, PoolId};
use crate::service::connection::{Connection, drop_stalled};
use crate::service::protocol::{Notice, Request};
use crate::service::registry::Registry;
use crate::settings::{SharedLocation, SharedSettings};

/// Requests of a client that are held during a takeover.
const MAX_HELD_REQUESTS: usize = 4096;

#[derive(Debug)]
struct Client {
    name: ClientName,
    connection: Connection,
    /// The topics that it uses, and how often each was granted.
    topics: BTreeMap<u32, u64>,
    /// Pools that it knows, and how many pieces of each it has.
    pools: HashMap<PoolId, usize>,
    /// Devices that it sees and opened topics on, with their memory in bytes.
    devices: HashMap<SharedLocation, u64>,
    held: Vec<Request>,
    is_leaving: bool,
}

/// A user of a topic in the registry is a client that uses it, or a process whose connection ended
/// and after which nothing was reclaimed yet.
#[derive(Debug)]
pub(super) struct Broker {
    clients: BTreeMap<Participant, Client>,
    registry: Registry,
    growth: Growth,
    piece_requests: PieceRequests,
}

impl Broker {
    pub(super) fn new(registry: Registry) -> Self {
        let (growth, piece_requests) = (Growth::default(), PieceRequests::default());
        Self { clients: BTreeMap::new(), registry, growth, piece_requests }
    }

    pub(super) fn registry(&self) -> &Registry {
        &self.registry
    }

    pub(super) fn registry_mut(&mut self) -> &mut Registry {
        &mut self.registry
    }

    pub(super) fn add(&mut self, member: Participant, label: String, connection: Connection) {
        let credentials = connection.channel().credentials().ok();
        let process = credentials.and_then(|it| it.process).unwrap_or(0);
        let client = Client {
            name: ClientName { process, label },
            connection,
            topics: BTreeMap::new(),
            pools: HashMap::new(),
            devices: HashMap::new(),
            held: Vec::new(),
            is_leaving: false,
        };
        self.clients.insert(member, client);
    }

    /// Removes a client; the topics that it used keep it as a user. Returns its name, and whether it
    /// was leaving.
    pub(super) fn remove(&mut self, member: Participant) -> Option<(ClientName, bool)> {
        self.clients.remove(&member).map(|client| (client.name, client.is_leaving))
    }

    pub(super) fn members(&self) -> impl ExactSizeIterator<Item = (Participant, &ClientName)> {
        self.clients.iter().map(|(member, client)| (*member, &client.name))
    }

    pub(super) fn name(&self, member: Participant) -> Option<&ClientName> {
        self.clients.get(&member).map(|client| &client.name)
    }

    /// A client leaves in order: it gets no new pieces.
    pub(super) fn mark_leaving(&mut self, member: Participant) -> Option<&ClientName> {
        let client = self.clients.get_mut(&member)?;
        client.is_leaving = true;
        Some(&client.name)
    }

    pub(super) fn connections(&self) -> impl Iterator<Item = (Participant, &Connection)> {
        self.clients.iter().map(|(member, client)| (*member, &client.connection))
    }

    pub(super) fn connection(&mut self, member: Participant) -> Option<&mut Connection> {
        self.clients.get_mut(&member).map(|client| &mut client.connection)
    }

    pub(super) fn notify(&mut self, member: Participant, notice: &Notice, files: Vec<OwnedFd>) {
        if let Some(connection) = self.connection(member) {
            connection.send(notice, files);
        }
    }

    pub(super) fn broadcast_pidfd(&mut self, member: Participant, pidfd: &PidFd) {
        let others = self.clients.iter_mut().filter(|(other, _)| **other != member);
        for (_, client) in others {
            let notice = Notice::Pidfds { participants: vec![member.number()] };
            match pidfd.as_fd().try_clone_to_owned() {
                Ok(copy) => client.connection.send(&notice, vec![copy]),
                Err(_) => client.connection.mark_broken(),
            }
        }
    }

    /// Sends what is queued without events. Returns clients with broken connections.
    pub(super) fn flush_stalled(&mut self) -> Vec<Participant> {
        let clients = self.clients.values_mut().map(|client| &mut client.connection);
        for connection in clients.filter(|connection| connection.is_stalled()) {
            connection.flush();
        }
        drop_stalled(Instant::now(), self.clients.values_mut().map(|it| &mut it.connection));
        let broken = self.connections().filter(|(_, connection)| connection.is_broken());
        broken.map(|(member, _)| member).collect()
    }

    pub(super) fn end_connections(&mut self) {
        for client in self.clients.values_mut() {
            client.connection.end();
        }
    }

    pub(super) fn hold(&mut self, member: Participant, request: Request) -> Result<()> {
        let Some(client) = self.clients.get_mut(&member) else { return Ok(()) };
        if client.held.len() >= MAX_HELD_REQUESTS {
            let detail = "too many requests during the takeover";
            return Err(Error::new(RECEIVING, ErrorKind::TooMany, detail));
        }
        client.held.push(request);
        Ok(())
    }

    pub(super) fn take_held(&mut self) -> Vec<(Participant, Request)> {
        let held = self.clients.iter_mut().flat_map(|(member, client)| {
            std::mem::take(&mut client.held).into_iter().map(|it| (*member, it))
        });
        held.collect()
    }

    pub(super) fn restore_pool(
        &mut self,
        member: Participant,
        id: PoolId,
        control_segment: OwnedFd,
    ) -> Result<()> {
        self.registry.restore_pool(id, control_segment)?;
        if let Some(client) = self.clients.get_mut(&member) {
            client.pools.entry(id).or_insert(0);
        }
        Ok(())
    }

    /// Restores pieces of a pool. Returns how many of the first pieces the process has, and the
    /// clients that had received wrong ones.
    pub(super) fn restore_pieces(
        &mut self,
        id: PoolId,
        first: u32,
        pieces: impl Iterator<Item = Piece>,
    ) -> Result<(usize, Vec<Participant>)> {
        let (end, replaced) = self.registry.restore_pieces(id, first, pieces)?;
        let mut lacking = Vec::new();
        if let Some(replaced) = replaced {
            for (member, client) in &mut self.clients {
                if let Some(has) = client.pools.get_mut(&id).filter(|has| **has > replaced) {
                    *has = replaced;
                    lacking.push(*member);
                }
            }
        }
        Ok((end, lacking))
    }

    /// A client has returned pieces. Without a gap: pieces behind a wrong one are sent again.
    pub(super) fn set_returned(&mut self, member: Participant, id: PoolId, first: u32, end: usize) {
        let has = self.clients.get_mut(&member).and_then(|client| client.pools.get_mut(&id));
        if let Some(has) = has.filter(|has| **has >= first as usize) {
            *has = (*has).max(end);
        }
    }

    pub(super) fn restore_topic(
        &mut self,
        member: Participant,
        number: u32,
        segment: OwnedFd,
    ) -> Result<()> {
        self.registry.restore_topic(number, segment)?;
        self.add_user(member, number);
        Ok(())
    }

    /// Opens a topic for a client, or creates it, with the client as its creator.
    pub(super) fn open(
        &mut self,
        member: Participant,
        name: &str,
        settings: Option<SharedSettings>,
        origin: &str,
        number: impl FnOnce() -> u32,
    ) -> Result<u32> {
        let is_new = !self.registry.has_topic(name);
        let device_memory = settings.and_then(|settings| self.device_memory(settings.place));
        let number = self.registry.open(name, settings, device_memory, number)?;
        if is_new && let Some(ClientName { process, label }) = self.name(member) {
            let creator = format!("process {process} (\"{}\"){origin}", label.escape_debug());
            self.registry.set_creator(number, creator);
        }
        Ok(number)
    }

    /// Grants a topic once more. True if the topic had no users.
    pub(super) fn add_user(&mut self, member: Participant, number: u32) -> bool {
        if let Some(client) = self.clients.get_mut(&member) {
            *client.topics.entry(number).or_insert(0) += 1;
        }
        self.registry.add_user(number, member)
    }

    /// Ends uses of a topic. True if the client uses it no more: it may have been granted again in
    /// the meantime.
    pub(super) fn close_topic(&mut self, member: Participant, number: u32, granted: u64) -> bool {
        let Some(client) = self.clients.get_mut(&member) else { return false };
        let Some(left) = client.topics.get_mut(&number) else { return false };
        *left = left.saturating_sub(granted);
        if *left > 0 {
            return false;
        }
        client.topics.remove(&number);
        self.registry.remove_user(number, member);
        true
    }

    /// A rejoined member has returned all its topics, perhaps fewer than before its connection was
    /// lost. Returns the topics that it uses, and then those that it did not return.
    pub(super) fn drop_unreturned_topics(&mut self, member: Participant) -> Vec<u32> {
        let Some(client) = self.clients.get(&member) else { return Vec::new() };
        let mut topics: Vec<_> = client.topics.keys().copied().collect();
        let is_not_returned = |number| !client.topics.contains_key(&number);
        topics.extend(self.registry.remove_user_from(member, is_not_returned));
        topics
    }

    pub(super) fn topics_of(&self, member: Participant) -> Vec<u32> {
        let client = self.clients.get(&member);
        client.into_iter().flat_map(|client| client.topics.keys().copied()).collect()
    }

    pub(super) fn uses_topic(&self, member: Participant, number: u32) -> bool {
        self.clients.get(&member).is_some_and(|client| client.topics.contains_key(&number))
    }

    pub(super) fn uses_pool(&self, member: Participant, id: PoolId) -> bool {
        self.clients.get(&member).is_some_and(|client| client.pools.contains_key(&id))
    }

    /// Admits a publisher of a topic that the process uses.
    pub(super) fn admit_publisher(
        &self,
        member: Participant,
        number: u32,
        publisher: u64,
    ) -> Result<()> {
        if !self.uses_topic(member, number) {
            let detail = "this process does not use the topic";
            return Err(Error::new("create publisher of topic", ErrorKind::NotFound, detail));
        }
        if let (Some((topic, _)), Some(ClientName { process, label })) =
            (self.registry.topic_and_pools(number), self.name(member))
        {
            let slot = topic.publisher(publisher);
            if slot.is_of(member, publisher) && !slot.has_reservation() {
                topic.name_publisher(publisher, *process, label);
            }
        }
        self.registry.admit_publisher(number, member, publisher)
    }
}

#[cfg(test)]
impl Broker {
    /// Returns the old one.
    pub(super) fn set_process(&mut self, member: Participant, process: u32) -> u32 {
        std::mem::replace(&mut self.clients.get_mut(&member).unwrap().name.process, process)
    }
}
