//! The ring: messages of any length through memory that one side writes and the other reads, in
//! each notify mode.

use std::time::{Duration, Instant};

use fabric::ring::{
    ChunkLayout, ChunkView, MIN_GRANULE, NotifyMode, Port, PortEvent, Pushed, ReceiverId,
    RingAnswer, RingOffer, RingOptions, SenderId,
};
use fabric::{
    Access, Caps, ErrorKind, HostMemory, MemoryRegion, Offer, Order, PostOptions, Query,
    TransferFlags,
};

use super::Case;
use crate::cells::{Cell, Memory};
use crate::cuda::DeviceMemory;
use crate::pair::{
    A, B, CaseResult, Idle, Pair, Parts, Setup, check_bytes, get, pattern, put, timeout,
};
use crate::{cases, ensure};

pub const CASES: &[Case] = cases![
    ring_by_immediates,
    ring_by_messages,
    ring_by_tagged_messages,
    ring_without_order,
    ring_views_outlive_later_ones,
    ring_takes_another_message_where_one_found_no_room,
    ring_misuse_is_refused
];

/// Capacity where the size does not matter.
pub(super) const CAPACITY: u64 = 64 << 10;

/// A writer and a reader, driven by one thread.
pub(super) struct Fixture {
    pub(super) ports: [Port; 2],
    pub(super) parts: Parts,
    pub(super) memory: Memory,
    pub(super) sender: SenderId,
    pub(super) receiver: ReceiverId,
}

impl Fixture {
    pub(super) fn new(
        cell: &Cell,
        options: &RingOptions,
        longest_payload: u64,
    ) -> CaseResult<Self> {
        Self::with(ordered(cell, Caps::empty())?, cell, options, longest_payload)
    }

    pub(super) fn with(
        offer: Offer,
        cell: &Cell,
        options: &RingOptions,
        longest_payload: u64,
    ) -> CaseResult<Self> {
        let offer = Some(offer);
        let pair = Pair::with(cell, Setup { offer, ..Setup::default() })?;
        Self::of(pair, cell.memory, options, longest_payload)
    }

    pub(super) fn of(
        pair: Pair,
        memory: Memory,
        options: &RingOptions,
        longest_payload: u64,
    ) -> CaseResult<Self> {
        if let Err(error) = options.notify.check(pair.sides[A].domain.capabilities()) {
            return Err(format!("lacking: {error}").into());
        }
        let (sides, parts) = pair.split();
        let mut ports = sides.map(|(endpoint, queue)| Port::new(endpoint, queue));
        let receiver = offer(&mut ports[B], memory, options)?;
        let ring_offer = round_trip::<RingOffer>(&ports[B].ring_offer(receiver)?)?;
        let (sender, answer) = ports[A].accept(parts.peers[A], &ring_offer, longest_payload)?;
        ports[B].connect(receiver, parts.peers[B], &round_trip::<RingAnswer>(&answer)?)?;
        Ok(Self { ports, parts, memory, sender, receiver })
    }

    /// One progress call of each side; true if an event was processed.
    pub(super) fn progress(&mut self) -> CaseResult<bool> {
        let mut any = false;
        for port in &mut self.ports {
            match port.progress()? {
                PortEvent::Idle => {}
                PortEvent::Ring => any = true,
                PortEvent::Other(outcome) => {
                    return Err(format!("unexpected completion: {outcome:?}").into());
                }
            }
            any |= port.return_all_credit(false);
        }
        Ok(any)
    }

    /// Drives both sides until a condition holds.
    pub(super) fn until(
        &mut self,
        what: &str,
        mut is_so: impl FnMut(&mut Self) -> CaseResult<bool>,
    ) -> CaseResult {
        let end = Instant::now() + timeout();
        let mut idle = Idle::default();
        loop {
            if is_so(self)? {
                return Ok(());
            }
            if self.progress()? {
                idle.end();
            } else {
                self.ports[B].return_all_credit(true);
                ensure!(Instant::now() < end, "timeout: waited for {what}");
                idle.pause();
            }
        }
    }

    /// Sends a message and receives it.
    pub(super) fn pass(&mut self, number: u64, length: usize) -> CaseResult {
        let source = self.source(&pattern(number + 5, length))?;
        let payload = source.slice(0..length)?;
        let (sender, receiver) = (self.sender, self.receiver);
        let mut message = self.ports[A].begin(sender, 3, length as u64)?;
        let mut got = Vec::with_capacity(length);
        let mut is_whole = false;
        self.until(&format!("message {number} of {length} bytes"), |fixture| {
            fixture.ports[A].push(sender, &mut message, &payload)?;
            while let Some(view) = fixture.ports[B].take(receiver)? {
                let header = *view.header();
                ensure!(header.message == number && header.topic == 3, "{header:?}");
                ensure!(header.length == length as u64, "{header:?}");
                ensure!(header.offset == got.len() as u64, "{header:?}");
                got.extend(bytes_of(&view)?);
                is_whole = view.is_last();
            }
            Ok(is_whole && message.is_written())
        })?;
        check_bytes(
            &format!("message {number} of {length} bytes"),
            &got,
            &pattern(number + 5, length),
        )
    }

    /// Memory of the cell's kind with these bytes, to write from.
    pub(super) fn source(&self, bytes: &[u8]) -> CaseResult<MemoryRegion> {
        let endpoint = self.ports[A].endpoint();
        let domain = endpoint.domain();
        let length = bytes.len().max(1);
        let access = Access::WRITE;
        let region = match self.memory {
            Memory::Host => domain.register(HostMemory::zeroed(length)?, access)?,
            Memory::Cuda => domain.register(DeviceMemory::new(length)?, access)?,
        };
        region.enable_for(endpoint)?;
        if !bytes.is_empty() {
            put(&region, 0, bytes)?;
        }
        Ok(region)
    }

    /// All credit is returned, and the memory of every message is free.
    pub(super) fn settle(&mut self, first: u64, count: u64) -> CaseResult {
        let (sender, mut read) = (self.sender, first);
        self.until("all credit to be returned", |fixture| {
            while let Some(number) = fixture.ports[A].next_read(sender)? {
                ensure!(number == read, "message {number}, not {read}");
                read += 1;
            }
            let sender = fixture.ports[A].sender(sender)?;
            Ok(read == first + count && sender.unfinished() == 0)
        })?;
        let writer = self.ports[A].sender(sender)?.writer();
        ensure!(writer.free() == writer.geometry().capacity(), "{writer:?}");
        Ok(())
    }
}

/// A ring in memory of this kind.
pub(super) fn offer(
    port: &mut Port,
    memory: Memory,
    options: &RingOptions,
) -> CaseResult<ReceiverId> {
    match memory {
        Memory::Host => Ok(port.offer(options)?),
        Memory::Cuda => {
            let memory = DeviceMemory::new(options.capacity as usize)?;
            Ok(port.offer_on_lanes(options, 1, memory)?)
        }
    }
}

/// Encoded and decoded, as between two processes.
pub(super) fn round_trip<T: serde::Serialize + serde::de::DeserializeOwned>(
    value: &T,
) -> CaseResult<T> {
    Ok(serde_json::from_slice(&serde_json::to_vec(value)?)?)
}

pub(super) fn bytes_of(view: &ChunkView) -> CaseResult<Vec<u8>> {
    match view.slice() {
        Some(slice) => get(&slice.region(), slice.offset(), slice.len()),
        None => Ok(Vec::new()),
    }
}

pub(super) fn options(notify: NotifyMode, capacity: u64, watermark: u64) -> RingOptions {
    RingOptions { capacity, watermark, notify, completed_messages: 0, inline_data: 0 }
}

fn ring_by_immediates(cell: &Cell) -> CaseResult {
    carries_messages(cell, NotifyMode::Immediate, Caps::empty())
}

fn ring_by_messages(cell: &Cell) -> CaseResult {
    if !cell.offer(Caps::empty())?.capabilities().caps.contains(Caps::MESSAGE) {
        return Err("lacking: no messages without tags".into());
    }
    carries_messages(cell, NotifyMode::Message, Caps::empty())
}

fn ring_by_tagged_messages(cell: &Cell) -> CaseResult {
    let has_tags = match cell.offer(Caps::TAGGED) {
        Err(error) if error.kind() == ErrorKind::NoProvider => false,
        offer => offer?.capabilities().caps.contains(Caps::TAGGED),
    };
    if !has_tags {
        return Err("lacking: no messages with tags".into());
    }
    carries_messages(cell, NotifyMode::Message, Caps::TAGGED)
}

/// Lengths from 0 to many times the capacity, with several watermarks.
fn carries_messages(cell: &Cell, notify: NotifyMode, caps: Caps) -> CaseResult {
    for (capacity, longest_payload, watermark) in
        [(4096, 512, 0), (CAPACITY, 16 << 10, 16 << 10), (1 << 20, 1 << 20, 1 << 19)]
    {
        let options = options(notify, capacity, watermark);
        let mut fixture = Fixture::with(ordered(cell, caps)?, cell, &options, longest_payload)?;
        let lengths = [0, 1, 63, 64, 65, 4000, 5 * capacity as usize + 13, 100, 0, 30_000];
        for (number, length) in lengths.into_iter().enumerate() {
            fixture.pass(number as u64, length)?;
        }
        fixture.settle(0, lengths.len() as u64)?;
        let sent = fixture.ports[A].sender(fixture.sender)?.statistics();
        let received = fixture.ports[B].receiver(fixture.receiver)?.statistics();
        ensure!(sent.messages == 10 && received.messages == 10, "{sent:?} {received:?}");
        let is_equal = received.chunks == sent.chunks && received.bytes == sent.bytes;
        ensure!(is_equal, "{sent:?} {received:?}");
        let is_credited = received.credits >= sent.credits && sent.credits > 0;
        ensure!(is_credited, "{sent:?} {received:?}");
        ensure!(received.duplicates == 0 && received.unmatched_notices == 0, "{received:?}");
    }
    Ok(())
}

/// In a domain without requested order: writes and notices may arrive in any order.
fn ring_without_order(cell: &Cell) -> CaseResult {
    let offer = ring_offer_for(cell, cell.query(), Caps::empty())?;
    let order = offer.capabilities().order.send_order;
    let pair = Pair::with(cell, Setup { offer: Some(offer), ..Setup::default() })?;
    let notify = match NotifyMode::best(pair.sides[A].domain.capabilities()) {
        Ok(notify) => notify,
        Err(error) => return Err(format!("lacking: {error}").into()),
    };
    let mut fixture = Fixture::of(pair, cell.memory, &options(notify, CAPACITY, 0), 1000)?;
    for (number, length) in [5, 70_000, 0, 300_000, 64].into_iter().enumerate() {
        fixture.pass(number as u64, length).map_err(|e| format!("with order {order:?}: {e}"))?;
    }
    fixture.settle(0, 5)
}

/// Views are held while later chunks arrive, and dropped in another order.
fn ring_views_outlive_later_ones(cell: &Cell) -> CaseResult {
    let notify = best(cell)?;
    let capacity = 64 * MIN_GRANULE;
    let mut fixture = Fixture::new(cell, &options(notify, capacity, 0), 64)?;
    let (sender, receiver) = (fixture.sender, fixture.receiver);
    // With its header a chunk takes two granules.
    let is_apart = fixture.ports[B].ring_offer(receiver)?.layout == ChunkLayout::SeparateHeader;
    let chunks = if is_apart { 64 } else { 32 };
    let mut held: Vec<ChunkView> = Vec::new();
    for number in 0..chunks {
        let source = fixture.source(&pattern(number, 64))?;
        let mut message = fixture.ports[A].begin(sender, 0, 64)?;
        fixture.until("a message to come", |fixture| {
            fixture.ports[A].push(sender, &mut message, &source.all())?;
            held.extend(fixture.ports[B].take(receiver)?);
            Ok(held.len() as u64 > number)
        })?;
    }
    let source = fixture.source(&pattern(99, 64))?;
    let mut message = fixture.ports[A].begin(sender, 0, 64)?;
    let pushed = fixture.ports[A].push(sender, &mut message, &source.all())?;
    ensure!(matches!(pushed, Pushed::Blocked(blocked) if blocked.free == 0), "{pushed:?}");
    // A failed message leaves no trace: the next one has its number.
    let late = fixture.ports[A].send(sender, 0, &source.all(), Duration::from_millis(20));
    ensure!(late.as_ref().is_err_and(|e| e.kind() == ErrorKind::DeadlineExceeded), "{late:?}");
    for (number, view) in held.iter().enumerate() {
        check_bytes("a view", &bytes_of(view)?, &pattern(number as u64, 64))?;
    }
    // The first is dropped last, by another thread: until then no credit is returned.
    let first = held.remove(0);
    while let Some(view) = held.pop() {
        drop(view);
    }
    ensure!(!fixture.ports[B].return_credit(receiver, true)?, "credit was returned");
    std::thread::spawn(move || drop(first)).join().map_err(|_| "the thread died")?;
    fixture
        .until("credit", |fixture| Ok(fixture.ports[A].sender(sender)?.writer().free() == capacity))
}

/// A message without space can be abandoned, and another one sent instead: however much of the
/// first the provider accepted, the reader receives the other.
fn ring_takes_another_message_where_one_found_no_room(cell: &Cell) -> CaseResult {
    const LENGTH: usize = 64;
    for others in 0..3 {
        let options = options(NotifyMode::Immediate, 4 << 20, 0);
        let mut fixture = Fixture::new(cell, &options, 1 << 16)?;
        fixture.pass(0, LENGTH)?;
        let (sender, receiver) = (fixture.sender, fixture.receiver);
        // The provider's queue fills up between the writes of one chunk, or elsewhere.
        let small = fixture.source(&[0])?;
        let place = fixture.ports[B]
            .endpoint()
            .domain()
            .register(HostMemory::zeroed(64)?, Access::REMOTE_WRITE)?;
        place.enable_for(fixture.ports[B].endpoint())?;
        let to = fixture.parts.peers[A];
        for _ in 0..others {
            let (endpoint, queue) = fixture.ports[A].parts();
            let remote = endpoint.domain().attach(&place.describe()?)?;
            let small = small.slice(0..1)?;
            let options = PostOptions::token(7).timeout(Duration::from_secs(5));
            endpoint.write(queue, to, &small, &remote.slice(0..1)?, options)?;
        }
        // The other side makes no progress, so the provider's queue fills up.
        let (first, second) = (fixture.source(&[b'A'; LENGTH])?, fixture.source(&[b'B'; LENGTH])?);
        let (first, second) = (first.slice(0..LENGTH)?, second.slice(0..LENGTH)?);
        let mut written = 1;
        for _ in 0..10_000 {
            let mut message = fixture.ports[A].begin(sender, 3, LENGTH as u64)?;
            let is_posted = (0..20).any(|_| {
                let pushed = fixture.ports[A].push(sender, &mut message, &first);
                let _ = fixture.ports[A].progress();
                matches!(pushed, Ok(Pushed::Posted(_)))
            });
            if !is_posted {
                break;
            }
            written += 1;
        }
        let mut message = fixture.ports[A].begin(sender, 3, LENGTH as u64)?;
        let mut taken = 1;
        let end = Instant::now() + timeout();
        while taken <= written {
            if !message.is_written() {
                fixture.ports[A].push(sender, &mut message, &second)?;
            }
            for port in &mut fixture.ports {
                let _ = port.progress()?;
            }
            while let Some(view) = fixture.ports[B].take(receiver)? {
                let expected = if taken == written { b'B' } else { b'A' };
                let what = format!("message {taken} of {written}, {others} others");
                check_bytes(&what, &bytes_of(&view)?, &[expected; LENGTH])?;
                taken += 1;
            }
            fixture.ports[B].return_all_credit(true);
            ensure!(Instant::now() < end, "{taken} of {written} came");
        }
    }
    Ok(())
}

/// Invalid arguments are refused before any write; a timeout reports how much was written.
fn ring_misuse_is_refused(cell: &Cell) -> CaseResult {
    let notify = best(cell)?;
    let mut fixture = Fixture::new(cell, &options(notify, CAPACITY, 0), 4096)?;
    let (sender, receiver) = (fixture.sender, fixture.receiver);
    let source = fixture.source(&pattern(1, 200_000))?;
    let mut message = fixture.ports[A].begin(sender, 0, 64)?;
    let refused = fixture.ports[A].push(sender, &mut message, &source.slice(0..63)?);
    let is_refused = refused.is_err_and(|error| error.kind() == ErrorKind::OutOfBounds);
    ensure!(is_refused, "a payload that is too short was accepted");
    let pushed = fixture.ports[A].push(sender, &mut message, &source.all())?;
    ensure!(matches!(pushed, Pushed::Posted(64) | Pushed::Busy), "{pushed:?}");
    fixture.until("the message", |fixture| {
        fixture.ports[A].push(sender, &mut message, &source.all())?;
        Ok(fixture.ports[B].take(receiver)?.is_some())
    })?;
    // Without a reader the deadline holds, and the error reports how much was written.
    let short = Duration::from_millis(50);
    let start = Instant::now();
    let late = fixture.ports[A].send(sender, 0, &source.all(), short);
    let took = start.elapsed();
    ensure!(took < Duration::from_secs(2), "{took:?}");
    let error = late.err().ok_or("a message without a reader was written")?;
    ensure!(error.kind() == ErrorKind::DeadlineExceeded, "{error}");
    let text = error.to_string();
    ensure!(text.contains("of 200000 bytes of message 1"), "{text}");
    // A partly written message blocks others.
    let refused = fixture.ports[A].send(sender, 0, &source.slice(0..64)?, short);
    let is_refused = refused.is_err_and(|e| e.kind() == ErrorKind::InvalidArgument);
    ensure!(is_refused, "two messages were mixed");
    // The deadline also holds for a reader without a writer: its ring has none.
    let without_writer = fixture.ports[A].offer(&options(notify, CAPACITY, 0))?;
    let late =
        fixture.ports[A].receive(without_writer, short).err().ok_or("a message was received")?;
    ensure!(late.kind() == ErrorKind::DeadlineExceeded, "{late}");
    let ring_offer = fixture.ports[B].ring_offer(receiver)?;
    let forged = [
        RingOffer { capacity: 2 * CAPACITY, ..ring_offer.clone() },
        RingOffer { capacity: 1000, ..ring_offer.clone() },
        RingOffer { ring: 1024, ..ring_offer.clone() },
        RingOffer { lanes: Vec::new(), ..ring_offer.clone() },
        RingOffer { completed_messages: u64::MAX, ..ring_offer.clone() },
    ];
    for offer in forged {
        let refused = fixture.ports[A].accept(fixture.parts.peers[A], &offer, 4096);
        ensure!(refused.is_err(), "{offer:?} was taken");
    }
    for capacity in [0, 1000, 1 << 50] {
        let refused = fixture.ports[B].offer(&options(notify, capacity, 0));
        let is_refused = refused.is_err_and(|e| e.kind() == ErrorKind::InvalidArgument);
        ensure!(is_refused, "a ring of {capacity} bytes was made");
    }
    // Completions of the caller's own operations are returned to the caller.
    let target =
        fixture.ports[B].endpoint().domain().register(HostMemory::zeroed(64)?, Access::ALL)?;
    target.enable_for(fixture.ports[B].endpoint())?;
    let own = fixture.ports[A].endpoint().domain().attach(&target.describe()?)?;
    let options = PostOptions::token(4711).flags(TransferFlags::DELIVERY_COMPLETE);
    let options = options.timeout(Duration::ZERO);
    let peer = fixture.parts.peers[A];
    let end = Instant::now() + timeout();
    let mut is_posted = false;
    loop {
        ensure!(Instant::now() < end, "the caller's own write did not complete");
        if !is_posted {
            let (endpoint, queue) = fixture.ports[A].parts();
            let from = source.slice(0..64)?;
            is_posted = match endpoint.write(queue, peer, &from, &own.all(), options) {
                Ok(_) => true,
                Err(error) if error.kind() == ErrorKind::WouldBlock => false,
                Err(error) => return Err(error.into()),
            };
        }
        let progress = fixture.ports[A].progress()?;
        if let PortEvent::Other(Ok(done)) = progress {
            ensure!(done.token == 4711, "{done:?}");
            return Ok(());
        }
        let _ = fixture.ports[B].progress()?;
    }
}

/// An offer whose provider can notify a reader: with tags, where nothing else is possible.
fn ring_offer_for(cell: &Cell, query: Query, caps: Caps) -> CaseResult<Offer> {
    let offer = cell.offer_of(query.clone(), caps)?;
    if NotifyMode::best(offer.capabilities()).is_ok() {
        return Ok(offer);
    }
    Ok(cell.offer_of(query, caps | Caps::TAGGED).unwrap_or(offer))
}

/// Selects an offer with ordered writes, where the provider has them.
pub(super) fn ordered(cell: &Cell, caps: Caps) -> CaseResult<Offer> {
    let order = Order::WRITE_AFTER_WRITE | Order::SEND_AFTER_WRITE;
    match cell.offer_of(cell.query().order(order), caps) {
        Err(error) if error.kind() == ErrorKind::NoProvider => {
            ring_offer_for(cell, cell.query(), caps)
        }
        _ => ring_offer_for(cell, cell.query().order(order), caps),
    }
}

/// The best notify mode; a cell without one is lacking.
pub(super) fn best(cell: &Cell) -> CaseResult<NotifyMode> {
    let offer = ordered(cell, Caps::empty())?;
    NotifyMode::best(offer.capabilities()).map_err(|error| format!("lacking: {error}").into())
}
