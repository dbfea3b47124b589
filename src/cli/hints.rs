//! Says on standard error why messages do not go between this node and others, and when that changes: the
//! node is asked for a report in a thread of its own, again and again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use pubsub::{Node, NodeIdentity, PublisherId, Row};

use super::paths::{misfit, name_of_node, not_carried, not_reached};
use super::text;

/// How long to wait before the node is asked, and between two reports.
const BEGIN: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_secs(2);
/// The same while messages come or go and the node has nothing to do with others.
const LONG_PAUSE: Duration = Duration::from_secs(10);
/// How long to wait for an answer in the end.
const CONCLUDING: Duration = Duration::from_secs(1);
/// A reason that comes back sooner is not said again: some attempts fail in two ways by turns.
const SAID_AGAIN: Duration = Duration::from_secs(60);
/// Other nodes that are remembered though the node does not tell of them any more.
const MOST_REMEMBERED: usize = 1000;

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
pub(crate) struct NodeHints {
    next: Instant,
    /// When the node was asked last.
    last: Option<Instant>,
    /// Dropped without an answer if the service ends meanwhile.
    asked: Option<mpsc::Receiver<pubsub::Result<Vec<Row>>>>,
    known: Known,
}

/// What reports told so far, and what was said of it.
#[derive(Debug, Default)]
struct Known {
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
    is_in_trouble: bool,
    /// It was said that it is gone: why it is not reached now adds nothing.
    is_gone: bool,
    /// The last reason that was said.
    reason: String,
    reasons: BTreeMap<String, Instant>,
}

impl NodeHints {
    pub(crate) fn begin() -> Self {
        Self { next: Instant::now() + BEGIN, last: None, asked: None, known: Known::default() }
    }

    /// To be called repeatedly. Gives the lines that are to be said now.
    pub(crate) fn look(&mut self, node: &Node, topic: &str, phase: Phase) -> Vec<String> {
        if let Some(asked) = &self.asked {
            let answer = match asked.try_recv() {
                Err(mpsc::TryRecvError::Empty) => return Vec::new(),
                // Without an answer, it is asked again.
                answer => answer.ok().and_then(Result::ok),
            };
            self.asked = None;
            let lines = answer.map(|rows| self.known.hear(rows, topic, phase));
            let is_alone = phase == Phase::Flowing && !self.known.has_to_do_with_others();
            self.next = Instant::now() + if is_alone { LONG_PAUSE } else { PAUSE };
            return lines.unwrap_or_default();
        }
        if Instant::now() >= self.next {
            self.asked = ask_for_report(node);
            self.last = Some(Instant::now());
            self.next = Instant::now() + PAUSE;
        }
        Vec::new()
    }

    /// The next report is wanted soon, if this publisher is not known yet.
    pub(crate) fn expect(&mut self, publisher: PublisherId) {
        if !self.known.publishers.contains_key(&publisher.as_u64()) {
            let soon = self.last.map_or_else(Instant::now, |last| last + PAUSE);
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
        name_of_node(&self.known.rows, &NodeIdentity(node).to_string())
    }

    /// To be called when messages did not get to where they were wanted, or nothing wanted them: asks once more,
    /// and says what is new. Gives what the node told last.
    pub(crate) fn conclude(&mut self, node: &Node, topic: &str) -> &[Row] {
        let answer = ask_for_report(node).and_then(|asked| asked.recv_timeout(CONCLUDING).ok());
        if let Some(Ok(rows)) = answer {
            say(&self.known.hear(rows, topic, Phase::Waiting));
        }
        &self.known.rows
    }

    /// The same at the end of a wait. Gives the cause, to be put behind the error: that the node is connected to
    /// no other one, though it was told of some.
    pub(crate) fn cause(&mut self, node: &Node, topic: &str) -> String {
        cause(self.conclude(node, topic))
    }
}

/// Says these lines.
pub(crate) fn say(lines: &[String]) {
    for line in lines {
        text::complain(&format!("fabricast: {line}"));
    }
}

/// Asks the node for a report, in a thread of its own.
pub(crate) fn ask_for_report(node: &Node) -> Option<mpsc::Receiver<pubsub::Result<Vec<Row>>>> {
    let (tell, asked) = mpsc::channel();
    let node = node.clone();
    let asking = std::thread::Builder::new().name("asks-why".to_owned());
    asking.spawn(move || tell.send(node.report())).is_ok().then_some(asked)
}

/// Why no message comes from other nodes, or goes there, behind a semicolon; nothing if one is connected,
/// or this node has nothing to do with others.
fn cause(rows: &[Row]) -> String {
    let is_connected = |row: &Row| matches!(row, Row::Peer { is_connected: true, .. });
    if rows.iter().any(is_connected) {
        return String::new();
    }
    let mut reasons: Vec<_> = rows.iter().filter_map(not_reached).collect();
    reasons.extend(rows.iter().filter_map(|row| match row {
        Row::NotCarried { kind, why } => Some(not_carried(*kind, why)),
        _ => None,
    }));
    if !reasons.is_empty() {
        return format!("; this node is connected to no other node: {}", reasons.join(", "));
    }
    let gone = rows.iter().find_map(|row| match row {
        Row::Peer { label, address, detail, .. } => Some(gone(label, address, detail)),
        _ => None,
    });
    let listens = rows.iter().find_map(|row| match row {
        Row::Node { listens, .. } => listens.as_deref().map(text::visible),
        _ => None,
    });
    match (gone, listens) {
        (Some(gone), _) => format!("; {gone}"),
        (None, Some(address)) => format!("; no node has connected to {address}"),
        (None, None) => String::new(),
    }
}

/// A node by name and address.
fn named(label: &str, address: &str) -> String {
    let address = text::visible(address);
    match label {
        "" => format!("node {address}"),
        label => format!("node \"{}\" ({address})", label.escape_debug()),
    }
}

fn gone(label: &str, address: &str, detail: &str) -> String {
    let node = named(label, address);
    match detail {
        "" => format!("{node} is gone"),
        detail => format!("{node} is gone: {}", text::visible(detail)),
    }
}

impl Known {
    fn has_to_do_with_others(&self) -> bool {
        let has = |row: &Row| match row {
            Row::Peer { .. } | Row::NotCarried { .. } => true,
            Row::Node { listens, .. } => listens.is_some(),
            _ => false,
        };
        self.rows.iter().any(has)
    }

    /// Takes a report, and gives what is to be said of it.
    fn hear(&mut self, rows: Vec<Row>, topic: &str, phase: Phase) -> Vec<String> {
        if rows.is_empty() {
            // The service has just ended.
            return Vec::new();
        }
        self.rows = rows;
        let mut lines = Vec::new();
        if phase == Phase::Waiting {
            let once = self.rows.iter().filter_map(|row| match row {
                Row::NotCarried { kind, why } => Some(not_carried(*kind, why)),
                Row::Misfit { topic: of, .. } if of == topic => {
                    let why = misfit(&self.rows, row)?;
                    Some(format!("{}: {why}", topic.escape_debug()))
                }
                _ => None,
            });
            lines.extend(once.filter(|why| self.said.insert(why.clone())));
        }
        self.learn_publishers(topic);
        lines.extend(hear_of_peers(&mut self.peers, &self.rows, Instant::now()));
        lines
    }

    fn learn_publishers(&mut self, name: &str) {
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
        while self.publishers.len() > MOST_REMEMBERED {
            self.publishers.pop_first();
        }
    }
}

/// What is to be said of other nodes: why one is not reached, when that is another reason than before; that
/// one that was connected is gone; and that one of which such a thing was said is connected.
fn hear_of_peers(peers: &mut Vec<Peer>, rows: &[Row], now: Instant) -> Vec<String> {
    let mut lines = Vec::new();
    let mut is_there = vec![false; peers.len()];
    for row in rows {
        let Row::Peer { node, label, address, is_connected, is_retried, detail } = row else {
            continue;
        };
        let is_it =
            |peer: &Peer| peer.address == *address || (!node.is_empty() && peer.node == *node);
        // One that began anew, at another port.
        let is_again =
            |peer: &Peer| !peer.is_connected && !label.is_empty() && peer.label == *label;
        let found = peers.iter().position(is_it).or_else(|| peers.iter().position(is_again));
        let at = found.unwrap_or_else(|| {
            is_there.push(false);
            peers.push(Peer {
                node: String::new(),
                label: String::new(),
                address: address.clone(),
                is_connected: false,
                is_in_trouble: false,
                is_gone: false,
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
            if std::mem::take(&mut peer.is_in_trouble) {
                lines.push(format!("{} is connected", named(&peer.label, address)));
            }
            peer.is_gone = false;
            peer.reason.clear();
            peer.reasons.clear();
        } else if was_connected {
            let retrying = if *is_retried { "; retrying" } else { "" };
            lines.push(format!("{}{retrying}", gone(&peer.label, address, detail)));
            (peer.is_in_trouble, peer.is_gone) = (true, true);
        } else if !peer.is_gone
            && let Some(line) = not_reached(row)
            && peer.reason != *detail
            && peer.has_reason(detail, now)
        {
            lines.push(format!("{line}; retrying"));
        }
    }
    // The node forgets some at once.
    for (peer, is_there) in peers.iter_mut().zip(is_there) {
        if !is_there && std::mem::take(&mut peer.is_connected) {
            (peer.is_in_trouble, peer.is_gone) = (true, true);
            lines.push(gone(&peer.label, &peer.address, ""));
        }
    }
    let excess = peers.len().saturating_sub(MOST_REMEMBERED);
    let mut gone = 0;
    peers.retain(|peer| {
        gone += usize::from(!peer.is_connected);
        peer.is_connected || gone > excess
    });
    lines
}

impl Peer {
    /// Notes why it is not connected. False if that was said not long ago.
    fn has_reason(&mut self, reason: &str, now: Instant) -> bool {
        self.is_in_trouble = true;
        self.reason = reason.to_owned();
        let said = self.reasons.get(reason);
        if said.is_some_and(|said| now.saturating_duration_since(*said) < SAID_AGAIN) {
            return false;
        }
        if self.reasons.len() >= MOST_REMEMBERED {
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
        let mut hear = |detail: &str, seconds| {
            let now = now + Duration::from_secs(seconds);
            hear_of_peers(&mut peers, &[peer("", false, true, detail)], now)
        };
        let cannot = |why: &str| vec![format!("cannot reach 10.0.0.1:7701: {why}; retrying")];
        assert_eq!(hear("no answer yet", 0), cannot("no answer yet"));
        assert!(hear("no answer yet", 2).is_empty());
        assert_eq!(hear("No route to host", 4), cannot("No route to host"));
        // By turns: each again after a minute.
        assert!(hear("no answer yet", 6).is_empty());
        assert!(hear("No route to host", 8).is_empty());
        assert_eq!(hear("no answer yet", 66), cannot("no answer yet"));
    }

    #[test]
    fn node_that_goes_and_comes_back_is_said_once_each() {
        let (mut peers, now) = (Vec::new(), Instant::now());
        let mut hear = |rows: &[Row]| hear_of_peers(&mut peers, rows, now);
        assert!(hear(&[peer("cd", true, false, "for 1 s")]).is_empty());
        let gone = ["node \"camera\" (10.0.0.1:7701) is gone: it left; retrying"];
        for expected in [&gone[..], &[]] {
            assert_eq!(hear(&[peer("cd", false, true, "it left")]), expected);
        }
        assert!(hear(&[peer("cd", false, true, "Connection refused")]).is_empty());
        // It began anew, and is another node.
        let back = ["node \"camera\" (10.0.0.1:7701) is connected"];
        for expected in [&back[..], &[]] {
            assert_eq!(hear(&[peer("ef", true, false, "for 1 s")]), expected);
        }
        for expected in [&["node \"camera\" (10.0.0.1:7701) is gone"][..], &[]] {
            assert_eq!(hear(&[]), expected);
        }
        assert_eq!(hear(&[peer("ef", true, false, "for 0 s")]), back);
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
        let away = peer("cd", false, false, "it left");
        assert_eq!(
            cause(&[listens.clone(), away]),
            "; node \"camera\" (10.0.0.1:7701) is gone: it left"
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
        let mut known = Known::default();
        known.hear(vec![node(None), process, publisher], "cam", Phase::Flowing);
        known.hear(vec![node(None)], "cam", Phase::Flowing);
        assert_eq!(known.publishers[&256], "process 1234 \"fabricast pub\"");
    }
}
