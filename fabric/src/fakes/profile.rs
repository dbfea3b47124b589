//! What each provider promises, demands and lacks, by its manual page or source.
//!
//! Facts are those of libfabric's main branch in August 2026, and of released versions where
//! named.

use libfabric_sys as sys;

/// The properties of a provider that this crate depends on.
#[derive(Debug, Clone, Copy)]
pub(super) struct ProviderProfile {
    pub(super) name: &'static str,
    pub(super) fabric: &'static str,
    /// Capabilities besides messages and one-sided operations.
    pub(super) caps: u64,
    pub(super) mr_mode: i32,
    pub(super) key_size: usize,
    pub(super) data_size: usize,
    /// Can writes carry immediates, and can injected writes?
    pub(super) write_data: bool,
    pub(super) inject_data: bool,
    pub(super) inject_size: usize,
    /// The largest injected write in bytes; 0: injected writes are refused.
    pub(super) inject_rma: usize,
    pub(super) iov_limit: usize,
    pub(super) max_message: usize,
    pub(super) order: u64,
    /// The longest write in bytes that a later write does not overtake, if writes are ordered.
    pub(super) max_ordered_write: usize,
    pub(super) depth: usize,
    /// Entries of a queue that is opened without a size.
    pub(super) entries: usize,
    pub(super) resource_management: u32,
    /// May queues overrun, whatever resource management is reported?
    pub(super) queues_overrun: bool,
    /// Do writes and reads progress without calls of the target?
    pub(super) automatic_progress: bool,
    /// Does a target refuse them unless it has inserted the initiator's address?
    pub(super) needs_initiator_address: bool,
}

const TAGS_AND_ATOMICS: u64 = sys::FI_TAGGED | sys::FI_ATOMIC;

/// The fabric `efa`. fi_efa.7: no FI_MR_LOCAL, manual progress, order of messages (SAS) only, no
/// limit of a message. prov/efa/src/efa_prov_info.c: keys as in the verbs library (4 bytes),
/// virtual addresses, 4 bytes of immediate, four pieces, injection emulated up to a packet.
/// fi_efa.7 says of unsolicited immediates that they can overrun the queue.
pub(super) const EFA: ProviderProfile = ProviderProfile {
    name: "efa",
    fabric: "efa",
    caps: TAGS_AND_ATOMICS,
    mr_mode: sys::FI_MR_VIRT_ADDR | sys::FI_MR_ALLOCATED | sys::FI_MR_PROV_KEY,
    key_size: 4,
    data_size: 4,
    write_data: true,
    inject_data: true,
    inject_size: 4096,
    inject_rma: 4096,
    iov_limit: 4,
    max_message: usize::MAX,
    order: sys::FI_ORDER_SAS,
    max_ordered_write: 0,
    depth: 256,
    entries: 512,
    resource_management: sys::FI_RM_ENABLED,
    queues_overrun: true,
    automatic_progress: false,
    needs_initiator_address: false,
};

/// The fabric `efa-direct`. fi_efa.7: FI_MR_LOCAL, no tags and no atomics, no order at all,
/// automatic progress, entries without tags only, and the target has to insert the initiator's
/// address. efa_prov_info.c: the device's limits (32 bytes in line, two pieces, 1 GiB).
/// prov/efa/src/efa_rma.c: injected writes up to FI_OPT_INJECT_RMA_SIZE; 2.1 to 2.4 refuse them.
pub(super) const EFA_DIRECT: ProviderProfile = ProviderProfile {
    fabric: "efa-direct",
    caps: 0,
    mr_mode: EFA.mr_mode | sys::FI_MR_LOCAL,
    inject_size: 32,
    inject_rma: 0,
    iov_limit: 2,
    max_message: 1 << 30,
    order: 0,
    automatic_progress: true,
    needs_initiator_address: true,
    ..EFA
};

/// fi_cxi.7: regions belong to endpoints (FI_MR_ENDPOINT), keys of 8 bytes by the provider where
/// that is taken, manual progress, order SAS and WAW of writes of any size; no fi_writedata unless
/// FI_CXI_ENABLE_WRITEDATA is set, though the domain has 8 bytes of data for messages.
/// prov/cxi/src/cxip_ep.c: -FI_EBUSY for an endpoint that regions are bound to.
/// prov/cxi/include/cxip.h: 192 bytes are injected, one piece, messages below 4 GiB.
pub(super) const CXI: ProviderProfile = ProviderProfile {
    name: "cxi",
    fabric: "cxi",
    caps: TAGS_AND_ATOMICS,
    mr_mode: sys::FI_MR_ENDPOINT | sys::FI_MR_ALLOCATED | sys::FI_MR_PROV_KEY,
    key_size: 8,
    data_size: 8,
    write_data: false,
    inject_data: false,
    inject_size: 192,
    inject_rma: 192,
    iov_limit: 1,
    max_message: (1 << 32) - 1,
    order: sys::FI_ORDER_SAS | sys::FI_ORDER_WAW,
    max_ordered_write: usize::MAX,
    depth: 1024,
    entries: 2048,
    resource_management: sys::FI_RM_ENABLED,
    queues_overrun: false,
    automatic_progress: false,
    needs_initiator_address: false,
};

/// fi_opx.7: scalable registration (without deprecated mode bits), manual progress, 4 bytes of
/// immediate. prov/opx/src/fi_opx_rma.c: no fi_inject_writedata in its tables. fi_opx_ep.c and
/// fi_opx_info.c: 16 bytes are injected, depths and pieces without a limit, no order between
/// writes or messages. fi_opx_domain.c: no resource management.
pub(super) const OPX: ProviderProfile = ProviderProfile {
    name: "opx",
    fabric: "opx",
    mr_mode: 0,
    key_size: 8,
    write_data: true,
    inject_data: false,
    inject_size: 16,
    inject_rma: 16,
    iov_limit: usize::MAX,
    max_message: usize::MAX,
    order: 0,
    depth: usize::MAX,
    entries: 4096,
    resource_management: sys::FI_RM_DISABLED,
    queues_overrun: true,
    ..EFA
};

/// fi_psm3.7: manual progress, 64 bytes are injected. prov/psm3/src/psmx3_attr.c: scalable
/// registration, three offers: 4 bytes of immediate with tags of 60 bits (this one), none with
/// tags of 64 bits, and 8 without messages; writes, reads and messages in order, but data of
/// writes only up to 4096 bytes; queues are managed.
pub(super) const PSM3: ProviderProfile = ProviderProfile {
    name: "psm3",
    fabric: "psm3",
    mr_mode: 0,
    key_size: 8,
    write_data: true,
    inject_data: true,
    inject_size: 64,
    inject_rma: 64,
    iov_limit: 1021,
    order: sys::FI_ORDER_SAS | sys::FI_ORDER_WAW,
    max_ordered_write: 4096,
    depth: usize::MAX,
    ..CXI
};
