//! A ring over several endpoints, each with a domain and a thread.

use std::time::{Duration, Instant};

use fabric::ring::{Pushed, RingAnswer, RingOffer, Stripes, StripesOptions};
use fabric::{Caps, EndpointKind, ErrorKind, HostMemory};

use super::Case;
use super::ring::{CAPACITY, best, bytes_of, options, ordered, travelled};
use crate::cells::{Cell, Memory};
use crate::cuda::DeviceMemory;
use crate::pair::{Checked, check_bytes, patience, pattern, put};
use crate::{cases, ensure};

pub const CASES: &[Case] = cases![ring_over_lanes];

/// Over three lanes, each with a domain and a thread. Whatever order chunks come in, messages come
/// whole; and either side hears of the other one's end.
fn ring_over_lanes(cell: &Cell) -> Checked {
    if cell.kind != EndpointKind::Rdm {
        return Err("lacking: lanes are connectionless".into());
    }
    let notify = best(cell)?;
    let offers = vec![ordered(cell, Caps::empty())?; 3];
    let open = || Stripes::open(&offers, StripesOptions::default());
    for reader_goes in [false, true] {
        let (writing, reading) = (open()?, open()?);
        let (writers, readers) = (writing.addresses()?, reading.addresses()?);
        let longest = 700_000;
        let source = match cell.memory {
            Memory::Host => writing.register(HostMemory::zeroed(longest)?)?,
            Memory::Cuda => writing.register(DeviceMemory::new(longest)?)?,
        };
        let options = options(notify, CAPACITY, CAPACITY / 8);
        let mut receiver = match cell.memory {
            Memory::Host => reading.receiver(&writers, &options)?,
            Memory::Cuda => {
                let memory = DeviceMemory::new(CAPACITY as usize)?;
                reading.receiver_over(&writers, &options, memory)?
            }
        };
        let terms = travelled::<RingOffer>(&receiver.terms()?)?;
        ensure!(terms.lanes.len() == 3, "{terms:?}");
        let (mut sender, answer) = writing.sender(&readers, &terms, 3000)?;
        receiver.connect(&travelled::<RingAnswer>(&answer)?)?;
        let end = Instant::now() + patience();
        let lengths = [64, 0, 5000, longest, 1, 100_000, 64];
        for (number, length) in lengths.into_iter().enumerate() {
            let bytes = pattern(number as u64 + 5, length);
            if length > 0 {
                put(source.region(), 0, &bytes)?;
            }
            let payload = source.slice(0..length)?;
            let mut message = sender.begin(9, length as u64);
            let mut got = Vec::with_capacity(length);
            let mut is_whole = false;
            while !is_whole {
                ensure!(Instant::now() < end, "{} of {length} bytes came", got.len());
                let pushed = sender.push(&mut message, &payload)?;
                while let Some(view) = receiver.take()? {
                    let header = *view.header();
                    ensure!(header.message == number as u64 && header.topic == 9, "{header:?}");
                    ensure!(header.offset == got.len() as u64, "{header:?}");
                    got.extend(bytes_of(&view)?);
                    is_whole = view.is_last();
                }
                if !receiver.tell(true) && !matches!(pushed, Pushed::Posted(_)) {
                    receiver.rest(Duration::from_micros(200));
                }
            }
            check_bytes(&format!("message {number} of {length} bytes"), &got, &bytes)?;
            // What is written from is free when the reader let go of it.
            let mut is_read = false;
            while !is_read {
                ensure!(Instant::now() < end, "message {number} is not told to be read");
                receiver.tell(true);
                sender.rest(Duration::from_millis(1));
                is_read = sender.next_read() == Some(number as u64);
            }
        }
        let (sent, received) = (sender.statistics(), receiver.statistics());
        ensure!(sent.messages == 7 && sent.chunks == received.chunks, "{sent:?} {received:?}");
        if reader_goes {
            let closing = std::thread::spawn(move || receiver.close(patience()));
            while sender.broken().is_none() {
                ensure!(Instant::now() < end, "the writer did not hear of the reader's end");
                sender.rest(Duration::from_millis(1));
            }
            let closed = closing.join().map_err(|_| "the thread died")??;
            ensure!(closed.messages == 7, "{closed:?}");
        } else {
            sender.close(patience())?;
            let said = receiver.receive(patience()).err().ok_or("something came")?;
            ensure!(said.kind() == ErrorKind::Closed, "{said}");
        }
    }
    Ok(())
}
