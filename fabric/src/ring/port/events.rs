//! Which rings something happened for: a list, for who has many rings and looks after few.

use std::collections::VecDeque;

use super::super::receiver::RingReceiver;
use super::super::sender::RingSender;
use super::{Port, ReceiverId, SenderId};

/// A ring for which something happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RingEvent {
    /// Something may be there to be read, or it is broken.
    Receiver(ReceiverId),
    /// Something left, was read, or failed.
    Sender(SenderId),
}

impl Port {
    /// From now on [`next_event`](Self::next_event) tells which rings something happened for: for
    /// who has many of them, and wants to look after none that nothing happened for.
    pub fn enable_events(&mut self) {
        self.events.get_or_insert_default();
    }

    /// A ring that something happened for since it was last given here.
    #[inline]
    pub fn next_event(&mut self) -> Option<RingEvent> {
        let events = self.events.as_mut()?.pop_front()?;
        match events {
            RingEvent::Receiver(id) => {
                let place = self.receivers.get_mut(usize::from(id.ring));
                if let Some(Some(receiver)) = place
                    && receiver.creation_epoch() == id.creation_epoch
                {
                    receiver.is_event_queued = false;
                }
            }
            RingEvent::Sender(id) => {
                if let Some(Some(sender)) = self.senders.get_mut(usize::from(id.0)) {
                    sender.is_event_queued = false;
                }
            }
        }
        Some(events)
    }
}

/// Takes note that something happened for a ring.
#[inline]
pub(super) fn queue_sender_event(
    events: &mut Option<VecDeque<RingEvent>>,
    sender_index: u16,
    sender: &mut RingSender,
) {
    if let Some(events) = events
        && !sender.is_event_queued
    {
        sender.is_event_queued = true;
        events.push_back(RingEvent::Sender(SenderId(sender_index)));
    }
}

#[inline]
pub(super) fn queue_receiver_event(
    events: &mut Option<VecDeque<RingEvent>>,
    ring: u16,
    receiver: &mut RingReceiver,
) {
    if let Some(events) = events
        && !receiver.is_event_queued
    {
        receiver.is_event_queued = true;
        events.push_back(RingEvent::Receiver(ReceiverId {
            ring,
            creation_epoch: receiver.creation_epoch(),
        }));
    }
}
