//! Peers on real sockets, on loopback.

use std::collections::{BTreeMap, VecDeque};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use testkit::children::ForkedChild;
use threads::lock;

use super::close_reason::{CloseReason, GoodbyeReason};
use super::fuzzing;
use super::identity::SessionId;
use super::interests::{Interest, InterestChange};
use super::mesh::PeerState;
use super::peer_event::PeerEvent;
use super::{Limits, Peers};
use crate::ids::NodeId;
use crate::network_options::NetworkOptions;
use crate::settings::TopicSettings;
use crate::{ErrorKind, Result};

impl Peers {
    /// Peers that send their interests as soon as there is a session.
    pub(crate) fn start_open(network: &NetworkOptions, identity: NodeId) -> Result<Self> {
        Self::start_with(network, identity, "", Limits::default(), false)
    }

    /// Bytes queued for all peers.
    pub(super) fn waiting(&self) -> usize {
        lock(&self.shared.mesh).waiting()
    }
}

/// Reached only by a failing test.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone)]
struct Options(u8, NetworkOptions);

impl Deref for Options {
    type Target = NetworkOptions;

    fn deref(&self) -> &NetworkOptions {
        &self.1
    }
}

impl DerefMut for Options {
    fn deref_mut(&mut self) -> &mut NetworkOptions {
        &mut self.1
    }
}

fn options(number: u8, peers: &[SocketAddr]) -> Options {
    let network = NetworkOptions {
        listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
        peers: peers.iter().map(SocketAddr::to_string).collect(),
        name: format!("node {number}"),
        // Other builds may keep both cores busy.
        lost_after: Duration::from_secs(20),
        insecure: true,
        ..NetworkOptions::default()
    };
    Options(number, network)
}

fn started(options: Options) -> Result<Peers> {
    Peers::start_open(&options.1, NodeId([options.0; 16]))
}

fn identity(number: u8) -> NodeId {
    NodeId([number; 16])
}

fn next(peers: &Peers) -> PeerEvent {
    let end = Instant::now() + TEST_TIMEOUT;
    loop {
        if let Some(event) = peers.next_event() {
            return event;
        }
        let left = end.saturating_duration_since(Instant::now());
        assert!(!left.is_zero(), "no event arrived; {:#?}", peers.reports());
        let mut entries = [PollFd::new(peers.descriptor(), PollFlags::POLLIN)];
        poll(&mut entries, PollTimeout::try_from(left).unwrap()).unwrap();
    }
}

/// The session with a node; it must be the next event.
fn connected(peers: &Peers, number: u8) -> SessionId {
    match next(peers) {
        PeerEvent::Connected { node, session, label, local_address, .. } => {
            assert_eq!((node, label), (identity(number), format!("node {number}")));
            assert!(local_address.ip().is_loopback());
            session
        }
        other => panic!("{other:?}"),
    }
}

fn disconnected(peers: &Peers, number: u8) -> CloseReason {
    loop {
        match next(peers) {
            PeerEvent::Disconnected { node, reason, .. } => {
                assert_eq!(node, identity(number));
                return reason;
            }
            PeerEvent::Connected { node, .. } => panic!("{node} connected"),
            _ => {}
        }
    }
}

fn wait_until(goal: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + TEST_TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < end, "waited for: {goal}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Two nodes with a session, after their empty interests arrived.
fn two() -> (Peers, Peers, SessionId) {
    let one = started(options(1, &[])).unwrap();
    let two = started(options(2, &[one.listens().unwrap()])).unwrap();
    let session = connected(&one, 2);
    assert_eq!(connected(&two, 1), session);
    for peers in [&one, &two] {
        assert!(matches!(next(peers), PeerEvent::Interests { changes, .. } if changes.is_empty()));
    }
    (one, two, session)
}

#[test]
fn two_nodes_exchange_interests_and_control_messages() {
    let (one, two, session) = two();
    // The number of held samples is not sent.
    let settings = TopicSettings { depth: 5, max_held: 4, ..TopicSettings::default() };
    let interest = |topic: &str| Interest::new(topic, true, false, &settings).unwrap();
    one.set_interests([interest("a"), interest("b")]).unwrap();
    let PeerEvent::Interests { node, session: in_session, changes } = next(&two) else { panic!() };
    assert_eq!((node, in_session), (identity(1), session));
    assert_eq!(changes, [InterestChange::Set(interest("a")), InterestChange::Set(interest("b"))]);
    assert_eq!(interest("a").settings.to_local(), settings);
    one.set_interests([interest("b"), interest("c")]).unwrap();
    let PeerEvent::Interests { changes, .. } = next(&two) else { panic!() };
    assert_eq!(
        changes,
        [InterestChange::Removed("a".to_owned()), InterestChange::Set(interest("c"))]
    );

    let messages: Vec<Vec<u8>> =
        (0_usize..300).map(|number| vec![number as u8; number * number / 4]).collect();
    for message in &messages {
        one.send(identity(2), session, message.clone()).unwrap();
    }
    two.send(identity(1), session, b"answer".to_vec()).unwrap();
    for message in messages {
        assert_eq!(
            next(&two),
            PeerEvent::ControlMessage { node: identity(1), session, bytes: message }
        );
    }
    let answer =
        PeerEvent::ControlMessage { node: identity(2), session, bytes: b"answer".to_vec() };
    assert_eq!(next(&one), answer);

    let reports = two.reports();
    assert_eq!(reports.len(), 1, "{reports:?}");
    assert_eq!(reports[0].state, PeerState::Connected);
    assert_eq!(reports[0].label.as_deref(), Some("node 1"));

    // Messages sent before the end arrive; later ones are refused.
    one.send(identity(2), session, b"last".to_vec()).unwrap();
    drop(one);
    let last = PeerEvent::ControlMessage { node: identity(1), session, bytes: b"last".to_vec() };
    assert_eq!(next(&two), last);
    assert_eq!(disconnected(&two, 1), CloseReason::Closed(GoodbyeReason::Leaving));
    let refused = two.send(identity(1), session, Vec::new()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Closed);
    wait_until("a reason", || two.reports().iter().any(|report| report.last_error.is_some()));
    // Its label is still known.
    let gone = two.reports().into_iter().find(|report| report.identity == Some(identity(1)));
    assert_eq!(gone.and_then(|report| report.label).as_deref(), Some("node 1"));
}

#[test]
fn too_long_control_message_is_refused() {
    let (one, _two, session) = two();
    let longest = vec![0; super::protocol_limits::MAX_CONTROL_MESSAGE_LENGTH + 1];
    let refused = one.send(identity(2), session, longest).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::TooLong);
}

#[test]
fn restarted_node_connects_in_another_session() {
    let (one, two, session) = two();
    let mut again = options(1, &[]);
    again.listen = one.listens();
    drop(one);
    assert_eq!(disconnected(&two, 1), CloseReason::Closed(GoodbyeReason::Leaving));
    let one = started(again).unwrap();
    let second = connected(&two, 1);
    assert_ne!(second, session);
    assert_eq!(connected(&one, 2), second);
}

#[test]
fn ended_node_stops_listening_though_a_child_has_the_socket() {
    let one = started(options(1, &[])).unwrap();
    let address = one.listens().unwrap();
    let child = ForkedChild::new(|| std::thread::sleep(TEST_TIMEOUT));
    drop(one);
    TcpStream::connect(address).unwrap_err();
    let mut again = options(1, &[]);
    again.listen = Some(address);
    let one = started(again).unwrap();
    let two = started(options(2, &[address])).unwrap();
    assert_eq!(connected(&one, 2), connected(&two, 1));
    child.kill();
    assert!(child.was_killed());
}

#[test]
fn nodes_that_dial_each_other_have_one_session() {
    for _ in 0..10 {
        // Most likely these ports are free.
        let ports = [1, 2].map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
        let addresses = ports.map(|port| port.local_addr().unwrap());
        let start = |number: u8, own: usize| {
            let mut options = options(number, &addresses);
            options.listen = Some(addresses[own]);
            started(options)
        };
        // Another process may have taken a port meanwhile.
        let (Ok(one), Ok(two)) = (start(1, 0), start(2, 1)) else { continue };
        let session = connected(&one, 2);
        assert_eq!(connected(&two, 1), session);
        one.send(identity(2), session, b"hello".to_vec()).unwrap();
        loop {
            match next(&two) {
                PeerEvent::ControlMessage { .. } => break,
                PeerEvent::Interests { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        wait_until("its own address to be detected", || {
            one.reports().iter().any(|report| report.state == PeerState::SelfConnection)
        });
    }
}

#[test]
fn five_find_each_other_through_one_of_them() {
    let first = started(options(1, &[])).unwrap();
    let rendezvous = first.listens().unwrap();
    let mut all = vec![first];
    for number in 2..=5 {
        let mut options = options(number, &[]);
        options.rendezvous = Some(format!("localhost:{}", rendezvous.port()));
        all.push(started(options).unwrap());
    }
    let mut sessions: Vec<BTreeMap<NodeId, SessionId>> = Vec::new();
    for peers in &all {
        let mut met = BTreeMap::new();
        while met.len() < 4 {
            match next(peers) {
                PeerEvent::Connected { node, session, .. } => {
                    assert_eq!(met.insert(node, session), None);
                }
                PeerEvent::Interests { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        sessions.push(met);
    }
    for (one, met) in sessions.iter().enumerate() {
        for (node, session) in met {
            let other = usize::from(node.0[0]) - 1;
            assert_eq!(sessions[other][&identity(one as u8 + 1)], *session);
        }
    }
}

#[test]
fn network_options_need_the_insecure_flag() {
    let refused = |change: fn(&mut Options)| {
        let mut options = options(1, &[]);
        change(&mut options);
        let error = started(options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        error.to_string()
    };
    // On loopback any user of the machine could connect.
    for listen in ["127.0.0.1:0", "[::1]:0", "0.0.0.0:0", "[::]:0"] {
        let mut options = options(1, &[]);
        (options.listen, options.insecure) = (Some(listen.parse().unwrap()), false);
        let why = started(options).unwrap_err().to_string();
        for part in [listen, "not authenticated", "each user of the machine", "Set insecure"] {
            assert!(why.contains(part), "{why}");
        }
    }
    for peer in ["127.0.0.1:7", "192.0.2.1:7", "a-name:7"] {
        for is_rendezvous in [false, true] {
            let mut options = options(1, &[]);
            (options.listen, options.insecure) = (None, false);
            match is_rendezvous {
                true => options.rendezvous = Some(peer.to_owned()),
                false => options.peers = vec![peer.to_owned()],
            }
            assert_eq!(started(options).unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
    }
    for address in ["", "host", "host:", ":7", "host:0", "127.0.0.1:0", "a b:7", "a:b:7"] {
        let mut options = options(1, &[]);
        options.peers = vec![address.to_owned()];
        assert_eq!(started(options).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    refused(|options| options.name = "x".repeat(65));
    refused(|options| options.name = "\u{1b}[31m".to_owned());
    refused(|options| options.lost_after = Duration::from_millis(99));
    let mut options = options(1, &[]);
    options.listen = Some("0.0.0.0:0".parse().unwrap());
    options.insecure = true;
    let peers = started(options.clone()).unwrap();
    options.listen = peers.listens();
    let taken = started(options).unwrap_err();
    assert!(taken.to_string().contains("in use"), "{taken}");
}

/// Reads until the peer closes.
fn until_closed(mut stream: &TcpStream) -> Vec<u8> {
    stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    let mut bytes = Vec::new();
    // A reset is an end as well.
    match stream.read_to_end(&mut bytes) {
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
            panic!("the connection stays open")
        }
        _ => bytes,
    }
}

#[test]
fn malformed_connection_is_closed_without_effect_on_others() {
    let (one, two, session) = two();
    let address = one.listens().unwrap();
    let valid_handshake = fuzzing::valid_handshake();
    let mut version = valid_handshake.clone();
    version[12] += 1;
    let mut oversized = valid_handshake.clone();
    oversized.extend(u32::MAX.to_le_bytes());
    let mut trailing = valid_handshake.clone();
    trailing.extend([2, 0, 0, 0, 3, 0]);
    let malformed: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0; 1000],
        vec![0xff; 1000],
        version,
        oversized,
        trailing,
        valid_handshake[..20].iter().chain(&[0xee; 200]).copied().collect(),
    ];
    for bytes in &malformed {
        let mut stream = TcpStream::connect(address).unwrap();
        // It may be closed before all bytes are written.
        let _ = stream.write_all(bytes);
        until_closed(&stream);
    }
    // Closed in the middle of a frame.
    for length in [0, 3, 10, valid_handshake.len()] {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&valid_handshake[..length]).unwrap();
    }
    two.send(identity(1), session, b"still here".to_vec()).unwrap();
    let mut messages = 0;
    let mut sessions: VecDeque<SessionId> = VecDeque::new();
    while messages == 0 {
        match next(&one) {
            PeerEvent::ControlMessage { node, .. } => {
                assert_eq!(node, identity(2));
                messages += 1;
            }
            // The acceptor is the node with the greater id, so no malformed peer gets a session.
            PeerEvent::Connected { session, .. } => sessions.push_back(session),
            PeerEvent::Disconnected { node, reason, .. } => {
                assert_ne!(node, identity(2), "{reason}")
            }
            PeerEvent::Interests { .. } => {}
        }
    }
    assert!(sessions.is_empty());
}

#[test]
fn flood_of_connections_does_not_exclude_nodes() {
    let limits = Limits { connections: 20, per_source: 16, pending: 8 };
    let mut first = options(1, &[]);
    first.listen = Some("0.0.0.0:0".parse().unwrap());
    first.insecure = true;
    let one = Peers::start_with(&first.1, NodeId([1; 16]), "", limits, false).unwrap();
    let port = one.listens().unwrap().port();
    let two = started(options(2, &[SocketAddr::from(([127, 0, 0, 1], port))])).unwrap();
    let session = connected(&one, 2);
    connected(&two, 1);
    // They stay open until they are closed here.
    let flood = SocketAddr::from(([127, 0, 0, 1], port));
    let mut pending = Vec::new();
    let mut third = None;
    for number in 0..200 {
        pending.push(super::socket::start_connect(flood, "127.0.0.9".parse().ok()).unwrap());
        if number == 100 {
            third = Some(started(options(3, &[flood])).unwrap());
        }
    }
    connected(third.as_ref().unwrap(), 1);
    two.send(identity(1), session, b"still here".to_vec()).unwrap();
    let (mut has_message, mut has_third) = (false, false);
    while !(has_message && has_third) {
        match next(&one) {
            PeerEvent::ControlMessage { .. } => has_message = true,
            PeerEvent::Connected { node, .. } => has_third |= node == identity(3),
            PeerEvent::Interests { .. } => {}
            PeerEvent::Disconnected { reason, .. } => panic!("{reason}"),
        }
    }
    assert!(one.reports().len() <= 20);
}

#[test]
fn silent_or_slow_handshake_is_closed() {
    let mut first = options(0xee, &[]);
    // The handshake timeout is as long, but two seconds at least.
    first.lost_after = Duration::from_millis(100);
    let one = started(first).unwrap();
    let silent = TcpStream::connect(one.listens().unwrap()).unwrap();
    let mut slow = TcpStream::connect(one.listens().unwrap()).unwrap();
    slow.set_nodelay(true).unwrap();
    for byte in fuzzing::valid_handshake().iter().cycle() {
        // The frame claims 4 KiB: it would never be complete.
        if slow.write_all(&[*byte & 0x0f]).is_err() {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let goodbye = until_closed(&silent);
    assert!(String::from_utf8_lossy(&goodbye).contains("within the timeout"), "{goodbye:?}");
    assert_eq!(one.next_event(), None);
}

#[test]
fn session_of_a_peer_that_does_not_read_is_closed() {
    let mut first = options(0xee, &[]);
    first.lost_after = Duration::from_secs(3600);
    let one = started(first).unwrap();
    let mut stream = TcpStream::connect(one.listens().unwrap()).unwrap();
    stream.write_all(&fuzzing::valid_handshake()).unwrap();
    let PeerEvent::Connected { node, session, .. } = next(&one) else { panic!() };
    let message = vec![7; 1 << 19];
    // The socket buffers of the system are limited, too.
    let refused = (0..1000).find_map(|_| {
        std::thread::yield_now();
        one.send(node, session, message.clone()).err()
    });
    assert_eq!(refused.unwrap().kind(), ErrorKind::TooMany);
    assert!(matches!(
        next(&one),
        PeerEvent::Disconnected { reason: CloseReason::Closed(GoodbyeReason::SendQueueFull), .. }
    ));
    assert_eq!(one.send(node, session, message).unwrap_err().kind(), ErrorKind::Closed);
    drop(stream);
}

#[test]
fn unread_events_are_delivered_later() {
    let (one, two, session) = two();
    // More than both event queues and socket buffers can hold.
    let mut sent = 0_u64;
    // Sending further would exceed the send queue.
    while sent < 40_000 && !is_stuck(&one) {
        for _ in 0..500 {
            let message = sent.to_le_bytes().repeat(100);
            one.send(identity(2), session, message).unwrap();
            sent += 1;
        }
    }
    assert!(sent > 4096, "{sent}");
    for number in 0..sent {
        let bytes = number.to_le_bytes().repeat(100);
        assert_eq!(next(&two), PeerEvent::ControlMessage { node: identity(1), session, bytes });
    }
    assert_eq!(two.next_event(), None);
    two.send(identity(1), session, Vec::new()).unwrap();
    assert_eq!(
        next(&one),
        PeerEvent::ControlMessage { node: identity(2), session, bytes: Vec::new() }
    );
}

/// Returns true if the send queue stays long.
fn is_stuck(peers: &Peers) -> bool {
    (0..500).all(|_| {
        let is_much = peers.waiting() > 1 << 19;
        if is_much {
            std::thread::sleep(Duration::from_millis(1));
        }
        is_much
    })
}

#[test]
fn name_without_listener_is_reported() {
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut options = options(1, &[]);
    options.peers = vec![format!("localhost:{}", closed.port())];
    let one = started(options).unwrap();
    wait_until("a reason", || {
        one.reports()
            .iter()
            .any(|report| report.last_error.as_deref().is_some_and(|why| why.contains("refused")))
    });
}

#[test]
fn version_mismatch_is_reported() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let one = started(options(1, &[listener.local_addr().unwrap()])).unwrap();
    let (mut stream, _) = listener.accept().unwrap();
    let mut other = fuzzing::valid_handshake();
    other[12] = 9;
    stream.write_all(&other).unwrap();
    wait_until("a reason", || {
        one.reports()
            .iter()
            .any(|report| report.last_error.as_deref().is_some_and(|why| why.contains("version 9")))
    });
    assert!(
        CloseReason::Refused { why: GoodbyeReason::TooManyConnections, detail: String::new() }
            .is_permanent()
    );
}
