//! Memory of a port that its peers write without a chunk: targets of notices, and credit.
//!
//! This memory belongs to the port, not to a ring: a late write to deregistered memory breaks the
//! connection for all rings.

use super::credit_format::{self, Credit};
use super::memory::RegistrationScope;
use crate::{Access, Endpoint, HostMemory, MemoryRegion, Result};

/// Bytes at the start whose contents are ignored: the target of notices without credit.
pub(super) const SCRATCH_LEN: usize = 64;

/// Memory for notices, with credit slots for this many senders of the port.
pub(super) fn register(endpoint: &Endpoint, senders: u16) -> Result<MemoryRegion> {
    let memory = HostMemory::zeroed(credit_offset(senders))?;
    RegistrationScope::of(endpoint).register(memory, Access::REMOTE_WRITE)
}

pub(super) fn credit_offset(sender_index: u16) -> usize {
    SCRATCH_LEN + usize::from(sender_index) * credit_format::LENGTH
}

#[derive(Debug)]
pub(super) struct CreditSlot {
    credit_memory: MemoryRegion,
    at: usize,
    epoch: u32,
}

impl CreditSlot {
    /// The slot of this sender, cleared of an earlier sender's credit.
    pub(super) fn new(credit_memory: &MemoryRegion, sender_index: u16, epoch: u32) -> Result<Self> {
        let slot =
            Self { credit_memory: credit_memory.clone(), at: credit_offset(sender_index), epoch };
        slot.credit_memory.write(slot.at, &[0; credit_format::LENGTH])?;
        Ok(slot)
    }

    /// The last credit written, if it is complete and of this epoch.
    #[inline]
    pub(super) fn read(&self) -> Option<Credit> {
        let mut bytes = [0; credit_format::LENGTH];
        for (word, at) in bytes.chunks_exact_mut(8).zip([self.at, self.at + 8]) {
            word.copy_from_slice(&self.credit_memory.load_u64(at).ok()?.to_ne_bytes());
        }
        Credit::decode(bytes, self.epoch)
    }
}
