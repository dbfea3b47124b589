//! Ready events of rings: for applications with many rings, most of them idle.

use std::collections::VecDeque;

use super::super::{RingReceiver, RingSender};
use super::{Port, ReceiverId, SenderId};

/// A ring that became ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RingEvent {
    /// Chunks may be ready to read, or the ring is broken.
    Receiver(ReceiverId),
    /// Chunks completed or were read, or the ring failed.
    Sender(SenderId),
}

impl Port {
    /// Enables [`next_event`](Self::next_event), for applications with many rings that want to
    /// service only ready ones.
    pub fn enable_events(&mut self) {
        self.events.get_or_insert_default();
    }

    /// A ring with an event since it was last returned here.
    #[inline]
    pub fn next_event(&mut self) -> Option<RingEvent> {
        let event = self.events.as_mut()?.pop_front()?;
        match event {
            RingEvent::Receiver(id) => {
                if let Some(Some(receiver)) = self.receivers.get_mut(usize::from(id.ring))
                    && receiver.id() == id
                {
                    receiver.set_event_queued(false);
                }
            }
            RingEvent::Sender(id) => {
                if let Some(Some(sender)) = self.senders.get_mut(usize::from(id.0)) {
                    sender.set_event_queued(false);
                }
            }
        }
        Some(event)
    }
}

/// Queues an event, once per ring.
#[inline]
pub(super) fn queue_sender_event(
    events: &mut Option<VecDeque<RingEvent>>,
    sender: &mut RingSender,
) {
    if let Some(events) = events
        && sender.set_event_queued(true)
    {
        events.push_back(RingEvent::Sender(SenderId(sender.instance().sender_index)));
    }
}

#[inline]
pub(super) fn queue_receiver_event(
    events: &mut Option<VecDeque<RingEvent>>,
    receiver: &mut RingReceiver,
) {
    if let Some(events) = events
        && receiver.set_event_queued(true)
    {
        events.push_back(RingEvent::Receiver(receiver.id()));
    }
}
