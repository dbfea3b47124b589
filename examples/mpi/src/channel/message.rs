//! Messages of MPI.

use fabricast::ipc::WaitStrategy;

use super::{Channel, Slots};
use crate::memory::{Location, Memory};
use crate::messages::{Datatype, MessageMemory, Part};
use crate::{Job, Result};

const TAG: u32 = 7;

/// `MPI_Isend` and `MPI_Irecv`. Memory of a device is staged in host memory.
#[derive(Debug)]
pub struct MessageChannel {
    slots: Slots,
    memory: MessageMemory<u8>,
    device: Option<Memory>,
    partner: Option<u32>,
    /// The datatype of the last length.
    datatype: (usize, Datatype),
    strategy: WaitStrategy,
    sent: u64,
    expected: u64,
    received: u64,
}

impl MessageChannel {
    /// Each rank calls it.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn new(job: &Job, partner: Option<u32>, slots: Slots, at: Location) -> Result<Self> {
        let device = match at {
            Location::Host => None,
            _ => Some(Memory::new(at, job.group.local().rank, slots.bytes() as u64)?),
        };
        Ok(Self {
            memory: MessageMemory::new(slots.bytes()),
            slots,
            device,
            partner,
            datatype: (0, Datatype::bytes(0)?),
            strategy: job.wait_strategy(),
            sent: 0,
            expected: 0,
            received: 0,
        })
    }

    fn prepare(&mut self, bytes: usize) -> Result<u32> {
        if self.datatype.0 != bytes {
            self.datatype = (bytes, Datatype::bytes(bytes)?);
        }
        self.partner.ok_or_else(|| "this rank has no partner".into())
    }
}

impl Channel for MessageChannel {
    fn describe(&self) -> String {
        let version = mpi::environment::library_version().unwrap_or_default();
        let end = version.find([',', '\n', '\t']).unwrap_or(version.len());
        let staged = if self.device.is_some() { ", staged in host memory" } else { "" };
        let rest = version[end..].trim_matches(['\t', ' ', '\n']);
        // "MPICH Version:\t4.0.2" has the number behind the tabulator.
        let number = rest.split_whitespace().next().filter(|it| it.starts_with(char::is_numeric));
        let number = number.map(|it| format!(" {it}")).unwrap_or_default();
        format!(
            "send + receive of {}{number}{staged}",
            version[..end].trim_end_matches(" Version:")
        )
    }

    fn fill(&mut self, bytes: &[u8]) -> Result<()> {
        let at = self.slots.outgoing(self.sent);
        if let Some(device) = &self.device {
            return device.write(at as u64, bytes);
        }
        self.memory.write_with(at, bytes.len(), |part| {
            part.copy_from_slice(bytes);
            Ok(())
        })
    }

    fn send(&mut self, _job: &mut Job, bytes: usize) -> Result<()> {
        let rank = self.prepare(bytes)?;
        let at = self.slots.outgoing(self.sent);
        if let Some(device) = &self.device {
            self.memory.write_with(at, bytes, |part| device.read(at as u64, part))?;
        }
        self.memory.send(Part { at, datatype: &self.datatype.1, rank, tag: TAG })?;
        self.sent += 1;
        Ok(())
    }

    fn flush(&mut self, _job: &mut Job) -> Result<()> {
        self.memory.wait(self.strategy)
    }

    fn expect(&mut self, _job: &mut Job, count: usize, bytes: usize) -> Result<()> {
        let rank = self.prepare(bytes)?;
        for _ in 0..count {
            let at = self.slots.incoming(self.expected);
            self.memory.receive(Part { at, datatype: &self.datatype.1, rank, tag: TAG })?;
            self.expected += 1;
        }
        Ok(())
    }

    fn receive(&mut self, _job: &mut Job, count: usize, bytes: usize) -> Result<()> {
        self.memory.wait(self.strategy)?;
        for _ in 0..count {
            let at = self.slots.incoming(self.received);
            if let Some(device) = &self.device {
                device.write(at as u64, &self.memory.memory()[at..at + bytes])?;
            }
            self.received += 1;
        }
        Ok(())
    }

    fn read(&mut self, before_last: u64, bytes: &mut [u8]) -> Result<()> {
        let at = self.slots.incoming(self.received - 1 - before_last);
        if let Some(device) = &self.device {
            return device.read(at as u64, bytes);
        }
        bytes.copy_from_slice(&self.memory.memory()[at..at + bytes.len()]);
        Ok(())
    }
}
