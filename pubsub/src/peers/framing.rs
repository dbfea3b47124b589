//! Splits received bytes into frames, and queues frames to send.

use std::collections::VecDeque;

use super::close_reason::{CloseReason, malformed};

const LENGTH_PREFIX: usize = 4;
/// Capacity that an empty buffer keeps.
const RETAINED_CAPACITY: usize = 1 << 16;

/// Received bytes without a complete frame. Memory grows with the bytes received, not with the
/// claimed length.
#[derive(Debug, Default)]
pub(super) struct ReceiveBuffer {
    bytes: Vec<u8>,
    taken: usize,
}

impl ReceiveBuffer {
    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The body of the next complete frame. A longer one is refused by its length prefix, so that
    /// at most `longest` bytes are ever buffered.
    pub(super) fn next(&mut self, longest: usize) -> Result<Option<&[u8]>, CloseReason> {
        let Some((length, rest)) = self.bytes[self.taken..].split_first_chunk::<LENGTH_PREFIX>()
        else {
            self.compact();
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length == 0 || length > longest {
            return Err(malformed(format!("frame length {length} is outside of 1 to {longest}")));
        }
        if rest.len() < length {
            self.compact();
            return Ok(None);
        }
        let start = self.taken + LENGTH_PREFIX;
        self.taken = start + length;
        Ok(Some(&self.bytes[start..start + length]))
    }

    /// Moves an incomplete frame to the front.
    fn compact(&mut self) {
        self.bytes.drain(..self.taken);
        self.taken = 0;
        if self.bytes.is_empty() && self.bytes.capacity() > RETAINED_CAPACITY {
            self.bytes = Vec::new();
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct SendBuffer(VecDeque<u8>);

impl SendBuffer {
    pub(super) fn add(&mut self, body: &[u8]) {
        // Bodies are bounded far below u32 by their creators.
        self.0.extend((body.len() as u32).to_le_bytes());
        self.0.extend(body);
    }

    pub(super) fn front(&self) -> &[u8] {
        let (front, back) = self.0.as_slices();
        if front.is_empty() { back } else { front }
    }

    pub(super) fn remove(&mut self, count: usize) {
        self.0.drain(..count.min(self.0.len()));
        if self.0.is_empty() && self.0.capacity() > RETAINED_CAPACITY {
            self.0 = VecDeque::new();
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.len()
    }

    pub(super) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.0).into()
    }
}
