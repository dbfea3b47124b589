//! `fabricast topics`: topics, publishers and subscribers of a node.

use std::collections::BTreeMap;

use gpu::{Device, DeviceName, Implementation};
use pubsub::Row;
use serde_json::{Value, json};

use super::exit::Result;
use super::paths::name_of_node;
use super::report_rows::{HOST, fields_of, matching, replication_error};
use super::settings::{DIRECTORY_ONLY, Options};
use super::size::amount;
use super::{node_report, output, text};

/// Lists the topics of a node with publishers, subscribers and backlog, and topics that exist on
/// connected peers only.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Also show the type of each topic's values, its reserved memory and its dropped messages
    #[arg(long)]
    verbose: bool,
    /// One JSON line with the whole report
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: Options<DIRECTORY_ONLY>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let settings = arguments.settings.settings()?;
    let rows = node_report::report(&settings)?;
    match arguments.json {
        true => output::json(&to_json(&rows)?),
        false => output::print_report(&to_text(&rows, arguments.verbose)),
    }
}

/// Totals of a topic's publishers and subscribers.
#[derive(Debug, Default)]
struct TopicUsers {
    publishers: u64,
    /// Number of waits for space, and the longest.
    waiting: Option<u64>,
    subscribers: u64,
    /// The most of one subscriber.
    unread: u64,
    held: u64,
    missed: u64,
}

fn users(rows: &[Row]) -> BTreeMap<&str, TopicUsers> {
    let mut all: BTreeMap<&str, TopicUsers> = BTreeMap::new();
    for row in rows {
        match row {
            Row::Publisher { topic, waits_microseconds, .. } => {
                let of = all.entry(topic).or_default();
                of.publishers += 1;
                if *waits_microseconds > 0 {
                    of.waiting = of.waiting.max(Some(*waits_microseconds));
                }
            }
            Row::Subscriber { topic, unread, held, is_evicted, missed, .. } => {
                let of = all.entry(topic).or_default();
                of.subscribers += u64::from(!is_evicted);
                of.unread = of.unread.max(*unread);
                of.held += held;
                of.missed += missed;
            }
            _ => {}
        }
    }
    all
}

/// Details of the topics.
fn details(rows: &[Row]) -> String {
    let head = [
        "topic",
        "type",
        "released within",
        "max held",
        "messages reserved",
        "bytes reserved",
        "dropped",
    ];
    let topics = matching!(
        rows,
        Row::Topic { name, type_name, release_microseconds, max_held, dropped, reserves, .. } => [
            name.escape_debug().to_string(),
            type_name.as_deref().map_or_else(|| "bytes".to_owned(), text::escape_control),
            format!("{} s", *release_microseconds as f64 / 1e6),
            max_held.to_string(),
            reserves.blocks.to_string(),
            reserves.bytes.to_string(),
            dropped.to_string(),
        ]
    );
    text::table_of(head, topics)
}

fn to_text(rows: &[Row], is_verbose: bool) -> String {
    let mut out = String::new();
    for row in rows {
        if let Row::Node { identity, label, service, process, listens } = row {
            let served =
                format!("service {service}, process {process}, \"{}\"", label.escape_debug());
            let listens = listens.as_deref().unwrap_or("not listening for other nodes");
            let (identity, listens) =
                (text::escape_control(identity), text::escape_control(listens));
            out.push_str(&text::wrapped("node ", &format!("{identity}: {served}; {listens}")));
        }
    }
    let users = users(rows);
    let head = [
        "topic",
        "reliability",
        "depth",
        "largest",
        "memory",
        "published",
        "arrived",
        "publishers",
        "subscribers",
        "unread",
        "held",
        "missed",
        "waits",
    ];
    let no_users = TopicUsers::default();
    let memory = MemoryNames::of(rows);
    let topics = rows.iter().filter_map(|row| {
        let Row::Topic { name, place, reliability, depth, largest, published, arrived, .. } = row
        else {
            return None;
        };
        let of = users.get(name.as_str()).unwrap_or(&no_users);
        Some([
            name.escape_debug().to_string(),
            text::escape_control(reliability),
            depth.to_string(),
            super::size::print(*largest),
            text::escape_control(&memory.name(place)),
            published.to_string(),
            arrived.to_string(),
            of.publishers.to_string(),
            of.subscribers.to_string(),
            of.unread.to_string(),
            of.held.to_string(),
            of.missed.to_string(),
            of.waiting.map_or_else(String::new, |waits| format!("{:.1} s", waits as f64 / 1e6)),
        ])
    });
    let table = text::table_of(head, topics);
    out.push_str(if table.is_empty() { "no topics\n" } else { &table });
    if is_verbose {
        out.push_str(&details(rows));
    }
    out.push_str(&remote_topics(rows));
    for row in rows {
        if let Row::Pool { place, is_inbound, bytes, budget, free, blocks, .. } = row {
            let reserved = matching!(
                rows,
                Row::Topic { place: of, reserves, .. } if of == place => reserves.bytes
            );
            let reserved = reserved.fold(0, u64::saturating_add);
            let direction = if *is_inbound { "from other nodes" } else { "of this node" };
            let place = text::escape_control(&memory.name(place));
            let [used, bytes, reserved, of_budget] =
                [bytes.saturating_sub(*free), *bytes, reserved, *budget]
                    .map(|bytes| amount(bytes as f64));
            let blocks = text::count_of(*blocks, "block");
            let line = format!(
                "{used} of {bytes} used in {blocks}; topics reserve {reserved} of {of_budget} ({budget} bytes)"
            );
            let first = format!("memory on {place} for messages {direction}: ");
            out.push_str(&text::wrapped(&first, &line));
        }
    }
    out
}

/// Names of memory locations: those of devices that this process sees.
struct MemoryNames(Vec<(String, String)>);

impl MemoryNames {
    /// Asks the driver only if memory of a device is reported.
    fn of(rows: &[Row]) -> Self {
        let is_on_device = |row: &Row| matches!(row, Row::Topic { place, .. } | Row::Pool { place, .. } if place != HOST);
        if !rows.iter().any(is_on_device) {
            return Self(Vec::new());
        }
        let all = [Implementation::Cuda, Implementation::Emulated].into_iter().flat_map(|it| {
            let count = Device::count(it).unwrap_or(0);
            (0..count).map(move |number| DeviceName { implementation: it, number })
        });
        Self(
            all.filter_map(|name| Some((name.uuid().ok()?.to_string(), name.to_string())))
                .collect(),
        )
    }

    /// Of another device the first part of its UUID, which distinguishes devices.
    fn name(&self, place: &str) -> String {
        match self.0.iter().find(|(uuid, _)| uuid == place) {
            Some((_, name)) => name.clone(),
            None => place.chars().take(12).collect(),
        }
    }
}

/// Topics that exist on other nodes only; empty without any.
fn remote_topics(rows: &[Row]) -> String {
    let head = ["remote topic", "reliability", "depth", "largest", "there", "node"];
    let topics = rows.iter().filter_map(|row| {
        let Row::RemoteTopic {
            topic,
            node,
            publishes,
            subscribes,
            reliability,
            depth,
            largest,
            ..
        } = row
        else {
            return None;
        };
        let there = match (publishes, subscribes) {
            (true, true) => "published and read",
            (true, false) => "published",
            (false, true) => "read",
            (false, false) => "not used",
        };
        Some([
            topic.escape_debug().to_string(),
            text::escape_control(reliability),
            depth.to_string(),
            super::size::print(*largest),
            there.to_owned(),
            name_of_node(rows, node).escape_debug().to_string(),
        ])
    });
    text::table_of(head, topics)
}

/// Rows by kind; publishers and subscribers within their topics.
fn to_json(rows: &[Row]) -> Result<Value> {
    let of_topics = [
        ("publishers", fields_of!(rows, Publisher)?),
        ("subscribers", fields_of!(rows, Subscriber)?),
        ("sent", fields_of!(rows, Sent)?),
        ("received", fields_of!(rows, Received)?),
    ];
    let mut topics = fields_of!(rows, Topic)?;
    for topic in &mut topics {
        for (key, all) in &of_topics {
            let of_topic = all.iter().filter(|one| one["topic"] == topic["name"]);
            topic[key] = of_topic.cloned().collect();
        }
    }
    Ok(json!({
        "node": fields_of!(rows, Node)?.pop(),
        "processes": fields_of!(rows, Process)?,
        "pools": fields_of!(rows, Pool)?,
        "topics": topics,
        "peers": fields_of!(rows, Peer)?,
        "incompatible_topics": fields_of!(rows, IncompatibleTopic)?,
        "remote_topics": fields_of!(rows, RemoteTopic)?,
        "replication_error": replication_error(rows),
    }))
}

#[cfg(test)]
pub(super) mod tests {
    use pubsub::{ReportedSubscriber, Reserve, RingPath, TopicSettings};

    use super::*;

    pub(crate) fn rows() -> Vec<Row> {
        let (topic, participant) = ("camera".to_owned(), "p1".to_owned());
        let path =
            RingPath { provider: "tcp: the only provider".to_owned(), lanes: 1, is_direct: false };
        vec![
            Row::Node {
                identity: "ab".repeat(16),
                label: "a node".to_owned(),
                service: 2,
                process: 77,
                listens: Some("10.0.0.1:7700".to_owned()),
            },
            Row::Pool {
                place: "host".to_owned(),
                is_inbound: false,
                bytes: 1 << 20,
                budget: 1 << 30,
                limit: 5 << 28,
                free: 1 << 19,
                blocks: 3,
            },
            Row::Topic {
                name: topic.clone(),
                number: 0,
                place: "host".to_owned(),
                reliability: "reliable".to_owned(),
                depth: 16,
                max_held: 16,
                largest: 1 << 20,
                loans: 4,
                release_microseconds: 5_000_000,
                type_name: Some("Pose".to_owned()),
                published: 12,
                arrived: 4,
                dropped: 0,
                reserves: TopicSettings::default().reserves(1),
            },
            Row::Publisher {
                topic: topic.clone(),
                participant: participant.clone(),
                publisher: 1,
                messages: 12,
                bytes: 1200,
                waits_microseconds: 1_500_000,
            },
            Row::Subscriber {
                topic: topic.clone(),
                participant: participant.into(),
                unread: 4,
                held: 1,
                is_evicted: false,
                missed: 1,
            },
            Row::Subscriber {
                topic: topic.clone(),
                participant: ReportedSubscriber::Replication,
                unread: 7,
                held: 2,
                is_evicted: false,
                missed: 2,
            },
            Row::Peer {
                node: "cd".repeat(16),
                label: "other".to_owned(),
                address: "10.0.0.2:7700".to_owned(),
                is_connected: true,
                is_retried: false,
                detail: "tcp".to_owned(),
            },
            Row::Sent {
                topic: topic.clone(),
                node: "cd".repeat(16),
                path: path.clone(),
                messages: 11,
                bytes: 1100,
                waits: 3,
                stages: vec![("copied".to_owned(), 22_000), ("written".to_owned(), 44_000)],
            },
            Row::Received {
                topic,
                node: "cd".repeat(16),
                path,
                staged: Some("net has no device memory".to_owned()),
                messages: 4,
                bytes: 400,
                stages: Vec::new(),
            },
        ]
    }

    #[test]
    fn topic_has_a_line_with_its_users() {
        let out = to_text(&rows(), false);
        assert!(out.lines().all(|line| line.chars().count() <= text::WIDTH), "{out}");
        let line = out.lines().find(|line| line.starts_with("camera")).unwrap();
        let cells: Vec<_> = line.split_whitespace().collect();
        let expected = "camera reliable 16 1MiB host 12 4 1 2 7 3 3 1.5 s";
        assert_eq!(cells.join(" "), expected);
        assert!(
            out.contains("memory on host for messages of this node: 512.00 KiB of 1.00 MiB"),
            "{out}"
        );
        let flat = out.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flat.contains("topics reserve 52.00 MiB of 1.00 GiB (1073741824 bytes)"), "{out}");
        assert!(to_text(&rows()[..1], false).contains("no topics"));
    }

    #[test]
    fn verbose_shows_what_a_topic_reserves() {
        let out = to_text(&rows(), true);
        assert!(out.lines().all(|line| line.chars().count() <= text::WIDTH), "{out}");
        let line = out.lines().filter(|line| line.starts_with("camera")).nth(1).unwrap();
        let cells: Vec<_> = line.split_whitespace().collect();
        assert_eq!(cells.join(" "), "camera Pose 5 s 16 52 54525952 0");
        let all = to_json(&rows()).unwrap();
        assert_eq!(all["topics"][0]["type_name"], "Pose");
        assert_eq!(all["topics"][0]["reserves"], json!({ "messages": 52, "bytes": 52 << 20 }));
    }

    #[test]
    fn devices_of_this_process_are_named() {
        let name = DeviceName { implementation: Implementation::Emulated, number: 1 };
        let uuid = name.uuid().unwrap().to_string();
        let mut all = rows();
        for row in &mut all {
            match row {
                Row::Topic { place, .. } => place.clone_from(&uuid),
                Row::Pool { place, .. } => "another device".clone_into(place),
                _ => {}
            }
        }
        let out = to_text(&all, false);
        assert!(out.contains("  emulated:1  "), "{out}");
        assert!(out.contains("memory on another devi for messages"), "{out}");
    }

    #[test]
    fn topics_of_other_nodes_have_their_own_table() {
        let mut all = rows();
        assert!(!to_text(&all, false).contains("remote_topics"));
        all.push(Row::RemoteTopic {
            topic: "lidar\u{1b}".to_owned(),
            node: "cd".repeat(16),
            publishes: true,
            subscribes: false,
            reliability: "reliable".to_owned(),
            depth: 4,
            largest: 1 << 16,
            release_microseconds: 5_000_000,
        });
        let out = to_text(&all, false);
        let line = out.lines().find(|line| line.starts_with("lidar")).unwrap();
        let cells: Vec<_> = line.split_whitespace().collect();
        assert_eq!(cells.join(" "), "lidar\\u{1b} reliable 4 64KiB published other");
        assert_eq!(to_json(&all).unwrap()["remote_topics"][0]["depth"], 4);
    }

    #[test]
    fn control_characters_of_a_node_are_escaped() {
        let strange = "\u{1b}]0;".to_owned();
        let node = Row::Node {
            identity: strange.clone(),
            label: strange.clone(),
            service: 1,
            process: 1,
            listens: Some(strange.clone()),
        };
        let topic = Row::Topic {
            name: strange.clone(),
            number: 0,
            place: strange.clone(),
            reliability: strange.clone(),
            depth: 1,
            max_held: 1,
            largest: 1,
            loans: 1,
            release_microseconds: 1,
            type_name: Some(strange.clone()),
            published: 0,
            arrived: 0,
            dropped: 0,
            reserves: Reserve::default(),
        };
        let pool = Row::Pool {
            place: strange,
            is_inbound: true,
            bytes: 1,
            budget: 1,
            limit: 1,
            free: 1,
            blocks: 1,
        };
        let out = to_text(&[node, topic, pool], false);
        assert!(!out.contains('\u{1b}') && out.contains("\\u{1b}]0;"), "{out}");
    }

    #[test]
    fn json_has_the_whole_report() {
        let all = to_json(&rows()).unwrap();
        assert_eq!(all["node"]["service"], 2);
        let topic = &all["topics"][0];
        assert_eq!(topic["publishers"].as_array().unwrap().len(), 1);
        assert_eq!(topic["subscribers"][1]["participant"], "replication");
        assert_eq!(topic["sent"][0]["messages"], 11);
        assert_eq!(all["peers"][0]["is_connected"], true);
    }
}
