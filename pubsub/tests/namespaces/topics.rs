//! Topics among five nodes: from one to many, from many to one, and all to all. Messages are empty,
//! short, or longer than a ring.
//!
//! A link is cut for longer than a session timeout, services are killed and replaced, and a reader
//! is killed. No message is lost or delivered twice, and the order of each publisher is kept.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use pubsub::{Event, Node, Publisher, Row, Sample, Subscriber, Topic, TopicSettings};

use crate::network::{NODES, Network, create_hub, cut_link, restore_link, run_inside};
use crate::support::{ChildProcess, TIMEOUT, TestDir, until};

/// A topic, the nodes that publish on it, and the nodes that read it, some with two subscribers.
struct Flow {
    topic: &'static str,
    from: &'static [u8],
    to: &'static [u8],
}

const WIDE: Flow = Flow { topic: "wide", from: &[1], to: &[2, 3, 3, 4, 5] };
const GATHERED: Flow = Flow { topic: "gathered", from: &[1, 2, 3, 4], to: &[5] };
const AROUND: Flow = Flow { topic: "around", from: &[1, 3, 5], to: &[1, 3, 5] };
const FLOWS: [Flow; 3] = [WIDE, GATHERED, AROUND];

/// The default size of a ring is 8 MiB.
const BEYOND_RING_SIZE: usize = 9 << 20;
/// Between two messages of a publisher, so that failure handling gets processor time.
const PAUSE: Duration = Duration::from_millis(4);

fn settings() -> TopicSettings {
    TopicSettings { depth: 3, largest: BEYOND_RING_SIZE as u64, ..TopicSettings::default() }
}

/// The metadata of a message.
#[derive(Debug, PartialEq)]
struct MessageMark {
    publisher: u8,
    number: u64,
    checksum: u32,
    is_last: bool,
}

impl MessageMark {
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![self.publisher, u8::from(self.is_last)];
        bytes.extend(self.number.to_le_bytes());
        bytes.extend(self.checksum.to_le_bytes());
        bytes
    }

    fn of(sample: &Sample) -> Self {
        let metadata = sample.metadata();
        let [publisher, is_last, rest @ ..] = &*metadata else { panic!("no mark: {metadata:?}") };
        let (number, checksum) = rest.split_at(8);
        let mark = Self {
            publisher: *publisher,
            number: u64::from_le_bytes(number.try_into().unwrap()),
            checksum: u32::from_le_bytes(checksum.try_into().unwrap()),
            is_last: *is_last == 1,
        };
        assert_eq!(crc32fast::hash(&sample.to_vec().unwrap()), mark.checksum, "{mark:?}");
        mark
    }
}

/// The length of a message: from empty to longer than a ring.
fn length(number: u64) -> usize {
    const LENGTHS: [usize; 8] = [0, 1, 63, 4096, 4097, 70_001, 300_000, 0];
    match number % 97 {
        50 => BEYOND_RING_SIZE,
        80 => 2 << 20,
        _ => LENGTHS[number as usize % LENGTHS.len()],
    }
}

/// Publishes until `is_over`, then a last message. Returns when all subscribers have them.
fn publish(publisher: &Publisher, node: u8, bytes: &[u8], is_over: &AtomicBool) {
    for number in 0.. {
        let is_last = is_over.load(Relaxed);
        let length = length(number);
        // Each message has other contents.
        let start = number as usize % (bytes.len() - length + 1);
        let part = &bytes[start..start + length];
        let mark =
            MessageMark { publisher: node, number, checksum: crc32fast::hash(part), is_last };
        let mut loan = publisher.loan(part.len() as u64, TIMEOUT).unwrap();
        loan.write(0, part).unwrap();
        loan.set_metadata(&mark.to_bytes()).unwrap();
        loan.publish(TIMEOUT).unwrap();
        if is_last {
            return publisher.flush(TIMEOUT).unwrap();
        }
        std::thread::sleep(PAUSE);
    }
}

struct Reader {
    flow: &'static Flow,
    node: u8,
    subscriber: Subscriber,
}

impl Reader {
    /// Reads until the last message of every publisher.
    fn read(&mut self, count: &AtomicU64) {
        let mut next: BTreeMap<u8, u64> = self.flow.from.iter().map(|node| (*node, 0)).collect();
        let mut unfinished = next.len();
        while unfinished > 0 {
            let name = format!("{} on node {}", self.flow.topic, self.node);
            let sample = self.subscriber.pull(TIMEOUT);
            let sample = sample.unwrap_or_else(|error| panic!("{name} at {next:?}: {error}"));
            let mark = MessageMark::of(&sample);
            let expected = next.get_mut(&mark.publisher).unwrap();
            assert_eq!(mark.number, *expected, "{name}: {mark:?}");
            *expected += 1;
            unfinished -= usize::from(mark.is_last);
            count.fetch_add(1, Relaxed);
        }
    }
}

/// Waits until each count has grown.
#[track_caller]
fn wait_for_progress<'a>(expected: &str, counts: impl Iterator<Item = &'a AtomicU64>) {
    let goals: Vec<_> = counts.map(|count| (count, count.load(Relaxed) + 20)).collect();
    until(expected, || goals.iter().all(|(count, goal)| count.load(Relaxed) >= *goal));
}

fn is_connected(node: &Node, other: u8) -> bool {
    let name = format!("node {other}");
    let rows = node.report().unwrap_or_default();
    rows.iter()
        .any(|row| matches!(row, Row::Peer { is_connected: true, label, .. } if *label == name))
}

fn count_rows(node: &Node, condition: impl Fn(&Row) -> bool) -> usize {
    node.report().unwrap_or_default().iter().filter(|row| condition(row)).count()
}

/// The five nodes. The field order drops members before their services.
struct Nodes {
    nodes: Vec<Node>,
    services: Vec<ChildProcess>,
    networks: Vec<Network>,
    test_dirs: Vec<TestDir>,
}

impl Nodes {
    fn start() -> Self {
        create_hub();
        let test_dirs: Vec<_> = (1..=NODES).map(|_| TestDir::new()).collect();
        let networks: Vec<_> = (1..=NODES).map(Network::new).collect();
        let services: Vec<_> = (1..=NODES)
            .map(|number| serve(&networks[index(number)], number, &test_dirs[index(number)]))
            .collect();
        let nodes = test_dirs.iter().map(TestDir::join_served).collect();
        Self { nodes, services, networks, test_dirs }
    }

    fn at(&self, number: u8) -> &Node {
        &self.nodes[index(number)]
    }

    /// Kills the service of a node and starts another one.
    fn replace_service(&mut self, number: u8) {
        let index = index(number);
        self.services[index].kill();
        self.services[index] = serve(&self.networks[index], number, &self.test_dirs[index]);
    }

    fn others(&self, number: u8) -> impl Iterator<Item = &Node> {
        (1..=NODES).filter(move |other| *other != number).map(|other| self.at(other))
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let nodes = (1..).zip(&self.nodes);
            nodes.for_each(|(number, node)| eprintln!("node {number}: {:#?}", node.report()));
        }
    }
}

fn index(number: u8) -> usize {
    usize::from(number) - 1
}

fn serve(network: &Network, number: u8, test_dir: &TestDir) -> ChildProcess {
    network.within(|| ChildProcess::start(&format!("serves {number}"), test_dir.path()))
}

/// Runs in the namespaces.
pub fn run() {
    let mut nodes = Nodes::start();
    let topics: Vec<BTreeMap<u8, Topic>> = FLOWS
        .iter()
        .map(|flow| {
            let members = flow.from.iter().chain(flow.to);
            members.map(|node| (*node, nodes.at(*node).topic(flow.topic, &settings()).unwrap()))
        })
        .map(Iterator::collect)
        .collect();
    let mut readers: Vec<Reader> = Vec::new();
    for (flow, topics) in FLOWS.iter().zip(&topics) {
        for node in flow.to {
            let subscriber = topics[node].subscriber().unwrap();
            readers.push(Reader { flow, node: *node, subscriber });
        }
    }
    let mut publishers: Vec<(u8, Publisher)> = Vec::new();
    for (flow, topics) in FLOWS.iter().zip(&topics) {
        publishers.extend(flow.from.iter().map(|node| (*node, topics[node].publisher().unwrap())));
    }
    let mut victim = ChildProcess::start("reads-forever wide", nodes.test_dirs[index(4)].path());
    let reads_wide = |row: &Row| matches!(row, Row::Subscriber { topic, .. } if topic == "wide");
    until("another reader", || count_rows(nodes.at(4), reads_wide) == 2);
    for flow in &FLOWS {
        for from in flow.from {
            let others: std::collections::BTreeSet<_> =
                flow.to.iter().filter(|to| *to != from).collect();
            until("all nodes that subscribe", || {
                count_rows(
                    nodes.at(*from),
                    |row| matches!(row, Row::Sent { topic, .. } if topic == flow.topic),
                ) == others.len()
            });
        }
    }

    let bytes = testkit::bytes::pattern(BEYOND_RING_SIZE + 4096, 31);
    let (bytes, is_over) = (&bytes[..], &AtomicBool::new(false));
    let counts: Vec<AtomicU64> = readers.iter().map(|_| AtomicU64::new(0)).collect();
    let of = |flow: &Flow| {
        let readers = FLOWS.iter().flat_map(|flow| flow.to.iter().map(|_| flow.topic));
        let name = flow.topic;
        counts.iter().zip(readers).filter(move |(_, topic)| *topic == name).map(|(it, _)| it)
    };
    std::thread::scope(|scope| {
        for (reader, count) in readers.iter_mut().zip(&counts) {
            scope.spawn(|| reader.read(count));
        }
        for (node, publisher) in publishers.drain(..) {
            scope.spawn(move || publish(&publisher, node, bytes, is_over));
        }
        // After a failure, too: otherwise the threads would never end.
        let _stop = StopOnDrop(is_over);
        wait_for_progress("messages", counts.iter());

        nodes.replace_service(3);
        wait_for_progress("messages after a service of readers was killed", counts.iter());

        cut_link(2);
        until("node 2 to be disconnected", || {
            !nodes.others(2).any(|node| is_connected(node, 2))
                && (1..=NODES).all(|other| !is_connected(nodes.at(2), other))
        });
        wait_for_progress("messages among the others", of(&GATHERED).chain(of(&AROUND)));
        restore_link(2);
        wait_for_progress("messages after the cut", counts.iter());

        victim.kill();
        wait_for_progress("messages after a reader was killed", counts.iter());

        nodes.replace_service(1);
        wait_for_progress("messages after a service of publishers was killed", counts.iter());
    });
    for reader in &mut readers {
        let extra = reader.subscriber.try_pull().unwrap();
        let name = format!("{} on node {}", reader.flow.topic, reader.node);
        assert!(extra.is_none(), "{name}: a message after the last one");
        // The publishers have left.
        assert!(matches!(reader.subscriber.poll_event(), None | Some(Event::NoPublishers)));
    }
    let counts: Vec<_> = counts.iter().map(|count| count.load(Relaxed)).collect();
    println!("messages: {counts:?}");
    drop((readers, topics));
    for node in &nodes.nodes {
        until("all memory to be free", || {
            let rows = node.report().unwrap_or_default();
            !rows.is_empty()
                && !rows.iter().any(|row| matches!(row, Row::Pool { blocks, .. } if *blocks > 0))
        });
    }
}

/// Ends the publishers when it is dropped.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn nothing_is_lost_among_five_nodes() {
    run_inside("topics");
}
