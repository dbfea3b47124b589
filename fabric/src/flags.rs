//! libfabric's bit sets, as types that cannot be confused.
//!
//! In C all of these are `uint64_t`, and the compiler does not detect a registration flag in a
//! transfer. Unknown bits of a provider are kept, so that the answer of a newer library
//! survives a round trip; they have no name here.

use bitflags::bitflags;
use libfabric_sys as sys;

bitflags! {
    /// What an endpoint can do (`fi_info::caps`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Caps: u64 {
        /// Send and receive messages.
        const MESSAGE = sys::FI_MSG;
        /// One-sided read and write.
        const RMA = sys::FI_RMA;
        /// Messages matched by tag.
        const TAGGED = sys::FI_TAGGED;
        /// One-sided atomics.
        const ATOMIC = sys::FI_ATOMIC;
        /// Multicast.
        const MULTICAST = sys::FI_MULTICAST;
        /// Collectives offered by the provider.
        const COLLECTIVE = sys::FI_COLLECTIVE;
        /// May initiate reads.
        const READ = sys::FI_READ;
        /// May initiate writes.
        const WRITE = sys::FI_WRITE;
        /// May receive.
        const RECEIVE = sys::FI_RECV;
        /// May send.
        const SEND = sys::FI_SEND;
        /// Peers may read memory of this endpoint.
        const REMOTE_READ = sys::FI_REMOTE_READ;
        /// Peers may write memory of this endpoint.
        const REMOTE_WRITE = sys::FI_REMOTE_WRITE;
        /// Operations can be fenced behind earlier ones.
        const FENCE = sys::FI_FENCE;
        /// Operations can be deferred until a counter reaches a value.
        const TRIGGER = sys::FI_TRIGGER;
        /// Device memory can be registered and transferred (`FI_HMEM`). This is a promise of
        /// the provider: only a registration shows whether the build supports it.
        const DEVICE_MEMORY = sys::FI_HMEM;
        /// Writes into persistent memory can be made durable.
        const PERSISTENT_MEMORY = sys::FI_RMA_PMEM;
        /// Peers on this machine can be reached.
        const LOCAL_COMMUNICATION = sys::FI_LOCAL_COMM;
        /// Peers on other machines can be reached.
        const REMOTE_COMMUNICATION = sys::FI_REMOTE_COMM;
        /// Remote accesses to a region are counted at the target.
        const RMA_EVENT = sys::FI_RMA_EVENT;
        /// Completions of receives name their sender, if it is in the address vector: see
        /// [`Endpoint::sender`](crate::Endpoint::sender).
        const SOURCE = sys::FI_SOURCE;
        /// Address vectors can be shared between processes.
        const SHARED_ADDRESSES = sys::FI_SHARED_AV;
        const _ = !0;
    }
}

bitflags! {
    /// What a provider requires of the application before memory may be used
    /// (`fi_domain_attr::mr_mode`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct MrMode: i32 {
        /// Deprecated: basic registration, equal to virtual addresses, allocated pages and
        /// provider keys. Not combined with other bits.
        const BASIC = sys::FABRICAST_MR_BASIC;
        /// Deprecated: scalable registration, equal to no bit at all. Not combined with other
        /// bits.
        const SCALABLE = sys::FABRICAST_MR_SCALABLE;
        /// Buffers of local operations must be registered and passed with their local
        /// descriptor. Without it a region for local use needs no registration.
        const LOCAL = sys::FI_MR_LOCAL;
        /// Keys are longer than 64 bits, or need setup at the peer.
        const RAW = sys::FI_MR_RAW;
        /// Remote addresses are the target's virtual addresses, not offsets from the region's
        /// start. Region descriptors carry the base, so callers need not distinguish.
        const VIRT_ADDR = sys::FI_MR_VIRT_ADDR;
        /// Registered ranges must be backed by pages.
        const ALLOCATED = sys::FI_MR_ALLOCATED;
        /// The provider chooses the keys.
        const PROV_KEY = sys::FI_MR_PROV_KEY;
        /// The application must report changed pages with
        /// [`MemoryRegion::refresh`](crate::MemoryRegion::refresh).
        const MMU_NOTIFY = sys::FI_MR_MMU_NOTIFY;
        /// Regions that count remote accesses are created disabled.
        const RMA_EVENT = sys::FI_MR_RMA_EVENT;
        /// Regions belong to an endpoint and are created disabled.
        const ENDPOINT = sys::FI_MR_ENDPOINT;
        /// Device buffers must be registered, even for local use.
        const HMEM = sys::FI_MR_HMEM;
        /// Buffers of collectives must be registered for them.
        const COLLECTIVE = sys::FI_MR_COLLECTIVE;
        const _ = !0;
    }
}

impl MrMode {
    /// Every bit that this library supports (the deprecated modes are queried separately).
    pub const SUPPORTED: Self = Self::LOCAL
        .union(Self::RAW)
        .union(Self::VIRT_ADDR)
        .union(Self::ALLOCATED)
        .union(Self::PROV_KEY)
        .union(Self::MMU_NOTIFY)
        .union(Self::RMA_EVENT)
        .union(Self::ENDPOINT)
        .union(Self::HMEM)
        .union(Self::COLLECTIVE);

    /// Removes the deprecated bits.
    ///
    /// ```
    /// use fabric::MrMode;
    /// assert!(MrMode::BASIC.without_deprecated().contains(MrMode::VIRT_ADDR | MrMode::PROV_KEY));
    /// assert_eq!(MrMode::SCALABLE.without_deprecated(), MrMode::empty());
    /// ```
    #[must_use]
    pub fn without_deprecated(self) -> Self {
        if self == Self::BASIC {
            Self::VIRT_ADDR | Self::ALLOCATED | Self::PROV_KEY
        } else if self == Self::SCALABLE {
            Self::empty()
        } else {
            self
        }
    }
}

bitflags! {
    /// The permitted uses of a registered region.
    ///
    /// Request only the access that is needed: access is checked at every post, and a region
    /// without remote access has no key that could leak.
    ///
    /// ```
    /// use fabric::Access;
    /// let inbox = Access::RECEIVE | Access::REMOTE_WRITE;
    /// assert!(inbox.intersects(Access::REMOTE));
    /// assert!(!Access::LOCAL.intersects(Access::REMOTE));
    /// ```
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Access: u64 {
        /// Source of sends.
        const SEND = sys::FI_SEND;
        /// Target of receives.
        const RECEIVE = sys::FI_RECV;
        /// Result buffer of reads and fetching atomics of this endpoint.
        const READ = sys::FI_READ;
        /// Source of writes and atomics of this endpoint.
        const WRITE = sys::FI_WRITE;
        /// Peers may read it.
        const REMOTE_READ = sys::FI_REMOTE_READ;
        /// Peers may write it, also by atomics.
        const REMOTE_WRITE = sys::FI_REMOTE_WRITE;
        /// Collectives may use it.
        const COLLECTIVE = sys::FI_COLLECTIVE;
    }
}

impl Access {
    /// All local operations.
    pub const LOCAL: Self = Self::SEND.union(Self::RECEIVE).union(Self::READ).union(Self::WRITE);
    /// All operations of peers.
    pub const REMOTE: Self = Self::REMOTE_READ.union(Self::REMOTE_WRITE);
    /// Local and remote use of every kind but collectives.
    pub const ALL: Self = Self::LOCAL.union(Self::REMOTE);
}

bitflags! {
    /// Flags of a registration.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct RegistrationFlags: u64 {
        /// Remote accesses will be counted by a counter bound to the region.
        const RMA_EVENT = sys::FI_RMA_EVENT;
        /// The memory is persistent.
        const PERSISTENT = sys::FI_RMA_PMEM;
        /// Only the device can reach the memory (no host mapping).
        const DEVICE_ONLY = sys::FI_HMEM_DEVICE_ONLY;
        /// Host memory that was allocated through the device's API.
        const HOST_ALLOCATED = sys::FI_HMEM_HOST_ALLOC;
    }
}

bitflags! {
    /// Ordering between operations to one peer (`msg_order`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Order: u64 {
        /// Read after read.
        const READ_AFTER_READ = sys::FI_ORDER_RAR;
        /// Read after write.
        const READ_AFTER_WRITE = sys::FI_ORDER_RAW;
        /// Read after send.
        const READ_AFTER_SEND = sys::FI_ORDER_RAS;
        /// Write after read.
        const WRITE_AFTER_READ = sys::FI_ORDER_WAR;
        /// Write after write.
        const WRITE_AFTER_WRITE = sys::FI_ORDER_WAW;
        /// Write after send.
        const WRITE_AFTER_SEND = sys::FI_ORDER_WAS;
        /// Send after read.
        const SEND_AFTER_READ = sys::FI_ORDER_SAR;
        /// Send after write.
        const SEND_AFTER_WRITE = sys::FI_ORDER_SAW;
        /// Send after send.
        const SEND_AFTER_SEND = sys::FI_ORDER_SAS;
        const _ = !0;
    }
}

bitflags! {
    /// Requirements of an offer on the application (`fi_info::mode`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Mode: u64 {
        /// Each operation provides 32 bytes of context to the provider.
        const CONTEXT = sys::FI_CONTEXT;
        /// Each operation provides 64 bytes of context to the provider.
        const CONTEXT2 = sys::FI_CONTEXT2;
        /// Immediates consume posted receives.
        const RX_CQ_DATA = sys::FI_RX_CQ_DATA;
        /// Vectors must stay valid until the operation is done.
        const ASYNC_IOV = sys::FI_ASYNC_IOV;
        /// Messages carry a prefix of the provider.
        const MESSAGE_PREFIX = sys::FI_MSG_PREFIX;
        /// Deprecated form of [`MrMode::LOCAL`].
        const LOCAL_MR = sys::FABRICAST_LOCAL_MR;
        const _ = !0;
    }
}

bitflags! {
    /// Flags of one transfer.
    ///
    /// ```
    /// use fabric::{PostOptions, TransferFlags};
    /// let durable = TransferFlags::DELIVERY_COMPLETE | TransferFlags::FENCE;
    /// let options = PostOptions::token(1).flags(durable);
    /// # let _ = options;
    /// ```
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct TransferFlags: u64 {
        /// Complete only when the data is at the target and visible there. One more round trip
        /// on most networks, and the only local proof of arrival.
        const DELIVERY_COMPLETE = sys::FI_DELIVERY_COMPLETE;
        /// Complete when the target's hardware or software has accepted the data: it survives
        /// the exit of the sender, and need not be visible yet.
        const TRANSMIT_COMPLETE = sys::FI_TRANSMIT_COMPLETE;
        /// Complete as soon as the source may be reused, whether or not the data arrived.
        const INJECT_COMPLETE = sys::FI_INJECT_COMPLETE;
        /// Complete only when the data is durable at the target.
        const COMMIT_COMPLETE = sys::FI_COMMIT_COMPLETE;
        /// Start only after all earlier operations to this peer are done. Needs
        /// [`Caps::FENCE`]; without it the flag is an error or has no effect.
        const FENCE = sys::FI_FENCE;
        /// More operations follow at once: the provider may delay its doorbell. The last
        /// operation of a series must not have this flag, or the series may stay in the
        /// provider.
        const MORE = sys::FI_MORE;
        /// The source may be reused when the call returns.
        const INJECT = sys::FI_INJECT;
    }
}

/// Names of the set bits, for messages.
pub(crate) fn names<T: bitflags::Flags>(flags: &T) -> Vec<&'static str> {
    flags.iter_names().map(|(name, _)| name).collect()
}
