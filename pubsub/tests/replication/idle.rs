//! Costs of idle topics.

use pubsub::replication::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pubsub::replication::TopicKey;

use super::support::{
    Lengths, MemoryKind, Nodes, PublishedLog, TestSource, cpu_time, node, options, topic,
};
use super::{lengths, receive};

#[test]
fn thousand_idle_topics_use_no_cpu_and_wake_on_publish() {
    let mut nodes = Nodes::start(2, &options(""));
    let lengths = lengths(&[64]);
    let (log, mut sources) = (PublishedLog::default(), Vec::new());
    for number in 0..1000 {
        let key = TopicKey(number);
        let log = if number == 500 { log.clone() } else { PublishedLog::default() };
        receive(&nodes, key, 1, MemoryKind::Host, &log);
        let is_open = Arc::new(AtomicU64::new(0));
        let gate = Arc::clone(&is_open);
        let gated: Lengths = Arc::clone(&lengths);
        let mut source = TestSource::new(&gated, MemoryKind::Host, 0, 5);
        source.depth = 5;
        let is_done = source.is_done();
        let source = GatedSource { source, gate };
        let options = topic(64);
        let announcer = nodes.of(0).send_topic(key, options, Box::new(source)).unwrap();
        nodes.of(0).send(Command::AddDestination(key, node(1))).unwrap();
        if number % 50 == 0 {
            nodes.process_events();
            // Waits until the workers have processed their commands, so that the queues have room.
            (0..2).for_each(|of| drop(nodes.counters(of)));
        }
        sources.push((announcer, is_open, is_done));
    }
    nodes.until("all connections", |nodes| nodes.connected == 2000);
    let sleeps = |nodes: &Nodes| {
        let of = |number| nodes.counters(number).sleeps;
        of(0) + of(1)
    };
    // Other load on the machine makes each sleep cost more: one of three measurements must pass.
    let measure = || {
        let (before, cpu) = (sleeps(&nodes), cpu_time("fabricast-repl"));
        std::thread::sleep(Duration::from_secs(3));
        // Workers of other tests in this process may end during the measurement.
        let (slept, cpu) =
            (sleeps(&nodes) - before, cpu_time("fabricast-repl").saturating_sub(cpu));
        println!("{slept} sleeps of two workers, {cpu:?} of processor time in three seconds");
        assert!(slept < 1200, "{slept} sleeps of two workers in three seconds");
        cpu
    };
    // One hundredth of a core each, checked only if this test has a process of its own.
    let is_alone = std::env::var_os("NEXTEST").is_some();
    let is_cheap = |cpu| cpu < Duration::from_millis(60);
    assert!((0..3).any(|_| is_cheap(measure()) || !is_alone), "too much processor time");
    let (announcer, is_open, is_done) = &sources[500];
    is_open.store(1, Ordering::SeqCst);
    announcer.announce_waiter();
    nodes.until("the messages of one topic", |_| is_done());
    log.check(5);
}

/// A source without messages until its gate is opened.
struct GatedSource {
    source: TestSource,
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
