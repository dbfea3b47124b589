//! Providers by name: defects and traits that no attribute of libfabric reports.
//!
//! Apart from one check each in `capabilities` and `offer`, this is the only file of the library
//! that knows providers by name. Everything else depends on
//! [`Capabilities`](crate::Capabilities), which this file corrects when an offer is read.

use crate::{Caps, Version};

/// Is this the whole name of the provider, or that of one of its layers?
pub(crate) fn matches_provider(name: &str, provider: &str) -> bool {
    name == provider || provider.split(';').any(|layer| layer == name)
}

/// Known drawbacks of providers that no attribute reports, with their penalty.
pub(crate) const PENALTIES: &[(&str, i64, &str)] = &[
    ("sockets", -300, "upstream has deprecated it"),
    ("udp", -200, "reliability is emulated in software"),
    ("UDP", -200, "reliability is emulated in software"),
    ("ofi_mrail", -250, "multi-rail needs its addresses configured by hand"),
    ("lnx", -150, "links other providers, experimental"),
    ("off_coll", -400, "for collectives only"),
];

/// Providers whose one-sided writes cannot notify the target by an immediate (`fi_writedata`),
/// whatever width their attributes claim: libfabric has no attribute for it. `ofi_mrail` even
/// accepts the flag in `fi_writemsg` and loses the immediate.
const WITHOUT_WRITE_DATA: &[&str] = &["cxi", "ucx", "lnx", "lpp", "ofi_mrail"];

/// Fabrics whose endpoints cannot communicate with other fabrics of the same provider, though
/// provider, protocol and addresses have the same names.
const SEPARATE_FABRICS: &[(&str, &str)] = &[("efa", "efa-direct")];

/// The fabric's name, if it is incompatible with the provider's other fabrics.
pub(crate) fn separate_fabric(provider: &str, fabric: &str) -> Option<&'static str> {
    let is_it = |(of, name): &&(&str, &str)| matches_provider(of, provider) && *name == fabric;
    SEPARATE_FABRICS.iter().find(is_it).map(|(_, name)| *name)
}

/// Is this provider known to lack `fi_writedata`?
pub(crate) fn lacks_write_data(provider: &str) -> bool {
    WITHOUT_WRITE_DATA.iter().any(|name| matches_provider(name, provider))
}

/// Are this provider's atomics known to be wrong? Native verbs before libfabric 2.2 adds, swaps
/// and compares the address of the operand instead of its value.
pub(crate) fn breaks_atomics(provider: &str, running: Version) -> bool {
    provider == "verbs" && running < (Version { major: 2, minor: 2 })
}

/// Does this provider return another fabric name from each call of `fi_getinfo`?
pub(crate) fn fabric_name_varies(provider: &str) -> bool {
    matches_provider("ofi_mrail", provider)
}

/// Does this provider let completion queues overrun, though it claims to prevent it? efa
/// reports `FI_RM_ENABLED`, but its documentation says that nothing protects the queue.
pub(crate) fn cq_may_overrun(provider: &str) -> bool {
    matches_provider("efa", provider)
}

/// Does this provider crash when an endpoint is closed while its queue has unread entries? rxm
/// over verbs posts a receive consumed by an immediate again, on a connection that is already
/// closed (seen with 1.17).
pub(crate) fn must_drain_before_close(provider: &str) -> bool {
    matches_provider("ofi_rxm", provider)
}

/// Kinds of messages that this provider accepts and does not deliver. `ofi_mrail` labels each
/// message as tagged, so that an untagged receive never matches. Since libfabric 2.0 it also
/// does not return the buffers of arrived messages: after a few thousand messages it stops
/// working, including one-sided operations.
pub(crate) fn undelivered_message_caps(provider: &str, running: Version) -> Caps {
    match matches_provider("ofi_mrail", provider) {
        false => Caps::empty(),
        true if running < (Version { major: 2, minor: 0 }) => Caps::MESSAGE,
        true => Caps::MESSAGE | Caps::TAGGED,
    }
}

/// Does polling this provider's queue take a lock that its peers need to write to this process?
/// shm's queues did until libfabric 1.18: a thread that polls all the time slows its peers
/// down.
pub(crate) fn polling_blocks_peers(provider: &str, running: Version) -> bool {
    matches_provider("shm", provider) && running < (Version { major: 1, minor: 18 })
}

/// Why shm before libfabric 1.19 is refused unless a policy requires it.
pub(crate) const ORPHANED_LOCK_REASON: &str = "shm before libfabric 1.19 can hang: a killed process leaves \
     the spin lock of its shared region locked. Require it with =shm to use it anyway";

/// Can a killed process leave a lock of this provider taken, so that its peers wait without a
/// bound? The queues of shm had a spin lock in shared memory until libfabric 1.19.
pub(crate) fn orphans_locks(provider: &str, running: Version) -> bool {
    matches_provider("shm", provider) && running < (Version { major: 1, minor: 19 })
}

/// Does this provider close a registration while other threads register or look up keys? tcp
/// did until libfabric 1.19; before 1.18 its name was net.
pub(crate) fn deregisters_without_lock(provider: &str, running: Version) -> bool {
    let is_tcp = matches_provider("net", provider)
        || matches_provider("tcp", provider) && running >= (Version { major: 1, minor: 18 });
    is_tcp && running < (Version { major: 1, minor: 19 })
}

/// Does this provider pass injected writes down without a context? Then an injected write that
/// still waits when its connection ends is taken for an operation at address 0. rxm does this
/// over tcp, unless a counter of writes is bound to the endpoint.
pub(crate) fn injects_without_context(provider: &str) -> bool {
    matches_provider("ofi_rxm", provider)
}

/// Does this provider put explicit registrations into a cache that widens their access and
/// leaves closed regions open to peers, unless configured otherwise?
pub(crate) fn caches_registrations(provider: &str) -> bool {
    matches_provider("verbs", provider)
        && std::env::var("FI_MR_CACHE_MAX_COUNT").map_or(true, |count| count.trim() != "0")
}

/// Providers that evaluate a dma-buf (`FI_MR_DMABUF`) by code of their own. Others take the
/// structure for a list of buffers, or register another range (`ofi_mr_map_insert` reads the offset
/// of the first buffer from it, up to 2.6). With a plain address, verbs and efa export the dma-buf
/// themselves, and fall back to nvidia-peermem.
const DMA_BUF_PROVIDERS: &[&str] = &["efa", "cxi", "opx", "verbs"];

/// Does this provider, without layers, register dma-bufs?
pub(crate) fn takes_dma_buf(provider: &str) -> bool {
    DMA_BUF_PROVIDERS.contains(&provider)
}

/// Does this provider complete operations on device memory before the bytes are there? shm copies
/// by `cudaMemcpy`, which returns early between devices, and reports the operation as done (1.17 to
/// 2.6; seen with 2.1 on two H200).
pub(crate) fn completes_device_copies_early(provider: &str) -> bool {
    matches_provider("shm", provider)
}
