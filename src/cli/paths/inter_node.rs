//! `fabricast paths --topics`: which messages go to which node by which path, and why.

use pubsub::{ErrorKind, ReportedSubscriber, Row};
use serde_json::{Value, json};

use super::Arguments;
use crate::cli::exit::Result;
use crate::cli::node_report;
use crate::cli::report_rows::{HOST, fields_of, matching, replication_error};
use crate::cli::size::amount;
use crate::cli::{output, text};

pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let settings = arguments.settings.settings()?;
    let rows = node_report::report(&settings)?;
    if arguments.json {
        output::json(&to_json(&rows)?)
    } else {
        output::print_report(&to_text(&rows))
    }
}

/// Name of a node if known, else its address, else the begin of its identity.
pub(crate) fn name_of_node(rows: &[Row], identity: &str) -> String {
    const ID_PREFIX_LENGTH: usize = 8;
    let of_it = || {
        matching!(
            rows,
            Row::Peer { node, label, address, .. } if node == identity => (label, address)
        )
    };
    let known = |text: &&String| !text.is_empty();
    let label = of_it().map(|(label, _)| label).find(known);
    match label.or_else(|| of_it().map(|(_, address)| address).find(known)) {
        Some(name) => name.clone(),
        None if identity.chars().count() <= ID_PREFIX_LENGTH => identity.to_owned(),
        None => identity.chars().take(ID_PREFIX_LENGTH).chain(['…']).collect(),
    }
}

/// Why no messages are replicated with other nodes.
pub(crate) fn replication_error_text(kind: ErrorKind, why: &str) -> String {
    let why = text::escape_control(why);
    format!("no topics are replicated with other nodes: {why}{}", remedy_for(kind))
}

/// Remedy of an error that keeps a node from other nodes, where the text of the error has none.
pub(crate) fn remedy_for(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::CannotListen => ". Choose another address: --listen",
        _ => "",
    }
}

/// Why a peer that is retried is not reached.
pub(crate) fn unreachable_text(peer: &Row) -> Option<String> {
    let Row::Peer { address, is_retried: true, detail, .. } = peer else { return None };
    let [address, detail] = [address, detail].map(|text| text::escape_control(text));
    Some(format!("cannot reach {address}: {detail}"))
}

fn to_text(rows: &[Row]) -> String {
    let mut out = String::new();
    for row in rows {
        let Row::Topic { name: topic, .. } = row else { continue };
        let title = format!("Topic \"{}\"", topic.escape_debug());
        out.push_str(&format!("{}\n", text::heading(&title)));
        for line in topic_lines(rows, topic) {
            out.push_str(&text::wrapped("  ", &line));
        }
    }
    if out.is_empty() {
        out.push_str("no topics\n");
    }
    for row in rows {
        if let Row::ReplicationError { kind, why } = row {
            out.push_str(&text::wrapped("", &replication_error_text(*kind, why)));
        }
        if let Row::Peer { label, address, is_connected, detail, .. } = row {
            let state = if *is_connected { "connected" } else { "not connected" };
            // An unknown or unnamed peer has no name.
            let name = match label.is_empty() {
                true => String::new(),
                false => format!("\"{}\" ", label.escape_debug()),
            };
            let (address, detail) = (text::escape_control(address), text::escape_control(detail));
            let detail = if detail.is_empty() { String::new() } else { format!(": {detail}") };
            let line = format!("{name}at {address}: {state}{detail}");
            out.push_str(&text::wrapped("node ", &line));
        }
    }
    out
}

fn is_on_device(rows: &[Row], name_of_topic: &str) -> bool {
    rows.iter().any(
        |row| matches!(row, Row::Topic { name, place, .. } if name == name_of_topic && place != HOST),
    )
}

fn topic_lines(rows: &[Row], name_of_topic: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let count_of = |number: usize, thing| text::count_of(number as u64, thing);
    let publishers = matching!(rows, Row::Publisher { topic, .. } if topic == name_of_topic => ());
    let subscribers = matching!(
        rows,
        Row::Subscriber { topic, participant, .. }
            if topic == name_of_topic && *participant != ReportedSubscriber::Replication => ()
    );
    lines.push(format!(
        "on this node: {}, {}, by shared memory: all read one copy",
        count_of(publishers.count(), "publisher"),
        count_of(subscribers.count(), "subscriber")
    ));
    for row in rows {
        match row {
            Row::Sent { topic, node, path, messages, bytes, stages, .. }
            | Row::Received { topic, node, path, messages, bytes, stages, .. }
                if topic == name_of_topic =>
            {
                let (direction, waits) = match row {
                    Row::Sent { waits, .. } => {
                        ("to", format!(", {} for room", text::count_of(*waits, "wait")))
                    }
                    _ => ("from", String::new()),
                };
                let staged = match row {
                    Row::Received { staged: Some(cause), .. } => {
                        format!(", copied through the host: {}", text::escape_control(cause))
                    }
                    // Before the first message the path is not known.
                    Row::Sent { path, messages: 1.., .. }
                        if !path.is_direct && is_on_device(rows, topic) =>
                    {
                        ", copied through the host: the reader has the reason, if its topic is on a device"
                            .to_owned()
                    }
                    _ => String::new(),
                };
                lines.push(format!(
                    "{direction} \"{}\" by {}{staged}; {}, {}{waits}{}",
                    name_of_node(rows, node).escape_debug(),
                    text::escape_control(&path.to_string()),
                    text::count_of(*messages, "message"),
                    amount(*bytes as f64),
                    stage_times(stages, *messages)
                ));
            }
            Row::IncompatibleTopic { topic, .. } if topic == name_of_topic => {
                lines.extend(incompatibility(rows, row));
            }
            Row::Missed { topic, nodes, messages } if topic == name_of_topic => {
                lines.push(format!(
                    "given up: other nodes{}, {}; they missed {}",
                    bracketed_names(&given_up(rows, topic)),
                    text::count_of(*nodes, "time"),
                    text::count_of(*messages, "message")
                ));
            }
            _ => {}
        }
    }
    lines
}

/// Names of nodes that were given up and missed messages of a topic, as far as known.
pub(crate) fn given_up(rows: &[Row], name_of_topic: &str) -> Vec<String> {
    let name = |node, label: &String| {
        if label.is_empty() { name_of_node(rows, node) } else { label.clone() }
    };
    let names = matching!(
        rows,
        Row::GivenUp { topic, node, label, .. } if topic == name_of_topic => name(node, label)
    );
    names.collect()
}

/// The names in brackets; empty without names.
pub(crate) fn bracketed_names(names: &[String]) -> String {
    let names: Vec<_> = names.iter().map(|name| format!("\"{}\"", name.escape_debug())).collect();
    if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) }
}

/// Why a topic is not replicated to or from a node.
pub(crate) fn incompatibility(rows: &[Row], row: &Row) -> Option<String> {
    let Row::IncompatibleTopic {
        node,
        is_wanted_remotely,
        is_wanted_locally,
        local,
        remote,
        differs,
        ..
    } = row
    else {
        return None;
    };
    let direction = match (is_wanted_remotely, is_wanted_locally) {
        (true, true) => "not to or from",
        (true, false) => "not to",
        (false, _) => "not from",
    };
    let direction = format!("{direction} \"{}\"", name_of_node(rows, node).escape_debug());
    let [local, remote] = [local, remote].map(|side| text::escape_control(side));
    if differs.is_empty() {
        return Some(format!("{direction}: {remote}"));
    }
    let (providers, settings): (Vec<_>, Vec<_>) =
        differs.iter().map(String::as_str).partition(|name| *name == Row::PROVIDER);
    let (mut which, mut advice) = (Vec::new(), Vec::new());
    if !settings.is_empty() {
        let options: Vec<_> =
            settings.iter().map(|name| format!("--{}", name.replace('_', "-"))).collect();
        let names = text::escape_control(&settings.join(", "));
        which.push(format!("topic settings differ ({names})"));
        advice.push(format!(
            "Set the same {} on both, or omit all topic settings on one: it is recreated there once \
             no process uses it",
            text::escape_control(&options.join(" "))
        ));
    }
    if !providers.is_empty() {
        which.push("the two nodes use different providers".to_owned());
        advice.push("Start both nodes with the same --provider".to_owned());
    }
    let (which, advice) = (which.join(", and "), advice.join(". "));
    Some(format!("{direction}: {which}; this node: {local}; other node: {remote}. {advice}"))
}

/// How long each stage takes, per message.
fn stage_times(stages: &[(String, u64)], messages: u64) -> String {
    let each = |(stage, nanoseconds): &(String, u64)| {
        let microseconds = *nanoseconds as f64 / 1000.0 / messages.max(1) as f64;
        format!("{} {microseconds:.1} µs", text::escape_control(stage))
    };
    let all: Vec<_> = stages.iter().map(each).collect();
    if all.is_empty() { String::new() } else { format!("; for each: {}", all.join(", ")) }
}

fn to_json(rows: &[Row]) -> Result<Value> {
    let mut missed = fields_of!(rows, Missed)?;
    for one in &mut missed {
        one["names"] = one["topic"].as_str().map(|topic| given_up(rows, topic)).into();
    }
    let topics = matching!(rows, Row::Topic { name, .. } => name);
    Ok(json!({
        "replication_error": replication_error(rows),
        "topics": topics.collect::<Vec<_>>(),
        "sent": fields_of!(rows, Sent)?,
        "received": fields_of!(rows, Received)?,
        "peers": fields_of!(rows, Peer)?,
        "incompatible_topics": fields_of!(rows, IncompatibleTopic)?,
        "missed": missed,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::topics::tests::rows;
    use pubsub::RingPath;

    #[test]
    fn every_path_is_listed_with_its_reason() {
        let out = to_text(&rows());
        assert!(out.lines().all(|line| line.chars().count() <= text::WIDTH), "{out}");
        let flat = out.split_whitespace().collect::<Vec<_>>().join(" ");
        for words in [
            "on this node: 1 publisher, 1 subscriber,",
            "to \"other\" by ring over tcp: the only provider; 11 messages, 1.07 KiB, 3 waits",
            "for each: copied 2.0 µs, written 4.0 µs",
            "from \"other\" by ring over tcp",
            "node \"other\" at 10.0.0.2:7700: connected: tcp",
        ] {
            assert!(flat.contains(words), "{words}: {out}");
        }
        assert_eq!(to_text(&[]), "no topics\n");
    }

    #[test]
    fn incompatible_topic_is_listed_with_the_difference() {
        let incompatibility = Row::IncompatibleTopic {
            topic: "camera".to_owned(),
            node: "ef".to_owned(),
            is_wanted_remotely: true,
            is_wanted_locally: false,
            local: "up to 64 bytes".to_owned(),
            remote: "up to 32 bytes\u{1b}".to_owned(),
            differs: vec!["largest".to_owned(), "release_deadline".to_owned()],
        };
        let mut all = rows();
        all.push(incompatibility);
        let out = to_text(&all);
        let flat = out.split_whitespace().collect::<Vec<_>>().join(" ");
        let words = "not to \"ef\": topic settings differ (largest, release_deadline); this node: up to 64 \
                     bytes; other node: up to 32 bytes\\u{1b}. Set the same --largest --release-deadline on both,";
        assert!(flat.contains(words), "{out}");
        assert_eq!(to_json(&all).unwrap()["incompatible_topics"][0]["differs"][0], "largest");
    }

    #[test]
    fn different_providers_of_two_nodes_are_listed() {
        let of = |differs: &[&str], local: &str, remote: &str| Row::IncompatibleTopic {
            topic: "camera".to_owned(),
            node: "cd".repeat(16),
            is_wanted_remotely: true,
            is_wanted_locally: true,
            local: local.to_owned(),
            remote: remote.to_owned(),
            differs: differs.iter().map(ToString::to_string).collect(),
        };
        let reason = |row| incompatibility(&rows(), &row).unwrap();
        assert_eq!(
            reason(of(&["provider"], "net (1)", "tcp (2)")),
            "not to or from \"other\": the two nodes use different providers; this node: net (1); other node: tcp (2). \
             Start both nodes with the same --provider"
        );
        let both = reason(of(&["depth", "provider"], "", ""));
        assert!(
            both.contains("differ (depth), and the two nodes use different providers"),
            "{both}"
        );
        assert!(both.contains("Set the same --depth on both, or"), "{both}");
        assert_eq!(reason(of(&[], "", "no memory")), "not to or from \"other\": no memory");
    }

    #[test]
    fn messages_missed_by_nodes_given_up_are_listed() {
        let mut all = rows();
        assert!(!to_text(&all).contains("given up"));
        all.push(Row::Missed { topic: "camera".to_owned(), nodes: 2, messages: 16 });
        let out = to_text(&all);
        assert!(out.contains("given up: other nodes, 2 times; they missed 16 messages"), "{out}");
        for (node, label) in [("cd".repeat(16), ""), ("ef".repeat(16), "third\u{1b}")] {
            let (topic, label) = ("camera".to_owned(), label.to_owned());
            all.push(Row::GivenUp { topic, node, label, messages: 8 });
        }
        let out = to_text(&all);
        let line =
            "given up: other nodes (\"other\", \"third\\u{1b}\"), 2 times; they missed 16 messages";
        assert!(out.contains(line) && !out.contains("not from"), "{out}");
        let document = to_json(&all).unwrap();
        let missed = json!([{
            "topic": "camera", "nodes": 2, "messages": 16, "names": ["other", "third\u{1b}"],
        }]);
        assert_eq!((&document["missed"], &document["incompatible_topics"]), (&missed, &json!([])));
    }

    #[test]
    fn replication_error_is_listed() {
        let mut all = rows();
        assert!(to_json(&all).unwrap()["replication_error"].is_null());
        let why = "no provider\u{1b}".to_owned();
        all.push(Row::ReplicationError { kind: ErrorKind::NoProvider, why });
        let out = to_text(&all);
        let words = "no topics are replicated with other nodes: no provider\\u{1b}\n";
        assert!(out.contains(words), "{out}");
        assert_eq!(to_json(&all).unwrap()["replication_error"], "no provider\u{1b}");
    }

    #[test]
    fn nodes_without_a_name_are_listed_by_address() {
        let peer = |label: &str, node: &str, address: &str| Row::Peer {
            node: node.to_owned(),
            label: label.to_owned(),
            address: address.to_owned(),
            is_connected: false,
            is_retried: true,
            detail: "refused".to_owned(),
        };
        let identity = "ab".repeat(16);
        let all = [peer("", "", "10.0.0.3:1"), peer("", &identity, "10.0.0.4:1")];
        let expected = "node at 10.0.0.3:1: not connected: refused\n\
                        node at 10.0.0.4:1: not connected: refused\n";
        assert!(to_text(&all).ends_with(expected), "{}", to_text(&all));
        assert_eq!(name_of_node(&all, &identity), "10.0.0.4:1");
        assert_eq!(name_of_node(&[peer("old", &identity, "x:1")], &identity), "old");
        assert_eq!(name_of_node(&[], &identity), "abababab…");
    }

    #[test]
    fn writer_says_that_messages_on_a_device_are_copied_through_the_host() {
        let mut all = rows();
        let words = "copied through the host: the reader has";
        assert!(!to_text(&all).contains(words));
        for row in &mut all {
            if let Row::Topic { place, .. } = row {
                "66616272".clone_into(place);
            }
        }
        assert!(to_text(&all).contains(words), "{}", to_text(&all));
        for row in &mut all {
            if let Row::Sent { path, .. } = row {
                path.is_direct = true;
            }
        }
        assert!(!to_text(&all).contains(words));
    }

    #[test]
    fn control_characters_of_other_nodes_are_escaped() {
        let strange = "\u{1b}[31m".to_owned();
        let peer = Row::Peer {
            node: strange.clone(),
            label: strange.clone(),
            address: strange.clone(),
            is_connected: true,
            is_retried: false,
            detail: strange.clone(),
        };
        let received = Row::Received {
            topic: "camera".to_owned(),
            node: strange.clone(),
            path: RingPath { provider: strange.clone(), lanes: 1, is_direct: false },
            staged: Some(strange.clone()),
            messages: 1,
            bytes: 1,
            stages: vec![(strange, 1)],
        };
        let mut all = rows();
        all.extend([peer, received]);
        let out = to_text(&all);
        assert!(!out.contains('\u{1b}') && out.contains("\\u{1b}[31m"), "{out}");
    }

    #[test]
    fn json_has_all_rows() {
        let all = to_json(&rows()).unwrap();
        assert_eq!(all["topics"][0], "camera");
        assert_eq!(all["sent"][0]["waits"], 3);
        assert_eq!(all["received"][0]["bytes"], 400);
        assert_eq!(all["peers"][0]["label"], "other");
    }
}
