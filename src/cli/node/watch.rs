//! What changes at a node, in words for the log.

use std::collections::BTreeMap;

use pubsub::Row;

use crate::cli::text;

/// What was seen at the last look.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// The number of the service, whether this process is it, and where that listens.
    service: Option<(u32, bool, Option<String>)>,
    /// Who is there, what there is, which nodes are connected: with what is said of each.
    seen: BTreeMap<Thing, String>,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Thing {
    Process(String),
    Topic(String),
    Peer(String),
}

impl Thing {
    fn says(&self, about: &str, is_there: bool) -> String {
        let (what, begins, ends) = match self {
            Self::Process(_) => ("process", "came", "left"),
            Self::Topic(_) => ("topic", "was made", "is gone"),
            Self::Peer(_) => ("node", "is connected", "is not connected any more"),
        };
        format!("{what} {about} {}", if is_there { begins } else { ends })
    }
}

impl Watch {
    /// Does the process do what it is there for? Not as long as it takes over.
    pub(super) fn is_settled(&self) -> bool {
        self.service.as_ref().is_some_and(|(_, serves, _)| *serves)
    }

    /// Logs what is different. Gives a line about the service, if that is.
    pub(super) fn look(&mut self, rows: &[Row], serves: bool) -> Option<String> {
        let (status, changes) = self.changes(rows, serves);
        for line in status.iter().chain(&changes) {
            tracing::info!("{line}");
        }
        status
    }

    fn changes(&mut self, rows: &[Row], serves: bool) -> (Option<String>, Vec<String>) {
        let mut status = None;
        if let Some(Row::Node { identity, service, process, listens, .. }) = rows.first()
            && let found = (*service, serves, listens.clone().filter(|_| serves))
            && self.service.as_ref() != Some(&found)
        {
            self.service = Some(found);
            status = Some(match serves {
                true => {
                    let listens = listens.as_ref().map_or_else(
                        || "it does not listen for other nodes".to_owned(),
                        |address| format!("other nodes reach it at {address}"),
                    );
                    format!("serves node {identity} as its service number {service}; {listens}")
                }
                false => format!("process {process} serves node {identity}; taking it over"),
            });
        }
        let now: BTreeMap<_, _> = rows.iter().filter_map(thing).collect();
        let mut lines = Vec::new();
        for (thing, about) in self.seen.iter().filter(|(thing, _)| !now.contains_key(thing)) {
            lines.push(thing.says(about, false));
        }
        for (thing, about) in now.iter().filter(|(thing, _)| !self.seen.contains_key(thing)) {
            lines.push(thing.says(about, true));
        }
        self.seen = now;
        (status, lines)
    }
}

/// What a row is about, if it is about something that comes and goes.
fn thing(row: &Row) -> Option<(Thing, String)> {
    match row {
        Row::Process { participant, label, process } => {
            let about = format!("\"{}\" ({process}, {participant})", label.escape_debug());
            Some((Thing::Process(participant.clone()), about))
        }
        Row::Topic { name, number, reliability, depth, largest, place, .. } => {
            let about = format!(
                "\"{}\" ({reliability}, {} of up to {} on {place})",
                name.escape_debug(),
                text::counted((*depth).into(), "message"),
                text::counted(*largest, "byte")
            );
            Some((Thing::Topic(format!("{number} {name}")), about))
        }
        Row::Peer { node, label, address, is_connected: true, .. } => {
            // A node need not call itself anything.
            let name = if label.is_empty() { node } else { label };
            let about = format!("\"{}\" at {address}", name.escape_debug());
            Some((Thing::Peer(format!("{node} {address}")), about))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(service: u32) -> Row {
        Row::Node {
            identity: "ab".to_owned(),
            label: "x".to_owned(),
            service,
            process: 7,
            listens: (service == 2).then(|| "10.0.0.1:1".to_owned()),
        }
    }

    fn process(name: &str) -> Row {
        let (participant, label) = (name.to_owned(), format!("{name}\n"));
        Row::Process { participant, label, process: 8 }
    }

    fn peer(label: &str) -> Row {
        Row::Peer {
            node: "cd".to_owned(),
            label: label.to_owned(),
            address: "10.0.0.2:1".to_owned(),
            is_connected: true,
            detail: "for 3 s".to_owned(),
        }
    }

    #[test]
    fn only_changes_are_told() {
        let mut watch = Watch::default();
        let (status, lines) = watch.changes(&[node(1), process("a")], false);
        assert_eq!(status.unwrap(), "process 7 serves node ab; taking it over");
        assert!(!watch.is_settled());
        assert_eq!(lines, ["process \"a\\n\" (8, a) came"]);
        let (status, lines) = watch.changes(&[node(1), process("a")], false);
        assert!(status.is_none() && lines.is_empty());
        let (status, lines) = watch.changes(&[node(2), process("b")], true);
        let said = "serves node ab as its service number 2; other nodes reach it at 10.0.0.1:1";
        assert_eq!(status.unwrap(), said);
        assert!(watch.is_settled());
        assert_eq!(lines, ["process \"a\\n\" (8, a) left", "process \"b\\n\" (8, b) came"]);
        let mut late = node(2);
        let Row::Node { listens, .. } = &mut late else { panic!() };
        *listens = None;
        let mut watch = Watch::default();
        let (status, _) = watch.changes(&[late], true);
        assert!(status.unwrap().ends_with("it does not listen for other nodes"));
        assert_eq!(watch.changes(&[node(2)], true).0.unwrap(), said);
        let peer_of = |label| Watch::default().changes(&[node(2), peer(label)], true).1;
        assert_eq!(peer_of("two"), [r#"node "two" at 10.0.0.2:1 is connected"#]);
        assert_eq!(peer_of(""), [r#"node "cd" at 10.0.0.2:1 is connected"#]);
    }
}
