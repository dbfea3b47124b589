//! Processes join a topic of two nodes, in every order.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use pubsub::{NetworkOptions, Node, NodeOptions, ReportedSubscriber, Row, ServiceMode};

use crate::between::{address, join, network};
use crate::support::{
    ChildProcess, TIMEOUT, TestDir, message, number_of, options, orders, settings, until,
};

/// Messages that each publisher adds after all steps.
const MORE: u64 = 10;

fn has_row(directory: &Path, condition: impl Fn(&Row) -> bool) -> bool {
    pubsub::report(directory).is_ok_and(|rows| rows.iter().any(condition))
}

/// Does the service retain messages for another node?
fn is_replicated(directory: &Path) -> bool {
    has_row(
        directory,
        |row| matches!(row, Row::Subscriber { participant, .. } if *participant == ReportedSubscriber::Replication),
    )
}

fn has_subscriber(directory: &Path) -> bool {
    has_row(
        directory,
        |row| matches!(row, Row::Subscriber { participant, .. } if *participant != ReportedSubscriber::Replication),
    )
}

/// A process that joins. The first one of the first node becomes its service. The service of the
/// second node is the peer, and the others wait for it.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Step {
    Publisher,
    Subscriber,
    Peer,
    RemotePublisher,
    RemoteSubscriber,
}

impl Step {
    const ALL: [Self; 5] = [
        Self::Publisher,
        Self::Subscriber,
        Self::Peer,
        Self::RemotePublisher,
        Self::RemoteSubscriber,
    ];
}

/// Progress of the processes, by node.
#[derive(Default)]
struct Progress {
    publishers: [AtomicBool; 2],
    subscribers: [AtomicBool; 2],
    peer: AtomicBool,
    /// Messages that publishers have begun to publish, and their final number.
    begun: [AtomicU64; 2],
    total: [AtomicU64; 2],
    /// Value of `begun` when messages of a publisher were already retained for the other node.
    replicated: [AtomicU64; 2],
    is_enough: AtomicBool,
    /// Publishers and subscribers that have finished.
    done: AtomicU64,
    is_over: AtomicBool,
}

impl Progress {
    fn has_joined(&self, step: Step) -> bool {
        match step {
            Step::Publisher => &self.publishers[0],
            Step::RemotePublisher => &self.publishers[1],
            Step::Subscriber => &self.subscribers[0],
            Step::RemoteSubscriber => &self.subscribers[1],
            Step::Peer => &self.peer,
        }
        .load(SeqCst)
    }
}

struct Scenario {
    test_dirs: [TestDir; 2],
    networks: [NetworkOptions; 2],
    progress: Progress,
}

impl Scenario {
    /// One node has the address of the other, or both have.
    fn new(number: usize) -> Self {
        let addresses = [address(), address()];
        let peers = |side: usize| -> Vec<SocketAddr> {
            let other = addresses[1 - side];
            (number % 3 != side).then_some(other).into_iter().collect()
        };
        let networks = [0, 1].map(|side| network(addresses[side], &peers(side)));
        Self {
            test_dirs: [TestDir::new(), TestDir::new()],
            networks,
            progress: Progress::default(),
        }
    }

    fn join(&self, side: usize) -> Node {
        let directory = self.test_dirs[side].path();
        if side == 0 {
            return join(directory, self.networks[0].clone());
        }
        Node::join(NodeOptions { service: ServiceMode::External, ..options(directory) }).unwrap()
    }

    fn run_step(&self, step: Step) {
        match step {
            Step::Publisher => self.publish(0),
            Step::RemotePublisher => self.publish(1),
            Step::Subscriber => self.subscribe(0),
            Step::RemoteSubscriber => self.subscribe(1),
            Step::Peer => {
                let node = join(self.test_dirs[1].path(), self.networks[1].clone());
                self.progress.peer.store(true, SeqCst);
                until("the end", || self.progress.is_over.load(SeqCst));
                drop(node);
            }
        }
    }

    fn publish(&self, side: usize) {
        let node = self.join(side);
        let publisher = node.topic("numbers", &settings()).unwrap().publisher().unwrap();
        self.progress.publishers[side].store(true, SeqCst);
        let mut number = 0;
        while !self.progress.is_enough.load(SeqCst) {
            self.progress.begun[side].store(number + 1, SeqCst);
            publisher.push(&message(number), TIMEOUT).unwrap();
            number += 1;
            std::thread::sleep(Duration::from_micros(300));
        }
        self.progress.total[side].store(number, SeqCst);
        publisher.flush(TIMEOUT).unwrap();
        self.wait_for_all();
    }

    /// Keeps the service until all have finished: if the last members leave during a takeover, no
    /// process closes the session, and the other node waits for it.
    fn wait_for_all(&self) {
        self.progress.done.fetch_add(1, SeqCst);
        until("all to be done", || self.progress.done.load(SeqCst) == 4);
    }

    /// Reads all messages of both publishers and checks that none is missing.
    fn subscribe(&self, side: usize) {
        let node = self.join(side);
        let mut subscriber = node.topic("numbers", &settings()).unwrap().subscriber().unwrap();
        // Every message begun after this must arrive.
        let mut latest = [0, 1].map(|_| u64::MAX);
        latest[side] = self.progress.begun[side].load(SeqCst);
        self.progress.subscribers[side].store(true, SeqCst);
        let mut next = [None; 2];
        let end = Instant::now() + TIMEOUT;
        let is_done = |next: &[Option<u64>; 2]| {
            let mut both = [0, 1].into_iter();
            self.progress.is_enough.load(SeqCst)
                && both.all(|from| next[from] == Some(self.progress.total[from].load(SeqCst)))
        };
        while !is_done(&next) {
            assert!(Instant::now() < end, "timeout: node {side} has {next:?}");
            let Ok(sample) = subscriber.pull(Duration::from_millis(20)) else { continue };
            let from = if sample.origin().is_some() { 1 - side } else { side };
            let number = number_of(&sample);
            let expected = next[from].replace(number + 1);
            match expected {
                Some(expected) => assert_eq!(number, expected, "on node {side} from {from}"),
                None => assert!(number <= latest[from], "on node {side} from {from}: late start"),
            }
            if expected.is_none() && from != side {
                latest[from] = number;
            }
        }
        let replicated = self.progress.replicated[1 - side].load(SeqCst);
        assert!(latest[1 - side] <= replicated, "on node {side}: late start of the other's");
        assert!(subscriber.try_pull().unwrap().is_none(), "a message was delivered twice");
        self.wait_for_all();
    }

    fn run(&self, order: [Step; 5]) {
        let progress = &self.progress;
        std::thread::scope(|scope| {
            let mut threads = Vec::new();
            let mut peer = None;
            for step in order {
                let thread = scope.spawn(move || self.run_step(step));
                if step == Step::Peer {
                    peer = Some(thread);
                } else {
                    threads.push(thread);
                }
                let remote = [Step::RemotePublisher, Step::RemoteSubscriber];
                if peer.is_some() || !remote.contains(&step) {
                    until("the next process", || progress.has_joined(step));
                }
            }
            until("all", || Step::ALL.into_iter().all(|step| progress.has_joined(step)));
            for side in [0, 1] {
                until("the other node", || is_replicated(self.test_dirs[side].path()));
                progress.replicated[side].store(progress.begun[side].load(SeqCst), SeqCst);
            }
            let enough = [0, 1].map(|side| progress.begun[side].load(SeqCst) + MORE);
            let is_enough = |side: usize| progress.begun[side].load(SeqCst) >= enough[side];
            until("more messages", || is_enough(0) && is_enough(1));
            for total in &progress.total {
                total.store(u64::MAX, SeqCst);
            }
            progress.is_enough.store(true, SeqCst);
            let outcomes: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
            // The peer leaves after the members that it serves.
            progress.is_over.store(true, SeqCst);
            assert!(outcomes.iter().all(Result::is_ok), "failed in the order {order:?}");
        });
    }
}

/// Runs two orders at a time.
fn in_all_orders<const COUNT: usize>(run: impl Fn(usize, [usize; COUNT]) + Sync) {
    let (orders, next) = (orders(), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, SeqCst) as usize;
                    let Some(order) = orders.get(number) else { break };
                    run(number, *order);
                }
            });
        }
    });
}

#[test]
fn messages_after_joining_arrive_in_every_start_order() {
    in_all_orders(|number, order| Scenario::new(number).run(order.map(|step| Step::ALL[step])));
}

#[test]
fn processes_of_two_nodes_start_in_every_order() {
    in_all_orders(|_, order: [usize; 4]| {
        let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
        let [first, second] = test_dirs.each_ref().map(TestDir::path);
        let network = |side: usize| format!("{} {}", addresses[side], addresses[1 - side]);
        let roles = [
            (first, format!("joins-and-publishes {} 12", network(0))),
            (first, format!("joins-and-reads {} 12", network(0))),
            (second, format!("serves {}", network(1))),
            (second, "reads numbers 12".to_owned()),
        ];
        let mut others = [const { None }; 4];
        for step in order {
            let (directory, role) = &roles[step];
            others[step] = Some(ChildProcess::start(role, directory));
            let has_joined = || match step {
                0 => has_row(first, |row| matches!(row, Row::Publisher { .. })),
                1 => has_subscriber(first),
                2 => pubsub::report(second).is_ok(),
                // The reader waits for the service.
                _ => others[2].is_none() || has_subscriber(second),
            };
            // After the last process has joined, all may have finished already.
            if others.iter().any(Option::is_none) {
                until("the next process", has_joined);
            }
        }
        let [publisher, reader, service, remote_reader] = others.each_mut();
        for other in [publisher, reader, remote_reader].into_iter().flatten() {
            other.finish();
        }
        service.as_mut().unwrap().end();
    });
}
