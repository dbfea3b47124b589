//! The outcome: verification, traffic of each path, and the slowest stages.

use std::collections::BTreeMap;

use pubsub::Row;
use serde::Serialize;

use super::display::{table, time, totals};
use super::processes::{Role, readers};
use super::{DemoTopic, Demonstration, NODES, SubscriberRow, TOPICS};
use crate::cli::exit::{Exit, Failure, Result};
use crate::cli::stages::TOTAL;
use crate::cli::statistics::Latency;
use crate::cli::{output, size, text};

#[derive(Debug, Default, Serialize)]
struct PathTraffic {
    /// Sent messages, once for each node with subscribers.
    messages: u64,
    bytes: u64,
    /// Messages and bytes that all subscribers read.
    read_messages: u64,
    read_bytes: u64,
}

#[derive(Debug, Serialize)]
struct SlowestStage {
    path: String,
    topic: &'static str,
    stage: String,
    p50_us: f64,
}

#[derive(Debug, Serialize)]
pub(super) struct DemoResult {
    network: &'static str,
    memory: [String; NODES],
    seconds: f64,
    published: BTreeMap<&'static str, u64>,
    subscribers: Vec<SubscriberRow>,
    paths: BTreeMap<String, PathTraffic>,
    slowest: Vec<SlowestStage>,
    verified: bool,
    complete: bool,
}

impl DemoResult {
    pub(super) fn of(all: &Demonstration<'_>, is_complete: bool) -> Self {
        let members = &all.processes.members;
        let published = members.iter().filter_map(|member| match member.part {
            Role::Publish(topic) => Some((TOPICS[topic].name, member.last_report.messages)),
            _ => None,
        });
        let subscribers = readers(members);
        let is_verified =
            |it: &SubscriberRow| it.last_report.corrupted == 0 && it.last_report.messages > 0;
        let verified = subscribers.iter().all(is_verified);
        Self {
            network: all.processes.network.name(),
            memory: all.memory.clone(),
            seconds: all.started_at.map_or(0.0, |started_at| started_at.elapsed().as_secs_f64()),
            published: published.collect(),
            paths: paths(&subscribers, &all.rows),
            slowest: slowest(&subscribers),
            subscribers,
            verified,
            complete: is_complete,
        }
    }

    pub(super) fn print(&self) -> Result<()> {
        output::print(&table(&self.subscribers, true))?;
        let legend = "loan: waiting for the loan of memory; fill: writing; queue: until the node begins to write \
             the message to the other node, or delivers it locally; copy-out: copying out of a device; wire: until \
             the last byte arrives; copy-in: copying into the memory of the topic; wakeup: until a subscriber pulls \
             the message. Chunks overlap, and so do copy-out, wire and copy-in; total: from publish on";
        let legend = text::wrapped("Medians by stage. ", legend);
        output::print(&format!("\n{legend}\n"))?;
        for (path, traffic) in &self.paths {
            let [once, read] =
                [traffic.bytes, traffic.read_bytes].map(|it| size::amount(it as f64));
            let [sent, received] =
                [traffic.messages, traffic.read_messages].map(|it| text::count_of(it, "message"));
            let what = match traffic.messages {
                0 => format!("{received} read, {read}"),
                _ => format!("{sent}, {once}, sent once; {read} read of that"),
            };
            output::print(&format!("path {path}: {what}\n"))?;
        }
        for slowest in &self.slowest {
            let SlowestStage { path, topic, stage, p50_us } = slowest;
            let bytes = TOPICS.iter().find(|it| it.name == *topic).map_or(0, |it| it.size);
            output::print(&format!(
                "slowest stage on {path}: {stage}, {} for {} of \"{topic}\" ({}/s)\n",
                time(*p50_us),
                size::print(bytes),
                size::amount(bytes as f64 / p50_us.max(1e-3) * 1e6)
            ))?;
        }
        let [messages, bytes, corrupted, missed] = totals(&self.subscribers);
        output::print(&format!(
            "data: {}, {} compared byte by byte: {corrupted} corrupted, {missed} missed\n",
            text::count_of(messages, "message"),
            size::amount(bytes as f64),
        ))
    }

    pub(super) fn verdict(&self) -> Result<()> {
        let [_, _, corrupted, _] = totals(&self.subscribers);
        if corrupted > 0 {
            return Err(Failure::new(Exit::DataCorrupted, text::corrupted(corrupted)));
        }
        for reader in &self.subscribers {
            let all = self.published.get(reader.topic).copied().unwrap_or(0);
            if reader.last_report.messages != all || reader.last_report.missed != Some(0) {
                let all = text::count_of(all, "message");
                let why = format!("{} read {} of {all}", reader.name, reader.last_report.messages);
                return Err(Failure::new(Exit::MessagesMissed, why));
            }
        }
        for SubscriberRow { name, is_local, last_report, .. } in &self.subscribers {
            let is_as_meant =
                last_report.paths.iter().all(|path| (path == SHARED_MEMORY) == *is_local);
            if !is_as_meant || last_report.paths.len() != 1 {
                let paths = last_report.paths.join(", ");
                let why = format!("{name} received by unexpected path {paths}");
                return Err(Failure::new(Exit::NoProvider, why));
            }
        }
        Ok(())
    }
}

const SHARED_MEMORY: &str = "shared-memory";

/// Traffic by path: what the subscribers read, and what the nodes received.
fn paths(subscribers: &[SubscriberRow], rows: &[(usize, Row)]) -> BTreeMap<String, PathTraffic> {
    let mut all: BTreeMap<String, PathTraffic> = BTreeMap::new();
    for SubscriberRow { last_report, .. } in subscribers {
        for path in &last_report.paths {
            let traffic = all.entry(path.clone()).or_default();
            traffic.read_messages += last_report.messages;
            traffic.read_bytes += last_report.bytes;
        }
    }
    let remote = all.keys().find(|path| *path != SHARED_MEMORY).cloned();
    let Some((mut path, mut traffic)) = remote.and_then(|path| all.remove_entry(&path)) else {
        return all;
    };
    let mut named = None;
    for (node, row) in rows {
        match row {
            Row::Received { path, .. } => named = Some(path),
            Row::Topic { name, arrived, .. } => {
                let is_remote = |topic: &&DemoTopic| topic.name == name && topic.from != *node;
                let size = TOPICS.iter().find(is_remote).map_or(0, |topic| topic.size);
                traffic.messages += if size > 0 { *arrived } else { 0 };
                traffic.bytes += size * arrived;
            }
            _ => {}
        }
    }
    // The node's description of the path has more detail than that of a sample.
    if let Some(named) = named {
        path = format!("{path} ({named})");
    }
    all.insert(path, traffic);
    all
}

/// For each path, the stage with the highest median of any topic.
fn slowest(subscribers: &[SubscriberRow]) -> Vec<SlowestStage> {
    let mut all: Vec<SlowestStage> = Vec::new();
    for reader in subscribers {
        let Some(path) = reader.last_report.paths.first() else { continue };
        for Latency { stage, p50_us, .. } in &reader.last_report.stages {
            let known = all.iter_mut().find(|known| known.path == *path);
            let is_longest = known.as_ref().is_none_or(|known| *p50_us > known.p50_us);
            if stage == TOTAL || !is_longest {
                continue;
            }
            let (path, stage) = (path.clone(), stage.clone());
            let slowest = SlowestStage { path, topic: reader.topic, stage, p50_us: *p50_us };
            match known {
                Some(known) => *known = slowest,
                None => all.push(slowest),
            }
        }
    }
    all.sort_by(|one, other| one.path.cmp(&other.path));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::demo::ProcessReport;

    #[test]
    fn slowest_stage_of_each_path_is_reported() {
        let reader = |path: &str, topic, stages: &[(&str, f64)]| SubscriberRow {
            topic,
            message_bytes: 1,
            name: String::new(),
            is_local: path == SHARED_MEMORY,
            rate: 0.0,
            last_report: ProcessReport {
                paths: vec![path.to_owned()],
                stages: stages.iter().map(|(name, p50_us)| Latency::new(name, *p50_us)).collect(),
                ..ProcessReport::default()
            },
        };
        let near = [("loan", 1.0), ("fill", 90.0), ("wakeup", 3.0), ("total", 900.0)];
        let far = [("fill", 80.0), ("wire", 700.0), ("copy-in", 1.0), ("total", 900.0)];
        let further = [("fill", 80.0), ("wire", 70.0), ("copy-in", 1.0), ("total", 900.0)];
        let found = slowest(&[
            reader(SHARED_MEMORY, "camera", &near),
            reader("ring", "tensors", &far),
            reader("ring", "lidar", &further),
        ]);
        let reported: Vec<_> = found.iter().map(|it| (&*it.path, it.topic, &*it.stage)).collect();
        assert_eq!(reported, [("ring", "tensors", "wire"), (SHARED_MEMORY, "camera", "fill")]);
    }
}
