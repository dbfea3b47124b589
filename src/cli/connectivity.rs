//! Reports on standard error why no messages are replicated with peer nodes, and when that changes.
//! A thread requests a report of the node repeatedly.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use pubsub::{Node, NodeId, PublisherId, Row};

use super::paths::{incompatibility, name_of_node, replication_error_text, unreachable_text};
use super::report_rows::matching;
use super::text;

/// Delay of the first request, and interval of the next.
const FIRST_REPORT_DELAY: Duration = Duration::from_secs(1);
const REPORT_INTERVAL: Duration = Duration::from_secs(2);
/// Interval while messages are sent or received and the node has no network.
const IDLE_REPORT_INTERVAL: Duration = Duration::from_secs(10);
const FINAL_REPORT_TIMEOUT: Duration = Duration::from_secs(1);
/// A reason is not repeated sooner: some attempts fail with two alternating reasons.
const REPEAT_INTERVAL: Duration = Duration::from_secs(60);
/// Number of disconnected peers that are remembered though reports of the node omit them.
const MAX_PEERS: usize = 1000;

/// What the process does meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The process waits for a topic, for subscribers or for the first message: every possible
    /// cause is reported.
    Waiting,
    /// The process sends or receives messages: changes of peers are reported.
    Flowing,
}

/// Requests reports of the node and holds what was printed.
#[derive(Debug)]
pub(crate) struct ConnectivityReporter {
    next: Instant,
    /// Time of the last request.
    last: Option<Instant>,
    /// The sender is dropped without an answer if the service ends.
    pending_report: Option<mpsc::Receiver<pubsub::Result<Vec<Row>>>>,
    known: ReportedState,
}

/// What the reports contained, and what was printed of it.
#[derive(Debug, Default)]
struct ReportedState {
    rows: Vec<Row>,
    /// Lines that are printed once.
    printed: BTreeSet<String>,
    peers: Vec<Peer>,
    /// Processes of publishers; reports omit publishers that have ended.
    publishers: BTreeMap<u64, String>,
}

#[derive(Debug, Default)]
struct Peer {
    node: String,
    label: String,
    address: String,
    is_connected: bool,
    /// A problem was printed, so that the next connection is printed, too.
    problem_reported: bool,
    /// The peer's loss was printed, so that reasons of failed attempts are not.
    loss_reported: bool,
    /// The last reason that was printed.
    reason: String,
    reasons: BTreeMap<String, Instant>,
}

impl ConnectivityReporter {
    pub(crate) fn begin() -> Self {
        Self {
            next: Instant::now() + FIRST_REPORT_DELAY,
            last: None,
            pending_report: None,
            known: ReportedState::default(),
        }
    }

    /// Call repeatedly. Returns the lines to print now.
    pub(crate) fn poll(&mut self, node: &Node, topic: &str, phase: Phase) -> Vec<String> {
        if let Some(pending_report) = &self.pending_report {
            let answer = match pending_report.try_recv() {
                Err(mpsc::TryRecvError::Empty) => return Vec::new(),
                // Without an answer, request again.
                answer => answer.ok().and_then(Result::ok),
            };
            self.pending_report = None;
            let lines = answer.map(|rows| self.known.update(rows, topic, phase));
            let has_no_network = phase == Phase::Flowing && !self.known.has_network();
            self.next = Instant::now()
                + if has_no_network { IDLE_REPORT_INTERVAL } else { REPORT_INTERVAL };
            return lines.unwrap_or_default();
        }
        if Instant::now() >= self.next {
            self.pending_report = request_report(node);
            self.last = Some(Instant::now());
            self.next = Instant::now() + REPORT_INTERVAL;
        }
        Vec::new()
    }

    /// Requests the next report soon if this publisher is unknown.
    pub(crate) fn expect(&mut self, publisher: PublisherId) {
        if !self.known.publishers.contains_key(&publisher.as_u64()) {
            let soon = self.last.map_or_else(Instant::now, |last| last + REPORT_INTERVAL);
            self.next = self.next.min(soon);
        }
    }

    /// The process of a publisher of this node, or else the identity of the publisher.
    pub(crate) fn name_of_publisher(&self, publisher: PublisherId) -> String {
        let known = self.known.publishers.get(&publisher.as_u64());
        known.cloned().unwrap_or_else(|| format!("publisher {publisher}"))
    }

    /// Name of a peer node, or else its address or identity.
    pub(crate) fn name_of_node(&self, node: [u8; 16]) -> String {
        name_of_node(&self.known.rows, &NodeId(node).to_string())
    }

    /// Call when messages were not delivered or not received: requests a last report, prints what
    /// is new in it, and returns it.
    pub(crate) fn final_report(&mut self, node: &Node, topic: &str) -> &[Row] {
        let answer = request_report(node)
            .and_then(|pending_report| pending_report.recv_timeout(FINAL_REPORT_TIMEOUT).ok());
        if let Some(Ok(rows)) = answer {
            print_lines(&self.known.update(rows, topic, Phase::Waiting));
        }
        &self.known.rows
    }

    /// Call at the end of a wait. Returns the cause to append to the error: that this node is
    /// connected to none of its peers.
    pub(crate) fn cause(&mut self, node: &Node, topic: &str) -> String {
        cause(self.final_report(node, topic))
    }
}

pub(crate) fn print_lines(lines: &[String]) {
    for line in lines {
        text::print_error(&format!("fabricast: {line}"));
    }
}

/// Requests a report of the node, in a thread.
pub(crate) fn request_report(node: &Node) -> Option<mpsc::Receiver<pubsub::Result<Vec<Row>>>> {
    let (sender, pending_report) = mpsc::channel();
    let node = node.clone();
    let asking = std::thread::Builder::new().name("node-report".to_owned());
    asking.spawn(move || sender.send(node.report())).is_ok().then_some(pending_report)
}

/// Why no messages are replicated with peers, after a semicolon; empty if a peer is connected, or
/// this node has no network.
fn cause(rows: &[Row]) -> String {
    let is_connected = |row: &Row| matches!(row, Row::Peer { is_connected: true, .. });
    if rows.iter().any(is_connected) {
        return String::new();
    }
    let mut reasons: Vec<_> = rows.iter().filter_map(unreachable_text).collect();
    let errors =
        matching!(rows, Row::ReplicationError { kind, why } => replication_error_text(*kind, why));
    reasons.extend(errors);
    if !reasons.is_empty() {
        return format!("; no peer node is connected: {}", reasons.join(", "));
    }
    let mut lost = matching!(
        rows,
        Row::Peer { label, address, detail, .. } => lost_text(label, address, detail)
    );
    let mut listens =
        matching!(rows, Row::Node { listens: Some(address), .. } => text::escape_control(address));
    match (lost.next(), listens.next()) {
        (Some(lost), _) => format!("; {lost}"),
        (None, Some(address)) => format!("; no peer node has connected to {address}"),
        (None, None) => String::new(),
    }
}

/// Name and address of a node.
fn node_text(label: &str, address: &str) -> String {
    let address = text::escape_control(address);
    match label {
        "" => format!("node {address}"),
        label => format!("node \"{}\" ({address})", label.escape_debug()),
    }
}

fn lost_text(label: &str, address: &str, detail: &str) -> String {
    let node = node_text(label, address);
    match detail {
        "" => format!("{node} is disconnected"),
        detail => format!("{node} is disconnected: {}", text::escape_control(detail)),
    }
}

impl ReportedState {
    fn has_network(&self) -> bool {
        let has = |row: &Row| {
            matches!(
                row,
                Row::Peer { .. }
                    | Row::ReplicationError { .. }
                    | Row::Node { listens: Some(_), .. }
            )
        };
        self.rows.iter().any(has)
    }

    /// Processes a report, and returns the lines to print.
    fn update(&mut self, rows: Vec<Row>, topic: &str, phase: Phase) -> Vec<String> {
        if rows.is_empty() {
            // The service has just ended.
            return Vec::new();
        }
        self.rows = rows;
        let mut lines = Vec::new();
        if phase == Phase::Waiting {
            let once = self.rows.iter().filter_map(|row| match row {
                Row::ReplicationError { kind, why } => Some(replication_error_text(*kind, why)),
                Row::IncompatibleTopic { topic: of, .. } if of == topic => {
                    let why = incompatibility(&self.rows, row)?;
                    Some(format!("{}: {why}", topic.escape_debug()))
                }
                _ => None,
            });
            lines.extend(once.filter(|why| self.printed.insert(why.clone())));
        }
        self.update_publishers(topic);
        lines.extend(update_peers(&mut self.peers, &self.rows, Instant::now()));
        lines
    }

    fn update_publishers(&mut self, name: &str) {
        for row in &self.rows {
            let Row::Publisher { topic, participant, publisher, .. } = row else { continue };
            if topic != name || self.publishers.contains_key(publisher) {
                continue;
            }
            let mut process = matching!(
                self.rows,
                Row::Process { participant: of, label, process } if of == participant => match process {
                    0 => format!("\"{}\"", label.escape_debug()),
                    _ => format!("process {process} \"{}\"", label.escape_debug()),
                }
            );
            self.publishers.extend(process.next().map(|process| (*publisher, process)));
        }
        // The lowest identities are the oldest.
        while self.publishers.len() > MAX_PEERS {
            self.publishers.pop_first();
        }
    }
}

/// The lines to print about peers: a new reason why a peer is unreachable, a lost connection, and a
/// connection after either.
fn update_peers(peers: &mut Vec<Peer>, rows: &[Row], now: Instant) -> Vec<String> {
    let mut lines = Vec::new();
    let mut is_listed = vec![false; peers.len()];
    for row in rows {
        let Row::Peer { node, label, address, is_connected, is_retried, detail } = row else {
            continue;
        };
        let is_it =
            |peer: &Peer| peer.address == *address || (!node.is_empty() && peer.node == *node);
        // A restarted peer, at another port.
        let is_restarted =
            |peer: &Peer| !peer.is_connected && !label.is_empty() && peer.label == *label;
        let found = peers.iter().position(is_it).or_else(|| peers.iter().position(is_restarted));
        let at = found.unwrap_or_else(|| {
            is_listed.push(false);
            peers.push(Peer { address: address.clone(), ..Peer::default() });
            peers.len() - 1
        });
        if is_listed[at] && !is_connected {
            // Another row has the connection, with another address.
            continue;
        }
        is_listed[at] = true;
        let peer = &mut peers[at];
        let was_connected = std::mem::replace(&mut peer.is_connected, *is_connected);
        peer.address.clone_from(address);
        for (known, new) in [(&mut peer.node, node), (&mut peer.label, label)] {
            if !new.is_empty() {
                known.clone_from(new);
            }
        }
        if *is_connected {
            if std::mem::take(&mut peer.problem_reported) {
                lines.push(format!("{} is connected", node_text(&peer.label, address)));
            }
            peer.loss_reported = false;
            peer.reason.clear();
            peer.reasons.clear();
        } else if was_connected {
            let retrying = if *is_retried { "; retrying" } else { "" };
            lines.push(format!("{}{retrying}", lost_text(&peer.label, address, detail)));
            (peer.problem_reported, peer.loss_reported) = (true, true);
        } else if !peer.loss_reported
            && let Some(line) = unreachable_text(row)
            && peer.reason != *detail
            && peer.record_reason(detail, now)
        {
            lines.push(format!("{line}; retrying"));
        }
    }
    // The node removes some peers from its report at once.
    for (peer, is_listed) in peers.iter_mut().zip(is_listed) {
        if !is_listed && std::mem::take(&mut peer.is_connected) {
            (peer.problem_reported, peer.loss_reported) = (true, true);
            lines.push(lost_text(&peer.label, &peer.address, ""));
        }
    }
    let excess = peers.len().saturating_sub(MAX_PEERS);
    let mut disconnected = 0;
    peers.retain(|peer| {
        disconnected += usize::from(!peer.is_connected);
        peer.is_connected || disconnected > excess
    });
    lines
}

impl Peer {
    /// Records why the peer is not connected. False if the reason was printed recently.
    fn record_reason(&mut self, reason: &str, now: Instant) -> bool {
        self.problem_reported = true;
        self.reason = reason.to_owned();
        let printed = self.reasons.get(reason);
        if printed.is_some_and(|at| now.saturating_duration_since(*at) < REPEAT_INTERVAL) {
            return false;
        }
        if self.reasons.len() >= MAX_PEERS {
            self.reasons.clear();
        }
        self.reasons.insert(reason.to_owned(), now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: &str = "10.0.0.1:7701";

    fn peer(node: &str, is_connected: bool, is_retried: bool, detail: &str) -> Row {
        let label = if node.is_empty() { "" } else { "camera" };
        Row::Peer {
            node: node.to_owned(),
            label: label.to_owned(),
            address: ADDRESS.to_owned(),
            is_connected,
            is_retried,
            detail: detail.to_owned(),
        }
    }

    fn node(listens: Option<&str>) -> Row {
        Row::Node {
            identity: "ab".to_owned(),
            label: "x".to_owned(),
            service: 1,
            process: 1,
            listens: listens.map(str::to_owned),
        }
    }

    #[test]
    fn unreachable_peer_is_reported_once_per_reason() {
        let (mut peers, now) = (Vec::new(), Instant::now());
        let mut update = |detail: &str, seconds| {
            let now = now + Duration::from_secs(seconds);
            update_peers(&mut peers, &[peer("", false, true, detail)], now)
        };
        let cannot = |why: &str| vec![format!("cannot reach 10.0.0.1:7701: {why}; retrying")];
        assert_eq!(update("no answer yet", 0), cannot("no answer yet"));
        assert!(update("no answer yet", 2).is_empty());
        assert_eq!(update("No route to host", 4), cannot("No route to host"));
        // Alternating reasons are printed once a minute each.
        assert!(update("no answer yet", 6).is_empty());
        assert!(update("No route to host", 8).is_empty());
        assert_eq!(update("no answer yet", 66), cannot("no answer yet"));
    }

    #[test]
    fn peer_that_disconnects_and_returns_is_reported_once_each() {
        let (mut peers, now) = (Vec::new(), Instant::now());
        let mut update = |rows: &[Row]| update_peers(&mut peers, rows, now);
        assert!(update(&[peer("cd", true, false, "for 1 s")]).is_empty());
        let gone =
            ["node \"camera\" (10.0.0.1:7701) is disconnected: it closed the session; retrying"];
        for expected in [&gone[..], &[]] {
            assert_eq!(update(&[peer("cd", false, true, "it closed the session")]), expected);
        }
        assert!(update(&[peer("cd", false, true, "Connection refused")]).is_empty());
        // A restarted node has a new identity.
        let back = ["node \"camera\" (10.0.0.1:7701) is connected"];
        for expected in [&back[..], &[]] {
            assert_eq!(update(&[peer("ef", true, false, "for 1 s")]), expected);
        }
        for expected in [&["node \"camera\" (10.0.0.1:7701) is disconnected"][..], &[]] {
            assert_eq!(update(&[]), expected);
        }
        assert_eq!(update(&[peer("ef", true, false, "for 0 s")]), back);
    }

    #[test]
    fn cause_names_the_peer_that_is_not_connected() {
        let refused = peer("", false, true, "Connection refused (os error 111)");
        assert_eq!(
            cause(&[node(None), refused]),
            "; no peer node is connected: cannot reach 10.0.0.1:7701: Connection refused (os error 111)"
        );
        let listens = node(Some("10.0.0.1:7700"));
        assert_eq!(
            cause(std::slice::from_ref(&listens)),
            "; no peer node has connected to 10.0.0.1:7700"
        );
        let away = peer("cd", false, false, "it closed the session");
        assert_eq!(
            cause(&[listens.clone(), away]),
            "; node \"camera\" (10.0.0.1:7701) is disconnected: it closed the session"
        );
        assert_eq!(cause(&[listens, peer("cd", true, true, "for 1 s")]), "");
        assert_eq!(cause(&[node(None)]), "");
    }

    #[test]
    fn ended_publisher_is_still_named_by_its_process() {
        let publisher = Row::Publisher {
            topic: "cam".to_owned(),
            participant: "p1".to_owned(),
            publisher: 256,
            messages: 0,
            bytes: 0,
            waits_microseconds: 0,
        };
        let process = Row::Process {
            participant: "p1".to_owned(),
            label: "fabricast pub".to_owned(),
            process: 1234,
        };
        let mut known = ReportedState::default();
        known.update(vec![node(None), process, publisher], "cam", Phase::Flowing);
        known.update(vec![node(None)], "cam", Phase::Flowing);
        assert_eq!(known.publishers[&256], "process 1234 \"fabricast pub\"");
    }
}
