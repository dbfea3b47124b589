//! Copies by the CPU, one step at a time.

use std::sync::Arc;
use std::time::Duration;

use gpu::{Block, Device, Slice, Stream};

use super::CpuCopy;
use crate::blocks::Run;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::host_buffer::HostBuffer;

/// Bytes copied between two polls of everything else.
const COPY_STEP: u64 = 1 << 20;
/// A step takes a device tens of microseconds.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(2);
const COPY: &str = "copy by CPU";

/// The memory at one end of a copy.
#[derive(Debug, Clone)]
pub(in crate::agent) enum CopyBuffer {
    Host(HostBuffer),
    /// Device memory that receives what the device itself cannot read.
    Device(Slice, Arc<Stream>),
}

impl CopyBuffer {
    pub(in crate::agent) fn device(memory: Slice, device: &Device) -> Result<Self> {
        Ok(Self::Device(memory, Arc::new(device.stream().during(COPY)?)))
    }

    fn copy(&self, to: u64, from: &Self, at: u64, length: u64) -> Result<()> {
        match (self, from) {
            (Self::Host(buffer), Self::Host(from)) => buffer.copy(to, from, at, length),
            (Self::Device(memory, stream), Self::Host(from)) => {
                let mut bytes = vec![0; length as usize];
                from.read(at, &mut bytes)?;
                let part = memory.slice(to, length);
                part.and_then(|part| stream.upload(&part, &bytes, UPLOAD_TIMEOUT)).during(COPY)
            }
            (_, Self::Device(..)) => {
                Err(Error::new(COPY, ErrorKind::NotAllowed, "the host memory is read-only"))
            }
        }
    }

    fn copy_rows(&self, from: &Self, rows: &Run) -> Result<()> {
        if let (Self::Host(buffer), Self::Host(from)) = (self, from) {
            return buffer.copy_rows(from, rows);
        }
        let Block { to, from: at, length } = rows.first;
        (0..rows.count).try_for_each(|row| {
            self.copy(to + row * rows.to_stride, from, at + row * rows.from_stride, length)
        })
    }
}

impl CpuCopy {
    /// Copies one step. True if the copy is complete.
    pub(super) fn copy_some(&mut self) -> Result<bool> {
        let mut left = COPY_STEP;
        while left > 0 {
            if self.block.length == 0 {
                match self.blocks.next_run(left) {
                    Some(run) if run.count == 1 => self.block = run.first,
                    Some(run) => {
                        self.to.copy_rows(&self.from, &run)?;
                        left -= run.count * run.first.length;
                        continue;
                    }
                    None => return Ok(true),
                }
            }
            let Block { to, from, length } = &mut self.block;
            let step = left.min(*length);
            self.to.copy(*to, &self.from, *from, step)?;
            *to += step;
            *from += step;
            *length -= step;
            left -= step;
        }
        Ok(false)
    }
}
