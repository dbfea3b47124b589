//! A holder: a reader that keeps samples for a random time, and compares what they contain with what
//! it read first, again and again, also after it was evicted.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use pubsub::{ErrorKind, Sample, Subscriber, Topic};
use testkit::children::{next_line, say};

use crate::message::Message;
use crate::random::Random;
use crate::topics;

/// Interval of comparisons.
const INTERVAL: Duration = Duration::from_millis(10);
/// The longest time without a pull: longer than the release deadline of its topics.
const LONGEST_STALL: u64 = 4000;

/// Counts of one holder.
#[derive(Debug, Default)]
pub struct Counts {
    pub comparisons: u64,
    pub evictions: u64,
    /// Samples that were held when their subscriber was evicted.
    pub outlived: u64,
    pub full: u64,
}

impl Counts {
    fn line(&self) -> String {
        let Self { comparisons, evictions, outlived, full } = self;
        format!("{comparisons} {evictions} {outlived} {full}")
    }

    pub fn of(line: &str) -> Self {
        let numbers: Vec<u64> =
            line.split(' ').map(|number| number.parse().expect("a number")).collect();
        let [comparisons, evictions, outlived, full] = numbers.try_into().expect("four numbers");
        Self { comparisons, evictions, outlived, full }
    }

    pub fn add(&mut self, other: &Self) {
        self.comparisons += other.comparisons;
        self.evictions += other.evictions;
        self.outlived += other.outlived;
        self.full += other.full;
    }
}

struct Held {
    sample: Sample,
    first: Vec<u8>,
    until: Instant,
}

impl Held {
    fn compare(&self) {
        assert!(self.sample.is_valid(), "a held sample is not valid: {:?}", self.sample);
        let bytes = self.sample.to_vec().expect("read a held sample");
        assert_eq!(bytes, self.first, "a held sample changed: {:?}", self.sample);
    }
}

pub fn run(directory: &Path, seed: u64) {
    let node = topics::join(directory);
    let is_over = &AtomicBool::new(false);
    let mut counts = Counts::default();
    std::thread::scope(|scope| {
        let threads: Vec<_> = topics::held()
            .into_iter()
            .zip(seed..)
            .map(|((name, settings), seed)| {
                let topic = node.topic(&name, &settings).expect("open the topic");
                scope.spawn(move || hold(&topic, Random::new(seed), is_over))
            })
            .collect();
        say("ready");
        while next_line().is_some_and(|line| line != "stop") {}
        is_over.store(true, Relaxed);
        threads.into_iter().for_each(|thread| counts.add(&thread.join().expect("hold samples")));
    });
    say(&counts.line());
}

fn hold(topic: &Topic, mut random: Random, is_over: &AtomicBool) -> Counts {
    let (mut counts, mut held): (Counts, Vec<Held>) = Default::default();
    let (mut subscriber, mut pulls_at) = (None, Instant::now());
    while !is_over.load(Relaxed) {
        let now = Instant::now();
        held.iter().for_each(Held::compare);
        counts.comparisons += held.len() as u64;
        held.retain(|one| one.until > now);
        if now >= pulls_at {
            if subscriber.is_none() {
                subscriber = subscribe(topic);
            }
            let is_evicted = subscriber.as_mut().is_some_and(|subscriber| {
                !pull_all(subscriber, &mut held, &mut random, &mut counts)
            });
            if is_evicted {
                counts.evictions += 1;
                counts.outlived += held.len() as u64;
                // Its samples stay.
                subscriber = subscribe(topic);
            }
            let stalls = random.below(20) == 0;
            let pause = if stalls { random.below(LONGEST_STALL) } else { random.below(30) };
            pulls_at = now + Duration::from_millis(pause);
        }
        std::thread::sleep(INTERVAL);
    }
    counts
}

/// None while evicted subscribers that hold samples occupy all places of the topic.
fn subscribe(topic: &Topic) -> Option<Subscriber> {
    match topic.subscriber() {
        Err(error) if error.kind() == ErrorKind::TooMany => None,
        result => Some(result.expect("subscribe")),
    }
}

/// Pulls what there is, and keeps some of it. False if the subscriber was evicted.
fn pull_all(
    subscriber: &mut Subscriber,
    held: &mut Vec<Held>,
    random: &mut Random,
    counts: &mut Counts,
) -> bool {
    loop {
        match subscriber.try_pull() {
            Ok(Some(sample)) => {
                let first = sample.to_vec().expect("read a sample");
                assert!(Message::of(&first).is_some(), "a corrupted message");
                if random.below(4) == 0 {
                    let longest = if random.below(10) == 0 { 20_000 } else { 500 };
                    let until = Instant::now() + Duration::from_millis(random.below(longest));
                    held.push(Held { sample, first, until });
                }
            }
            Ok(None) => return true,
            Err(error) if error.kind() == ErrorKind::TooManySamples => {
                counts.full += 1;
                return true;
            }
            Err(error) if error.kind() == ErrorKind::Evicted => return false,
            Err(error) => panic!("pull: {error}"),
        }
    }
}
