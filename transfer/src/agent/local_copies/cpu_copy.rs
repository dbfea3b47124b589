//! Copies by the CPU, one step at a time.

use std::sync::Arc;
use std::time::Duration;

use gpu::{Block, Device, Slice, Stream};

use super::CpuCopy;
use crate::blocks::Run;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::host_buffer::HostBuffer;
use crate::host_copy::CacheUse;

/// Bytes copied between two polls of everything else.
const COPY_STEP: u64 = 1 << 20;
/// A step takes a device tens of microseconds.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(2);
const COPY: &str = "copy by CPU";

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

    fn copy(&self, from: &Self, rows: &Run, cache_use: CacheUse) -> Result<()> {
        match (self, from) {
            (Self::Host(buffer), Self::Host(from)) => buffer.copy_rows(from, rows, cache_use),
            (Self::Device(memory, stream), Self::Host(from)) => {
                let Block { to, from: start, length } = rows.first;
                let mut bytes = vec![0; length as usize];
                (0..rows.count).try_for_each(|row| {
                    from.read(start + row * rows.from_stride, &mut bytes)?;
                    let part = memory.slice(to + row * rows.to_stride, length);
                    part.and_then(|part| stream.upload(&part, &bytes, UPLOAD_TIMEOUT)).during(COPY)
                })
            }
            (_, Self::Device(..)) => {
                Err(Error::new(COPY, ErrorKind::NotAllowed, "the host memory is read-only"))
            }
        }
    }
}

impl CpuCopy {
    /// Copies one step. True if the copy is complete.
    pub(super) fn copy_some(&mut self) -> Result<bool> {
        let mut left = COPY_STEP;
        let cache_use = CacheUse::of_request(self.context.bytes);
        while left > 0 {
            if self.block.length == 0 {
                match self.blocks.next_run(left) {
                    Some(run) if run.count == 1 => self.block = run.first,
                    Some(run) => {
                        self.to.copy(&self.from, &run, cache_use)?;
                        left -= run.count * run.first.length;
                        continue;
                    }
                    None => return Ok(true),
                }
            }
            let step = left.min(self.block.length);
            let row = Block { length: step, ..self.block };
            self.to.copy(&self.from, &row.into(), cache_use)?;
            self.block.to += step;
            self.block.from += step;
            self.block.length -= step;
            left -= step;
        }
        Ok(false)
    }
}
