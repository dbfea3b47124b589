//! Cost of topics without messages: CPU time of the service, and memory.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::cores::{Cores, Services};
use super::node::join;
use super::role::WorkerRole;
use super::schedule::TIMEOUT;
use super::shared_words::{WORDS, end_all};
use super::topic_results::{WorkerResult, common};
use super::{Arguments, Service, TopicKind};
use crate::exchange::plan::Wait;
use crate::report::{Common, Metrics, Report};
use crate::worker_group::WorkerGroup;
use command::exit::Failure;
use command::histogram::Histogram;
use command::text;

#[derive(Debug, Serialize)]
struct IdleMetrics {
    topics: u64,
    /// CPU time of the service, in per cent of one core.
    cpu_percent: f64,
    /// Memory of all processes and their segments, for each topic.
    bytes_per_topic: u64,
    /// Time until all topics were created.
    create_s: f64,
}

/// CPU time of a process, in seconds.
fn cpu_seconds(process: u32) -> Option<f64> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).ok()?;
    let each = tasks.flatten().filter_map(|task| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<f64>().ok()
    });
    Some(each.sum::<f64>() / 1e9)
}

/// Memory of both processes, and of the machine's segments, in bytes.
fn memory(service: u32) -> u64 {
    let service = format!("{service}/status");
    let all = [("meminfo", "Shmem:"), ("self/status", "RssAnon:"), (&*service, "RssAnon:")];
    let value = |(file, name)| {
        let text = std::fs::read_to_string(format!("/proc/{file}")).unwrap_or_default();
        ipc::memory::kibibytes(&text, name).unwrap_or(0)
    };
    all.into_iter().map(value).sum()
}

pub(super) fn run(arguments: &Arguments, topics: u64) -> Result<(), Failure> {
    let mut group = WorkerGroup::new(WORDS)?;
    let cores = Cores::new(arguments.cores.as_ref(), 0, Services::Rest)?.all();
    let kind = TopicKind::new(arguments, arguments.memory, 16);
    let directory = group.directory().join("node");
    let of_service = cores.as_deref().unwrap_or_default();
    let service = Service::local(directory.clone(), kind.budget(topics), of_service);
    group.start_workers(&[(WorkerRole::Serve(service), None)])?;
    group.begin()?;
    let node = join(&directory, "idle", Wait::Block)?;
    let process = node.report()?.into_iter().find_map(|row| match row {
        pubsub::Row::Node { process, .. } => Some(process),
        _ => None,
    });
    let process = process.ok_or_else(|| Failure::failed("no process serves the node"))?;
    let begin = Instant::now();
    let before = memory(process);
    let settings = kind.settings()?;
    let mut users = Vec::new();
    for number in 0..topics {
        let topic = node.topic(&format!("idle {number}"), &settings)?;
        users.push((topic.publisher()?, topic.subscriber()?));
    }
    let create_s = begin.elapsed().as_secs_f64();
    std::thread::sleep(Duration::from_millis(500));
    let bytes_per_topic = memory(process).saturating_sub(before) / topics;
    let (from, since) = (cpu_seconds(process), Instant::now());
    std::thread::sleep(Duration::from_secs(arguments.seconds));
    let used = cpu_seconds(process).zip(from).map(|(to, from)| to - from);
    let used = used.ok_or_else(|| Failure::failed("the service has exited"))?;
    let cpu_percent = used / since.elapsed().as_secs_f64() * 100.0;
    // All topics still work.
    let mut verified = true;
    for (number, (publisher, subscriber)) in users.iter_mut().enumerate() {
        let bytes = vec![number as u8; arguments.size.min(64) as usize];
        publisher.push(&bytes, TIMEOUT)?;
        verified &= subscriber.pull(TIMEOUT)?.to_vec()? == bytes;
    }
    drop((users, node));
    end_all(&group.shared)?;
    let _: Vec<WorkerResult> = group.results()?;
    let (waiting, samples) = (arguments.waiting, Histogram::default());
    let common = common(arguments, waiting, cores, &samples, topics, verified);
    let found = IdleMetrics { topics, cpu_percent, bytes_per_topic, create_s };
    Report::new(common, found).conclude(arguments.json)
}

impl Metrics for IdleMetrics {
    const FAILURE_TEXT: &str = "a topic no longer works";

    fn to_text(&self, _common: &Common) -> String {
        format!(
            "{}: {:.3} % of a core, {} of memory each; created in {:.2} s\n",
            text::count_of(self.topics, "idle topic"),
            self.cpu_percent,
            text::count_of(self.bytes_per_topic, "byte"),
            self.create_s
        )
    }
}
