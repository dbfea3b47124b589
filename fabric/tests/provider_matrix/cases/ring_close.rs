//! Ends of a ring: reset connections, closed sides, replaced memory.

use std::time::{Duration, Instant};

use fabric::ErrorKind;
use fabric::ring::{Pushed, RingOffer, RingOptions};

use super::Case;
use super::ring::{CAPACITY, Fixture, best, bytes_of, offer, options, round_trip};
use crate::cells::{Cell, Memory};
use crate::pair::{A, B, CaseResult, check_bytes, pattern, timeout};
use crate::{cases, ensure};

pub const CASES: &[Case] = cases![
    ring_begins_again_after_a_loss,
    ring_ends_tell_each_other,
    ring_of_a_new_reader_hears_nothing_of_the_old_one
];

/// A connection is reset in the middle of a message, with others in flight; the ring continues in
/// another epoch, in other memory.
fn ring_begins_again_after_a_loss(cell: &Cell) -> CaseResult {
    let notify = best(cell)?;
    let mut fixture = Fixture::new(cell, &options(notify, CAPACITY, 0), 1000)?;
    let (sender, receiver) = (fixture.sender, fixture.receiver);
    fixture.pass(0, 3000)?;
    // Two complete messages that are not taken, and a part of one that does not fit.
    let long = fixture.source(&pattern(77, 200_000))?;
    for length in [10, 5000, 200_000] {
        let mut message = fixture.ports[A].begin(sender, 3, length)?;
        while let Pushed::Posted(_) | Pushed::Busy =
            fixture.ports[A].push(sender, &mut message, &long.slice(0..length as usize)?)?
        {
            fixture.progress()?;
        }
    }
    // One of them is taken, so it is complete; its view outlives the epoch.
    let mut taken = Vec::new();
    fixture.until("a message", |fixture| {
        taken.extend(fixture.ports[B].take(receiver)?);
        Ok(taken.last().is_some_and(|view| view.is_last()))
    })?;
    let completed_messages = fixture.ports[B].receiver(receiver)?.reader().completed_messages();
    fixture.ports[B].forget(receiver);
    let again = RingOptions { completed_messages, ..options(notify, CAPACITY, 0) };
    fixture.receiver = offer(&mut fixture.ports[B], cell.memory, &again)?;
    let ring_offer = round_trip::<RingOffer>(&fixture.ports[B].ring_offer(fixture.receiver)?)?;
    ensure!(ring_offer.completed_messages == 2 && ring_offer.epoch > 1, "{ring_offer:?}");
    let peers = fixture.parts.peers;
    fixture.ports[A].drop_sender(sender);
    let (sender, answer) = fixture.ports[A].accept(peers[A], &ring_offer, 1000)?;
    fixture.sender = sender;
    fixture.ports[B].connect(fixture.receiver, peers[B], &answer)?;
    check_bytes("an old view", &bytes_of(&taken[0])?, &pattern(77, 200_000)[..10])?;
    drop(taken);
    // An incomplete message is written again with its number, and the ring continues.
    for (number, length) in [(2, 5000), (3, 200_000), (4, 0), (5, 64)] {
        fixture.pass(number, length)?;
    }
    fixture.settle(2, 4)?;
    // The old memory still exists, for late writes.
    ensure!(
        fixture.ports[B].quarantined_bytes() == CAPACITY,
        "{}",
        fixture.ports[B].quarantined_bytes()
    );
    Ok(())
}

/// Either side closes, and the other one is notified.
fn ring_ends_tell_each_other(cell: &Cell) -> CaseResult {
    let notify = best(cell)?;
    let mut fixture = Fixture::new(cell, &options(notify, CAPACITY, CAPACITY / 2), 4096)?;
    let (sender, receiver) = (fixture.sender, fixture.receiver);
    fixture.pass(0, 10_000)?;
    // The writer closes without waiting, since one thread drives both sides.
    fixture.ports[A].drop_sender(sender);
    let mut said = None;
    fixture.until("the end", |fixture| {
        said = fixture.ports[B].take(receiver).err();
        Ok(said.is_some() && fixture.ports[A].rings().1 == 0)
    })?;
    ensure!(said.as_ref().is_some_and(|e| e.kind() == ErrorKind::Closed), "{said:?}");
    // The reader of another ring, with the same indices.
    let ring_offer = {
        let receiver = fixture.ports[B].close_receiver(receiver)?;
        ensure!(receiver.messages == 1, "{receiver:?}");
        fixture.receiver = fixture.ports[B].offer(&options(notify, CAPACITY, 0))?;
        fixture.ports[B].ring_offer(fixture.receiver)?
    };
    let peers = fixture.parts.peers;
    let (sender, answer) = fixture.ports[A].accept(peers[A], &ring_offer, 4096)?;
    fixture.ports[B].connect(fixture.receiver, peers[B], &answer)?;
    fixture.sender = sender;
    if cell.memory == Memory::Host {
        fixture.pass(0, 10_000)?;
        fixture.settle(0, 1)?;
        // In the middle of a message that is never read.
        let source = fixture.source(&pattern(9, 200_000))?;
        let mut message = fixture.ports[A].begin(sender, 3, 200_000)?;
        while let Pushed::Posted(_) = fixture.ports[A].push(sender, &mut message, &source.all())? {}
    }
    fixture.ports[B].close_receiver(fixture.receiver)?;
    fixture.until("the writer to be notified", |fixture| {
        Ok(fixture.ports[A].sender(sender)?.broken().is_some())
    })?;
    let source = fixture.source(&[1])?;
    let refused = fixture.ports[A].send(sender, 0, &source.all(), Duration::from_secs(1));
    ensure!(refused.as_ref().is_err_and(|e| e.kind() == ErrorKind::Closed), "{refused:?}");
    // The writer drops its side: the reader waits for that.
    fixture.ports[A].drop_sender(sender);
    fixture.until("both sides to be dropped", |fixture| {
        Ok(fixture.ports[A].rings().1 == 0 && fixture.ports[B].rings().0 == 0)
    })?;
    Ok(())
}

/// A reader dies, and the writer connects to the ring of another one, on the same endpoint. Each
/// reader counts its own epochs: unprocessed credit of the old reader must not count for the new
/// one, which has read nothing.
fn ring_of_a_new_reader_hears_nothing_of_the_old_one(cell: &Cell) -> CaseResult {
    let notify = best(cell)?;
    let options = options(notify, CAPACITY, 0);
    let mut fixture = Fixture::new(cell, &options, 1000)?;
    let source = fixture.source(&pattern(7, 3000))?;
    let write = |fixture: &mut Fixture| {
        let sender = fixture.sender;
        let mut message = fixture.ports[A].begin(sender, 3, 3000)?;
        fixture.until("a message to be written", |fixture| {
            fixture.ports[A].push(sender, &mut message, &source.all())?;
            Ok(message.is_written() && fixture.ports[A].sender(sender)?.unfinished() == 0)
        })
    };
    write(&mut fixture)?;
    // Read and credited, while the writer makes no progress.
    let end = Instant::now() + timeout();
    let mut chunks = 0;
    while chunks < 3 || fixture.ports[B].receiver(fixture.receiver)?.has_unsent_credit() {
        chunks += usize::from(fixture.ports[B].take(fixture.receiver)?.is_some());
        let _ = fixture.ports[B].progress()?;
        fixture.ports[B].return_all_credit(true);
        ensure!(Instant::now() < end, "{chunks} chunks came");
    }
    fixture.ports[A].drop_sender(fixture.sender);
    fixture.ports[B].forget(fixture.receiver);
    // A notice has four bits for the epoch: the sixteenth from here equals the first.
    for _ in 1..16 {
        let passing = offer(&mut fixture.ports[B], fixture.memory, &options)?;
        fixture.ports[B].forget(passing);
    }
    fixture.receiver = offer(&mut fixture.ports[B], fixture.memory, &options)?;
    let ring_offer = fixture.ports[B].ring_offer(fixture.receiver)?;
    ensure!(ring_offer.epoch == 17, "{ring_offer:?}");
    let peers = fixture.parts.peers;
    let (sender, answer) = fixture.ports[A].accept(peers[A], &ring_offer, 1000)?;
    fixture.sender = sender;
    fixture.ports[B].connect(fixture.receiver, peers[B], &answer)?;
    write(&mut fixture)?;
    let end = Instant::now() + Duration::from_millis(100);
    while Instant::now() < end {
        fixture.progress()?;
    }
    let writer = fixture.ports[A].sender(sender)?.writer();
    ensure!(writer.known_head() == 0, "credit of another reader was accepted: {writer:?}");
    Ok(())
}
