//! The offers of the providers on this machine (`fi_getinfo`).
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::os::raw::{c_char, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use libfabric_sys as sys;

use crate::handle::Handle;
use crate::quirks::{
    breaks_atomics, cq_may_overrun, fabric_name_varies, lacks_write_data, undelivered_message_caps,
};
use crate::shm_files;
use crate::{
    Capabilities, Caps, EndpointKind, Error, ErrorKind, ExecutionModel, Fabric, ImmediateWidths,
    Mode, MrMode, Nic, OperationLimits, Order, OrderGuarantees, Progress, RegistrationAttributes,
    Result, Threading, Version,
};

/// An owned `fi_info`.
pub(crate) struct Info {
    element: NonNull<sys::fi_info>,
    /// The element of a connection request names the half-open connection, which can be
    /// accepted or rejected once.
    claimed: AtomicBool,
    /// The listener's fabric, for a connection request. Providers cast its half-open connection
    /// without a check.
    fabric: Option<Fabric>,
}

// SAFETY: plain data behind the pointer, owned by this value and not changed through shared
// references.
unsafe impl Send for Info {}
// SAFETY: as above.
unsafe impl Sync for Info {}

impl Info {
    /// Replaces the process id, after which shm names its files, by a
    /// [unique name](shm_files::new_source). A requested IP address is not used as a name: two
    /// processes that request the loopback address would collide.
    pub(crate) fn make_source_name_unique(&self) {
        let number = std::process::id();
        // SAFETY: the element is owned and not shared yet. Its address is terminated if its
        // format is a string, and allocated with malloc, as fi_freeinfo expects.
        unsafe {
            let raw = &mut *self.as_ptr();
            if raw.addr_format != sys::FI_ADDR_STR || raw.src_addr.is_null() {
                return;
            }
            let given = string(raw.src_addr.cast()).unwrap_or_default();
            let Some(name) = given.strip_prefix(shm_files::SCHEME) else { return };
            if name != number.to_string() && name.parse::<std::net::IpAddr>().is_err() {
                return;
            }
            let Ok(name) = CString::new(shm_files::new_source()) else { return };
            let copy = libc::strdup(name.as_ptr());
            if !copy.is_null() {
                libc::free(raw.src_addr);
                raw.src_addr = copy.cast();
                raw.src_addrlen = name.as_bytes_with_nul().len();
            }
        }
    }

    pub(crate) fn has_shm_source(&self) -> bool {
        // SAFETY: the element is alive; an address in the format of a string is terminated.
        unsafe {
            let raw = &*self.as_ptr();
            raw.addr_format == sys::FI_ADDR_STR
                && !raw.src_addr.is_null()
                && string(raw.src_addr.cast()).is_some_and(|it| it.starts_with(shm_files::SCHEME))
        }
    }

    pub(crate) fn destination(&self) -> Option<String> {
        // SAFETY: the element is alive, and its address has the given length.
        let raw = unsafe { &*self.as_ptr() };
        (!raw.dest_addr.is_null() && raw.dest_addrlen > 0)
            .then(|| format_address_bytes(raw.addr_format, raw.dest_addr.cast(), raw.dest_addrlen))
    }

    /// Takes ownership of an element that libfabric returned (of a connection request, for
    /// example).
    ///
    /// # Safety
    /// `info` must be null or an element that no other owner frees.
    pub(crate) unsafe fn adopt(info: *mut sys::fi_info) -> Option<Self> {
        let element = NonNull::new(info)?;
        Some(Self { element, claimed: AtomicBool::new(false), fabric: None })
    }

    /// The offer of a connection request to a listener of this fabric.
    pub(crate) fn for_request(mut self, fabric: &Fabric) -> Self {
        self.fabric = Some(fabric.clone());
        self
    }

    /// A connection request must be used with its listener's fabric.
    pub(crate) fn check_fabric(&self, fabric: &Fabric, operation: &'static str) -> Result<()> {
        if self.fabric.as_ref().is_none_or(|own| own.is_same(fabric)) {
            return Ok(());
        }
        let detail = "the connection request belongs to a listener on another fabric. Open the domain \
                      with Domain::open_on and the listener's fabric";
        Err(fabric.error(ErrorKind::InvalidArgument, operation, detail))
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::fi_info {
        self.element.as_ptr()
    }

    pub(crate) fn is_request(&self) -> bool {
        // SAFETY: the element is alive.
        !unsafe { (*self.as_ptr()).handle }.is_null()
    }

    /// Claims the half-open connection, if there is one: libfabric frees it at its first use.
    pub(crate) fn claim(&self, operation: &'static str) -> Result<()> {
        if self.is_request() && self.claimed.swap(true, Ordering::AcqRel) {
            let detail = "this connection request was accepted or rejected already";
            return Err(Error::new(ErrorKind::InvalidArgument, operation, detail));
        }
        Ok(())
    }

    /// A copy with this destination address.
    pub(crate) fn towards(&self, address: &[u8]) -> Result<Self> {
        let no_memory = || Error::from_code("fi_dupinfo", sys::FI_ENOMEM);
        // SAFETY: the element is alive, and its copy is owned here.
        let copy = unsafe { Self::adopt(sys::fi_dupinfo(self.as_ptr())) }.ok_or_else(no_memory)?;
        // Providers read a whole sockaddr union.
        let room = address.len().max(256);
        // SAFETY: the copy is owned; its strings and addresses are allocated with malloc, as
        // fi_freeinfo expects; `room` bytes are available for `address`.
        unsafe {
            let bytes: *mut u8 = libc::calloc(1, room).cast();
            if bytes.is_null() {
                return Err(no_memory());
            }
            ptr::copy_nonoverlapping(address.as_ptr(), bytes, address.len());
            let raw = &mut *copy.as_ptr();
            libc::free(raw.dest_addr);
            raw.dest_addr = bytes.cast();
            raw.dest_addrlen = address.len();
        }
        Ok(copy)
    }
}

impl Drop for Info {
    fn drop(&mut self) {
        // SAFETY: owned; its `next` was cut, or it came from fi_dupinfo, which copies one
        // element.
        unsafe { sys::fi_freeinfo(self.as_ptr()) };
    }
}

impl std::fmt::Debug for Info {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "fi_info {:p}", self.element)
    }
}

/// A way to communicate that a provider offers, with its addresses and conditions.
#[derive(Debug, Clone)]
pub struct Offer {
    pub(crate) info: Arc<Info>,
    pub(crate) capabilities: Arc<Capabilities>,
    /// Was `Caps::SOURCE` requested? Many offers have it without a request; looking up the
    /// sender of each completion costs a few nanoseconds that most callers do not need.
    pub(crate) reports_source: bool,
    /// Opens the fabric instead of libfabric.
    #[cfg(feature = "fault-injection")]
    pub(crate) emulated: Option<FabricOpener>,
}

/// Opens the fabric of an emulated provider.
#[cfg(feature = "fault-injection")]
#[derive(Clone, Copy)]
pub(crate) struct FabricOpener {
    /// Passed to each call.
    network: usize,
    open: fn(usize) -> *mut sys::fid_fabric,
}

#[cfg(feature = "fault-injection")]
impl FabricOpener {
    pub(crate) fn new(network: usize, open: fn(usize) -> *mut sys::fid_fabric) -> Self {
        Self { network, open }
    }
}

#[cfg(feature = "fault-injection")]
impl std::fmt::Debug for FabricOpener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "network {}", self.network)
    }
}

impl Offer {
    pub(crate) fn adopt(info: Info, threading: Threading) -> Self {
        // SAFETY: the element is alive, and not shared yet.
        unsafe {
            // No structured tags are requested. `ofi_mrail` returns the format of the layer
            // below, and then refuses an endpoint with it.
            (*(*info.as_ptr()).ep_attr).mem_tag_format = 0;
        }
        let capabilities = read_capabilities(&info, threading);
        Self {
            info: Arc::new(info),
            capabilities: Arc::new(capabilities),
            reports_source: false,
            #[cfg(feature = "fault-injection")]
            emulated: None,
        }
    }

    /// Replaces the provider by an emulated one.
    #[cfg(feature = "fault-injection")]
    pub(crate) fn emulated_by(mut self, opener: FabricOpener) -> Self {
        self.emulated = Some(opener);
        self
    }

    /// Is the provider emulated, for tests?
    pub(crate) fn is_emulated(&self) -> bool {
        #[cfg(feature = "fault-injection")]
        return self.emulated.is_some();
        #[cfg(not(feature = "fault-injection"))]
        false
    }

    /// The facts.
    #[must_use]
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// Every attribute, printed by libfabric.
    #[must_use]
    pub fn describe(&self) -> String {
        // SAFETY: the element is alive.
        unsafe { printed(self.info.as_ptr().cast(), sys::FI_TYPE_INFO, 32 * 1024) }
    }

    /// Is this the same provider with the same addresses, whatever the other attributes?
    pub(crate) fn is_duplicate_of(&self, other: &Self) -> bool {
        let (a, b) = (self.capabilities(), other.capabilities());
        let is_same_fabric = a.fabric == b.fabric || fabric_name_varies(&a.provider);
        a.provider == b.provider
            && is_same_fabric
            && a.domain == b.domain
            && a.endpoint == b.endpoint
            && a.protocol == b.protocol
            && a.address_format == b.address_format
            // psm3 offers its tags once with and once without immediates.
            && a.immediates.cq_data_size == b.immediates.cq_data_size
            && without_port(a.source.as_deref()) == without_port(b.source.as_deref())
    }
}

impl Fabric {
    /// Opens the fabric that an offer is about.
    ///
    /// # Errors
    /// The provider's error.
    pub fn open(offer: &Offer) -> Result<Self> {
        let provider = offer.capabilities().provider.clone();
        #[cfg(feature = "fault-injection")]
        if let Some(FabricOpener { network, open }) = offer.emulated {
            // SAFETY: a new object, which is owned here.
            let handle = unsafe { Handle::adopt("fi_fabric", open(network))? };
            return Ok(Self::new(handle, provider));
        }
        // SAFETY: the offer's attributes are alive; the object is owned here.
        let handle = unsafe {
            let attributes = (*offer.info.as_ptr()).fabric_attr;
            Handle::open("fi_fabric", &provider, |fabric| {
                sys::fi_fabric(attributes, fabric, ptr::null_mut())
            })?
        };
        Ok(Self::new(handle, provider))
    }
}

/// A provider that picks a port, or puts its process id into its address, returns another one
/// from each call.
fn without_port(address: Option<&str>) -> Option<&str> {
    address.map(|a| a.rsplit_once(':').map_or(a, |(host, _)| host))
}

/// A string of libfabric, if present.
///
/// # Safety
/// `text` must be null or a terminated string that outlives the call.
pub(crate) unsafe fn string(text: *const c_char) -> Option<String> {
    // SAFETY: by contract.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// Renders one value with libfabric's own printer.
///
/// # Safety
/// The value has the type that `kind` names.
unsafe fn printed(value: *const c_void, kind: u32, room: usize) -> String {
    let mut buffer = vec![0_u8; room];
    // SAFETY: by contract; the buffer's length is passed, libfabric terminates what it writes.
    unsafe { sys::fi_tostr_r(buffer.as_mut_ptr().cast(), room, value, kind) };
    let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
    text.to_string_lossy().into_owned()
}

fn progress(number: u32) -> Progress {
    // Unified control progress (2.x) is a promise about threads: the application still has to
    // poll to move data.
    if number == sys::FI_PROGRESS_AUTO { Progress::Automatic } else { Progress::Manual }
}

fn read_capabilities(info: &Info, threading: Threading) -> Capabilities {
    // SAFETY: elements from fi_getinfo and fi_dupinfo have all attribute
    // structures except `nic`; their strings are terminated or null.
    unsafe {
        let raw = &*info.as_ptr();
        let (tx, rx) = (&*raw.tx_attr, &*raw.rx_attr);
        let (endpoint, domain, fabric) = (&*raw.ep_attr, &*raw.domain_attr, &*raw.fabric_attr);
        let source = (!raw.src_addr.is_null() && raw.src_addrlen > 0)
            .then(|| format_address_bytes(raw.addr_format, raw.src_addr.cast(), raw.src_addrlen));
        let provider = string(fabric.prov_name).unwrap_or_default();
        let protocol = (&raw const endpoint.protocol).cast();
        let protocol_name = printed(protocol, sys::FI_TYPE_PROTOCOL, 256);
        let mut caps = Caps::from_bits_retain(raw.caps);
        if breaks_atomics(&provider, Version::running()) {
            caps.remove(Caps::ATOMIC);
        }
        caps.remove(undelivered_message_caps(&provider, Version::running()));
        let resource_management =
            domain.resource_mgmt == sys::FI_RM_ENABLED && !cq_may_overrun(&provider);
        let writes = raw.caps & sys::FI_RMA != 0 && !lacks_write_data(&provider);
        Capabilities {
            provider,
            provider_version: Version::from_packed(fabric.prov_version),
            fabric: string(fabric.name).unwrap_or_default(),
            domain: string(domain.name).unwrap_or_default(),
            endpoint: match endpoint.type_ {
                sys::FI_EP_MSG => EndpointKind::Msg,
                sys::FI_EP_DGRAM => EndpointKind::Datagram,
                _ => EndpointKind::Rdm,
            },
            protocol: endpoint.protocol,
            protocol_name: protocol_name.trim().to_owned(),
            caps,
            mode: Mode::from_bits_retain(raw.mode | domain.mode | rx.mode | tx.mode),
            registration: RegistrationAttributes {
                mr_mode: MrMode::from_bits_retain(domain.mr_mode),
                mr_key_size: domain.mr_key_size,
                mr_iov_limit: domain.mr_iov_limit.max(1),
            },
            immediates: ImmediateWidths {
                cq_data_size: domain.cq_data_size,
                write_data_size: if writes { domain.cq_data_size } else { 0 },
            },
            max_message_size: endpoint.max_msg_size,
            inject_size: tx.inject_size,
            order: OrderGuarantees {
                send_order: Order::from_bits_retain(tx.msg_order),
                receive_order: Order::from_bits_retain(rx.msg_order),
                max_ordered_write: endpoint.max_order_waw_size,
            },
            limits: OperationLimits {
                iov_limit: tx.iov_limit.max(1),
                rma_iov_limit: tx.rma_iov_limit,
                transmit_depth: tx.size,
                receive_depth: rx.size,
                resource_management,
            },
            execution: ExecutionModel {
                data_progress: progress(sys::fcs_data_progress(domain) as u32),
                control_progress: progress(domain.control_progress),
                threading,
            },
            address_format: raw.addr_format,
            source,
            reaches_other_machines: false,
            nic: read_nic(raw.nic),
        }
    }
}

/// # Safety
/// `nic` must be null or point to a NIC description that libfabric made.
unsafe fn read_nic(nic: *const sys::fid_nic) -> Option<Nic> {
    // SAFETY: by contract; its parts may be null.
    unsafe {
        let raw = nic.as_ref()?;
        let (mut domain, mut bus, mut device, mut function) = (0, 0, 0, 0);
        let pci = sys::fcs_nic_pci(nic, &mut domain, &mut bus, &mut device, &mut function) != 0;
        let link = raw.link_attr.as_ref();
        Some(Nic {
            name: raw.device_attr.as_ref().and_then(|d| string(d.name)),
            pci: pci.then(|| format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}")),
            link_bits_per_second: link.map_or(0, |l| l.speed as u64),
            link_up: link.and_then(|l| match l.state {
                sys::FI_LINK_UP => Some(true),
                sys::FI_LINK_DOWN => Some(false),
                _ => None,
            }),
        })
    }
}

/// An address in readable form, for messages. The provider's own printer needs an address
/// vector, so the common formats are parsed here.
pub(crate) fn format_address_bytes(format: u32, address: *const u8, length: usize) -> String {
    // SAFETY: callers pass the address and length that libfabric gave them.
    let bytes = unsafe { std::slice::from_raw_parts(address, length) };
    match (format, bytes) {
        (sys::FI_SOCKADDR_IN | sys::FI_SOCKADDR, [_, _, p0, p1, a, b, c, d, ..])
            if bytes.len() < 28 =>
        {
            format!("{a}.{b}.{c}.{d}:{}", u16::from_be_bytes([*p0, *p1]))
        }
        (sys::FI_SOCKADDR_IN6 | sys::FI_SOCKADDR, bytes) if bytes.len() >= 28 => {
            let mut octets = [0_u8; 16];
            octets.copy_from_slice(&bytes[8..24]);
            let port = u16::from_be_bytes([bytes[2], bytes[3]]);
            format!("[{}]:{port}", std::net::Ipv6Addr::from(octets))
        }
        (sys::FI_ADDR_STR, bytes) => {
            let text = bytes.split(|b| *b == 0).next().unwrap_or_default();
            String::from_utf8_lossy(text).into_owned()
        }
        (_, bytes) => bytes.iter().take(32).map(|b| format!("{b:02x}")).collect(),
    }
}
