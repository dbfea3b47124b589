//! The workers of a measurement: services of nodes, and readers.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ipc::Words;
use pubsub::{Budgets, NetworkOptions, Node, NodeOptions, ServiceMode};
use serde::{Deserialize, Serialize};

use super::timed_subscriber::{self, SubscriberTask};
use super::{Service, TopicResult, baseline, many_topics, wire_baseline};
use crate::exchange::plan::Wait;
use crate::process::set_affinity;
use crate::worker_group::{self, LONGEST, SharedSegment, Task};
use command::exit::{Exit, Failure};

pub(super) const TIMEOUT: Duration = Duration::from_secs(60);
/// Stamps of a message: when it was published, how long the loan and the fill took before, and its
/// number.
const STAMPS: usize = 4;
/// The word that ends services and other waiting workers.
const END_WORD: usize = 0;
/// Ended pauses: two lines, for readers that pause independently.
const RESUME_WORDS: usize = 1;
/// Requested and completed turns of the ring throughput baseline.
const WIRE_WORDS: (usize, usize) = (3, 4);
/// Common words of all workers.
pub(super) const WORDS: usize = 5;
/// Longer than one sleep of a paused worker.
pub(super) const WAKEUP_TIME: Duration = Duration::from_millis(4);

/// The task of a worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum WorkerRole {
    Serve(Service),
    Read(SubscriberTask),
    Many(many_topics::ManyTopicsRole),
    Baseline(baseline::Role),
    Wire(wire_baseline::WireEnd),
}

/// The result of a worker.
pub(super) type WorkerResult = worker_group::WorkerResult<Option<TopicResult>>;

/// Nanoseconds of the clock that all processes of a machine share, and that stamps messages.
#[inline]
pub(super) fn now() -> u64 {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_REALTIME);
    time.map_or(0, |time| time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}

/// The stamps attached to a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamps {
    pub(super) published: u64,
    pub(super) loan: u64,
    /// 0 if not measured.
    pub(super) fill: u64,
    pub(super) number: u64,
}

impl Stamps {
    pub(super) fn bytes(self) -> [u8; STAMPS * 8] {
        let mut bytes = [0; STAMPS * 8];
        let words = [self.published, self.loan, self.fill, self.number];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    pub(super) fn of(bytes: &[u8]) -> Option<Self> {
        let word =
            |at: usize| Some(u64::from_le_bytes(bytes.get(at * 8..at * 8 + 8)?.try_into().ok()?));
        Some(Self { published: word(0)?, loan: word(1)?, fill: word(2)?, number: word(3)? })
    }
}

/// Joins a node that another process serves.
pub(super) fn join(directory: &Path, label: &str, waiting: Wait) -> Result<Node, Failure> {
    let options = NodeOptions {
        directory: directory.to_owned(),
        label: label.to_owned(),
        service: ServiceMode::External,
        service_timeout: TIMEOUT,
        waiting: waiting.wait_strategy(),
        ..NodeOptions::default()
    };
    Ok(Node::join(options)?)
}

/// Joins a node, and serves it.
pub(super) fn serve(service: &Service) -> Result<Node, Failure> {
    let network = service.network.as_ref().map(|network| NetworkOptions {
        listen: Some(network.listen),
        peers: network.peer.iter().map(ToString::to_string).collect(),
        provider: network.replication.provider.clone(),
        lanes: network.replication.lanes.unwrap_or(0) as usize,
        workers: network.replication.workers.unwrap_or(0) as usize,
        lost_after: TIMEOUT,
        insecure: true,
        ..NetworkOptions::default()
    });
    Ok(Node::join(NodeOptions {
        directory: service.directory.clone(),
        label: "service".to_owned(),
        service_timeout: TIMEOUT,
        budgets: Budgets { host: Some(service.budget), device: Some(service.budget) },
        network,
        ..NodeOptions::default()
    })?)
}

/// Ends all waiting workers.
pub(super) fn end_all(shared: &SharedSegment) -> Result<(), Failure> {
    shared.part()?.store(END_WORD, 1, Ordering::Release);
    Ok(())
}

pub(super) fn has_ended(shared: &SharedSegment) -> Result<bool, Failure> {
    Ok(shared.part()?.load(END_WORD, Ordering::Acquire) != 0)
}

/// Ends the pause of a line of readers.
pub(super) fn next_turn(shared: &SharedSegment, line: usize) -> Result<(), Failure> {
    shared.part()?.fetch_add(RESUME_WORDS + line, 1);
    // The pause must not be awaited while a message is in flight.
    std::thread::sleep(WAKEUP_TIME);
    Ok(())
}

/// Requests a turn of the ring throughput baseline, and waits for it.
pub(super) fn wire_turn(shared: &SharedSegment) -> Result<(), Failure> {
    let requested = shared.part()?.fetch_add(WIRE_WORDS.0, 1) + 1;
    await_word(shared, WIRE_WORDS.1, requested, 2 * TIMEOUT, "for the ring throughput baseline")
}

/// Waits until a word has this value, or a higher one.
fn await_word(
    shared: &SharedSegment,
    word: usize,
    least: u64,
    longest: Duration,
    what: &str,
) -> Result<(), Failure> {
    let end = Instant::now() + longest;
    while shared.part()?.load(word, Ordering::Acquire) < least {
        if Instant::now() > end {
            return Err(Failure::new(Exit::Deadline, format!("timed out waiting {what}")));
        }
        std::thread::sleep(WAKEUP_TIME / 4);
    }
    Ok(())
}

/// Number of requested turns of the ring throughput baseline.
pub(super) fn wire_asked(shared: &SharedSegment) -> Result<u64, Failure> {
    Ok(shared.part()?.load(WIRE_WORDS.0, Ordering::Acquire))
}

/// Reports so many turns as completed.
pub(super) fn wire_done(shared: &SharedSegment, turns: u64) -> Result<(), Failure> {
    shared.part()?.store(WIRE_WORDS.1, turns, Ordering::Release);
    Ok(())
}

pub(super) fn empty_result(iterations: u64) -> WorkerResult {
    WorkerResult { iterations, verified: true, ..WorkerResult::default() }
}

impl Task for WorkerRole {
    const NAME: &'static str = "topic";
    type Detail = Option<TopicResult>;

    fn run(
        &self,
        shared: &SharedSegment,
        ready: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<WorkerResult, Failure> {
        match self {
            WorkerRole::Serve(service) => {
                // All its threads inherit this affinity.
                set_affinity(&service.cores)?;
                let _node = serve(service)?;
                ready()?;
                while !has_ended(shared)? {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Ok(empty_result(0))
            }
            WorkerRole::Read(reading) => timed_subscriber::read(shared, reading, ready),
            WorkerRole::Many(side) => many_topics::take(shared, side, ready),
            WorkerRole::Baseline(role) => baseline::take(role, ready),
            WorkerRole::Wire(end) => wire_baseline::take(shared, end, ready),
        }
    }
}

/// Pauses until this line of readers was resumed so often.
pub(super) fn pause(shared: &SharedSegment, line: usize, pauses: u64) -> Result<(), Failure> {
    await_word(shared, RESUME_WORDS + line, pauses, LONGEST, "to be resumed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_are_read_as_written() {
        let stamps = Stamps { published: 1, loan: 2, fill: 3, number: u64::MAX };
        assert_eq!(Stamps::of(&stamps.bytes()), Some(stamps));
        assert_eq!(Stamps::of(&stamps.bytes()[1..]), None);
    }
}
