//! The ring's ends: connections that are given up, sides that close, memory that comes and goes.

use std::time::{Duration, Instant};

use fabric::ErrorKind;
use fabric::ring::{Pushed, RingOffer, RingOptions};

use super::Case;
use super::ring::{CAPACITY, World, best, bytes_of, offer, options, travelled};
use crate::cells::{Cell, Memory};
use crate::pair::{A, B, Checked, check_bytes, patience, pattern};
use crate::{cases, ensure};

pub const CASES: &[Case] = cases![
    ring_begins_again_after_a_loss,
    ring_ends_tell_each_other,
    ring_of_a_new_reader_hears_nothing_of_the_old_one
];

/// A connection is given up in the middle of a message, with others on their way; the ring
/// goes on in another epoch, in other memory.
fn ring_begins_again_after_a_loss(cell: &Cell) -> Checked {
    let notify = best(cell)?;
    let mut world = World::new(cell, &options(notify, CAPACITY, 0), 1000)?;
    let (sender, receiver) = (world.sender, world.receiver);
    world.pass(0, 3000)?;
    // Two whole ones that nobody takes, and a part of one that does not fit.
    let long = world.source(&pattern(77, 200_000))?;
    for length in [10, 5000, 200_000] {
        let mut message = world.ports[A].begin(sender, 3, length)?;
        while let Pushed::Posted(_) | Pushed::Busy =
            world.ports[A].push(sender, &mut message, &long.slice(0..length as usize)?)?
        {
            world.turn()?;
        }
    }
    // One of them is taken, and so is whole; its view outlives the epoch.
    let mut taken = Vec::new();
    world.until("a message", |world| {
        taken.extend(world.ports[B].take(receiver)?);
        Ok(taken.last().is_some_and(|view| view.is_last()))
    })?;
    let whole = world.ports[B].receiver(receiver)?.reader().whole();
    world.ports[B].forget(receiver);
    let again = RingOptions { whole, ..options(notify, CAPACITY, 0) };
    world.receiver = offer(&mut world.ports[B], cell.memory, &again)?;
    let terms = travelled::<RingOffer>(&world.ports[B].terms(world.receiver)?)?;
    ensure!(terms.whole == 2 && terms.epoch > 1, "{terms:?}");
    let peers = world.parts.peers;
    world.ports[A].drop_sender(sender);
    let (sender, answer) = world.ports[A].accept(peers[A], &terms, 1000)?;
    world.sender = sender;
    world.ports[B].connect(world.receiver, peers[B], &answer)?;
    check_bytes("an old view", &bytes_of(&taken[0])?, &pattern(77, 200_000)[..10])?;
    drop(taken);
    // What is not whole is written again, under its number; and it goes on.
    for (number, length) in [(2, 5000), (3, 200_000), (4, 0), (5, 64)] {
        world.pass(number, length)?;
    }
    world.settle(2, 4)?;
    // The old memory is still there, for what comes late.
    ensure!(world.ports[B].quarantined() == CAPACITY, "{}", world.ports[B].quarantined());
    Ok(())
}

/// Either side closes, and the other one hears of it.
fn ring_ends_tell_each_other(cell: &Cell) -> Checked {
    let notify = best(cell)?;
    let mut world = World::new(cell, &options(notify, CAPACITY, CAPACITY / 2), 4096)?;
    let (sender, receiver) = (world.sender, world.receiver);
    world.pass(0, 10_000)?;
    // The writer: what would wait for that is not for one thread.
    world.ports[A].drop_sender(sender);
    let mut said = None;
    world.until("the end", |world| {
        said = world.ports[B].take(receiver).err();
        Ok(said.is_some() && world.ports[A].rings().1 == 0)
    })?;
    ensure!(said.as_ref().is_some_and(|e| e.kind() == ErrorKind::Closed), "{said:?}");
    // The reader of another one, in the same places.
    let terms = {
        let receiver = world.ports[B].close_receiver(receiver)?;
        ensure!(receiver.messages == 1, "{receiver:?}");
        world.receiver = world.ports[B].offer(&options(notify, CAPACITY, 0))?;
        world.ports[B].terms(world.receiver)?
    };
    let peers = world.parts.peers;
    let (sender, answer) = world.ports[A].accept(peers[A], &terms, 4096)?;
    world.ports[B].connect(world.receiver, peers[B], &answer)?;
    world.sender = sender;
    if cell.memory == Memory::Host {
        world.pass(0, 10_000)?;
        world.settle(0, 1)?;
        // In the middle of a message that nobody will read.
        let source = world.source(&pattern(9, 200_000))?;
        let mut message = world.ports[A].begin(sender, 3, 200_000)?;
        while let Pushed::Posted(_) = world.ports[A].push(sender, &mut message, &source.all())? {}
    }
    world.ports[B].close_receiver(world.receiver)?;
    world.until("the writer to hear of it", |world| {
        Ok(world.ports[A].sender(sender)?.broken().is_some())
    })?;
    let source = world.source(&[1])?;
    let refused = world.ports[A].send(sender, 0, &source.all(), Duration::from_secs(1));
    ensure!(refused.as_ref().is_err_and(|e| e.kind() == ErrorKind::Closed), "{refused:?}");
    // And lets go of its side: the reader waits for that.
    world.ports[A].drop_sender(sender);
    world.until("both to be let go of", |world| {
        Ok(world.ports[A].rings().1 == 0 && world.ports[B].rings().0 == 0)
    })?;
    Ok(())
}

/// A reader dies, and the writer takes the ring of another one, on the same endpoint. Each counts
/// its epochs by itself: credit of the old one that was not looked at yet must not count for
/// the new one, which read nothing.
fn ring_of_a_new_reader_hears_nothing_of_the_old_one(cell: &Cell) -> Checked {
    let notify = best(cell)?;
    let options = options(notify, CAPACITY, 0);
    let mut world = World::new(cell, &options, 1000)?;
    let source = world.source(&pattern(7, 3000))?;
    let write = |world: &mut World| {
        let sender = world.sender;
        let mut message = world.ports[A].begin(sender, 3, 3000)?;
        world.until("a message to be written", |world| {
            world.ports[A].push(sender, &mut message, &source.all())?;
            Ok(message.is_written() && world.ports[A].sender(sender)?.unfinished() == 0)
        })
    };
    write(&mut world)?;
    // Read and told, while the writer looks away.
    let end = Instant::now() + patience();
    let mut chunks = 0;
    while chunks < 3 || world.ports[B].receiver(world.receiver)?.has_untold() {
        chunks += usize::from(world.ports[B].take(world.receiver)?.is_some());
        let _ = world.ports[B].turn()?;
        world.ports[B].tell_all(true);
        ensure!(Instant::now() < end, "{chunks} chunks came");
    }
    world.ports[A].drop_sender(world.sender);
    world.ports[B].forget(world.receiver);
    // Of an epoch has a notice four bits: the sixteenth from now on looks like the first.
    for _ in 1..16 {
        let passing = offer(&mut world.ports[B], world.memory, &options)?;
        world.ports[B].forget(passing);
    }
    world.receiver = offer(&mut world.ports[B], world.memory, &options)?;
    let terms = world.ports[B].terms(world.receiver)?;
    ensure!(terms.epoch == 17, "{terms:?}");
    let peers = world.parts.peers;
    let (sender, answer) = world.ports[A].accept(peers[A], &terms, 1000)?;
    world.sender = sender;
    world.ports[B].connect(world.receiver, peers[B], &answer)?;
    write(&mut world)?;
    let end = Instant::now() + Duration::from_millis(100);
    while Instant::now() < end {
        world.turn()?;
    }
    let writer = world.ports[A].sender(sender)?.writer();
    ensure!(writer.known_head() == 0, "credit of another reader was believed: {writer:?}");
    Ok(())
}
