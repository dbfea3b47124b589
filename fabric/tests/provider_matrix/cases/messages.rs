//! Two-sided messages.

use fabric::{Caps, ErrorKind, TransferFlags};

use super::{Case, sizes};
use crate::cells::Cell;
use crate::pair::{A, B, CaseResult, Pair, check_bytes, get, nonblocking, pattern, put};
use crate::{cases, ensure};

pub const CASES: &[Case] = cases![
    send_receive_all_sizes,
    send_unaligned,
    send_delivery_complete,
    many_messages_in_order,
    message_longer_than_buffer,
    cancel_receive,
    tagged_messages_match,
    tagged_ignore_mask,
    sender_is_reported,
];

fn exchange(pair: &mut Pair, length: usize, offset: usize) -> CaseResult {
    let from = pair.sides[A].region(length + offset)?;
    let into = pair.sides[B].region(length + offset)?;
    let bytes = pattern(length as u64, length);
    put(&from, offset, &bytes)?;
    let (source, target) =
        (from.slice(offset..offset + length)?, into.slice(offset..offset + length)?);
    let receive = pair.post(B, |s| s.endpoint.receive(&mut s.queue, &target, nonblocking(2)))?;
    let send = pair.post(A, |s| s.endpoint.send(&mut s.queue, s.peer, &source, nonblocking(1)))?;
    let received = pair.complete(B, receive)?;
    pair.complete(A, send)?;
    ensure!(received.length == length, "length {} of {length}", received.length);
    ensure!(received.token == 2, "token {}", received.token);
    check_bytes(&format!("{length} bytes"), &get(&into, offset, length)?, &bytes)
}

fn send_receive_all_sizes(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let limit = pair.sides[A].domain.capabilities().max_message_size;
    for length in sizes(limit) {
        exchange(&mut pair, length, 0)?;
    }
    Ok(())
}

fn send_unaligned(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    for offset in [1, 3, 61] {
        for length in [1, 100, 5000, 70_001] {
            exchange(&mut pair, length, offset)?;
        }
    }
    Ok(())
}

fn send_delivery_complete(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let (from, into) = (pair.sides[A].region(4096)?, pair.sides[B].region(4096)?);
    put(&from, 0, &pattern(4, 4096))?;
    let receive =
        pair.post(B, |s| s.endpoint.receive(&mut s.queue, &into.all(), nonblocking(2)))?;
    let options = nonblocking(1).flags(TransferFlags::DELIVERY_COMPLETE);
    let send = pair.post(A, |s| s.endpoint.send(&mut s.queue, s.peer, &from.all(), options))?;
    pair.complete(A, send)?;
    pair.complete(B, receive)?;
    check_bytes("payload", &get(&into, 0, 4096)?, &pattern(4, 4096))
}

fn many_messages_in_order(cell: &Cell) -> CaseResult {
    const COUNT: usize = 1000;
    const WINDOW: usize = 32;
    let mut pair = Pair::new(cell)?;
    let from = pair.sides[A].region(WINDOW * 8)?;
    let into = pair.sides[B].region(WINDOW * 8)?;
    let slice = |region: &fabric::MemoryRegion, i: usize| {
        region.slice((i % WINDOW) * 8..(i % WINDOW) * 8 + 8)
    };
    let mut receives = std::collections::VecDeque::new();
    let mut sends = std::collections::VecDeque::new();
    for i in 0..COUNT + WINDOW {
        if i >= WINDOW {
            let number = (i - WINDOW) as u64;
            let receive = receives.pop_front().ok_or("no receive")?;
            pair.complete(B, receive)?;
            let got = get(&into, (number as usize % WINDOW) * 8, 8)?;
            check_bytes(&format!("message {number}"), &got, &number.to_le_bytes())?;
            let send = sends.pop_front().ok_or("no send")?;
            pair.complete(A, send)?;
        }
        if i < COUNT {
            let (source, target) = (slice(&from, i)?, slice(&into, i)?);
            let receive =
                pair.post(B, |s| s.endpoint.receive(&mut s.queue, &target, nonblocking(0)))?;
            receives.push_back(receive);
            put(&from, (i % WINDOW) * 8, &(i as u64).to_le_bytes())?;
            let send =
                pair.post(A, |s| s.endpoint.send(&mut s.queue, s.peer, &source, nonblocking(0)))?;
            sends.push_back(send);
        }
    }
    Ok(())
}

fn message_longer_than_buffer(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let (from, into) = (pair.sides[A].region(128)?, pair.sides[B].region(128)?);
    put(&from, 0, &pattern(5, 128))?;
    let small = into.slice(0..64)?;
    let receive = pair.post(B, |s| s.endpoint.receive(&mut s.queue, &small, nonblocking(2)))?;
    pair.post(A, |s| s.endpoint.send(&mut s.queue, s.peer, &from.all(), nonblocking(1)))?;
    match pair.outcome(B, receive)? {
        Err(failure) => {
            ensure!(failure.token == 2, "token {}", failure.token);
            // Hardware is less precise: it reports an error of the receiving queue pair.
            let kind = failure.error.kind();
            ensure!(matches!(kind, ErrorKind::Truncated | ErrorKind::Other), "{failure}");
        }
        Ok(completion) => {
            return Err(
                format!("a truncated message was reported as complete: {completion:?}").into()
            );
        }
    }
    ensure!(get(&into, 64, 64)?.iter().all(|b| *b == 0), "bytes beyond the buffer changed");
    Ok(())
}

fn cancel_receive(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let into = pair.sides[B].region(64)?;
    let receive =
        pair.post(B, |s| s.endpoint.receive(&mut s.queue, &into.all(), nonblocking(2)))?;
    pair.sides[B].queue.abandon(receive);
    pair.pump_for(std::time::Duration::from_millis(50));
    let queue = &pair.sides[B].queue;
    ensure!(
        queue.in_flight() == 0,
        "{} in flight, {} quarantined",
        queue.in_flight(),
        queue.quarantined()
    );
    // The endpoint still works, and the message goes to the next receive.
    exchange(&mut pair, 100, 0)
}

fn tagged_messages_match(cell: &Cell) -> CaseResult {
    let mut pair = Pair::caps(cell, Caps::TAGGED)?;
    let (from, into) = (pair.sides[A].region(128)?, pair.sides[B].region(128)?);
    put(&from, 0, &pattern(1, 128))?;
    let (first, second) = (into.slice(0..64)?, into.slice(64..128)?);
    let receive = |s: &mut crate::pair::Side, slice, tag| {
        s.endpoint.receive_tagged(&mut s.queue, slice, (tag, 0), nonblocking(tag))
    };
    let one = pair.post(B, |s| receive(s, &first, 1))?;
    let two = pair.post(B, |s| receive(s, &second, 2))?;
    // Sent in reverse order: the tag decides, not the time.
    let (half, other) = (from.slice(0..64)?, from.slice(64..128)?);
    let sent_two =
        pair.post(A, |s| s.endpoint.send_tagged(&mut s.queue, s.peer, &half, 2, nonblocking(0)))?;
    let sent_one =
        pair.post(A, |s| s.endpoint.send_tagged(&mut s.queue, s.peer, &other, 1, nonblocking(0)))?;
    let got_two = pair.complete(B, two)?;
    let got_one = pair.complete(B, one)?;
    pair.complete(A, sent_one)?;
    pair.complete(A, sent_two)?;
    ensure!(got_two.tag == 2, "{got_two:?}");
    ensure!(got_one.tag == 1, "{got_one:?}");
    check_bytes("tag 2", &get(&into, 64, 64)?, &pattern(1, 128)[..64])?;
    check_bytes("tag 1", &get(&into, 0, 64)?, &pattern(1, 128)[64..])
}

fn tagged_ignore_mask(cell: &Cell) -> CaseResult {
    let mut pair = Pair::caps(cell, Caps::TAGGED)?;
    let (from, into) = (pair.sides[A].region(64)?, pair.sides[B].region(64)?);
    let receive = pair.post(B, |s| {
        s.endpoint.receive_tagged(&mut s.queue, &into.all(), (0x1200, 0xff), nonblocking(0))
    })?;
    pair.post(A, |s| {
        s.endpoint.send_tagged(&mut s.queue, s.peer, &from.all(), 0x12ab, nonblocking(0))
    })?;
    let got = pair.complete(B, receive)?;
    ensure!(got.tag == 0x12ab, "tag {:#x}", got.tag);
    Ok(())
}

fn sender_is_reported(cell: &Cell) -> CaseResult {
    let mut pair = Pair::caps(cell, Caps::SOURCE)?;
    let (from, into) = (pair.sides[A].region(8)?, pair.sides[B].region(8)?);
    let receive =
        pair.post(B, |s| s.endpoint.receive(&mut s.queue, &into.all(), nonblocking(0)))?;
    pair.post(A, |s| s.endpoint.send(&mut s.queue, s.peer, &from.all(), nonblocking(0)))?;
    let got = pair.complete(B, receive)?;
    let sender = pair.sides[B].endpoint.sender(&got);
    ensure!(sender == Some(pair.sides[B].peer), "sender {sender:?}");
    Ok(())
}
