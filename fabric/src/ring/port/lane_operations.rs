//! Extra lanes: endpoints with a domain and a thread each, for large messages of all rings.

use std::sync::Arc;

use super::super::lanes::{ExtraLanes, LaneEvent};
use super::super::memory::RegistrationScope;
use super::super::{
    LaneSet, Message, NotifyMode, Pushed, RingAnswer, RingOffer, RingOptions, RingReceiver,
};
use super::opening::free_index;
use super::{Port, ReceiverId, SenderId, sender_mut, sender_of};
use crate::{
    Access, Address, Domain, Error, ErrorKind, Memory, MemoryKind, MemoryRegion, Peer, RegionSlice,
    Result,
};

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

    /// Like [`offer`](Self::offer), in the caller's memory, which may be device or shared memory.
    /// To be written on at most `lanes` lanes including the endpoint, and fewer if the port has
    /// fewer or the ring does not use immediates.
    ///
    /// # Errors
    /// As [`offer`](Self::offer); `OutOfBounds` if the memory is too small.
    pub fn offer_on_lanes(
        &mut self,
        options: &RingOptions,
        lanes: usize,
        memory: impl Memory,
    ) -> Result<ReceiverId> {
        let lanes = match options.notify {
            NotifyMode::Immediate => lanes.min(self.lanes()),
            NotifyMode::Message => 1,
        };
        let (kind, memory) = (memory.kind(), Arc::new(memory));
        self.offer_in(options, lanes, kind, |scopes| {
            let register = |scope: &RegistrationScope<'_>| {
                scope.register(Arc::clone(&memory), Access::REMOTE_WRITE)
            };
            scopes.iter().map(register).collect()
        })
    }

    /// Like [`offer_on_lanes`](Self::offer_on_lanes), in memory that the caller has registered for
    /// remote writes, with the [domain](Self::lane_domain) of each lane in turn: of device memory,
    /// which may be registered in several ways.
    ///
    /// # Errors
    /// As [`offer_on_lanes`](Self::offer_on_lanes); `InvalidArgument` for a region of another
    /// domain.
    pub fn offer_registered(
        &mut self,
        options: &RingOptions,
        regions: Vec<MemoryRegion>,
    ) -> Result<ReceiverId> {
        let refuse =
            |detail: &'static str| Err(Error::new(ErrorKind::InvalidArgument, "open ring", detail));
        let Some(kind) = regions.first().map(MemoryRegion::kind) else {
            return refuse("no registered memory was given");
        };
        let max_lanes = if options.notify == NotifyMode::Immediate { self.lanes() } else { 1 };
        let is_of_lane = |(lane, region): (usize, &MemoryRegion)| {
            self.lane_domain(lane).is_some_and(|domain| domain.is_same(region.domain()))
        };
        if regions.len() > max_lanes || !regions.iter().enumerate().all(is_of_lane) {
            return refuse("the memory is not registered with the domains of the lanes, in order");
        }
        self.offer_in(options, regions.len(), kind, |scopes| {
            scopes.iter().zip(regions).map(|(scope, region)| scope.enable(region)).collect()
        })
    }

    /// Opens a ring on so many lanes, in memory of this kind that is registered for all of them.
    fn offer_in(
        &mut self,
        options: &RingOptions,
        lanes: usize,
        kind: MemoryKind,
        register: impl FnOnce(&[RegistrationScope<'_>]) -> Result<Vec<MemoryRegion>>,
    ) -> Result<ReceiverId> {
        let extra = lanes.saturating_sub(1);
        let ring = free_index(&self.receivers, self.next_ring)?;
        self.epoch += 1;
        let id = ReceiverId { ring, creation_epoch: self.epoch };
        let limits = (options, &self.queue_budget);
        let lanes = self.extra_lanes.as_ref();
        let scopes = lanes.map(|it| it.registration_scopes(extra)).unwrap_or_default();
        let receiver = RingReceiver::open(&self.io, &scopes, id, limits, kind, register)?;
        if let Some(lanes) = lanes.filter(|_| extra > 0) {
            lanes.retain_memory(receiver.memory());
        }
        self.insert_receiver(receiver)
    }

    /// Inserts the addresses of a writer's [extra lanes](Self::lane_addresses), in their order.
    /// Some providers drop data from unknown addresses. So call this before sending a [ring
    /// offer](Self::ring_offer) to the writer, whose own address must be
    /// [inserted](crate::AddressVector::insert), too.
    ///
    /// # Errors
    /// Errors of the provider for an address; `ResourceExhausted` if a lane has too many addresses.
    pub fn insert_lane_addresses(&mut self, writer: &[Address]) -> Result<()> {
        self.extra_lanes.as_mut().map_or(Ok(()), |lanes| lanes.insert_addresses(writer))
    }

    /// Like [`accept`](Self::accept), for a ring on several lanes: all lanes of the offer, whose
    /// extra ones are at these addresses.
    ///
    /// # Errors
    /// As [`accept`](Self::accept); `MalformedDescriptor` if the number of addresses does not fit
    /// the offer or exceeds the lanes here; `ResourceExhausted` if a lane has too many addresses.
    pub fn accept_on_lanes(
        &mut self,
        peer: Peer,
        extra: &[Address],
        offer: &RingOffer,
        max_payload: u64,
    ) -> Result<(SenderId, RingAnswer)> {
        let addresses = extra.len();
        let offered = offer.lanes.len();
        let here = self.lanes();
        let is_possible = addresses < here
            && offered == addresses + 1
            && (addresses == 0 || offer.notify == NotifyMode::Immediate);
        if !is_possible {
            let detail = format!(
                "{addresses} addresses of extra lanes for a ring of {offered} lanes that is notified by {}; {here} lanes here",
                offer.notify.name()
            );
            return Err(Error::new(ErrorKind::MalformedDescriptor, "open ring", detail));
        }
        let (id, answer) = self.accept(peer, offer, max_payload)?;
        if !extra.is_empty()
            && let Some(lanes) = &mut self.extra_lanes
        {
            let sender = sender_mut(&mut self.senders, id.0)?;
            if let Err(error) = lanes.open(extra, offer, sender.instance()) {
                self.drop_sender(id);
                return Err(error);
            }
            sender.stripe_over(extra.len() + 1);
        }
        Ok((id, answer))
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
    /// more bytes than [the ring has room for](RingOptions::inline_data).
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
