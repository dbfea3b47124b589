//! What came of it: was all of it right, what did each path carry, what took longest.

use std::collections::BTreeMap;

use pubsub::Row;
use serde::Serialize;

use super::cast::{NODES, Part, Reading, STAGES, TIMES, TOPICS, line};
use super::company::Company;
use super::show::{medians, reading, time};
use crate::cli::exit::{Exit, Failure};
use crate::cli::stages::{ALL_TOGETHER, Stage};
use crate::cli::{progress, size, text};

/// What is told of a subscriber.
#[derive(Debug, Serialize)]
struct Reader {
    topic: &'static str,
    bytes_of_each: u64,
    name: String,
    messages: u64,
    bytes: u64,
    altered: u64,
    missed: u64,
    paths: Vec<String>,
    stages: Vec<Latency>,
}

#[derive(Debug, Serialize)]
struct Latency {
    stage: &'static str,
    p50_us: f64,
    p99_us: f64,
}

/// What a path carried.
#[derive(Debug, Default, Serialize)]
struct Carried {
    /// Once for each node, however many read it there.
    messages: u64,
    bytes: u64,
    /// What all subscribers read of it.
    read_messages: u64,
    read_bytes: u64,
}

/// A stage that took longest.
#[derive(Debug, Serialize)]
struct Slowest {
    path: String,
    topic: &'static str,
    stage: &'static str,
    p50_us: f64,
    #[serde(skip)]
    nanoseconds: u64,
}

/// All of it.
#[derive(Debug, Serialize)]
pub(super) struct Outcome {
    between: &'static str,
    memory: [String; NODES],
    seconds: f64,
    published: BTreeMap<&'static str, u64>,
    subscribers: Vec<Reader>,
    paths: BTreeMap<String, Carried>,
    slowest: Vec<Slowest>,
    verified: bool,
    complete: bool,
}

impl Outcome {
    pub(super) fn of(
        company: &Company,
        (between, memory): (&'static str, &[String; NODES]),
        seconds: f64,
        is_complete: bool,
    ) -> Self {
        let readings = || company.members.iter().filter_map(reading);
        let mut published = BTreeMap::new();
        for member in &company.members {
            if let Part::Publish { topic, .. } = member.role.part {
                published.insert(TOPICS[topic].name, member.published.messages);
            }
        }
        let subscribers: Vec<_> = company
            .members
            .iter()
            .filter_map(|member| Some((reading(member)?, &member.role.label)))
            .map(|((topic, reading), name)| Reader {
                topic: TOPICS[topic].name,
                bytes_of_each: TOPICS[topic].size,
                name: name.clone(),
                messages: reading.messages,
                bytes: reading.bytes,
                altered: reading.altered,
                missed: reading.missed,
                paths: reading.paths.clone(),
                stages: stages(reading),
            })
            .collect();
        let verified = subscribers.iter().all(|it| it.altered == 0 && it.messages > 0);
        Self {
            between,
            memory: memory.clone(),
            seconds,
            paths: paths(company),
            slowest: slowest(readings()),
            published,
            subscribers,
            verified,
            complete: is_complete,
        }
    }

    pub(super) fn print(&self, company: &Company, is_json: bool) -> Result<(), Failure> {
        if is_json {
            return text::print(&line(self)?);
        }
        text::print(&super::show::table(company, true))?;
        let legend = "borrow: until there was memory for it; fill: until it was written; begin: until its node began to \
                      write it to the other, or, if it stays there, delivered it; out: copied out of a device; wire: \
                      until its last byte had come; in: copied to where it is read; notice: until a subscriber had \
                      it. Chunk by chunk, so that out, wire and in overlap; all: from publishing on";
        let legend = text::wrapped("Medians by stage. ", legend);
        text::print(&format!("\n{legend}\n"))?;
        for (path, carried) in &self.paths {
            let (once, read) = (carried.bytes as f64, carried.read_bytes as f64);
            let what = match carried.messages {
                0 => format!(
                    "{} read, {}",
                    text::counted(carried.read_messages, "message"),
                    progress::amount(read)
                ),
                messages => format!(
                    "{}, {}, carried once; {} read of that",
                    text::counted(messages, "message"),
                    progress::amount(once),
                    progress::amount(read)
                ),
            };
            text::print(&format!("path {path}: {what}\n"))?;
        }
        for slowest in &self.slowest {
            let Slowest { path, topic, stage, nanoseconds, .. } = slowest;
            let bytes = TOPICS.iter().find(|it| it.name == *topic).map_or(0, |it| it.size);
            text::print(&format!(
                "slowest stage on {path}: {stage}, {} for {} of \"{topic}\" ({}/s)\n",
                time(*nanoseconds),
                size::print(bytes),
                progress::amount(bytes as f64 / (*nanoseconds).max(1) as f64 * 1e9)
            ))?;
        }
        let sum = |of: fn(&Reader) -> u64| self.subscribers.iter().map(of).sum::<u64>();
        text::print(&format!(
            "data: {}, {} compared byte by byte: {} altered, {} missed\n",
            text::counted(sum(|it| it.messages), "message"),
            progress::amount(sum(|it| it.bytes) as f64),
            sum(|it| it.altered),
            sum(|it| it.missed),
        ))
    }

    /// Is all as it should be?
    pub(super) fn judge(&self, company: &Company) -> Result<(), Failure> {
        let altered: u64 = self.subscribers.iter().map(|it| it.altered).sum();
        if altered > 0 {
            return Err(Failure::new(Exit::Corrupt, text::altered(altered)));
        }
        for reader in &self.subscribers {
            let all = self.published.get(reader.topic).copied().unwrap_or(0);
            if reader.messages != all || reader.missed > 0 {
                let all = text::counted(all, "message");
                let why = format!("{} read {} of {all}", reader.name, reader.messages);
                return Err(Failure::new(Exit::Missed, why));
            }
        }
        for member in &company.members {
            let Some((topic, reading)) = reading(member) else { continue };
            let is_near = member.role.directory == company.directory_of(TOPICS[topic].from);
            let is_as_meant = reading.paths.iter().all(|path| (path == SHARED_MEMORY) == is_near);
            if !is_as_meant || reading.paths.len() != 1 {
                let paths = reading.paths.join(", ");
                let why = format!("{} was reached by the wrong path: {paths}", member.role.label);
                return Err(Failure::new(Exit::NoProvider, why));
            }
        }
        Ok(())
    }
}

const SHARED_MEMORY: &str = "shared-memory";

fn stages(reading: &Reading) -> Vec<Latency> {
    let names = STAGES.into_iter().map(Stage::name).chain([ALL_TOGETHER]);
    let all = names.zip(&reading.samples).filter_map(|(stage, samples)| {
        let (p50_us, p99_us) = (samples.microseconds(0.5)?, samples.microseconds(0.99)?);
        Some(Latency { stage, p50_us, p99_us })
    });
    all.collect()
}

/// What subscribers say by which path they read, and what nodes say that they sent.
fn paths(company: &Company) -> BTreeMap<String, Carried> {
    let mut all: BTreeMap<String, Carried> = BTreeMap::new();
    let mut remote = None;
    for (_, reading) in company.members.iter().filter_map(reading) {
        for path in &reading.paths {
            let carried = all.entry(path.clone()).or_default();
            carried.read_messages += reading.messages;
            carried.read_bytes += reading.bytes;
            if path != SHARED_MEMORY {
                remote = Some(path.clone());
            }
        }
    }
    let Some(remote) = remote else { return all };
    let mut named = None;
    for row in company.members.iter().flat_map(|member| &member.sent) {
        if let Row::Sent { path, messages, bytes, .. } = row {
            let carried = all.entry(remote.clone()).or_default();
            carried.messages += messages;
            carried.bytes += bytes;
            named = Some(path.clone());
        }
    }
    // What a node says of it tells more than what a sample does.
    if let (Some(named), Some(carried)) = (named, all.remove(&remote)) {
        all.insert(format!("{remote} ({named})"), carried);
    }
    all
}

/// On each path, what takes longest of the messages whose stage takes longest.
fn slowest<'a>(readings: impl Iterator<Item = (usize, &'a Reading)>) -> Vec<Slowest> {
    let mut all: BTreeMap<String, (u64, usize, usize)> = BTreeMap::new();
    for (topic, reading) in readings {
        let Some(path) = reading.paths.first() else { continue };
        let found = medians(reading);
        for (stage, time) in found[..TIMES - 1].iter().enumerate() {
            let longest = all.entry(path.clone()).or_insert((0, 0, 0));
            *longest = (*longest).max((*time, topic, stage));
        }
    }
    let told = all.into_iter().map(|(path, (nanoseconds, topic, stage))| Slowest {
        path,
        topic: TOPICS[topic].name,
        stage: STAGES[stage].name(),
        p50_us: nanoseconds as f64 / 1e3,
        nanoseconds,
    });
    told.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_stage_of_each_path_is_named() {
        let reading = |path: &str, latest| Reading {
            paths: vec![path.to_owned()],
            latest,
            ..Reading::default()
        };
        let near = reading(SHARED_MEMORY, [1, 90, 2, 0, 0, 0, 3, 900]);
        let far = reading("ring", [1, 80, 2, 0, 700, 1, 3, 900]);
        let further = reading("ring", [1, 80, 2, 0, 70, 1, 3, 900]);
        let found = slowest([(0, &near), (2, &far), (1, &further)].into_iter());
        let told: Vec<_> = found.iter().map(|it| (&*it.path, it.topic, it.stage)).collect();
        assert_eq!(told, [("ring", "tensors", "wire"), (SHARED_MEMORY, "camera", "fill")]);
    }
}
