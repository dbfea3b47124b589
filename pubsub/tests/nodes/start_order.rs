//! Coming to a topic of two nodes, in every order.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use pubsub::{NetworkOptions, Node, NodeOptions, Row, ServiceMode};

use crate::between::{address, join, network};
use crate::support::{
    ChildProcess, TIMEOUT, TestDir, message, number_of, options, orders, settings, until,
};

/// Messages that both publish when all have come.
const MORE: u64 = 10;

fn has_row(place: &Path, is_so: impl Fn(&Row) -> bool) -> bool {
    pubsub::report(place).is_ok_and(|rows| rows.iter().any(is_so))
}

/// Does the service keep messages for another node?
fn is_replicated(place: &Path) -> bool {
    has_row(
        place,
        |row| matches!(row, Row::Subscriber { participant, .. } if participant == "replication"),
    )
}

fn has_subscriber(place: &Path) -> bool {
    has_row(
        place,
        |row| matches!(row, Row::Subscriber { participant, .. } if participant != "replication"),
    )
}

/// Who comes. Here whoever comes first serves the node; there it is the peer, for whom the others
/// wait.
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

/// What those say of themselves that have come: here, and there.
#[derive(Default)]
struct Progress {
    publishers: [AtomicBool; 2],
    subscribers: [AtomicBool; 2],
    peer: AtomicBool,
    /// Messages that publishers have begun to publish, and in the end how many there are.
    begun: [AtomicU64; 2],
    total: [AtomicU64; 2],
    /// Of what was begun when a publisher's messages were kept for the other side.
    replicated: [AtomicU64; 2],
    is_enough: AtomicBool,
    /// Publishers and subscribers that are through.
    done: AtomicU64,
    is_over: AtomicBool,
}

impl Progress {
    fn is_there(&self, step: Step) -> bool {
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
    /// One node knows of the other, or both do.
    fn new(number: usize) -> Self {
        let addresses = [address(), address()];
        let knows = |side: usize| -> Vec<SocketAddr> {
            let other = addresses[1 - side];
            (number % 3 != side).then_some(other).into_iter().collect()
        };
        let networks = [0, 1].map(|side| network(addresses[side], &knows(side)));
        Self {
            test_dirs: [TestDir::new(), TestDir::new()],
            networks,
            progress: Progress::default(),
        }
    }

    fn join(&self, side: usize) -> Node {
        let place = self.test_dirs[side].path();
        if side == 0 {
            return join(place, self.networks[0].clone());
        }
        Node::join(NodeOptions { service: ServiceMode::External, ..options(place) }).unwrap()
    }

    fn run_step(&self, step: Step) {
        match step {
            Step::Publisher => self.publishes(0),
            Step::RemotePublisher => self.publishes(1),
            Step::Subscriber => self.subscribes(0),
            Step::RemoteSubscriber => self.subscribes(1),
            Step::Peer => {
                let node = join(self.test_dirs[1].path(), self.networks[1].clone());
                self.progress.peer.store(true, SeqCst);
                until("the end", || self.progress.is_over.load(SeqCst));
                drop(node);
            }
        }
    }

    /// Publishes all the time.
    fn publishes(&self, side: usize) {
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
        self.waits_for_all();
    }

    /// Whoever serves stays until all is said: a node whose last ones go while one service follows
    /// the other has nobody who says goodbye, and others wait for it.
    fn waits_for_all(&self) {
        self.progress.done.fetch_add(1, SeqCst);
        until("all to be done", || self.progress.done.load(SeqCst) == 4);
    }

    /// Reads until it has all of both publishers, and misses nothing on the way.
    fn subscribes(&self, side: usize) {
        let node = self.join(side);
        let mut subscriber = node.topic("numbers", &settings()).unwrap().subscriber().unwrap();
        // Whatever is begun from now on has to come.
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
            assert!(Instant::now() < end, "at {side} it has {next:?}");
            let Ok(sample) = subscriber.pull(Duration::from_millis(20)) else { continue };
            let from = if sample.origin().is_some() { 1 - side } else { side };
            let number = number_of(&sample);
            let expected = next[from].replace(number + 1);
            match expected {
                Some(expected) => assert_eq!(number, expected, "at {side} of {from}"),
                None => assert!(number <= latest[from], "at {side} of {from}: it begins late"),
            }
            if expected.is_none() && from != side {
                latest[from] = number;
            }
        }
        let replicated = self.progress.replicated[1 - side].load(SeqCst);
        assert!(latest[1 - side] <= replicated, "at {side}: it begins late with the other's");
        assert!(subscriber.try_pull().unwrap().is_none(), "one came twice");
        self.waits_for_all();
    }

    fn run(&self, order: [Step; 5]) {
        let progress = &self.progress;
        std::thread::scope(|scope| {
            let mut parts = Vec::new();
            let mut peer = None;
            for step in order {
                let part = scope.spawn(move || self.run_step(step));
                if step == Step::Peer {
                    peer = Some(part);
                } else {
                    parts.push(part);
                }
                let there = [Step::RemotePublisher, Step::RemoteSubscriber];
                if peer.is_some() || !there.contains(&step) {
                    until("one who comes", || progress.is_there(step));
                }
            }
            until("all", || Step::ALL.into_iter().all(|step| progress.is_there(step)));
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
            let outcomes: Vec<_> = parts.into_iter().map(|part| part.join()).collect();
            // Those that it serves leave before it.
            progress.is_over.store(true, SeqCst);
            assert!(outcomes.iter().all(Result::is_ok), "not in the order {order:?}");
        });
    }
}

/// Two at a time.
fn in_all_orders<const COUNT: usize>(play: impl Fn(usize, [usize; COUNT]) + Sync) {
    let (orders, next) = (orders(), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, SeqCst) as usize;
                    let Some(order) = orders.get(number) else { break };
                    play(number, *order);
                }
            });
        }
    });
}

#[test]
fn in_every_order_nothing_is_lost_that_was_published_after_one_came() {
    in_all_orders(|number, order| Scenario::new(number).run(order.map(|step| Step::ALL[step])));
}

#[test]
fn processes_of_two_nodes_come_in_every_order() {
    in_all_orders(|_, order: [usize; 4]| {
        let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
        let [here, there] = test_dirs.each_ref().map(TestDir::path);
        let network = |side: usize| format!("{} {}", addresses[side], addresses[1 - side]);
        let roles = [
            (here, format!("comes-and-publishes {} 12", network(0))),
            (here, format!("comes-and-reads {} 12", network(0))),
            (there, format!("serves {}", network(1))),
            (there, "reads numbers 12".to_owned()),
        ];
        let mut others = [const { None }; 4];
        for step in order {
            let (place, role) = &roles[step];
            others[step] = Some(ChildProcess::start(role, place));
            let is_there = || match step {
                0 => has_row(here, |row| matches!(row, Row::Publisher { .. })),
                1 => has_subscriber(here),
                2 => pubsub::report(there).is_ok(),
                // It waits for the service.
                _ => others[2].is_none() || has_subscriber(there),
            };
            // All may have been said and done when the last one has come.
            if others.iter().any(Option::is_none) {
                until("one who comes", is_there);
            }
        }
        let [publishes, reads, serves, reads_there] = others.each_mut();
        for other in [publishes, reads, reads_there].into_iter().flatten() {
            other.finish();
        }
        serves.as_mut().unwrap().end();
    });
}
