//! What the service tells those that ask who is there.

use super::Reception;
use crate::error::ErrorKind;
use crate::pool::Direction;
use crate::report::Row;
use crate::service::protocol::{self, Notice, Refusal};

/// Bytes of the rows of one message: several of these fit into the buffer of a socket.
const PART: usize = 16 << 10;

impl Reception {
    /// What one is told who asks who is there.
    pub(super) fn answer_to_report(&mut self, request: u64) -> Vec<Notice> {
        if self.gathering.is_some() {
            let why = "the service has just taken over and does not know yet who is there";
            let why = Refusal::new(ErrorKind::Failed, why);
            return vec![Notice::Refused { request, why }];
        }
        let mut parts = vec![Vec::new()];
        let mut bytes = 0;
        for row in self.report() {
            let length = protocol::encode(&row).len();
            if bytes + length > PART && bytes > 0 {
                parts.push(Vec::new());
                bytes = 0;
            }
            bytes += length;
            if let Some(part) = parts.last_mut() {
                part.push(row);
            }
        }
        let last = parts.len() - 1;
        let notices = parts.into_iter().enumerate();
        notices.map(|(at, rows)| Notice::Rows { request, rows, is_last: at == last }).collect()
    }

    /// All that is to be told. The first row is the node's.
    fn report(&mut self) -> Vec<Row> {
        let Some(seat) = &self.seat else { return Vec::new() };
        let mut rows = vec![Row::Node {
            identity: seat.hall.identity().to_string(),
            label: self.options.label.clone(),
            service: seat.number,
            process: std::process::id(),
            listens: self.carrying.carrier.as_ref().and_then(|it| it.listens()),
        }];
        rows.extend(self.guests.iter().map(|(who, guest)| Row::Process {
            participant: who.to_string(),
            label: guest.label.clone(),
            process: guest.process,
        }));
        for (id, keeping) in &self.registry.pools {
            let found = keeping.pool.statistics(&seat.caller()).unwrap_or_default();
            rows.push(Row::Pool {
                place: id.place.to_string(),
                is_for_arrivals: id.direction == Direction::Arrivals,
                bytes: keeping.pool.length(),
                budget: self.registry.budget(id.place),
                limit: keeping.pool.limit(),
                free: found.free,
                blocks: found.blocks_taken,
            });
        }
        for kept in self.registry.topics.values() {
            rows.extend(self.report_of(kept));
        }
        rows.extend(self.carrying.rows());
        rows
    }

    fn report_of(&self, kept: &crate::service::registry::Kept) -> Vec<Row> {
        let topic = &kept.topic;
        let settings = topic.settings();
        let name = || topic.name().to_owned();
        let mut rows = vec![Row::Topic {
            name: name(),
            number: topic.number(),
            place: settings.place.to_string(),
            reliability: settings.reliability.to_string(),
            depth: settings.depth,
            largest: settings.largest,
            loans: settings.loans,
            release_microseconds: settings.release_microseconds,
            type_name: settings.type_name.map(String::from),
            published: topic.here().position(),
            arrived: topic.arrivals().position(),
            dropped: topic.here().dropped() + topic.arrivals().dropped(),
            reserves: settings.reserves(topic.promised()),
        }];
        let census = topic.census();
        rows.extend(census.publishers.into_iter().map(|found| {
            Row::Publisher {
                topic: name(),
                participant: found.who.to_string(),
                publisher: found.id,
                messages: found.messages,
                bytes: found.bytes,
                waits_microseconds: found
                    .waits_since
                    .map_or(0, |since| crate::clock::now().saturating_sub(since) / 1000),
            }
        }));
        rows.extend(census.subscribers.into_iter().map(|found| Row::Subscriber {
            topic: name(),
            participant: match found.who {
                Some(who) if who.is_role() => "carrier".into(),
                Some(who) => who.to_string(),
                None => String::new(),
            },
            behind: u64::from(found.unread) + u64::from(found.held),
            missed: found.missed,
        }));
        let missed = topic.missed_by_nodes();
        if missed.nodes > 0 {
            rows.push(Row::Missed {
                topic: name(),
                nodes: missed.nodes,
                messages: missed.messages,
            });
        }
        rows
    }
}
