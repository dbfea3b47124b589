//! Clients that send arbitrary messages, for the fuzzers and the replay of their corpora.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU64;

use ipc::{Channel, ChannelError, Layout, Segment};

use super::admission::MAX_PENDING_CLIENTS;
use super::*;
use crate::budgets::Budgets;
use crate::ids::NodeId;
use crate::pool::{Direction, Pool, PoolId};
use crate::service::election::{self, socket_path};
use crate::service::protocol::{self, Notice, Request};
use crate::settings::{SharedLocation, SharedSettings};
use crate::topic::Topic;

/// How often each kind of answer was received.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct ClientOutcome {
    /// Clients that were admitted.
    pub welcomes: usize,
    /// Requests that were granted or refused.
    pub answers: usize,
    /// Connections that were ended with a reason.
    pub rejections: usize,
}

const CLIENTS: usize = 4;
const BUDGET: u64 = 1 << 24;
const NOW: Duration = Duration::ZERO;

fn failed(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::because("serve malformed clients", ErrorKind::Failed, error)
}

/// A directory, removed on drop.
struct TestDir(std::path::PathBuf);

impl Drop for TestDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A service, and the objects that clients can send.
struct Fixture {
    service: Service,
    clients: [Option<Channel>; CLIENTS],
    node_segment: NodeSegment,
    pools: [Pool; 2],
    topic: Topic,
    outcome: ClientOutcome,
    _member_lock: Option<MemberLock>,
    _test_dir: TestDir,
}

impl Fixture {
    fn new(takes_over: bool) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fabricast-hostile-{}-{number}", std::process::id());
        let test_dir = TestDir(std::env::temp_dir().join(name));
        election::prepare(SERVING, &test_dir.0)?;
        let node_segment = NodeSegment::create(NodeId::random()?)?;
        // A member that has still to rejoin a service that takes over.
        let member_lock = match takes_over {
            true => {
                MemberLock::write_node_id(SERVING, &test_dir.0, Some(node_segment.identity()))?;
                node_segment
                    .participants()
                    .admit(PidFd::of_this_process().map_err(failed)?)
                    .inspect(|participant| node_segment.mark_member(*participant));
                Some(MemberLock::hold(SERVING, &test_dir.0)?)
            }
            false => None,
        };
        let options = NodeOptions {
            directory: test_dir.0.clone(),
            label: "service".to_owned(),
            budgets: Budgets { host: Some(BUDGET), device: Some(BUDGET) },
            ..NodeOptions::default()
        };
        let listener = ChannelListener::bind(&socket_path(&test_dir.0)).map_err(failed)?;
        let bell = WakeFd::new().map_err(failed)?;
        let service =
            Service::new(options, Arc::default(), None, listener, Arc::new(bell), Arc::default())?;
        // As on a node with replication.
        if let Some(served_node) = &service.served_node {
            served_node.participants.admit_role(0);
        }
        let pool = |direction| {
            let id = PoolId { place: SharedLocation::Host, direction };
            Pool::create(id, BUDGET, 64)
        };
        let settings = SharedSettings::of(&crate::TopicSettings::default())?;
        Ok(Self {
            service,
            clients: [const { None }; CLIENTS],
            node_segment,
            pools: [pool(Direction::Local)?, pool(Direction::Inbound)?],
            topic: Topic::create(4, "returned", &settings)?,
            outcome: ClientOutcome::default(),
            _member_lock: member_lock,
            _test_dir: test_dir,
        })
    }

    /// A descriptor of some kind.
    fn file(&self, kind: u8) -> Result<OwnedFd> {
        let copy = |file: BorrowedFd<'_>| file.try_clone_to_owned().map_err(failed);
        let segment = |layout, words: usize, word| {
            let segment = Segment::create(layout, words * 8).map_err(failed)?;
            let content = segment.words();
            for at in 0..words {
                ipc::Words::store(&content, at, word, Ordering::Relaxed);
            }
            segment.mark_ready();
            copy(segment.as_fd())
        };
        match kind % 16 {
            0 => copy(PidFd::of_this_process().map_err(failed)?.as_fd()),
            1 => match self.service.served_node.as_ref().filter(|_| kind < 16) {
                Some(served_node) => copy(served_node.node_segment.as_fd()),
                None => copy(self.node_segment.as_fd()),
            },
            2 => File::open("/dev/null").map(OwnedFd::from).map_err(failed),
            3 => {
                let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
                nix::sys::memfd::memfd_create("page", flags).map_err(failed)
            }
            4 => copy(self.pools[0].control_segment()),
            5 => copy(self.pools[1].control_segment()),
            6 => copy(self.topic.segment()),
            7 => self.pools[0].make_piece(4096).map(|piece| piece.memory),
            8 => Channel::pair().map_err(failed).and_then(|(one, _)| copy(one.as_fd())),
            9 => nix::unistd::pipe().map(|(read, _)| read).map_err(failed),
            // Too short, or of the right length with invalid content.
            10 => segment(crate::node_segment::LAYOUT, 8, 0),
            11 => segment(crate::node_segment::LAYOUT, 1 << 14, u64::MAX),
            12 => segment(crate::pool::LAYOUT, 8, 0),
            13 => segment(crate::pool::LAYOUT, 1 << 14, 0x0101_0101_0101_0101),
            14 => segment(crate::topic::LAYOUT, 1 << 12, 1),
            _ => segment(Layout::new("something else", 1), 64, 0),
        }
    }

    /// Sends a message of a client, which connects first if necessary.
    fn client_sends(
        &mut self,
        client: usize,
        bytes: &[u8],
        kinds: impl Iterator<Item = u8>,
    ) -> Result<()> {
        let files = kinds.map(|kind| self.file(kind)).collect::<Result<Vec<_>>>()?;
        if self.clients[client].is_none() {
            let (near, far) = Channel::pair().map_err(failed)?;
            self.service.admission.receive(far);
            self.clients[client] = Some(near);
        }
        let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        if let Some(channel) = &self.clients[client]
            && channel.send(bytes, &borrowed, NOW).is_err()
        {
            // The connection has ended.
            self.clients[client] = None;
        }
        self.run_once();
        Ok(())
    }

    fn run_once(&mut self) {
        for _ in 0..2 {
            self.service.bell.ring();
            self.service.run_once();
        }
    }

    /// Receives all messages of a client, and drops an ended connection.
    fn receive_all(&mut self, client: usize) -> Vec<Notice> {
        let mut notices = Vec::new();
        let Some(channel) = &self.clients[client] else { return notices };
        let ended = loop {
            match channel.receive(NOW) {
                Ok(message) => notices.extend(protocol::decode::<Notice>(SERVING, &message.bytes)),
                Err(error) => break !matches!(error, ChannelError::DeadlineExceeded { .. }),
            }
        };
        for notice in &notices {
            match notice {
                Notice::Welcome { .. } => self.outcome.welcomes += 1,
                Notice::Rejected { .. } => self.outcome.rejections += 1,
                Notice::Topic { .. } | Notice::Refused { .. } | Notice::Rows { .. } => {
                    self.outcome.answers += 1;
                }
                _ => {}
            }
        }
        if ended {
            self.clients[client] = None;
        }
        notices
    }

    /// A well-behaved client is still served.
    fn check_serves_others(&mut self) -> Result<()> {
        assert!(
            self.service.admission.connections().count() <= MAX_PENDING_CLIENTS,
            "too many pending clients"
        );
        for pool in self.service.broker.registry().pools() {
            assert!(pool.length() <= pool.limit(), "the pool exceeds its limit");
        }
        if self.service.takeover.is_some() {
            return Ok(());
        }
        let outcome = self.outcome;
        self.clients[0] = None;
        let hello = protocol::encode(&Request::Hello { label: "valid".to_owned() });
        self.client_sends(0, &hello, std::iter::once(0))?;
        let notices = self.receive_all(0);
        let is_in = notices.iter().any(|notice| matches!(notice, Notice::Welcome { .. }));
        assert!(is_in, "no client is admitted any more: {notices:?}");
        let settings = SharedSettings::of(&crate::TopicSettings {
            depth: 1,
            largest: 64,
            ..crate::TopicSettings::default()
        })?;
        let open = Request::Open { request: 7, name: "valid".into(), settings: Some(settings) };
        self.client_sends(0, &protocol::encode(&open), std::iter::empty())?;
        let notices = self.receive_all(0);
        let is_answered = notices.iter().any(|notice| {
            matches!(notice, Notice::Topic { request: 7, .. } | Notice::Refused { request: 7, .. })
        });
        assert!(is_answered, "no request is answered any more: {notices:?}");
        self.outcome = outcome;
        Ok(())
    }
}

/// Runs a service with these clients. The first byte says whether it is taking over. Then,
/// repeatedly: the client (with 32, its message includes a version; with 64, it does not receive;
/// with 128, it reconnects); the number of descriptors; their kinds (the first, and the step to the
/// next); the length of the message in two bytes; the message.
///
/// # Errors
/// System calls that fail.
///
/// # Panics
/// If a well-behaved client is not served afterwards, or the service exceeds a limit.
pub fn run_clients(script: &[u8]) -> Result<ClientOutcome> {
    let (mode, mut script) = script.split_first().unwrap_or((&0, &[]));
    let mut fixture = Fixture::new(mode % 2 == 1)?;
    while let [client, count, kinds, low, high, rest @ ..] = script {
        let (bytes, rest) = rest.split_at(rest.len().min(u16::from_le_bytes([*low, *high]).into()));
        script = rest;
        let which = usize::from(*client) % CLIENTS;
        if client & 128 != 0 {
            fixture.clients[which] = None;
        }
        let (first, step) = (kinds & 15, kinds >> 4);
        let kinds = (0..*count).map(|number| first.wrapping_add(step.wrapping_mul(number)));
        let version = [protocol::VERSION];
        let version = if client & 32 == 0 { &version[..] } else { &[] };
        fixture.client_sends(which, &[version, bytes].concat(), kinds)?;
        if client & 64 == 0 {
            fixture.receive_all(which);
        }
    }
    (0..CLIENTS).for_each(|client| drop(fixture.receive_all(client)));
    fixture.check_serves_others()?;
    let Fixture { service, outcome, .. } = fixture;
    service.close();
    Ok(outcome)
}
