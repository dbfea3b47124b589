//! A model of a writer, a reader and their ring, over a network that delays, reorders, duplicates
//! and disconnects.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::writer_state::exceeds;
use super::*;

/// Contents of a message at an offset.
fn byte(message: u64, at: u64) -> u8 {
    (message.wrapping_mul(31) ^ at.wrapping_mul(7) ^ at >> 8) as u8
}

/// A write in flight to the reader: data, and the notice that follows it, if any.
struct InFlightWrite {
    location: HeaderLocation,
    bytes: Vec<u8>,
    immediate: Option<u32>,
    epoch: u32,
}

/// How credit travels to the writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CreditPath {
    /// In messages, in any order.
    Messages,
    /// Into one slot, in order, each followed by its notice.
    Ordered,
    /// Into one slot, in any order, each followed by its notice.
    Unordered,
}

/// A credit in flight.
#[derive(Debug, Clone, Copy)]
struct InFlightCredit {
    notice: u32,
    bytes: [u8; 16],
    epoch: u32,
}

struct RingModel {
    geometry: RingGeometry,
    writer: WriterState,
    reader: ReaderState,
    memory: Vec<u8>,
    /// Separate headers.
    headers: Vec<u8>,
    in_flight: Vec<InFlightWrite>,
    credit_path: CreditPath,
    credits: Vec<InFlightCredit>,
    /// The slot that credit is written to.
    credit_slot: [u8; 16],
    /// Credits that arrived and that the writer has not read.
    unread_credits: VecDeque<InFlightCredit>,
    epoch: u32,
    /// Lengths of all messages, and the message being written.
    lengths: Vec<u64>,
    current: Option<Message>,
    /// The part of the next message that the reader has.
    partial: Vec<u8>,
    completed_messages: u64,
    /// Chunks not released.
    held: Vec<ReleaseToken>,
    watermark: u64,
    /// Limit of credit notices in the writer's queue.
    max_notices: u64,
}

#[derive(Debug, Clone)]
enum Step {
    Begin(u64),
    Write,
    /// Delivers a write in flight: the first, or any.
    Deliver(usize),
    Repeat(usize),
    Take,
    Release(usize),
    Credit {
        is_idle: bool,
    },
    /// Delivers a credit in flight: the first, or any.
    CreditDelivered(usize),
    CreditRepeats(usize),
    CreditRead,
    Reconnect,
}

fn steps(most_length: u64) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0..most_length).prop_map(Step::Begin),
        8 => Just(Step::Write),
        8 => any::<usize>().prop_map(Step::Deliver),
        1 => any::<usize>().prop_map(Step::Repeat),
        8 => Just(Step::Take),
        6 => any::<usize>().prop_map(Step::Release),
        4 => any::<bool>().prop_map(|is_idle| Step::Credit { is_idle }),
        4 => any::<usize>().prop_map(Step::CreditDelivered),
        1 => any::<usize>().prop_map(Step::CreditRepeats),
        4 => Just(Step::CreditRead),
        1 => Just(Step::Reconnect),
    ];
    proptest::collection::vec(step, 1..400)
}

impl RingModel {
    fn new(capacity: u64, layout: ChunkLayout, max_payload: u64, watermark: u64) -> Self {
        let geometry = RingGeometry::new(capacity, 5).unwrap().with_layout(layout);
        Self {
            geometry,
            writer: WriterState::new(geometry, 1, max_payload).with_sender_index(9),
            reader: Self::reader(geometry, 1, watermark, CreditPath::Messages),
            memory: vec![0xee; capacity as usize],
            headers: vec![0xee; (MAX_CHUNKS_SEPARATE_HEADER * HEADER_LEN) as usize],
            in_flight: Vec::new(),
            credit_path: CreditPath::Messages,
            credits: Vec::new(),
            credit_slot: [0; 16],
            unread_credits: VecDeque::new(),
            epoch: 1,
            lengths: Vec::new(),
            current: None,
            partial: Vec::new(),
            completed_messages: 0,
            held: Vec::new(),
            watermark,
            max_notices: u64::MAX,
        }
    }

    fn reader(geometry: RingGeometry, epoch: u32, watermark: u64, path: CreditPath) -> ReaderState {
        let mut reader = ReaderState::new(geometry, epoch, watermark);
        // The writer uses another index than the reader.
        reader.set_sender_index(9);
        if path == CreditPath::Unordered {
            reader.serialize_credits();
        }
        reader
    }

    fn with_credit_by(mut self, path: CreditPath) -> Self {
        self.credit_path = path;
        self.reader = Self::reader(self.geometry, self.epoch, self.watermark, path);
        self
    }

    fn with_notices(self, max_notices: u64) -> Self {
        Self { max_notices, writer: self.writer.limit_notices(max_notices), ..self }
    }

    fn check(&self) {
        let (tail, credit) = (self.writer.tail(), self.writer.known_head());
        assert!(tail - credit <= self.geometry.capacity(), "production");
        assert!(self.reader.head() <= tail, "consumption");
        assert!(credit <= self.reader.head(), "lag");
        // Earlier epochs have their own quota, and messages may be duplicated.
        if self.credit_path != CreditPath::Messages {
            let credits = self.credits.iter().chain(&self.unread_credits);
            let waiting = credits.filter(|credit| credit.epoch == self.epoch).count() as u64;
            assert!(waiting <= self.max_notices, "{waiting} notices of credit");
        }
    }

    /// False if there was no room, or no message to write.
    fn write(&mut self) -> bool {
        let Some(message) = &mut self.current else { return false };
        let Ok(chunk) = self.writer.plan(message) else { return false };
        let payload = u64::from(chunk.header.payload);
        let taken = self.geometry.taken(payload);
        assert!(taken <= self.geometry.max_chunk_len());
        let offset = self.geometry.offset(chunk.header.position);
        assert!(offset + taken <= self.geometry.capacity(), "around the end");
        let (number, from) = (message.number(), message.written());
        let header = chunk.header.encode().to_vec();
        let body: Vec<u8> = (from..from + payload).map(|at| byte(number, at)).collect();
        self.writer.commit(message, &chunk);
        if message.is_written() {
            self.current = None;
        }
        let epoch = self.epoch;
        let fly = |location, bytes, immediate| InFlightWrite { location, bytes, immediate, epoch };
        let notice = Some(chunk.immediate);
        match self.geometry.layout() {
            ChunkLayout::InlineHeader => {
                let location = HeaderLocation::Ring(chunk.header_at);
                self.in_flight.push(fly(location, [header, body].concat(), notice));
            }
            // Two writes, which may complete in any order.
            ChunkLayout::SeparateHeader => {
                self.in_flight.push(fly(HeaderLocation::Headers(chunk.header_at), header, None));
                self.in_flight.push(fly(HeaderLocation::Ring(chunk.payload_at), body, notice));
            }
        }
        true
    }

    fn deliver(&mut self, which: usize) {
        if self.in_flight.is_empty() {
            return;
        }
        let which = which % self.in_flight.len();
        let InFlightWrite { location, bytes, immediate, epoch } = self.in_flight.remove(which);
        // Late writes of an old epoch hit memory that is not used any more.
        if epoch == self.epoch {
            let (memory, offset) = match location {
                HeaderLocation::Ring(offset) => (&mut self.memory, offset as usize),
                HeaderLocation::Headers(offset) => (&mut self.headers, offset as usize),
            };
            memory[offset..offset + bytes.len()].copy_from_slice(&bytes);
        }
        if let Some(immediate) = immediate {
            // With separate headers, the length is that of the payload alone, if there is one.
            let length = bytes.len() as u64;
            self.reader.notice(&Immediate::decode(immediate), length).unwrap();
        }
    }

    fn take(&mut self) -> bool {
        let (memory, headers) = (&self.memory, &self.headers);
        let look = |location: HeaderLocation| match location {
            HeaderLocation::Ring(offset) => *memory[offset as usize..].first_chunk().unwrap(),
            HeaderLocation::Headers(offset) => *headers[offset as usize..].first_chunk().unwrap(),
        };
        let Some(arrived) = self.reader.take(look).unwrap() else { return false };
        let header = arrived.header;
        assert_eq!(header.message, self.completed_messages, "once, and in order");
        assert_eq!(header.length, self.lengths[self.completed_messages as usize]);
        assert_eq!(header.offset, self.partial.len() as u64);
        let range = arrived.offset as usize..arrived.offset as usize + header.payload as usize;
        self.partial.extend(&self.memory[range]);
        self.held.push(arrived.release_token);
        if arrived.is_last {
            let expected = (0..header.length).map(|at| byte(self.completed_messages, at));
            assert!(
                self.partial.iter().copied().eq(expected),
                "message {}",
                self.completed_messages
            );
            self.partial.clear();
            self.completed_messages += 1;
            assert_eq!(self.reader.completed_messages(), self.completed_messages);
        }
        true
    }

    fn release(&mut self, which: usize) {
        self.reader.release(self.held.swap_remove(which));
    }

    fn credit(&mut self, is_idle: bool) {
        if let Some(credit) = self.reader.credit(is_idle) {
            let (notice, bytes) = (self.reader.credit_notice(), credit.encode());
            self.credits.push(InFlightCredit { notice, bytes, epoch: self.epoch });
        }
    }

    /// A credit arrives; the writer may read it later, after others.
    fn deliver_credit(&mut self, which: usize) {
        if self.credits.is_empty() {
            return;
        }
        let in_order = self.credit_path == CreditPath::Ordered;
        let which = if in_order { 0 } else { which % self.credits.len() };
        let credit = self.credits.remove(which);
        self.unread_credits.push_back(credit);
        // A credit of an earlier epoch has another slot, since indexes are used round robin.
        if credit.epoch == self.epoch {
            self.credit_slot = credit.bytes;
            self.reader.credit_completed();
        }
    }

    fn read_credit(&mut self) -> bool {
        let Some(credit) = self.unread_credits.pop_front() else { return false };
        if !self.writer.take_credit_notice(&Immediate::decode(credit.notice)) {
            return true;
        }
        let bytes = match self.credit_path {
            CreditPath::Messages => credit.bytes,
            CreditPath::Ordered | CreditPath::Unordered => self.credit_slot,
        };
        if let Some(credit) = Credit::decode(bytes, self.writer.epoch()) {
            self.writer.credit(&credit);
            // A late duplicate changes nothing.
            assert!(!self.writer.credit(&credit));
        }
        true
    }

    /// The connection is lost with the writes in flight.
    fn reconnect(&mut self) {
        self.epoch += 1;
        assert_eq!(self.reader.completed_messages(), self.completed_messages);
        let reader = Self::reader(self.geometry, self.epoch, self.watermark, self.credit_path);
        self.reader = reader.resume_after(self.completed_messages);
        let writer = WriterState::new(self.geometry, self.epoch, self.writer.max_payload());
        let writer = writer.with_sender_index(9).resume_after(self.completed_messages);
        self.writer = writer.limit_notices(self.max_notices);
        self.partial.clear();
        self.held.clear();
        self.memory.fill(0xdd);
        // Incomplete messages are written again.
        self.current = None;
        // A closed connection does not deliver forever: nothing in flight is older than the epoch
        // bits of a notice can express.
        let epoch = self.epoch;
        self.in_flight.retain(|in_flight| epoch - in_flight.epoch < 8);
        self.credits.retain(|credit| epoch - credit.epoch < 8);
        self.unread_credits.retain(|credit| epoch - credit.epoch < 8);
        self.credit_slot = [0; 16];
    }

    fn next_message(&mut self, length: u64) {
        if self.current.is_some() {
            return;
        }
        let number = self.writer.messages() as usize;
        if number == self.lengths.len() {
            self.lengths.push(length);
        }
        // After a reconnect the same message is written again.
        self.current = Some(self.writer.begin(3, self.lengths[number]));
    }

    fn step(&mut self, step: &Step, in_order: bool) {
        match *step {
            Step::Begin(length) => self.next_message(length),
            Step::Write => drop(self.write()),
            Step::Deliver(which) => self.deliver(if in_order { 0 } else { which }),
            Step::Repeat(which) if !self.in_flight.is_empty() => {
                // A notice must not precede its data: it is repeated only after delivery.
                let which = which % self.in_flight.len();
                let bits = self.in_flight[which].immediate;
                self.deliver(which);
                if let Some(bits) = bits {
                    self.reader.notice(&Immediate::decode(bits), 0).unwrap();
                }
            }
            Step::Repeat(_) => {}
            Step::Take => drop(self.take()),
            Step::Release(which) if !self.held.is_empty() => {
                self.release(which % self.held.len());
            }
            Step::Release(_) => {}
            Step::Credit { is_idle } => self.credit(is_idle),
            Step::CreditDelivered(which) => self.deliver_credit(which),
            Step::CreditRepeats(which) if self.credit_path == CreditPath::Messages => {
                if let Some(credit) = self.credits.get(which % self.credits.len().max(1)) {
                    self.unread_credits.push_back(*credit);
                }
            }
            Step::CreditRepeats(_) => {}
            Step::CreditRead => drop(self.read_credit()),
            Step::Reconnect => self.reconnect(),
        }
        self.check();
    }

    /// Performs every step that is possible. False if there was none.
    fn pump(&mut self) -> bool {
        if self.writer.messages() < self.lengths.len() as u64 {
            self.next_message(0);
        }
        let mut has_moved = self.write();
        while !self.in_flight.is_empty() {
            self.deliver(0);
        }
        while self.take() {
            has_moved = true;
        }
        while !self.held.is_empty() {
            self.release(0);
        }
        // Idle only if nothing else moved: otherwise the watermark decides.
        self.credit(!has_moved);
        while !self.credits.is_empty() {
            has_moved = true;
            // Last one first, where there is no order: an old credit arrives last.
            self.deliver_credit(self.credits.len() - 1);
        }
        while self.read_credit() {
            has_moved = true;
        }
        self.check();
        has_moved
    }

    fn pump_until(&mut self, is_met: impl Fn(&Self) -> bool) {
        let mut idle = 0;
        while !is_met(self) {
            idle = if self.pump() { 0 } else { idle + 1 };
            assert!(
                idle < 3,
                "stuck at message {} with watermark {}",
                self.completed_messages,
                self.watermark
            );
        }
    }

    /// Completes all messages after any earlier steps.
    fn finish(&mut self) {
        self.pump_until(|model| model.completed_messages == model.lengths.len() as u64);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_message_arrives_once_complete_and_in_order(
        steps in steps(5000),
        granules in 8_u64..64,
        max_payload in 1_u64..3000,
        watermark in prop_oneof![Just(0_u64), Just(256), Just(1024), Just(u64::MAX)],
        layout in prop_oneof![
            2 => Just(ChunkLayout::InlineHeader), 1 => Just(ChunkLayout::SeparateHeader)
        ],
        credit_path in prop_oneof![
            Just(CreditPath::Messages), Just(CreditPath::Ordered), Just(CreditPath::Unordered)
        ],
        max_notices in prop_oneof![1_u64..16, Just(u64::MAX)],
        in_order: bool,
    ) {
        let model = RingModel::new(granules * 128, layout, max_payload, watermark);
        let mut model = model.with_credit_by(credit_path).with_notices(max_notices);
        for step in &steps {
            model.step(step, in_order);
        }
        model.finish();
    }

    #[test]
    fn exceeds_agrees_with_offset_arithmetic(
        capacity in 1_u64..200,
        head in 0_u64..1000,
        used in 0_u64..200,
        length in 0_u64..300,
    ) {
        prop_assume!(used <= capacity);
        let tail = head + used;
        // The same with offsets: free room is in one piece, or wraps around the end.
        let (write, read) = (tail % capacity, head % capacity);
        let free = if used == capacity {
            0
        } else if write >= read {
            capacity - write + read
        } else {
            read - write
        };
        prop_assert_eq!(exceeds(tail, length, head, capacity), length > free);
    }
}

#[test]
fn messages_may_be_many_times_longer_than_the_ring() {
    let sizes = [(1024, 64), (4096, 3000), (1 << 20, u64::MAX)];
    let layouts = [ChunkLayout::InlineHeader, ChunkLayout::SeparateHeader];
    for ((capacity, max_payload), layout) in
        sizes.into_iter().flat_map(|size| layouts.map(|layout| (size, layout)))
    {
        let mut model = RingModel::new(capacity, layout, max_payload, capacity / 4);
        for length in [0, 1, 20 * capacity + 13, 7, capacity, capacity - 64] {
            model.pump_until(|model| model.current.is_none());
            model.next_message(length);
        }
        model.finish();
        assert_eq!(model.completed_messages, 6);
    }
}

#[test]
fn one_credit_frees_a_full_ring() {
    for capacity in [1024, 1152, 2 << 20, (2 << 20) + 512, 4 << 20, 1 << 30, MAX_CAPACITY] {
        let geometry = RingGeometry::new(capacity, 0).unwrap();
        let mut writer = WriterState::new(geometry, 0, u64::MAX);
        let mut reader = ReaderState::new(geometry, 0, u64::MAX);
        // Several rounds, so that positions differ.
        for epoch in 1..6 {
            let mut headers = Vec::new();
            let mut message = writer.begin(0, 4 * capacity);
            while let Ok(chunk) = writer.plan(&message) {
                writer.commit(&mut message, &chunk);
                reader.notice(&Immediate::decode(chunk.immediate), chunk.length()).unwrap();
                headers.push(chunk.header);
            }
            assert!(!headers.is_empty(), "an empty ring of {capacity} bytes is blocked");
            let free_before = writer.free();
            for header in headers {
                let look = |location| {
                    let is_here =
                        location == HeaderLocation::Ring(geometry.offset(header.position));
                    if is_here { header.encode() } else { [0; 64] }
                };
                let arrived = reader.take(look).unwrap().unwrap();
                reader.release(arrived.release_token);
            }
            let credit = reader.credit(true).unwrap();
            assert!(writer.credit(&credit));
            assert!(writer.free() > free_before);
            assert_eq!(writer.free(), capacity);
            // The message is far from complete; the next round begins another epoch.
            (writer, reader) = (
                WriterState::new(geometry, epoch, u64::MAX),
                ReaderState::new(geometry, epoch, u64::MAX),
            );
        }
    }
}

#[test]
fn ring_holds_exactly_max_chunks() {
    let geometry = RingGeometry::new(4 << 20, 0).unwrap();
    let mut writer = WriterState::new(geometry, 0, 1);
    let mut reader = ReaderState::new(geometry, 0, 0);
    let mut sent = 0;
    loop {
        let mut message = writer.begin(0, 0);
        let Ok(chunk) = writer.plan(&message) else { break };
        writer.commit(&mut message, &chunk);
        reader.notice(&Immediate::decode(chunk.immediate), chunk.length()).unwrap();
        sent += 1;
    }
    assert!(sent <= MAX_CHUNKS && sent * geometry.granule() <= geometry.capacity());
    assert_eq!(sent, MAX_CHUNKS);
    // A peer that writes more is detected.
    let notice = RingNotice::Chunk { sequence: sent as u16 };
    let beyond = Immediate { ring: 0, epoch: 0, notice };
    let error = reader.notice(&beyond, 0).unwrap_err();
    assert_eq!(error, ProtocolError::TooFarAhead { sequence: sent, next: 0 });
}

#[test]
fn credit_for_small_chunks_does_not_wait_for_idle() {
    let geometry = RingGeometry::new(64 << 20, 0).unwrap();
    let mut writer = WriterState::new(geometry, 0, 64);
    let mut reader = ReaderState::new(geometry, 0, u64::MAX);
    for number in 0..100_000 {
        let mut message = writer.begin(0, 64);
        let chunk = writer.plan(&message).expect("room, since every chunk is released at once");
        writer.commit(&mut message, &chunk);
        reader.notice(&Immediate::decode(chunk.immediate), chunk.length()).unwrap();
        let arrived = reader.take(|_| chunk.header.encode()).unwrap().unwrap();
        assert_eq!(arrived.header.message, number);
        reader.release(arrived.release_token);
        if let Some(credit) = reader.credit(false) {
            assert!(writer.credit(&credit));
        }
    }
}

/// A chunk whose header was not read yet is a backlog, and needs no polling.
#[test]
fn header_is_awaited_only_after_a_failed_take() {
    let geometry = RingGeometry::new(4096, 0).unwrap().with_layout(ChunkLayout::SeparateHeader);
    let mut writer = WriterState::new(geometry, 0, u64::MAX);
    let mut reader = ReaderState::new(geometry, 0, 0);
    let mut message = writer.begin(0, 100);
    let chunk = writer.plan(&message).unwrap();
    writer.commit(&mut message, &chunk);
    assert_eq!(reader.take(|_| [0; HEADER_LEN as usize]), Ok(None));
    assert!(!reader.awaits_header(), "no notice arrived");
    reader.notice(&Immediate::decode(chunk.immediate), 100).unwrap();
    assert!(!reader.awaits_header(), "no take yet");
    assert_eq!(reader.take(|_| [0; HEADER_LEN as usize]), Ok(None));
    assert!(reader.awaits_header());
    assert!(reader.take(|_| chunk.header.encode()).unwrap().is_some());
    assert!(!reader.awaits_header());
}

#[test]
fn protocol_violations_are_detected() {
    let geometry = RingGeometry::new(4096, 1).unwrap();
    let notify = |reader: &mut ReaderState, sequence| {
        let notice = RingNotice::Chunk { sequence };
        reader.notice(&Immediate { ring: 1, epoch: 0, notice }, 0)
    };
    let valid = ChunkHeader {
        epoch: 0,
        position: 0,
        sequence: 0,
        message: 0,
        length: 100,
        offset: 0,
        payload: 100,
        topic: 0,
    };
    let refused = |header: ChunkHeader| {
        let mut reader = ReaderState::new(geometry, 0, 0);
        notify(&mut reader, 0).unwrap();
        reader.take(|_| header.encode()).unwrap_err()
    };
    let nothing = ProtocolError::MissingChunk { position: 0 };
    assert_eq!(refused(ChunkHeader { position: 64, ..valid }), nothing);
    assert_eq!(refused(ChunkHeader { sequence: 1, ..valid }), nothing);
    assert_eq!(refused(ChunkHeader { epoch: 16, ..valid }), nothing);
    let mut reader = ReaderState::new(geometry, 0, 0);
    reader
        .notice(&Immediate { ring: 1, epoch: 0, notice: RingNotice::Chunk { sequence: 0 } }, 163)
        .unwrap();
    let wrong = ProtocolError::WrongLength { sequence: 0, received: 163, announced: 164 };
    assert_eq!(reader.take(|_| valid.encode()), Err(wrong));
    let misplaced = ProtocolError::Misplaced { sequence: 0 };
    assert_eq!(refused(ChunkHeader { message: 1, ..valid }), misplaced);
    assert_eq!(refused(ChunkHeader { offset: 50, length: 150, ..valid }), misplaced);
    assert_eq!(refused(ChunkHeader { payload: 0, ..valid }), misplaced);
    assert_eq!(refused(ChunkHeader { payload: 5000, length: 5000, ..valid }), misplaced);
    // Length and topic of a message do not change.
    for second in [ChunkHeader { length: 1 << 60, ..valid }, ChunkHeader { topic: 9, ..valid }] {
        let mut reader = ReaderState::new(geometry, 0, 0);
        notify(&mut reader, 0).unwrap();
        notify(&mut reader, 1).unwrap();
        let first = ChunkHeader { payload: 10, ..valid };
        assert!(reader.take(|_| first.encode()).unwrap().is_some());
        let (position, sequence) = (geometry.taken(10), 1);
        let second = ChunkHeader { position, sequence, offset: 10, payload: 10, ..second };
        let misplaced = ProtocolError::Misplaced { sequence: 1 };
        assert_eq!(reader.take(|_| second.encode()), Err(misplaced));
    }
    // Notices of other rings and earlier epochs are ignored.
    let mut reader = ReaderState::new(geometry, 0, 0);
    let notice = RingNotice::Chunk { sequence: 0 };
    reader.notice(&Immediate { ring: 2, epoch: 0, notice }, 0).unwrap();
    reader.notice(&Immediate { ring: 1, epoch: 3, notice }, 0).unwrap();
    assert_eq!((reader.take(|_| valid.encode()), reader.ignored()), (Ok(None), (0, 2)));
}

#[test]
fn chunks_of_two_messages_do_not_mix() {
    let geometry = RingGeometry::new(4096, 1).unwrap();
    let mut writer = WriterState::new(geometry, 0, 64);
    let (mut first, other) = (writer.begin(0, 100), writer.begin(0, 5));
    // Neither is written: the first to be committed gets the number.
    assert!(writer.plan(&other).is_ok());
    let chunk = writer.plan(&first).unwrap();
    writer.commit(&mut first, &chunk);
    assert_eq!(writer.plan(&other), Err(Refused::Stale));
    assert_eq!(writer.plan(&writer.begin(0, 5)), Err(Refused::Stale));
    let chunk = writer.plan(&first).unwrap();
    writer.commit(&mut first, &chunk);
    assert!(first.is_written());
    assert_eq!(writer.plan(&other), Err(Refused::Stale), "the first message has its number");
    let next = writer.begin(0, 5);
    assert_eq!(next.number(), 1);
    assert!(writer.plan(&next).is_ok());
    let writer = WriterState::new(geometry, 1, 64);
    assert_eq!(writer.plan(&next), Err(Refused::Stale), "of another epoch");
    assert_eq!(writer.begin(0, 100).number(), 0);
}

#[test]
fn impossible_credit_is_ignored() {
    let geometry = RingGeometry::new(4096, 1).unwrap();
    let mut writer = WriterState::new(geometry, 2, 64);
    let mut message = writer.begin(0, 64);
    let chunk = writer.plan(&message).unwrap();
    writer.commit(&mut message, &chunk);
    let credit = |granules, epoch| Credit { epoch, head: granules * geometry.granule() };
    assert!(!writer.credit(&credit(3, 2)), "more than was written");
    assert!(!writer.credit(&credit(2, 1)), "another epoch");
    assert!(!writer.credit(&credit(2 + (1 << 16), 2)), "far ahead");
    assert_eq!(writer.next_read(), None);
    assert!(writer.credit(&credit(2, 2)));
    assert_eq!((writer.next_read(), writer.next_read()), (Some(0), None));
    assert!(!writer.credit(&credit(1, 2)), "behind the known head");
    assert_eq!(writer.free(), 4096);
    let mut take_notice =
        |ring, epoch, notice| writer.take_credit_notice(&Immediate { ring, epoch, notice });
    let credit = |released| RingNotice::Credit { released };
    assert!(!take_notice(0, 2, credit(1)), "another ring");
    assert!(!take_notice(1, 1, credit(1)), "another epoch");
    assert!(!take_notice(1, 2, RingNotice::ReaderClosed), "another notice");
    // A credit notice for more chunks than were written is ignored.
    assert!(take_notice(1, 2, credit(2)));
    assert_eq!(writer.unnoticed(), 1);
    let immediate = Immediate { ring: 1, epoch: 2, notice: credit(1) };
    assert!(writer.take_credit_notice(&immediate));
    assert_eq!(writer.unnoticed(), 0);
}

/// The writer takes one notice, and only when it cannot write. It reads the newest credit, so each
/// notice may free the whole ring.
#[test]
fn waiting_credit_notices_never_exceed_the_writers_quota() {
    const QUOTA: u64 = 7;
    for path in [CreditPath::Ordered, CreditPath::Unordered, CreditPath::Messages] {
        let model =
            RingModel::new(1 << 16, ChunkLayout::InlineHeader, 1000, 0).with_credit_by(path);
        let mut model = model.with_notices(QUOTA);
        let mut most = 0;
        while model.completed_messages < 5000 {
            model.next_message(64);
            if !model.write() {
                assert!(
                    model.read_credit(),
                    "{path:?}: stuck at message {}",
                    model.completed_messages
                );
            }
            model.deliver(0);
            while model.take() {
                model.release(0);
            }
            // Idle after each chunk, so each has a credit.
            model.credit(true);
            while !model.credits.is_empty() {
                model.deliver_credit(model.credits.len() - 1);
            }
            model.check();
            most = most.max(model.unread_credits.len() as u64);
        }
        assert!(most <= QUOTA, "{path:?}: {most} notices wait in the queue");
    }
}

/// A credit that was overtaken by many rounds of the ring, and whose lower bits look like one
/// ahead.
#[test]
fn overtaken_credit_frees_nothing() {
    let geometry = RingGeometry::new(4096, 1).unwrap();
    let mut writer = WriterState::new(geometry, 0, 1000);
    let mut reader = ReaderState::new(geometry, 0, 0);
    let mut overtaken = Vec::new();
    for number in 0..12_000 {
        // Four of them fill the ring.
        let mut message = writer.begin(0, 960);
        let chunk = writer.plan(&message).unwrap();
        writer.commit(&mut message, &chunk);
        reader.notice(&Immediate::decode(chunk.immediate), chunk.length()).unwrap();
        let arrived = reader.take(|_| chunk.header.encode()).unwrap().unwrap();
        // The chunk in the ring is unread: no credit may free it.
        for late in &overtaken {
            writer.credit(late);
            assert!(writer.known_head() <= reader.head(), "chunk {number} is freed unread");
        }
        reader.release(arrived.release_token);
        let credit = reader.credit(true).unwrap();
        if number % 17 == 1 {
            overtaken.push(credit);
            // As many as one round of the 16 bits.
            if overtaken.len() > 300 {
                overtaken.remove(0);
            }
        } else {
            assert!(writer.credit(&credit));
        }
    }
}

#[test]
fn without_write_order_the_next_credit_waits_for_the_last() {
    let geometry = RingGeometry::new(4096, 1).unwrap();
    let mut writer = WriterState::new(geometry, 0, 100);
    let mut reader = ReaderState::new(geometry, 0, 0);
    reader.serialize_credits();
    let mut read_one = |reader: &mut ReaderState| {
        let mut message = writer.begin(0, 100);
        let chunk = writer.plan(&message).unwrap();
        writer.commit(&mut message, &chunk);
        reader.notice(&Immediate::decode(chunk.immediate), chunk.length()).unwrap();
        let arrived = reader.take(|_| chunk.header.encode()).unwrap().unwrap();
        reader.release(arrived.release_token);
    };
    read_one(&mut reader);
    let first = reader.credit(true).unwrap();
    read_one(&mut reader);
    assert_eq!(reader.credit(true), None);
    // After a loss it is sent again, and the next one still waits.
    reader.credit_completed();
    reader.resend_credit();
    assert_eq!((reader.last_credit(), reader.credit(true)), (first, None));
    reader.credit_completed();
    let second = reader.credit(true).unwrap();
    assert_eq!((first.head, second.head), (geometry.taken(100), 2 * geometry.taken(100)));
}

#[test]
fn released_bytes_are_free_room() {
    assert!(!exceeds(1000, 24, 0, 1024));
    assert!(exceeds(1000, 25, 0, 1024));
    assert!(!exceeds(1000, 25, 64, 1024), "the reader released 64 bytes");
}
