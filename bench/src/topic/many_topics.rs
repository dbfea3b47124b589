//! Many topics on two nodes at once: does any topic stall, or get a smaller share?

use std::path::PathBuf;
use std::time::{Duration, Instant};

use pubsub::{Publisher, Subscriber};
use serde::{Deserialize, Serialize};

use super::message_stamps::now;
use super::node::{join, services};
use super::role::WorkerRole;
use super::shared_words::{WORDS, end_all, has_ended};
use super::topic_results::{WorkerResult, common, empty_result, found};
use super::{Arguments, TopicKind, TopicResult};
use crate::exchange::plan::Wait;
use crate::random_pattern::RandomPattern;
use crate::report::{Common, Metrics, Report};
use crate::worker_group::{SharedSegment, WorkerGroup};
use command::exit::{Exit, Failure};
use command::histogram::Histogram;
use command::text;

/// Time after the last message until all subscribers must have read everything.
const DRAIN_TIME: Duration = Duration::from_secs(30);
/// Pause while there is nothing to do.
const IDLE_SLEEP: Duration = Duration::from_micros(200);

/// The task of a process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ManyTopicsRole {
    directory: PathBuf,
    kind: TopicKind,
    topics: u64,
    /// Publishes the topics of its node; otherwise reads those of both nodes.
    publishes: Option<u64>,
    /// The topics of each node are distributed over so many processes, of which this is one.
    process: u64,
    processes: u64,
    /// Number of nodes that publish their share of the topics.
    nodes: u64,
    /// Busy-polls, also while there is nothing to do.
    is_busy: bool,
    /// Readers at a publisher's node, with the replication to the other node.
    readers: u32,
    seconds: u64,
}

impl ManyTopicsRole {
    fn topics(&self) -> impl Iterator<Item = u64> {
        assigned_topics((self.topics, self.nodes), (self.process, self.processes))
    }

    fn pause(&self) {
        match self.is_busy {
            true => std::hint::spin_loop(),
            false => std::thread::sleep(IDLE_SLEEP),
        }
    }
}

#[derive(Debug, Serialize)]
struct ManyTopicsMetrics {
    topics: u64,
    subscribers: u64,
    /// For each node, and each subscriber.
    processes: u64,
    one_way: bool,
    messages: u64,
    messages_per_s: f64,
    /// Messages of the topic with the fewest, and with the most, relative to the mean.
    smallest_share: f64,
    largest_share: f64,
    /// The longest time without a message of a topic, of any subscriber.
    longest_gap_ms: f64,
    lost: u64,
}

pub(super) fn run(arguments: &Arguments, topics: u64) -> Result<(), Failure> {
    let mut group = WorkerGroup::new(WORDS)?;
    let kind = TopicKind::new(arguments, arguments.memory, 16);
    let both = services(&group, arguments, kind.budget(topics), &[])?;
    let mut tasks: Vec<_> =
        both.iter().map(|service| (WorkerRole::Serve(service.clone()), None)).collect();
    // Half of the subscribers at each node, at least one.
    let near = arguments.subscribers.div_ceil(2);
    let readers = match arguments.one_way {
        false => [near, (arguments.subscribers - near).max(1)],
        true => [0, arguments.subscribers],
    };
    let nodes = if arguments.one_way { 1 } else { 2 };
    let processes = arguments.processes.min(topics.div_ceil(nodes));
    let count = (readers[0] + readers[1]) * processes;
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let role = |node: usize, publishes: Option<u64>, process: u64| {
        let role = ManyTopicsRole {
            directory: both[node].directory.clone(),
            kind: kind.clone(),
            topics,
            publishes,
            process,
            processes,
            nodes,
            is_busy: arguments.waiting == Wait::Poll && count + nodes * processes < cores,
            readers: readers[node] as u32 + 1,
            seconds: arguments.seconds,
        };
        (WorkerRole::Many(role), None)
    };
    for process in 0..processes {
        for (node, count) in readers.into_iter().enumerate() {
            tasks.extend((0..count).map(|_| role(node, None, process)));
        }
    }
    for process in 0..processes {
        tasks.extend((0..nodes).map(|node| role(node as usize, Some(node), process)));
    }
    group.start_workers(&tasks)?;
    group.begin()?;
    // Readers end after some time without a message, services by a signal.
    std::thread::sleep(Duration::from_secs(arguments.seconds));
    // Services end after all other workers.
    let results = group.results_ending_with(2, end_all)?;
    let (readers_found, publishers) = results[2..].split_at(count as usize);
    let mut published = vec![0; topics as usize];
    for found in found(publishers) {
        for (all, one) in published.iter_mut().zip(&found.shares) {
            *all += one;
        }
    }
    let mut lost = 0;
    let mut longest_gap = 0;
    let mut samples = Histogram::default();
    for (at, found) in found(readers_found).enumerate() {
        // Each subscriber has read the topics of its share.
        let process = at as u64 / (readers[0] + readers[1]);
        longest_gap = longest_gap.max(found.longest_gap);
        found.topics.iter().for_each(|times| samples.merge(times));
        let counts = assigned_topics((topics, nodes), (process, processes)).zip(&found.shares);
        let missing = counts.map(|(topic, count)| published[topic as usize].abs_diff(*count));
        lost += missing.sum::<u64>();
    }
    let messages: u64 = published.iter().sum();
    let mean = messages as f64 / topics as f64;
    let share = |count: Option<&u64>| count.map_or(0.0, |count| *count as f64 / mean.max(1.0));
    let verified = lost == 0 && results.iter().all(|done| done.verified);
    let common = common(arguments, arguments.waiting, None, &samples, messages, verified);
    let summary = ManyTopicsMetrics {
        topics,
        subscribers: readers[0] + readers[1],
        processes,
        one_way: arguments.one_way,
        messages,
        messages_per_s: messages as f64 / arguments.seconds as f64,
        smallest_share: share(published.iter().min()),
        largest_share: share(published.iter().max()),
        longest_gap_ms: longest_gap as f64 / 1e6,
        lost,
    };
    Report::new(common, summary).conclude(arguments.json)
}

impl Metrics for ManyTopicsMetrics {
    const FAILURE_TEXT: &str = "messages were lost or corrupted";

    fn to_text(&self, _common: &Common) -> String {
        format!(
            "{} {}, {} each: {}, {:.0}/s; the least has {:.3} of \
         the mean, the most {:.3}; longest without one {:.0} ms; {} lost\n",
            text::count_of(self.topics, "topic"),
            if self.one_way { "from one node to another" } else { "of two nodes" },
            text::count_of(self.subscribers, "subscriber"),
            text::count_of(self.messages, "message"),
            self.messages_per_s,
            self.smallest_share,
            self.largest_share,
            self.longest_gap_ms,
            self.lost,
        )
    }
}

/// The topics of this process.
fn assigned_topics(
    (topics, nodes): (u64, u64),
    (process, processes): (u64, u64),
) -> impl Iterator<Item = u64> {
    // Topics alternate between nodes.
    (0..topics).filter(move |topic| topic / nodes % processes == process)
}

fn name(topic: u64) -> String {
    format!("many {topic}")
}

/// Runs such a process.
pub(super) fn take(
    shared: &SharedSegment,
    role: &ManyTopicsRole,
    ready: impl FnOnce() -> Result<(), Failure>,
) -> Result<WorkerResult, Failure> {
    let node = join(&role.directory, "many", Wait::Default)?;
    let settings = role.kind.settings()?;
    match role.publishes {
        Some(node_number) => {
            let own: Vec<u64> =
                role.topics().filter(|topic| topic % role.nodes == node_number).collect();
            let mut publishers = Vec::new();
            for topic in &own {
                publishers.push(node.topic(&name(*topic), &settings)?.publisher()?);
            }
            ready()?;
            publish(role, &own, &publishers)
        }
        None => {
            let mut subscribers = Vec::new();
            for topic in role.topics() {
                subscribers.push(node.topic(&name(topic), &settings)?.subscriber()?);
            }
            ready()?;
            read(shared, role, &mut subscribers)
        }
    }
}

fn publish(
    role: &ManyTopicsRole,
    own: &[u64],
    publishers: &[Publisher],
) -> Result<WorkerResult, Failure> {
    let deadline = Instant::now() + DRAIN_TIME;
    while publishers.iter().any(|publisher| publisher.subscribers() < role.readers) {
        if Instant::now() > deadline {
            return Err(Failure::new(Exit::Deadline, "not all subscribers were ready in time"));
        }
        std::thread::sleep(IDLE_SLEEP);
    }
    let random_pattern = RandomPattern::default();
    let mut bytes = vec![0; role.kind.size as usize];
    let mut shares = vec![0; role.topics as usize];
    let end = Instant::now() + Duration::from_secs(role.seconds);
    while Instant::now() < end {
        let mut is_busy = false;
        for (topic, publisher) in own.iter().zip(publishers) {
            let sent = &mut shares[*topic as usize];
            random_pattern.write(role.kind.content(*sent), |offset, part| {
                bytes[offset as usize..][..part.len()].copy_from_slice(part);
                Ok::<(), Failure>(())
            })?;
            if publisher.try_push(&bytes)?.is_some() {
                *sent += 1;
                is_busy = true;
            }
        }
        if !is_busy {
            role.pause();
        }
    }
    for publisher in publishers {
        publisher.flush(DRAIN_TIME)?;
    }
    let iterations = shares.iter().sum();
    let found = TopicResult { shares, ..TopicResult::default() };
    Ok(WorkerResult { detail: Some(found), ..empty_result(iterations) })
}

fn read(
    shared: &SharedSegment,
    role: &ManyTopicsRole,
    subscribers: &mut [Subscriber],
) -> Result<WorkerResult, Failure> {
    let mut random_pattern = RandomPattern::default();
    let topics = vec![Histogram::default()];
    let mut found =
        TopicResult { shares: vec![0; subscribers.len()], topics, ..TopicResult::default() };
    let mut last: Vec<Option<Instant>> = vec![None; subscribers.len()];
    let mut verified = true;
    // The publisher waits until everything is read; a while later no message follows.
    let mut quiet = Instant::now();
    while quiet.elapsed()
        < Duration::from_secs(2) + DRAIN_TIME * u32::from(found.shares.contains(&0))
    {
        if has_ended(shared)? {
            break;
        }
        let mut is_busy = false;
        for (topic, subscriber) in subscribers.iter_mut().enumerate() {
            let Some(sample) = subscriber.try_pull()? else { continue };
            let time = Instant::now();
            if let Some(before) = last[topic].replace(time) {
                found.longest_gap = found.longest_gap.max((time - before).as_nanos() as u64);
            }
            found.topics[0].add(now().saturating_sub(sample.published_at()));
            let content = role.kind.content(found.shares[topic]);
            found.shares[topic] += 1;
            verified &= sample.length() == content.length
                && random_pattern.check(content, |offset, to| sample.read(offset, to))?.is_none();
            is_busy = true;
        }
        match is_busy {
            true => quiet = Instant::now(),
            false => role.pause(),
        }
    }
    let iterations = found.shares.iter().sum();
    Ok(WorkerResult { verified, detail: Some(found), ..empty_result(iterations) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_topic_has_one_process_and_one_publishing_node() {
        for (topics, nodes, processes) in [(1, 1, 1), (8, 2, 1), (8, 2, 3), (7, 2, 2), (5, 1, 4)] {
            let all = (0..processes)
                .map(|it| assigned_topics((topics, nodes), (it, processes)).collect());
            let mut all: Vec<Vec<u64>> = all.collect();
            let counts = all.iter().map(Vec::len);
            let most = topics.div_ceil(nodes).div_ceil(processes) * nodes;
            assert!(counts.max() <= Some(most as usize), "{all:?}");
            let mut all = all.drain(..).flatten().collect::<Vec<_>>();
            all.sort_unstable();
            assert_eq!(all, (0..topics).collect::<Vec<_>>());
        }
    }
}
