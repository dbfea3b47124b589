//! Says on standard error why messages do not go between this node and others, and when that changes: the
//! node is asked for a report in a thread of its own, again and again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use pubsub::{Node, NodeId, PublisherId, Row};

use super::paths::{incompatibility, name_of_node, replication_error_text, unreachable_text};
use super::text;

/// How long to wait before the node is asked, and between two reports.
const FIRST_REPORT_DELAY: Duration = Duration::from_secs(1);
const REPORT_INTERVAL: Duration = Duration::from_secs(2);
/// The same while messages come or go and the node has nothing to do with others.
const IDLE_REPORT_INTERVAL: Duration = Duration::from_secs(10);
/// How long to wait for an answer in the end.
const FINAL_REPORT_TIMEOUT: Duration = Duration::from_secs(1);
/// A reason that comes back sooner is not said again: some attempts fail in two ways by turns.
const REPEAT_INTERVAL: Duration = Duration::from_secs(60);
/// Other nodes that are remembered though the node does not tell of them any more.
const MAX_PEERS: usize = 1000;

/// What a process does while its node is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// It waits for a topic, for subscribers or for the first message: whatever may be the cause is said.
    Waiting,
    /// Messages come or go: what becomes of other nodes is said.
    Flowing,
}

/// What was said of this node and others.
#[derive(Debug)]
pub(crate) struct ConnectivityReporter {
    next: Instant,
    /// When the node was asked last.
    last: Option<Instant>,
    /// Dropped without an answer if the service ends meanwhile.
    pending_report: Option<mpsc::Receiver<pubsub::Result<Vec<Row>>>>,
    known: ReportedState,
}

/// What reports told so far, and what was said of it.
#[derive(Debug, Default)]
struct ReportedState {
    /// The last report.
    rows: Vec<Row>,
    /// What is said once.
    said: BTreeSet<String>,
    peers: Vec<Peer>,
    /// The processes of publishers, which reports do not name any more when these have ended.
    publishers: BTreeMap<u64, String>,
}

/// Another node.
#[derive(Debug)]
struct Peer {
    node: String,
    label: String,
    address: String,
    is_connected: bool,
    /// Something was said of it that is over when it is connected.
    problem_reported: bool,
    /// It was said that it is gone: why it is not reached now adds nothing.
    loss_reported: bool,
    /// The last reason that was said.
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

    /// To be called repeatedly. Gives the lines that are to be said now.
    pub(crate) fn poll(&mut self, node: &Node, topic: &str, phase: Phase) -> Vec<String> {
        if let Some(pending_report) = &self.pending_report {
            let answer = match pending_report.try_recv() {
                Err(mpsc::TryRecvError::Empty) => return Vec::new(),
                // Without an answer, it is asked again.
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

    /// The next report is wanted soon, if this publisher is not known yet.
    pub(crate) fn expect(&mut self, publisher: PublisherId) {
        if !self.known.publishers.contains_key(&publisher.as_u64()) {
            let soon = self.last.map_or_else(Instant::now, |last| last + REPORT_INTERVAL);
            self.next = self.next.min(soon);
        }
    }

    /// The process of a publisher of this node, or else its identity.
    pub(crate) fn name_of_publisher(&self, publisher: PublisherId) -> String {
        let known = self.known.publishers.get(&publisher.as_u64());
        known.cloned().unwrap_or_else(|| format!("publisher {publisher}"))
    }

    /// What another node is called, as far as that is known.
    pub(crate) fn name_of_node(&self, node: [u8; 16]) -> String {
        name_of_node(&self.known.rows, &NodeId(node).to_string())
    }

    /// To be called when messages did not get to where they were wanted, or nothing wanted them: asks once more,
    /// and says what is new. Gives what the node told last.
    pub(crate) fn final_report(&mut self, node: &Node, topic: &str) -> &[Row] {
        let answer = request_report(node)
            .and_then(|pending_report| pending_report.recv_timeout(FINAL_REPORT_TIMEOUT).ok());
        if let Some(Ok(rows)) = answer {
            say(&self.known.update(rows, topic, Phase::Waiting));
        }
        &self.known.rows
    }

    /// The same at the end of a wait. Gives the cause, to be put behind the error: that the node is connected to
    /// no other one, though it was told of some.
    pub(crate) fn cause(&mut self, node: &Node, topic: &str) -> String {
        cause(self.final_report(node, topic))
    }
}

/// Says these lines.
pub(crate) fn say(lines: &[String]) {
    for line in lines {
        text::print_error(&format!("fabricast: {line}"));
    }
}

/// Asks the node for a report, in a thread of its own.
pub(crate) fn request_report(node: &Node) -> Option<mpsc::Receiver<pubsub::Result<Vec<Row>>>> {
    let (tell, pending_report) = mpsc::channel();
    let node = node.clone();
    let asking = std::thread::Builder::new().name("node-report".to_owned());
    asking.spawn(move || tell.send(node.report())).is_ok().then_some(pending_report)
}

/// Why no message comes from other nodes, or goes there, behind a semicolon; nothing if one is connected,
/// or this node has nothing to do with others.
fn cause(rows: &[Row]) -> String {
    let is_connected = |row: &Row| matches!(row, Row::Peer { is_connected: true, .. });
    if rows.iter().any(is_connected) {
        return String::new();
    }
    let mut reasons: Vec<_> = rows.iter().filter_map(unreachable_text).collect();
    reasons.extend(rows.iter().filter_map(|row| match row {
        Row::ReplicationError { kind, why } => Some(replication_error_text(*kind, why)),
        _ => None,
    }));
    if !reasons.is_empty() {
        return format!("; no peer node is connected: {}", reasons.join(", "));
    }
    let gone = rows.iter().find_map(|row| match row {
        Row::Peer { label, address, detail, .. } => Some(gone(label, address, detail)),
        _ => None,
    });
    let listens = rows.iter().find_map(|row| match row {
        Row::Node { listens, .. } => listens.as_deref().map(text::escape_control),
        _ => None,
    });
    match (gone, listens) {
        (Some(gone), _) => format!("; {gone}"),
        (None, Some(address)) => format!("; no peer node has connected to {address}"),
        (None, None) => String::new(),
    }
}

/// A node by name and address.
fn node_text(label: &str, address: &str) -> String {
    let address = text::escape_control(address);
    match label {
        "" => format!("node {address}"),
        label => format!("node \"{}\" ({address})", label.escape_debug()),
    }
}

fn gone(label: &str, address: &str, detail: &str) -> String {
    let node = node_text(label, address);
    match detail {
        "" => format!("{node} is disconnected"),
        detail => format!("{node} is disconnected: {}", text::escape_control(detail)),
    }
}

impl ReportedState {
    fn has_network(&self) -> bool {
        let has = |row: &Row| match row {
            Row::Peer { .. } | Row::ReplicationError { .. } => true,
            Row::Node { listens, .. } => listens.is_some(),
            _ => false,
        };
        self.rows.iter().any(has)
    }

    /// Takes a report, and gives what is to be said of it.
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
            lines.extend(once.filter(|why| self.said.insert(why.clone())));
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
            let process = self.rows.iter().find_map(|row| match row {
                Row::Process { participant: of, label, process } if of == participant => {
                    let label = label.escape_debug();
                    Some(match process {
                        0 => format!("\"{label}\""),
                        _ => format!("process {process} \"{label}\""),
                    })
                }
                _ => None,
            });
            self.publishers.extend(process.map(|process| (*publisher, process)));
        }
        // The oldest ones have the lowest identities.
        while self.publishers.len() > MAX_PEERS {
            self.publishers.pop_first();
        }
    }
}

/// What is to be said of other nodes: why one is not reached, when that is another reason than before; that
/// one that was connected is gone; and that one of which such a thing was said is connected.
fn update_peers(peers: &mut Vec<Peer>, rows: &[Row], now: Instant) -> Vec<String> {
    let mut lines = Vec::new();
    let mut is_there = vec![false; peers.len()];
    for row in rows {
        let Row::Peer { node, label, address, is_connected, is_retried, detail } = row else {
            continue;
        };
        let is_it =
            |peer: &Peer| peer.address == *address || (!node.is_empty() && peer.node == *node);
        // One that began anew, at another port.
        let is_restarted =
            |peer: &Peer| !peer.is_connected && !label.is_empty() && peer.label == *label;
        let found = peers.iter().position(is_it).or_else(|| peers.iter().position(is_restarted));
        let at = found.unwrap_or_else(|| {
            is_there.push(false);
            peers.push(Peer {
                node: String::new(),
                label: String::new(),
                address: address.clone(),
                is_connected: false,
                problem_reported: false,
                loss_reported: false,
                reason: String::new(),
                reasons: BTreeMap::new(),
            });
            peers.len() - 1
        });
        if is_there[at] && !is_connected {
            // It is there in another row, by another address.
            continue;
        }
        is_there[at] = true;
        let peer = &mut peers[at];
        let was_connected = std::mem::replace(&mut peer.is_connected, *is_connected);
        peer.address.clone_from(address);
        for (known, told) in [(&mut peer.node, node), (&mut peer.label, label)] {
            if !told.is_empty() {
                known.clone_from(told);
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
            lines.push(format!("{}{retrying}", gone(&peer.label, address, detail)));
            (peer.problem_reported, peer.loss_reported) = (true, true);
        } else if !peer.loss_reported
            && let Some(line) = unreachable_text(row)
            && peer.reason != *detail
            && peer.record_reason(detail, now)
        {
            lines.push(format!("{line}; retrying"));
        }
    }
    // The node forgets some at once.
    for (peer, is_there) in peers.iter_mut().zip(is_there) {
        if !is_there && std::mem::take(&mut peer.is_connected) {
            (peer.problem_reported, peer.loss_reported) = (true, true);
            lines.push(gone(&peer.label, &peer.address, ""));
        }
    }
    let excess = peers.len().saturating_sub(MAX_PEERS);
    let mut gone = 0;
    peers.retain(|peer| {
        gone += usize::from(!peer.is_connected);
        peer.is_connected || gone > excess
    });
    lines
}

impl Peer {
    /// Notes why it is not connected. False if that was said not long ago.
    fn record_reason(&mut self, reason: &str, now: Instant) -> bool {
        self.problem_reported = true;
        self.reason = reason.to_owned();
        let said = self.reasons.get(reason);
        if said.is_some_and(|said| now.saturating_duration_since(*said) < REPEAT_INTERVAL) {
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
    fn unreached_peer_is_said_for_each_reason() {
        let (mut peers, now) = (Vec::new(), Instant::now());
        let mut update = |detail: &str, seconds| {
            let now = now + Duration::from_secs(seconds);
            update_peers(&mut peers, &[peer("", false, true, detail)], now)
        };
        let cannot = |why: &str| vec![format!("cannot reach 10.0.0.1:7701: {why}; retrying")];
        assert_eq!(update("no answer yet", 0), cannot("no answer yet"));
        assert!(update("no answer yet", 2).is_empty());
        assert_eq!(update("No route to host", 4), cannot("No route to host"));
        // By turns: each again after a minute.
        assert!(update("no answer yet", 6).is_empty());
        assert!(update("No route to host", 8).is_empty());
        assert_eq!(update("no answer yet", 66), cannot("no answer yet"));
    }

    #[test]
    fn node_that_goes_and_comes_back_is_said_once_each() {
        let (mut peers, now) = (Vec::new(), Instant::now());
        let mut update = |rows: &[Row]| update_peers(&mut peers, rows, now);
        assert!(update(&[peer("cd", true, false, "for 1 s")]).is_empty());
        let gone = ["node \"camera\" (10.0.0.1:7701) is gone: it closed the session; retrying"];
        for expected in [&gone[..], &[]] {
            assert_eq!(update(&[peer("cd", false, true, "it closed the session")]), expected);
        }
        assert!(update(&[peer("cd", false, true, "Connection refused")]).is_empty());
        // It began anew, and is another node.
        let back = ["node \"camera\" (10.0.0.1:7701) is connected"];
        for expected in [&back[..], &[]] {
            assert_eq!(update(&[peer("ef", true, false, "for 1 s")]), expected);
        }
        for expected in [&["node \"camera\" (10.0.0.1:7701) is gone"][..], &[]] {
            assert_eq!(update(&[]), expected);
        }
        assert_eq!(update(&[peer("ef", true, false, "for 0 s")]), back);
    }

    #[test]
    fn cause_is_that_no_other_node_is_connected() {
        let refused = peer("", false, true, "Connection refused (os error 111)");
        assert_eq!(
            cause(&[node(None), refused]),
            "; this node is connected to no other node: cannot reach 10.0.0.1:7701: Connection refused (os error 111)"
        );
        let listens = node(Some("10.0.0.1:7700"));
        assert_eq!(
            cause(std::slice::from_ref(&listens)),
            "; no node has connected to 10.0.0.1:7700"
        );
        let away = peer("cd", false, false, "it closed the session");
        assert_eq!(
            cause(&[listens.clone(), away]),
            "; node \"camera\" (10.0.0.1:7701) is gone: it closed the session"
        );
        assert_eq!(cause(&[listens, peer("cd", true, true, "for 1 s")]), "");
        assert_eq!(cause(&[node(None)]), "");
    }

    #[test]
    fn publisher_is_named_by_its_process_after_its_end_too() {
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
