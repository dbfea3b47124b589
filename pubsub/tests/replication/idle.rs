//! What topics cost that nothing happens to.

use pubsub::replication::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pubsub::replication::TopicKey;

use super::support::{
    Lengths, MemoryKind, Nodes, Published, PublishedLog, cpu_time, facts, node, options,
};
use super::{lengths, receive};

#[test]
fn a_thousand_topics_that_are_idle_cost_nothing_and_wake_when_announced() {
    let mut nodes = Nodes::start(2, &options(""));
    let lengths = lengths(&[64]);
    let (log, mut sources) = (PublishedLog::default(), Vec::new());
    for number in 0..1000 {
        let key = TopicKey(number);
        let log = if number == 500 { log.clone() } else { PublishedLog::default() };
        receive(&nodes, key, 1, MemoryKind::Host, &log);
        let may_begin = Arc::new(AtomicU64::new(0));
        let gate = Arc::clone(&may_begin);
        let gated: Lengths = Arc::clone(&lengths);
        let mut source = Published::new(&gated, MemoryKind::Host, 0, 5);
        source.depth = 5;
        let is_done = source.is_done();
        let source = GatedSource { source, gate };
        let options = facts(64);
        let announcer = nodes.of(0).send_topic(key, options, Box::new(source)).unwrap();
        nodes.of(0).tell(Command::AddDestination(key, node(1))).unwrap();
        if number % 50 == 0 {
            nodes.carry();
            // They took what they were told so far, however slow they are.
            (0..2).for_each(|of| drop(nodes.counters(of)));
        }
        sources.push((announcer, may_begin, is_done));
    }
    nodes.until("all are connected", |nodes| nodes.connected == 2000);
    let sleeps = |nodes: &Nodes| {
        let of = |number| nodes.counters(number).sleeps;
        of(0) + of(1)
    };
    // Other work on the machine makes each sleep cost more: the cheapest of three measurements counts.
    let look = || {
        let (before, cpu) = (sleeps(&nodes), cpu_time("fabricast-repl"));
        std::thread::sleep(Duration::from_secs(3));
        // Workers of other tests in this process may end meanwhile.
        let (slept, cpu) =
            (sleeps(&nodes) - before, cpu_time("fabricast-repl").saturating_sub(cpu));
        println!("{slept} sleeps of two workers, {cpu:?} of processor time in three seconds");
        assert!(slept < 1200, "{slept} sleeps of two workers in three seconds");
        cpu
    };
    // One hundredth of a core each: where this test has a process of its own.
    let is_alone = std::env::var_os("NEXTEST").is_some();
    let is_cheap = |cpu| cpu < Duration::from_millis(60);
    assert!((0..3).any(|_| is_cheap(look()) || !is_alone), "too much processor time, see above");
    let (announcer, may_begin, is_done) = &sources[500];
    may_begin.store(1, Ordering::SeqCst);
    announcer.announce_waiter();
    nodes.until("those of one are delivered", |_| is_done());
    log.check(5);
}

/// A source that has nothing until it is opened.
struct GatedSource {
    source: Published,
    gate: Arc<AtomicU64>,
}

impl pubsub::replication::Source for GatedSource {
    fn next(&mut self) -> pubsub::Result<Option<pubsub::replication::OutgoingMessage>> {
        if self.gate.load(Ordering::SeqCst) == 0 { Ok(None) } else { self.source.next() }
    }

    fn release(&mut self, through: u64) {
        self.source.release(through);
    }

    fn release_one(&mut self, position: u64) {
        self.source.release_one(position);
    }
}
