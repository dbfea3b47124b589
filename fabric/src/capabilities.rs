//! Everything that a decision may depend on, read once from an offer.
//!
//! Providers and code paths are chosen by these facts alone; a provider's name says nothing
//! that survives its next version. Where an attribute is known to promise too much, the value
//! is corrected when the offer is read, so that no caller has to know the quirk.

use serde::Serialize;

use crate::flags::names;
use crate::{Caps, Mode, MrMode, Order, Version};

/// How an endpoint communicates.
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

/// Which side makes data move while the application does something else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Progress {
    /// The provider itself, by hardware or by threads of its own
    /// (`FI_PROGRESS_AUTO`).
    Automatic,
    /// The thread that polls the queues (`FI_PROGRESS_MANUAL`): a target that does not poll
    /// answers no reads and takes no messages.
    Manual,
}

/// Which threads may call into a domain at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Threading {
    /// Any thread; the provider locks.
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

/// The network card behind an offer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Nic {
    /// Device name.
    pub name: Option<String>,
    /// PCI address as `domain:bus:device.function`.
    pub pci: Option<String>,
    /// Speed of the link in bits per second; 0 if unknown.
    pub link_bits_per_second: u64,
    /// State of the link, if known.
    pub link_up: Option<bool>,
}

/// How a provider registers memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct RegistrationAttributes {
    /// Demands on memory registration, as the provider returned them.
    #[serde(serialize_with = "serialize_names")]
    pub mr_mode: MrMode,
    /// Length of a registration key in bytes.
    pub mr_key_size: usize,
    /// Buffers that one registration may span (`domain_attr::mr_iov_limit`); if 1,
    /// [`Domain::register_vector`](crate::Domain::register_vector) takes one buffer only.
    pub mr_iov_limit: usize,
}

/// Width of the immediates that an offer carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ImmediateWidths {
    /// Width of remote completion data in bytes, as the provider states it for
    /// messages; 0: there are no immediates.
    pub cq_data_size: usize,
    /// Width of the immediate that a one-sided write can carry (`fi_writedata`);
    /// 0 where writes carry none, even if messages do.
    pub write_data_size: usize,
}

/// The order of operations that a provider promises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct OrderGuarantees {
    /// Order promised for operations that this endpoint sends.
    #[serde(serialize_with = "serialize_names")]
    pub send_order: Order,
    /// Order promised for operations that arrive at this endpoint.
    #[serde(serialize_with = "serialize_names")]
    pub receive_order: Order,
    /// Largest transfer in bytes for which write-after-write order covers every byte
    /// (`max_order_waw_size`); 0: no order is promised.
    pub max_ordered_write: usize,
}

/// Limits of operations, and of the number in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct OperationLimits {
    /// Local buffers that one operation gathers or scatters (`tx_attr::iov_limit`).
    pub iov_limit: usize,
    /// Remote ranges per operation.
    pub rma_iov_limit: usize,
    /// Operations that may be outstanding towards peers (`tx_attr::size`). Some providers queue
    /// more. Beyond the limit a post returns `EAGAIN` and needs a timeout.
    pub transmit_depth: usize,
    /// Receives that may be posted at the same time (`rx_attr::size`).
    pub receive_depth: usize,
    /// Does the provider prevent overruns of queues and receives (`FI_RM_ENABLED`)? Otherwise
    /// an entry that does not fit is lost, at the peer, too. False where the provider reports
    /// this but does not enforce it.
    pub resource_management: bool,
}

/// Which threads may call into a domain, and which make its progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ExecutionModel {
    /// Which side makes data progress.
    pub data_progress: Progress,
    /// Which side makes control progress, such as connections.
    pub control_progress: Progress,
    /// Threading level that the domain is opened with (`domain_attr::threading`):
    /// `Safe` unless the caller promised more by [`Query::threading`](crate::Query::threading).
    pub threading: Threading,
}

/// The facts about one offer. Decisions use these facts, never the provider's name.
///
/// ```
/// use fabric::*;
/// let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
/// let facts = offer.capabilities();
/// if facts.immediate_mask() > 0 {
///     // Immediates arrive complete: wider ones are refused, not cut.
///     assert!(facts.immediate_mask() >= 0xff);
/// }
/// let chunk = facts.max_message_size.min(1 << 20);
/// assert!(chunk >= facts.inject_size);
/// # Ok::<(), fabric::Error>(())
/// ```
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
    /// Number of the wire protocol (`ep_attr::protocol`). Endpoints with equal numbers can
    /// communicate, whatever the providers are called. Region descriptors carry it.
    pub protocol: u32,
    /// Name of the wire protocol.
    pub protocol_name: String,
    /// Capability bits.
    #[serde(serialize_with = "serialize_names")]
    pub caps: Caps,
    /// Mode bits: demands of the provider on the application.
    #[serde(serialize_with = "serialize_names")]
    pub mode: Mode,
    /// How memory is registered.
    #[serde(flatten)]
    pub registration: RegistrationAttributes,
    /// Width of immediates.
    #[serde(flatten)]
    pub immediates: ImmediateWidths,
    /// Largest message or transfer in bytes.
    pub max_message_size: usize,
    /// Largest payload in bytes that can be injected, that is, copied during the call; 0: no
    /// injection.
    pub inject_size: usize,
    /// Promised order of operations.
    #[serde(flatten)]
    pub order: OrderGuarantees,
    /// Limits of operations, and of their number.
    #[serde(flatten)]
    pub limits: OperationLimits,
    /// Which threads may call, and which make progress.
    #[serde(flatten)]
    pub execution: ExecutionModel,
    /// Format number of addresses (`FI_SOCKADDR_IN` and so on). It determines the length and
    /// the text form of an address.
    pub address_format: u32,
    /// The address that this offer is bound to, if any, in the provider's text form.
    pub source: Option<String>,
    /// Does the provider offer remote peers when the query asks for them?
    pub reaches_other_machines: bool,
    /// The network card, if there is one.
    pub nic: Option<Nic>,
}

impl Capabilities {
    /// Largest immediate of a one-sided write that arrives complete: some providers cut wider
    /// ones silently. 0 if writes carry none.
    #[must_use]
    pub fn immediate_mask(&self) -> u64 {
        match self.immediates.write_data_size {
            0 => 0,
            bytes @ 1..8 => (1 << (8 * bytes)) - 1,
            _ => u64::MAX,
        }
    }

    /// Does the provider keep both orders that an ordered ring needs: write after write, and
    /// send after write?
    #[must_use]
    pub fn orders_writes(&self) -> bool {
        let needed = Order::WRITE_AFTER_WRITE | Order::SEND_AFTER_WRITE;
        (self.order.send_order & self.order.receive_order).contains(needed)
    }

    /// Does each arriving immediate consume a posted receive?
    #[must_use]
    pub fn immediates_consume_receives(&self) -> bool {
        self.mode.contains(Mode::RX_CQ_DATA)
    }

    /// Must local buffers be registered and passed with a local descriptor?
    #[must_use]
    pub fn needs_local_registration(&self) -> bool {
        self.registration.mr_mode.without_deprecated().contains(MrMode::LOCAL)
            || self.mode.contains(Mode::LOCAL_MR)
    }

    /// What both ends need in common besides [`protocol`](Self::protocol): the provider's name,
    /// or the name of its fabric where fabrics of one provider are incompatible (`efa-direct`
    /// of efa). A [`Policy`](crate::Policy) can name either.
    #[must_use]
    pub fn wire_name(&self) -> &str {
        let separate = crate::quirks::separate_fabric(&self.provider, &self.fabric);
        separate.unwrap_or(&self.provider)
    }

    /// Does the provider reach peers by TCP connections to the address and port of their
    /// endpoints? Then a port without a listener belongs to a process that has exited.
    ///
    /// ```
    /// use fabric::{EndpointKind, Query};
    /// let query = Query::new(EndpointKind::Rdm).provider("tcp;ofi_rxm").source("127.0.0.1");
    /// assert!(query.first()?.capabilities().connects_by_tcp());
    /// # Ok::<(), fabric::Error>(())
    /// ```
    #[must_use]
    pub fn connects_by_tcp(&self) -> bool {
        self.provider.split(';').any(|layer| matches!(layer, "tcp" | "net" | "sockets"))
    }

    /// Can device memory be registered [by a dma-buf](crate::Domain::register_exported)? Other
    /// providers misread it.
    #[must_use]
    pub fn takes_dma_buf(&self) -> bool {
        Version::has_dma_buf() && crate::quirks::takes_dma_buf(&self.provider)
    }

    /// Is the provider known to complete operations on device memory before the bytes are there?
    ///
    /// ```
    /// use fabric::{EndpointKind, Query};
    /// let offer = Query::new(EndpointKind::Rdm).provider("shm").first()?;
    /// assert!(offer.capabilities().completes_device_copies_early());
    /// # Ok::<(), fabric::Error>(())
    /// ```
    #[must_use]
    pub fn completes_device_copies_early(&self) -> bool {
        crate::quirks::completes_device_copies_early(&self.provider)
    }

    /// The number of stacked providers: 1 for a native one.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.provider.split(';').count()
    }
}

fn serialize_names<S, T>(flags: &T, serializer: S) -> Result<S::Ok, S::Error>
where
    S: serde::Serializer,
    T: bitflags::Flags,
{
    serializer.collect_seq(names(flags))
}
