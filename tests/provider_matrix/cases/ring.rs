//! The ring: messages of any length through memory that one side writes and the other
//! reads.

use std::time::Instant;

use fabric::ring::{GRANULE, Pushed, RingReceiver, RingSender, Shape, View};
use fabric::{CompletionKind, ErrorKind, Outcome};

use super::Case;
use crate::cells::{Cell, Memory};
use crate::pair::{A, B, Checked, Pair, check_bytes, get, patience, pattern, put};
use crate::{cases, ensure};

pub const CASES: &[Case] = cases![ring_carries_messages, ring_views_outlive_later_ones];

/// Receives that are posted ahead, where immediates use them up.
const AHEAD: usize = 64;

struct World {
    pair: Pair,
    sender: RingSender,
    receiver: RingReceiver,
}

impl World {
    fn new(cell: &Cell, shape: Shape, longest_payload: u64, watermark: u64) -> Checked<Self> {
        if cell.memory != Memory::Host {
            return Err("lacking: rings lie in host memory".into());
        }
        let mut pair = Pair::new(cell)?;
        if !pair.sides[A].domain.capabilities().has_write_data() {
            return Err("lacking: the provider has no immediates".into());
        }
        for side in [A, B] {
            pair.expect_immediates(side, AHEAD)?;
        }
        let epoch = 1;
        let mut receiver = RingReceiver::new(&pair.sides[B].endpoint, shape, epoch, watermark)?;
        let (a, b) = (&pair.sides[A], &pair.sides[B]);
        let credit = RingSender::credit_memory(&a.domain, &a.endpoint)?;
        receiver.connect(b.peer, b.attach(&credit)?);
        let ring = a.attach(receiver.region())?;
        let sender =
            RingSender::new(&a.endpoint, a.peer, ring, credit, shape, epoch, longest_payload)?;
        Ok(Self { pair, sender, receiver })
    }

    /// Hands what the queues gave to whom it concerns; used-up receives are posted again.
    fn settle(&mut self) -> Checked<bool> {
        let mut any = self.pair.pump();
        for side in [A, B] {
            while let Some(outcome) = self.pair.next_outcome(side) {
                any = true;
                if side == A {
                    self.sender.accept(&outcome)?;
                } else {
                    self.receiver.accept(&outcome)?;
                }
                let is_notice =
                    matches!(&outcome, Ok(done) if done.kind == CompletionKind::RemoteWrite);
                if is_notice {
                    self.pair.expect_immediates(side, 1)?;
                }
                only_good(outcome)?;
            }
        }
        Ok(any)
    }

    fn tell(&mut self, is_quiet: bool) -> Checked<bool> {
        let side = &mut self.pair.sides[B];
        Ok(self.receiver.tell(&mut side.endpoint, &mut side.queue, is_quiet)?)
    }
}

fn only_good(outcome: Outcome) -> Checked {
    outcome?;
    Ok(())
}

/// From nothing to many times the ring, with several watermarks.
fn ring_carries_messages(cell: &Cell) -> Checked {
    for (capacity, longest_payload, watermark) in
        [(4096, 512, 0), (64 << 10, 16 << 10, 16 << 10), (1 << 20, 1 << 20, 1 << 19)]
    {
        let shape = Shape::new(capacity, 7).ok_or("a shape")?;
        let mut world = World::new(cell, shape, longest_payload, watermark)?;
        let lengths = [0, 1, 63, 64, 65, 4000, 5 * capacity as usize + 13, 100, 0, 30_000];
        let longest = 5 * capacity as usize + 30_000;
        let source = world.pair.sides[A].region(longest)?;
        for (number, length) in lengths.into_iter().enumerate() {
            let bytes = pattern(number as u64 + 5, length);
            put(&source, 0, &bytes)?;
            let payload = source.slice(0..length.max(1))?;
            let mut message = world.sender.begin(3, length as u64);
            let mut got = Vec::with_capacity(length);
            let mut is_whole = false;
            let end = Instant::now() + patience();
            while !(is_whole && message.is_written()) {
                ensure!(Instant::now() < end, "{} of {length} bytes came", got.len());
                let side = &mut world.pair.sides[A];
                let pushed = world.sender.push(
                    &mut side.endpoint,
                    &mut side.queue,
                    &mut message,
                    &payload,
                )?;
                let mut has_moved = matches!(pushed, Pushed::Posted(_));
                has_moved |= world.settle()?;
                while let Some(view) = world.receiver.take()? {
                    has_moved = true;
                    ensure!(view.header.message == number as u64, "{:?}", view.header);
                    ensure!(
                        view.header.topic == 3 && view.header.length == length as u64,
                        "{view:?}"
                    );
                    if let Some(payload) = &view.payload {
                        let region = payload.region();
                        got.extend(get(&region, payload.offset(), payload.len())?);
                    }
                    is_whole = view.is_last;
                    world.receiver.release(view);
                }
                has_moved |= world.tell(!has_moved)?;
                if !has_moved {
                    std::thread::yield_now();
                }
            }
            check_bytes(&format!("message {number} of {length} bytes"), &got, &bytes)?;
        }
        // All of it is given back, and every message's memory is free again.
        let end = Instant::now() + patience();
        let mut read = 0;
        while read < lengths.len() as u64 {
            ensure!(Instant::now() < end, "{read} messages are told to be read");
            world.settle()?;
            world.tell(true)?;
            while let Some(number) = world.sender.next_read() {
                ensure!(number == read, "message {number}, not {read}");
                read += 1;
            }
        }
        ensure!(world.sender.writer().free() == capacity, "{:?}", world.sender.writer());
    }
    Ok(())
}

/// Views are held while later ones come, and released in another order.
fn ring_views_outlive_later_ones(cell: &Cell) -> Checked {
    let shape = Shape::new(64 * GRANULE, 1023).ok_or("a shape")?;
    let mut world = World::new(cell, shape, 64, 0)?;
    let source = world.pair.sides[A].region(64)?;
    let mut held: Vec<View> = Vec::new();
    let end = Instant::now() + patience();
    // A payload that is shorter than its message is refused, and nothing is sent of it.
    let (mut message, short) = (world.sender.begin(0, 64), source.slice(0..63)?);
    let side = &mut world.pair.sides[A];
    let refused = world.sender.push(&mut side.endpoint, &mut side.queue, &mut message, &short);
    let is_refused = refused.is_err_and(|error| error.kind() == ErrorKind::OutOfBounds);
    ensure!(is_refused, "a payload that is too short was taken");
    // A chunk takes two granules: 32 messages fill the ring.
    for number in 0..32 {
        put(&source, 0, &pattern(number, 64))?;
        if number > 0 {
            message = world.sender.begin(0, 64);
        }
        while held.len() as u64 <= number {
            ensure!(Instant::now() < end, "message {number} did not come");
            let side = &mut world.pair.sides[A];
            let (endpoint, queue) = (&mut side.endpoint, &mut side.queue);
            world.sender.push(endpoint, queue, &mut message, &source.all())?;
            world.settle()?;
            held.extend(world.receiver.take()?);
        }
    }
    let mut message = world.sender.begin(0, 64);
    let side = &mut world.pair.sides[A];
    let pushed =
        world.sender.push(&mut side.endpoint, &mut side.queue, &mut message, &source.all())?;
    ensure!(matches!(pushed, Pushed::Blocked(blocked) if blocked.free == 0), "{pushed:?}");
    for (number, view) in held.iter().enumerate() {
        let payload = view.payload.as_ref().ok_or("no payload")?;
        let bytes = get(&payload.region(), payload.offset(), 64)?;
        check_bytes("a view", &bytes, &pattern(number as u64, 64))?;
    }
    // The first is released last: until then nothing is given back.
    let first = held.remove(0);
    while let Some(view) = held.pop() {
        world.receiver.release(view);
    }
    ensure!(!world.tell(true)?, "something was given back");
    world.receiver.release(first);
    let mut is_told = false;
    while world.sender.writer().free() != shape.capacity() {
        ensure!(Instant::now() < end, "credit did not come");
        is_told |= world.tell(true)?;
        world.settle()?;
    }
    ensure!(is_told, "nothing was told");
    Ok(())
}
