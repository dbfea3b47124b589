//! A ring in each direction.

use std::time::Duration;

use fabricast::fabric::Policy;
use fabricast::fabric::ring::{RingReader, RingSetup, RingWriter};

use super::{Channel, Slots};
use crate::{Job, Result};

/// A ring to the other rank, and one from it. Received messages are read in place.
#[derive(Debug)]
pub struct RingChannel {
    slots: Slots,
    writer: RingWriter,
    reader: RingReader,
    outgoing: Vec<u8>,
    /// Copies of received messages, to check them.
    incoming: Option<Vec<u8>>,
    timeout: Duration,
    sent: u64,
    received: u64,
}

impl RingChannel {
    /// Both ranks call it. Received messages are copied if `validates`.
    ///
    /// # Errors
    /// Errors of the rings.
    pub fn new(
        job: &mut Job,
        partner: u32,
        slots: Slots,
        validates: bool,
        provider: Option<&str>,
    ) -> Result<Self> {
        let timeout = job.timeout();
        let mut setup = RingSetup::new().capacity((4 * slots.longest as u64).max(8 << 20));
        if let Some(provider) = provider {
            setup = setup.policy(format!("={provider}").parse::<Policy>()?);
        }
        let (writer, reader);
        if job.group.rank() < partner {
            writer = job.group.ring_to(partner, &setup, timeout)?;
            reader = job.group.ring_from(partner, &setup, timeout)?;
        } else {
            reader = job.group.ring_from(partner, &setup, timeout)?;
            writer = job.group.ring_to(partner, &setup, timeout)?;
        }
        Ok(Self {
            writer,
            reader,
            outgoing: vec![0; slots.bytes() / 2],
            incoming: validates.then(|| vec![0; slots.bytes() / 2]),
            slots,
            timeout,
            sent: 0,
            received: 0,
        })
    }
}

impl Channel for RingChannel {
    fn describe(&self) -> String {
        format!("ring over {}", self.writer.provider())
    }

    fn fill(&mut self, bytes: &[u8]) -> Result<()> {
        let at = self.slots.outgoing(self.sent);
        self.outgoing[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn send(&mut self, _job: &mut Job, bytes: usize) -> Result<()> {
        let at = self.slots.outgoing(self.sent);
        self.writer.send(&self.outgoing[at..at + bytes], self.timeout)?;
        self.sent += 1;
        Ok(())
    }

    fn flush(&mut self, _job: &mut Job) -> Result<()> {
        // Sent bytes were copied.
        Ok(())
    }

    fn receive(&mut self, _job: &mut Job, count: usize, bytes: usize) -> Result<()> {
        for _ in 0..count {
            let (start, mut length) = (self.slots.outgoing(self.received), 0);
            loop {
                let chunk = self.reader.receive_chunk(self.timeout)?;
                if length + chunk.len() > bytes {
                    return Err(format!("a message has more than {bytes} bytes").into());
                }
                if let Some(incoming) = &mut self.incoming {
                    let at = start + length;
                    chunk.read(0, &mut incoming[at..at + chunk.len()])?;
                }
                length += chunk.len();
                if chunk.is_last() {
                    break;
                }
            }
            if length != bytes {
                return Err(format!("a message has {length} instead of {bytes} bytes").into());
            }
            self.received += 1;
        }
        Ok(())
    }

    fn read(&mut self, before_last: u64, bytes: &mut [u8]) -> Result<()> {
        let incoming = self.incoming.as_ref().ok_or("messages are not kept")?;
        let at = self.slots.outgoing(self.received - 1 - before_last);
        bytes.copy_from_slice(&incoming[at..at + bytes.len()]);
        Ok(())
    }
}
