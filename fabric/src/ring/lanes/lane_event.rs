//! Events that the thread of a lane reports to the port.

use super::super::{ReceivedNotice, SenderInstance};
use crate::{Error, Result};

#[derive(Debug)]
pub(in super::super) enum LaneEvent {
    /// A notice arrived.
    ReceivedNotice(ReceivedNotice),
    /// A chunk with so many bytes of payload is locally complete, and so are all chunks on this
    /// lane that end at or below the position. Or it was not written, and no later one of its ring
    /// will be; source memory of chunks that end at or below the position may be reused.
    Written { lane: usize, instance: SenderInstance, completed_to: u64, bytes: Result<u64> },
    /// The lane has stopped.
    LaneFailed(Error),
}
