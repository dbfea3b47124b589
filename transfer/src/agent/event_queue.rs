//! Queue of the events of an agent: initiators that connect and disconnect, and their notices.

use std::collections::VecDeque;
use std::sync::Arc;

use super::event::Event;
use super::local_target::{LocalInitiator, LocalTarget};

/// Events that were not taken, and the local initiators that cause some of them.
#[derive(Debug, Default)]
pub(super) struct EventQueue {
    queue: VecDeque<(Event, Option<NoticeCredit>)>,
    first_reserved: Option<u64>,
    /// Notices with reserved tags, and departures of peers.
    reserved: VecDeque<(Event, Option<NoticeCredit>)>,
    /// Entries of `queue` with a credit.
    held_credits: usize,
    /// Credits to be returned to peers.
    freed_credits: Vec<NoticeCredit>,
    /// Initiators that joined and did not leave.
    initiators: Vec<Arc<LocalInitiator>>,
    /// The initiator of the last notice: the next one has its turn.
    next_initiator: usize,
    seen_changes: u64,
}

/// The rail and session that a notice holds a credit of.
pub(super) type NoticeCredit = (usize, u64);

pub(super) type TakeEvent = fn(&mut EventQueue) -> Option<Event>;

impl EventQueue {
    pub(super) fn new(first_reserved: Option<u64>) -> Self {
        Self { first_reserved, ..Self::default() }
    }

    pub(super) fn push(&mut self, event: Event, credit: Option<NoticeCredit>) {
        match &event {
            Event::Notice { notice, .. }
                if self.first_reserved.is_some_and(|first| notice.tag >= first) =>
            {
                self.reserved.push_back((event, credit));
                return;
            }
            Event::Left { .. } if self.first_reserved.is_some() => {
                self.reserved.push_back((event.clone(), None));
            }
            _ => {}
        }
        self.held_credits += usize::from(credit.is_some());
        self.queue.push_back((event, credit));
    }

    /// The next event without a reserved tag, if any.
    pub(super) fn take(&mut self) -> Option<Event> {
        loop {
            if let Some((event, credit)) = self.queue.pop_front() {
                self.held_credits -= usize::from(credit.is_some());
                self.freed_credits.extend(credit);
                return Some(event);
            }
            let notice = self.take_local_notice()?;
            self.push(notice, None);
        }
    }

    /// The next notice with a reserved tag, or departure of a peer, if any.
    ///
    /// Notices without such a tag return their credit although they are not taken: all notices of a
    /// peer share one queue there, and those with reserved tags may wait behind them.
    pub(super) fn take_reserved(&mut self) -> Option<Event> {
        loop {
            if let Some((event, credit)) = self.reserved.pop_front() {
                self.freed_credits.extend(credit);
                return Some(event);
            }
            if std::mem::take(&mut self.held_credits) > 0 {
                let held = self.queue.iter_mut().filter_map(|(_, credit)| credit.take());
                self.freed_credits.extend(held);
            }
            let notice = self.take_local_notice()?;
            self.push(notice, None);
        }
    }

    pub(super) fn take_freed_credits(&mut self) -> Vec<NoticeCredit> {
        std::mem::take(&mut self.freed_credits)
    }

    fn take_local_notice(&mut self) -> Option<Event> {
        // Round robin: an initiator with many notices does not starve the others.
        for _ in 0..self.initiators.len() {
            self.next_initiator = (self.next_initiator + 1) % self.initiators.len();
            if let Some(notice) = self.initiators[self.next_initiator].take_notice() {
                return Some(notice);
            }
        }
        None
    }

    /// Reports local initiators that connected or disconnected.
    pub(super) fn update(&mut self, local_target: &LocalTarget) {
        let Some(all) = local_target.changed_initiators(&mut self.seen_changes) else { return };
        for initiator in all {
            if !self.initiators.iter().any(|reported| Arc::ptr_eq(reported, &initiator)) {
                if let Some(joined) = initiator.joined() {
                    self.push(joined, None);
                }
                self.initiators.push(initiator);
            }
        }
        // Notices that it sent before are reported first.
        let left: Vec<_> =
            self.initiators.extract_if(.., |initiator| initiator.has_left()).collect();
        for initiator in left {
            initiator.report_departure(|event| self.push(event, None));
        }
        local_target.remove_departed();
    }
}
