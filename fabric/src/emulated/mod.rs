//! A provider inside of this process, for tests: it registers memory of emulated devices, and shows
//! selected faults of real providers.
//!
//! Emulated endpoints reach each other if they were opened from the same offer or its clones.
//! Messages and host memory always arrive whole and in order. A [`Fault`] concerns operations on
//! device memory only.
//!
//! The parts: `open_objects` has the open objects and carries out operations;
//! `function_tables` has the tables of functions.
#![allow(unsafe_code)]

mod function_tables;
mod open_objects;
#[cfg(test)]
mod tests;

use std::ffi::CString;
use std::time::Duration;

use libfabric_sys as sys;

use crate::offer::{FabricOpener, Info};
use crate::version::load_library;
use crate::{Error, Offer, Result, Threading};

const NAME: &str = "emulated";
/// The longest transfer.
const MAX_MESSAGE: usize = 1 << 30;
/// The longest message that is copied.
const MAX_INJECTED: usize = 64;
/// Operations in flight of an endpoint.
const DEPTH: usize = 1024;

/// What is wrong with operations on device memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    #[default]
    None,
    /// Operations are reported as done this long before their bytes arrive.
    EarlyCompletions(Duration),
    /// Only this many bytes of each operation arrive. All are reported as done.
    CutsTransfers(usize),
    /// Operations are never reported as done.
    NeverCompletes,
    /// Device memory is refused at its registration, with EINVAL.
    RefusesRegistration,
    /// Direct transfers between devices are refused when an endpoint is opened.
    RefusesPeerToPeer,
}

/// An offer of the provider, with device memory (`Caps::DEVICE_MEMORY`).
///
/// ```
/// use fabric::{Access, Caps, Domain, HostMemory, MemoryKind, emulated};
/// let offer = emulated::offer(emulated::Fault::None)?;
/// assert!(offer.capabilities().caps.contains(Caps::DEVICE_MEMORY));
/// let domain = Domain::open(&offer)?;
/// domain.probe_memory(MemoryKind::Emulated(0))?;
/// # Ok::<(), fabric::Error>(())
/// ```
///
/// # Errors
/// `NoLibrary` if libfabric is not installed: it makes the offer's structure.
pub fn offer(fault: Fault) -> Result<Offer> {
    load_library("fi_dupinfo")?;
    let copy = |name: &str| -> Result<*mut libc::c_char> {
        let name = CString::new(name).map_err(|_| Error::from_code("strdup", sys::FI_EINVAL))?;
        // SAFETY: a terminated string; libfabric frees the copy.
        Ok(unsafe { libc::strdup(name.as_ptr()) })
    };
    let (provider, domain_name) = (copy(NAME)?, copy("emulated-0")?);
    // SAFETY: makes an empty element with all attributes; the strings in it are malloc's.
    let info = unsafe {
        let raw = sys::fi_dupinfo(std::ptr::null());
        let Some(info) = Info::adopt(raw) else {
            return Err(Error::from_code("fi_dupinfo", sys::FI_ENOMEM));
        };
        (*raw).caps = sys::FI_MSG | sys::FI_RMA | sys::FI_HMEM;
        let endpoint = &mut *(*raw).ep_attr;
        (endpoint.type_, endpoint.max_msg_size) = (sys::FI_EP_RDM, MAX_MESSAGE);
        let (tx, rx) = (&mut *(*raw).tx_attr, &mut *(*raw).rx_attr);
        (tx.iov_limit, tx.rma_iov_limit, tx.size, rx.size) = (1, 1, DEPTH, DEPTH);
        tx.inject_size = MAX_INJECTED;
        let domain = &mut *(*raw).domain_attr;
        // All memory has a registration, so that late bytes find out whether it still exists.
        (domain.mr_mode, domain.mr_key_size) = (sys::FI_MR_LOCAL | sys::FI_MR_HMEM, 8);
        (domain.resource_mgmt, domain.cq_data_size) = (sys::FI_RM_ENABLED, 4);
        (*(*raw).fabric_attr).prov_name = provider;
        domain.name = domain_name;
        info
    };
    let opener = FabricOpener::new(open_objects::create(fault), function_tables::fabric);
    Ok(Offer::adopt(info, Threading::Safe).emulated_by(opener))
}
