//! Ready events of rings: for applications with many rings, most of them idle.

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
                    receiver.event_returned();
                }
            }
            RingEvent::Sender(id) => {
                if let Some(Some(sender)) = self.senders.get_mut(usize::from(id.0)) {
                    sender.event_returned();
                }
            }
        }
        Some(event)
    }
}
