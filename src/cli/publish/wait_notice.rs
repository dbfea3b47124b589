//! A notice about what the publisher waits for: space in the topic, or the release of messages.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use pubsub::{Node, ReportedSubscriber, Row, ServiceProcess};

use crate::cli::connectivity::request_report;
use crate::cli::open_topic::directory_note;
use crate::cli::report_rows::matching;
use crate::cli::service_wait::ServiceWait;
use crate::cli::text;

const NOTICE_DELAY: Duration = Duration::from_secs(1);
/// Timeout of the service's report about the slow subscriber.
const REPORT_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    Room,
    /// All messages were published, but not all are released.
    Release,
}

/// A wait is reported once, with the slowest subscriber if known.
#[derive(Debug, Default)]
pub(super) enum WaitNotice {
    #[default]
    NotReported,
    /// A report of the service was requested, which names the subscriber.
    ReportRequested(Instant, Option<mpsc::Receiver<pubsub::Result<Vec<Row>>>>),
    Reported,
}

impl WaitNotice {
    /// Call repeatedly during a wait, with its begin. Returns the notice when it is due.
    pub(super) fn poll(
        &mut self,
        node: &Node,
        topic: &str,
        wait: Wait,
        since: Instant,
    ) -> Option<String> {
        let answer = match self {
            Self::NotReported if since.elapsed() >= NOTICE_DELAY => {
                *self = Self::ReportRequested(Instant::now(), request_report(node));
                return None;
            }
            Self::ReportRequested(begin, answer) => {
                match answer.as_ref().map(mpsc::Receiver::try_recv) {
                    Some(Err(mpsc::TryRecvError::Empty)) if begin.elapsed() < REPORT_TIMEOUT => {
                        return None;
                    }
                    answer => answer.and_then(Result::ok).and_then(Result::ok),
                }
            }
            _ => return None,
        };
        *self = Self::Reported;
        // A stopped service evicts no subscriber, itself included.
        let service = || ServiceWait::of(node.directory()).process();
        let unresponsive = answer.is_none().then(service).flatten();
        let unresponsive = unresponsive.map_or_else(String::new, describe_unresponsive);
        let notice = describe(&answer.unwrap_or_default(), topic, wait);
        Some(format!("{notice}{unresponsive} {}", directory_note(node)))
    }
}

fn describe_unresponsive(process: ServiceProcess) -> String {
    let (number, state) = (process.number, process.state());
    let named = format!(
        "; {process} serves the node, which evicts subscribers that hold messages for too long, and does \
         not answer: {state}"
    );
    match number {
        0 => named,
        _ => format!("{named}. Resume it (kill -CONT {number}) or kill it (kill -KILL {number})"),
    }
}

fn describe(rows: &[Row], topic: &str, wait: Wait) -> String {
    let name = topic.escape_debug();
    let what = match wait {
        Wait::Room => format!("waiting for space in topic \"{name}\""),
        Wait::Release => format!("waiting until all messages of topic \"{name}\" are released"),
    };
    let (subscriber, messages) = match slowest(rows, topic) {
        Some((subscriber, behind)) => (subscriber, text::count_of(behind, "message")),
        None => ("a subscriber".to_owned(), "messages".to_owned()),
    };
    format!("{what}: {subscriber} has {messages} to read or release")
}

/// The subscriber of a topic that is furthest behind, and by how many messages.
fn slowest(rows: &[Row], name: &str) -> Option<(String, u64)> {
    let subscribers = matching!(
        rows,
        Row::Subscriber { topic, participant, unread, held, .. }
            if topic == name && unread + held > 0 => (participant, unread + held)
    );
    let (participant, behind) = subscribers.max_by_key(|(_, behind)| *behind)?;
    let ReportedSubscriber::Process(participant) = participant else {
        return Some(("another node".to_owned(), behind));
    };
    let mut process = matching!(
        rows,
        Row::Process { participant: of, label, process } if of == participant => match process {
            0 => format!("\"{}\"", label.escape_debug()),
            _ => format!("process {process} (\"{}\")", label.escape_debug()),
        }
    );
    Some((process.next().unwrap_or_else(|| "a subscriber".to_owned()), behind))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subscriber(topic: &str, participant: &str, behind: u64) -> Row {
        let (topic, participant) = (topic.to_owned(), participant.to_owned().into());
        let (unread, held) = (behind, 0);
        Row::Subscriber { topic, participant, unread, held, is_evicted: false, missed: 0 }
    }

    fn process(participant: &str, process: u32) -> Row {
        let label = format!("label of {participant}");
        Row::Process { participant: participant.to_owned(), label, process }
    }

    #[test]
    fn slowest_subscriber_is_named() {
        let mut rows = vec![
            process("p1", 7),
            process("p2", 0),
            subscriber("t", "p1", 2),
            subscriber("t", "p2", 1),
            subscriber("u", "p2", 5),
            subscriber("v", "p1", 0),
            subscriber("w", "replication", 3),
        ];
        let room = |rows: &[Row], topic| describe(rows, topic, Wait::Room);
        assert_eq!(
            room(&rows, "t"),
            "waiting for space in topic \"t\": process 7 (\"label of p1\") has 2 messages to read or release"
        );
        let expected = "waiting for space in topic \"u\": \"label of p2\" has 5 messages to read";
        assert!(room(&rows, "u").starts_with(expected));
        assert!(room(&rows, "w").contains(": another node has 3 messages to read"));
        rows.clear();
        assert_eq!(
            describe(&rows, "t", Wait::Release),
            "waiting until all messages of topic \"t\" are released: a subscriber has messages to read or \
             release"
        );
    }
}
