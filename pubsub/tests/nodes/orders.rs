//! Coming to a topic of two nodes, in every order.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use pubsub::{NetworkOptions, Node, NodeOptions, Row, ServiceMode};

use crate::between::{address, join, network};
use crate::ground::{
    Ground, Other, PATIENCE, message, number_of, options, orders, settings, until,
};

/// Messages that both publish when all have come.
const MORE: u64 = 10;

fn has_row(place: &Path, is_so: impl Fn(&Row) -> bool) -> bool {
    pubsub::report(place).is_ok_and(|rows| rows.iter().any(is_so))
}

/// Does the service keep messages for another node?
fn is_carried(place: &Path) -> bool {
    has_row(
        place,
        |row| matches!(row, Row::Subscriber { participant, .. } if participant == "carrier"),
    )
}

fn has_subscriber(place: &Path) -> bool {
    has_row(
        place,
        |row| matches!(row, Row::Subscriber { participant, .. } if participant != "carrier"),
    )
}

/// Who comes. Here whoever comes first serves the node; there it is the peer, for whom the others
/// wait.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Comes {
    Publisher,
    Subscriber,
    Peer,
    PublisherThere,
    SubscriberThere,
}

impl Comes {
    const ALL: [Self; 5] = [
        Self::Publisher,
        Self::Subscriber,
        Self::Peer,
        Self::PublisherThere,
        Self::SubscriberThere,
    ];
}

/// What those say of themselves that have come: here, and there.
#[derive(Default)]
struct Said {
    publishers: [AtomicBool; 2],
    subscribers: [AtomicBool; 2],
    peer: AtomicBool,
    /// Messages that publishers have begun to publish, and in the end how many there are.
    begun: [AtomicU64; 2],
    total: [AtomicU64; 2],
    /// Of what was begun when a publisher's messages were kept for the other side.
    carried: [AtomicU64; 2],
    is_enough: AtomicBool,
    /// Publishers and subscribers that are through.
    done: AtomicU64,
    is_over: AtomicBool,
}

impl Said {
    fn is_there(&self, who: Comes) -> bool {
        match who {
            Comes::Publisher => &self.publishers[0],
            Comes::PublisherThere => &self.publishers[1],
            Comes::Subscriber => &self.subscribers[0],
            Comes::SubscriberThere => &self.subscribers[1],
            Comes::Peer => &self.peer,
        }
        .load(SeqCst)
    }
}

struct Scene {
    grounds: [Ground; 2],
    networks: [NetworkOptions; 2],
    said: Said,
}

impl Scene {
    /// One node knows of the other, or both do.
    fn new(number: usize) -> Self {
        let addresses = [address(), address()];
        let knows = |side: usize| -> Vec<SocketAddr> {
            let other = addresses[1 - side];
            (number % 3 != side).then_some(other).into_iter().collect()
        };
        let networks = [0, 1].map(|side| network(addresses[side], &knows(side)));
        Self { grounds: [Ground::new(), Ground::new()], networks, said: Said::default() }
    }

    fn join(&self, side: usize) -> Node {
        let place = self.grounds[side].path();
        if side == 0 {
            return join(place, self.networks[0].clone());
        }
        Node::join(NodeOptions { service: ServiceMode::Outside, ..options(place) }).unwrap()
    }

    fn comes(&self, who: Comes) {
        match who {
            Comes::Publisher => self.publishes(0),
            Comes::PublisherThere => self.publishes(1),
            Comes::Subscriber => self.subscribes(0),
            Comes::SubscriberThere => self.subscribes(1),
            Comes::Peer => {
                let node = join(self.grounds[1].path(), self.networks[1].clone());
                self.said.peer.store(true, SeqCst);
                until("the end", || self.said.is_over.load(SeqCst));
                drop(node);
            }
        }
    }

    /// Publishes all the time.
    fn publishes(&self, side: usize) {
        let node = self.join(side);
        let publisher = node.topic("numbers", &settings()).unwrap().publisher().unwrap();
        self.said.publishers[side].store(true, SeqCst);
        let mut number = 0;
        while !self.said.is_enough.load(SeqCst) {
            self.said.begun[side].store(number + 1, SeqCst);
            publisher.push(&message(number), PATIENCE).unwrap();
            number += 1;
            std::thread::sleep(Duration::from_micros(300));
        }
        self.said.total[side].store(number, SeqCst);
        publisher.flush(PATIENCE).unwrap();
        self.waits_for_all();
    }

    /// Whoever serves stays until all is said: a node whose last ones go while one service follows
    /// the other has nobody who says goodbye, and others wait for it.
    fn waits_for_all(&self) {
        self.said.done.fetch_add(1, SeqCst);
        until("all to be done", || self.said.done.load(SeqCst) == 4);
    }

    /// Reads until it has all of both publishers, and misses nothing on the way.
    fn subscribes(&self, side: usize) {
        let node = self.join(side);
        let mut subscriber = node.topic("numbers", &settings()).unwrap().subscriber().unwrap();
        // Whatever is begun from now on has to come.
        let mut latest = [0, 1].map(|_| u64::MAX);
        latest[side] = self.said.begun[side].load(SeqCst);
        self.said.subscribers[side].store(true, SeqCst);
        let mut next = [None; 2];
        let end = Instant::now() + PATIENCE;
        let is_done = |next: &[Option<u64>; 2]| {
            let mut both = [0, 1].into_iter();
            self.said.is_enough.load(SeqCst)
                && both.all(|from| next[from] == Some(self.said.total[from].load(SeqCst)))
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
        let carried = self.said.carried[1 - side].load(SeqCst);
        assert!(latest[1 - side] <= carried, "at {side}: it begins late with the other's");
        assert!(subscriber.try_pull().unwrap().is_none(), "one came twice");
        self.waits_for_all();
    }

    fn plays(&self, order: [Comes; 5]) {
        let said = &self.said;
        std::thread::scope(|scope| {
            let mut parts = Vec::new();
            let mut peer = None;
            for who in order {
                let part = scope.spawn(move || self.comes(who));
                if who == Comes::Peer {
                    peer = Some(part);
                } else {
                    parts.push(part);
                }
                let there = [Comes::PublisherThere, Comes::SubscriberThere];
                if peer.is_some() || !there.contains(&who) {
                    until("one who comes", || said.is_there(who));
                }
            }
            until("all", || Comes::ALL.into_iter().all(|who| said.is_there(who)));
            for side in [0, 1] {
                until("the other node", || is_carried(self.grounds[side].path()));
                said.carried[side].store(said.begun[side].load(SeqCst), SeqCst);
            }
            let enough = [0, 1].map(|side| said.begun[side].load(SeqCst) + MORE);
            let is_enough = |side: usize| said.begun[side].load(SeqCst) >= enough[side];
            until("more messages", || is_enough(0) && is_enough(1));
            for total in &said.total {
                total.store(u64::MAX, SeqCst);
            }
            said.is_enough.store(true, SeqCst);
            let outcomes: Vec<_> = parts.into_iter().map(|part| part.join()).collect();
            // Those that it serves leave before it.
            said.is_over.store(true, SeqCst);
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
    in_all_orders(|number, order| Scene::new(number).plays(order.map(|who| Comes::ALL[who])));
}

#[test]
fn processes_of_two_nodes_come_in_every_order() {
    in_all_orders(|_, order: [usize; 4]| {
        let (grounds, addresses) = ([Ground::new(), Ground::new()], [address(), address()]);
        let [here, there] = grounds.each_ref().map(Ground::path);
        let network = |side: usize| format!("{} {}", addresses[side], addresses[1 - side]);
        let roles = [
            (here, format!("comes-and-publishes {} 12", network(0))),
            (here, format!("comes-and-reads {} 12", network(0))),
            (there, format!("serves {}", network(1))),
            (there, "reads numbers 12".to_owned()),
        ];
        let mut others = [const { None }; 4];
        for who in order {
            let (place, role) = &roles[who];
            others[who] = Some(Other::start(role, place));
            let is_there = || match who {
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
