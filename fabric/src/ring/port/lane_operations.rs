//! Extra lanes: endpoints with a domain and a thread each, for large messages of all rings.

use super::super::lanes::{ExtraLanes, LaneEvent};
use super::super::{LaneSet, Message, Pushed};
use super::{Port, SenderId, sender_mut, sender_of};
use crate::{Address, Domain, Error, ErrorKind, RegionSlice, Result};

impl Port {
    /// Starts extra lanes, each a thread with its own endpoint. They carry large messages of rings
    /// that were [offered](Self::offer_on_lanes) and [accepted](Self::accept_on_lanes) on lanes.
    /// Idle threads sleep.
    ///
    /// ```
    /// use std::time::Duration;
    /// use fabric::ring::*;
    /// use fabric::*;
    ///
    /// let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
    /// let domain = Domain::open(&offer)?;
    /// let addresses = AddressVector::open(&domain)?;
    /// let mut queue = CompletionQueue::open(&domain)?;
    /// let endpoint = Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open()?;
    /// let peer = addresses.insert(&endpoint.address()?)?;
    /// let mut port = Port::new(endpoint, queue);
    /// let extra = Domain::open(&offer)?;
    /// port.add_lanes(LaneSet::open_on(&[extra])?)?;
    /// // A ring to itself.
    /// let options = RingOptions::new(port.endpoint(), 1 << 20)?;
    /// let reading = port.offer_on_lanes(&options, 2, HostMemory::zeroed(1 << 20)?)?;
    /// let (ring_offer, addresses) = (port.ring_offer(reading)?, port.lane_addresses());
    /// let (writing, answer) = port.accept_on_lanes(peer, &addresses, &ring_offer, 64 << 10)?;
    /// port.connect(reading, peer, &answer)?;
    ///
    /// // Memory is registered for each lane that writes from it.
    /// let memory = std::sync::Arc::new(HostMemory::from_vec(vec![7; 512 << 10])?);
    /// let regions = (0..port.lanes()).map(|lane| {
    ///     let domain = port.lane_domain(lane).expect("the lane exists");
    ///     domain.register(std::sync::Arc::clone(&memory), Access::WRITE)
    /// });
    /// let regions = regions.collect::<Result<Vec<_>>>()?;
    /// let mut message = port.begin(writing, 3, 512 << 10)?;
    /// while !message.is_written() {
    ///     if let Some(lane) = port.pick_lane(writing, 64 << 10)? {
    ///         port.push_with(lane, writing, &mut message, (&regions[lane].all(), 0), &[])?;
    ///     }
    ///     while let Some(view) = port.take(reading)? {
    ///         assert_eq!(view.header().topic, 3);
    ///     }
    ///     let _ = port.wait(Duration::from_millis(1))?;
    /// }
    /// # Ok::<(), fabric::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidArgument` if the port has extra lanes; `NotSupported` where memory is bound to an
    /// endpoint, where writes carry no immediates, or where a sleeping thread cannot be woken.
    pub fn add_lanes(&mut self, lanes: LaneSet) -> Result<()> {
        if self.extra_lanes.is_some() {
            let detail = "the port has extra lanes already";
            return Err(Error::new(ErrorKind::InvalidArgument, "open lanes of port", detail));
        }
        for (capabilities, entries) in lanes.queues() {
            self.queue_budget.limit(capabilities, entries);
        }
        self.extra_lanes = Some(Box::new(ExtraLanes::start(lanes, self.io.queue.waker())?));
        Ok(())
    }

    /// Number of lanes with the port's endpoint; 1 after an extra lane [failed](Self::lane_error).
    #[must_use]
    pub fn lanes(&self) -> usize {
        1 + self.extra_lanes.as_ref().map_or(0, |lanes| lanes.usable())
    }

    /// Why extra lanes failed, if they did. All rings on them are broken. Memory given to them may
    /// still be read or written until the endpoint is [replaced](Self::replace_endpoint) or the
    /// port closed.
    #[must_use]
    pub fn lane_error(&self) -> Option<&Error> {
        self.extra_lanes.as_ref()?.broken()
    }

    /// Addresses of the extra lanes, in their order.
    #[must_use]
    pub fn lane_addresses(&self) -> Vec<Address> {
        self.extra_lanes.iter().flat_map(|lanes| lanes.addresses().cloned()).collect()
    }

    /// The most peer addresses that an extra lane holds: they stay until the endpoint is
    /// [replaced](Self::replace_endpoint), and their number is bounded.
    #[must_use]
    pub fn lane_peer_count(&self) -> usize {
        self.extra_lanes.as_ref().map_or(0, |lanes| lanes.max_peers())
    }

    /// The domain of a lane; lane 0 is the port's endpoint. Memory to be written on a lane is
    /// registered with its domain.
    #[must_use]
    pub fn lane_domain(&self, lane: usize) -> Option<&Domain> {
        match lane {
            0 => Some(self.io.endpoint.domain()),
            _ => self.extra_lanes.as_ref()?.domain(lane),
        }
    }

    /// The lane for the next chunk of a ring, of about this many bytes; None if all lanes are full.
    /// Of four or more lanes it is never lane 0: that carries small messages, credit and end
    /// notices, and the port's thread has the other lanes to serve.
    ///
    /// # Errors
    /// `Closed` if there is no such ring.
    #[inline]
    pub fn pick_lane(&self, id: SenderId, bytes: u64) -> Result<Option<usize>> {
        Ok(self.sender(id)?.pick_lane(bytes))
    }

    /// Like [`push_part`](Self::push_part), on this lane, whose domain has the part registered. The
    /// bytes `inline` accompany the header of the chunk, if one is posted, and the reader finds them
    /// as its [`inline_data`](super::super::ChunkView::inline_data): also where its processor cannot
    /// read the payload.
    ///
    /// # Errors
    /// As [`push_part`](Self::push_part); `OutOfBounds` for a lane that the ring does not use, or
    /// more bytes than [the ring has room for](super::super::RingOptions::inline_data).
    #[inline]
    pub fn push_with(
        &mut self,
        lane: usize,
        id: SenderId,
        message: &mut Message,
        (part, at): (&RegionSlice, u64),
        inline: &[u8],
    ) -> Result<Pushed> {
        let sender = sender_mut(&mut self.senders, id.0)?;
        match &self.extra_lanes {
            Some(lanes) if lane > 0 => {
                sender.push_on_lane((lanes, lane), message, part, at, inline)
            }
            _ => sender.push_part(&mut self.io, message, part, at, inline),
        }
    }

    /// Stops writing to a ring whose reader may be dead: chunks that lanes could not post for lack
    /// of room are dropped within a second. So [`unfinished`](super::super::RingSender::unfinished)
    /// reaches 0 eventually.
    pub fn stop_sender(&mut self, id: SenderId) {
        if let (Some(lanes), Ok(sender)) =
            (&mut self.extra_lanes, sender_mut(&mut self.senders, id.0))
            && sender.stop()
        {
            lanes.stop(sender.instance(), false);
        }
    }

    /// Makes the lanes wake the thread in the queue. True if an event was handled just now.
    pub(super) fn set_lanes_sleeping(&mut self) -> bool {
        let Some(lanes) = &self.extra_lanes else { return false };
        // Of rings that were closed while views existed.
        lanes.sweep();
        lanes.set_sleeping(true);
        self.handle_lane_event()
    }

    /// Handles one event of a lane. False if there is none.
    pub(super) fn handle_lane_event(&mut self) -> bool {
        let Some(lanes) = &mut self.extra_lanes else { return false };
        let Some(event) = lanes.next() else { return false };
        match event {
            LaneEvent::ReceivedNotice(notice) => self.handle_notice(notice),
            LaneEvent::Written { lane, instance, completed_to, bytes } => {
                if let Some(sender) = sender_of(&mut self.senders, instance) {
                    self.needs_polling |= bytes.is_err();
                    match bytes {
                        Ok(bytes) => sender.lane_completed(lane, completed_to, bytes),
                        Err(error) => sender.lane_failed(lane, completed_to, error),
                    }
                    sender.queue_event(&mut self.events);
                }
            }
            LaneEvent::LaneFailed(error) => self.handle_lane_failure(error),
        }
        true
    }

    /// A lane has stopped. Its chunks may still be in flight.
    #[cold]
    fn handle_lane_failure(&mut self, error: Error) {
        if let Some(lanes) = &mut self.extra_lanes {
            lanes.fail(error.clone());
        }
        for sender in self.senders.iter_mut().flatten().filter(|it| it.lanes() > 1) {
            sender.lane_failed(0, 0, error.clone());
            sender.queue_event(&mut self.events);
        }
        for receiver in self.receivers.iter_mut().flatten().filter(|it| it.lanes() > 1) {
            receiver.fail(error.clone());
            receiver.queue_event(&mut self.events);
        }
        self.needs_polling = true;
    }

    pub(super) fn close_lanes(&mut self) -> Result<()> {
        self.are_lanes_next = false;
        self.extra_lanes.take().map_or(Ok(()), |lanes| lanes.shut_down())
    }
}
