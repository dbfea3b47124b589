//! Everything a decision may depend on, read once from an offer.

use serde::Serialize;

use crate::flags::{Caps, Mode, MrMode, Order, names};
use crate::version::Version;

/// How an endpoint talks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EndpointKind {
    /// Connectionless and reliable: one endpoint reaches many peers.
    Rdm,
    /// Connected: one endpoint, one peer.
    Msg,
    /// Connectionless and unreliable.
    Datagram,
}

/// Who makes data move while the application does something else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Progress {
    /// The provider itself.
    Automatic,
    /// Whoever polls the queues.
    Manual,
}

/// Who may call into a domain at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Threading {
    /// Anyone; the provider locks.
    Safe,
    /// One thread per domain at a time.
    Domain,
    /// One thread per completion queue at a time.
    Completion,
    /// One thread per object at a time.
    Object,
    /// One thread per endpoint at a time.
    Endpoint,
}

/// What is known of the network card behind an offer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Nic {
    /// Device name.
    pub name: Option<String>,
    /// PCI address as `domain:bus:device.function`.
    pub pci: Option<String>,
    /// Speed of the link in bits per second; 0 where not known.
    pub link_bits_per_second: u64,
    /// State of the link, where known.
    pub link_up: Option<bool>,
}

/// The facts about one offer. Code that has to decide looks here, never at the
/// provider's name.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Capabilities {
    /// Name of the provider, with its layers: `tcp;ofi_rxm`.
    pub provider: String,
    /// Version of the provider.
    pub provider_version: Version,
    /// Name of the fabric.
    pub fabric: String,
    /// Name of the domain.
    pub domain: String,
    /// Kind of endpoint.
    pub endpoint: EndpointKind,
    /// Number of the wire protocol; equal numbers can talk to each other.
    pub protocol: u32,
    /// Name of the wire protocol.
    pub protocol_name: String,
    /// Capability bits.
    #[serde(serialize_with = "serialize_names")]
    pub caps: Caps,
    /// Bits that the provider demands of applications.
    #[serde(serialize_with = "serialize_names")]
    pub mode: Mode,
    /// Demands on memory registration, as the provider returned them.
    #[serde(serialize_with = "serialize_names")]
    pub mr_mode: MrMode,
    /// Length of a registration key in bytes.
    pub mr_key_size: usize,
    /// Buffers that one registration may span.
    pub mr_iov_limit: usize,
    /// Width of remote completion data in bytes, as the provider states it for
    /// messages; 0: there are no immediates.
    pub cq_data_size: usize,
    /// Width of the immediate that a one-sided write can carry (`fi_writedata`);
    /// 0 where writes carry none, even if messages do.
    pub write_data_size: usize,
    /// Largest message or transfer in bytes.
    pub max_message_size: usize,
    /// Largest payload that can be injected.
    pub inject_size: usize,
    /// Order promised to what is sent from here.
    #[serde(serialize_with = "serialize_names")]
    pub send_order: Order,
    /// Order promised to what arrives here.
    #[serde(serialize_with = "serialize_names")]
    pub receive_order: Order,
    /// Largest transfer for which write-after-write order covers every byte.
    pub max_ordered_write: usize,
    /// Local buffers per operation.
    pub iov_limit: usize,
    /// Remote ranges per operation.
    pub rma_iov_limit: usize,
    /// Depth of the transmit queue.
    pub transmit_depth: usize,
    /// Depth of the receive queue.
    pub receive_depth: usize,
    /// Who moves data.
    pub data_progress: Progress,
    /// Who moves connections and the like.
    pub control_progress: Progress,
    /// Threading level of the domain.
    pub threading: Threading,
    /// Format number of addresses.
    pub address_format: u32,
    /// The address this offer is bound to, where one was given, in the provider's text form.
    pub source: Option<String>,
    /// Does the provider offer peers on other machines when asked for them?
    pub reaches_other_machines: bool,
    /// The card, where there is one.
    pub nic: Option<Nic>,
}

impl Capabilities {
    /// Largest immediate of a message that arrives whole: wider ones are silently
    /// cut by some providers. 0 if there are none.
    #[must_use]
    pub fn message_data_mask(&self) -> u64 {
        mask(self.cq_data_size)
    }

    /// Largest immediate of a one-sided write that arrives whole; 0 if there are none.
    #[must_use]
    pub fn immediate_mask(&self) -> u64 {
        mask(self.write_data_size)
    }

    /// Can data arrive with an immediate (`fi_writedata`)?
    #[must_use]
    pub fn has_write_data(&self) -> bool {
        self.write_data_size > 0
    }

    /// Do the two bits of an ordered ring hold: a write after a write, a send after a write?
    #[must_use]
    pub fn orders_writes(&self) -> bool {
        let needed = Order::WRITE_AFTER_WRITE | Order::SEND_AFTER_WRITE;
        (self.send_order & self.receive_order).contains(needed)
    }

    /// Does each arriving immediate use up a posted receive?
    #[must_use]
    pub fn immediates_consume_receives(&self) -> bool {
        self.mode.contains(Mode::RX_CQ_DATA)
    }

    /// Must local buffers be registered and passed with a descriptor?
    #[must_use]
    pub fn needs_local_registration(&self) -> bool {
        self.mr_mode.modern().contains(MrMode::LOCAL) || self.mode.contains(Mode::LOCAL_MR)
    }

    /// How many providers are stacked: 1 for a native one.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.provider.split(';').count()
    }
}

fn mask(bytes: usize) -> u64 {
    match bytes {
        0 => 0,
        1..8 => (1 << (8 * bytes)) - 1,
        _ => u64::MAX,
    }
}

fn serialize_names<S, T>(flags: &T, serializer: S) -> Result<S::Ok, S::Error>
where
    S: serde::Serializer,
    T: bitflags::Flags,
{
    serializer.collect_seq(names(flags))
}
