//! Why an endpoint is renewed, or the rings of a node restart.

/// Why an endpoint is renewed, or the rings of a node restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RenewalReason {
    WriteIncomplete,
    LaneEnded,
    QuarantineLimit,
    NoRingCapacity,
    AddressLimit,
    /// A connection has data to move, and makes no progress.
    ConnectionStalled,
    /// Data in flight may be retransmitted late.
    NodeReturned,
}

impl RenewalReason {
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::WriteIncomplete => "the provider does not report the completion of a write",
            Self::LaneEnded => "the thread of a lane ended",
            Self::QuarantineLimit => "rings of writers that are gone retain too much memory",
            Self::NoRingCapacity => "closed rings hold capacity of the completion queue",
            Self::AddressLimit => "the address limit is reached",
            Self::ConnectionStalled => "a connection is stalled",
            Self::NodeReturned => "a node returned after its link was down",
        }
    }
}
