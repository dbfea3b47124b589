//! What the providers on this machine offer (`fi_getinfo`).
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::os::raw::c_char;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use libfabric_sys as sys;

use crate::capabilities::{Capabilities, EndpointKind, Nic, Progress, Threading};
use crate::error::{Error, ErrorKind, Result};
use crate::flags::{Caps, Mode, MrMode, Order};
use crate::version::Version;

/// A question to `fi_getinfo`. What is not set is left to the providers.
///
/// ```
/// use fabric::{Caps, EndpointKind, Query};
/// let offers = Query::new(EndpointKind::Rdm)
///     .caps(Caps::MESSAGE | Caps::RMA)
///     .source("127.0.0.1")
///     .offers()?;
/// assert!(offers.iter().all(|o| o.capabilities().endpoint == EndpointKind::Rdm));
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Query {
    kind: EndpointKind,
    caps: Caps,
    mr_mode: MrMode,
    required_order: Option<Order>,
    provider: Option<String>,
    domain: Option<String>,
    fabric: Option<String>,
    source: Option<(String, Option<String>)>,
    destination: Option<(String, Option<String>)>,
    threading: Threading,
    progress: Option<Progress>,
    transmit_depth: usize,
    receive_depth: usize,
    version: Version,
}

impl Query {
    /// Endpoints of this kind, for messages and one-sided transfers.
    #[must_use]
    pub fn new(kind: EndpointKind) -> Self {
        let caps = match kind {
            EndpointKind::Datagram => Caps::MESSAGE,
            EndpointKind::Rdm | EndpointKind::Msg => Caps::MESSAGE | Caps::RMA,
        };
        Self {
            kind,
            caps,
            mr_mode: MrMode::OBEYED,
            required_order: None,
            provider: None,
            domain: None,
            fabric: None,
            source: None,
            destination: None,
            threading: Threading::Safe,
            progress: None,
            transmit_depth: 0,
            receive_depth: 0,
            version: Version::spoken(),
        }
    }

    /// Capabilities that every offer must have.
    #[must_use]
    pub fn caps(mut self, caps: Caps) -> Self {
        self.caps = caps;
        self
    }

    /// Registration demands that the caller is prepared to obey. The default is
    /// all that this library obeys; narrowing it narrows the offers. The
    /// deprecated [`MrMode::BASIC`] and [`MrMode::SCALABLE`] stand alone.
    #[must_use]
    pub fn mr_mode(mut self, mode: MrMode) -> Self {
        self.mr_mode = mode;
        self
    }

    /// Ordering that every offer must promise. By default write-after-write and
    /// send-after-write are asked for where a provider has them, and offers
    /// without any order are listed too.
    #[must_use]
    pub fn order(mut self, order: Order) -> Self {
        self.required_order = Some(order);
        self
    }

    /// Only this provider, by its exact name with layers (`tcp;ofi_rxm`).
    #[must_use]
    pub fn provider(mut self, name: impl Into<String>) -> Self {
        self.provider = Some(name.into());
        self
    }

    /// Only this domain (device or interface).
    #[must_use]
    pub fn domain(mut self, name: impl Into<String>) -> Self {
        self.domain = Some(name.into());
        self
    }

    /// Only this fabric (network).
    #[must_use]
    pub fn fabric(mut self, name: impl Into<String>) -> Self {
        self.fabric = Some(name.into());
        self
    }

    /// Bind to this local address or host name.
    #[must_use]
    pub fn source(mut self, node: impl Into<String>) -> Self {
        self.source = Some((node.into(), None));
        self
    }

    /// Bind to this local address and port.
    #[must_use]
    pub fn source_service(mut self, node: impl Into<String>, service: impl Into<String>) -> Self {
        self.source = Some((node.into(), Some(service.into())));
        self
    }

    /// Reach this address and port.
    #[must_use]
    pub fn destination(mut self, node: impl Into<String>, service: impl Into<String>) -> Self {
        self.destination = Some((node.into(), Some(service.into())));
        self
    }

    /// Who moves data, where it matters.
    #[must_use]
    pub fn progress(mut self, progress: Progress) -> Self {
        self.progress = Some(progress);
        self
    }

    /// Operations that can be outstanding, where the default is too small.
    #[must_use]
    pub fn depths(mut self, transmit: usize, receive: usize) -> Self {
        self.transmit_depth = transmit;
        self.receive_depth = receive;
        self
    }

    /// Asks the library to speak this version of its interface instead of the
    /// newest common one.
    #[must_use]
    pub fn version(mut self, version: Version) -> Self {
        self.version = version;
        self
    }

    /// Drops the provider's locks: fewer nanoseconds per call, and nobody who
    /// checks. `docs/threading.md` has the measurement.
    ///
    /// # Safety
    /// All objects of a domain that is opened from such an offer (queues,
    /// endpoints, regions, address vectors, and the domain itself) must be used,
    /// and dropped, by one thread at a time as the level demands.
    #[must_use]
    pub unsafe fn threading(mut self, level: Threading) -> Self {
        self.threading = level;
        self
    }

    /// Asks all providers.
    ///
    /// # Errors
    /// `NoProvider` if nothing matches, `VersionMismatch` if the library cannot
    /// speak the version asked for.
    pub fn offers(&self) -> Result<Vec<Offer>> {
        if self.version > Version::running() {
            return Err(Error::new(
                ErrorKind::VersionMismatch,
                "fi_getinfo",
                format!(
                    "version {} was asked for, the library that is loaded speaks {}",
                    self.version,
                    Version::running()
                ),
            ));
        }
        let wanted = Order::WRITE_AFTER_WRITE | Order::SEND_AFTER_WRITE;
        let mut lists = Vec::new();
        match self.required_order {
            Some(order) => lists.push(self.ask(order, self.caps)),
            // A provider may give up all ordering unless some is hinted, and
            // one that has none is not listed when it is.
            None => {
                lists.push(self.ask(wanted, self.caps));
                lists.push(self.ask(Order::empty(), self.caps));
            }
        }
        let mut offers: Vec<Offer> = Vec::new();
        let mut failure = None;
        for list in lists {
            match list {
                Ok(list) => {
                    for offer in list {
                        if !offers.iter().any(|known| known.is_same_place(&offer)) {
                            offers.push(offer);
                        }
                    }
                }
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        // Reach is reported only by some; which providers still answer when
        // other machines are asked for is a fact.
        let far = self
            .ask(self.required_order.unwrap_or_default(), self.caps | Caps::REMOTE_COMMUNICATION)
            .unwrap_or_default();
        for offer in &mut offers {
            let reaches = far.iter().any(|f| f.is_same_place(offer));
            offer.set_reach(reaches);
        }
        if offers.is_empty() {
            let error = failure
                .unwrap_or_else(|| Error::from_code("fi_getinfo", i64::from(sys::FI_ENODATA)));
            return Err(self.explain_nothing(error));
        }
        Ok(offers)
    }

    /// The first offer, for those who asked precisely.
    ///
    /// # Errors
    /// As [`offers`](Self::offers).
    pub fn first(&self) -> Result<Offer> {
        Ok(self.offers()?.remove(0))
    }

    fn explain_nothing(&self, error: Error) -> Error {
        let mut what = format!(
            "no {:?} endpoint with {}",
            self.kind,
            crate::flags::names(&self.caps).join(", ")
        );
        if let Some(provider) = &self.provider {
            what.push_str(&format!(" from provider \"{provider}\""));
        }
        if let Some((node, _)) = &self.source {
            what.push_str(&format!(" bound to {node}"));
        }
        if let Some(order) = self.required_order {
            what.push_str(&format!(" that promises {}", crate::flags::names(&order).join(", ")));
        }
        if let Ok(filter) = std::env::var("FI_PROVIDER") {
            what.push_str(&format!(" (FI_PROVIDER={filter} is set and filters all offers)"));
        }
        error.with_detail(what)
    }

    fn ask(&self, order: Order, caps: Caps) -> Result<Vec<Offer>> {
        let hints = Hints::new(self, order, caps)?;
        let (node, service, flags) = match (&self.source, &self.destination) {
            (Some((node, service)), _) => (Some(node), service.as_ref(), sys::FI_SOURCE),
            (None, Some((node, service))) => (Some(node), service.as_ref(), 0),
            (None, None) => (None, None, 0),
        };
        let node = node.map(|n| c_string("node", n)).transpose()?;
        let service = service.map(|s| c_string("service", s)).transpose()?;
        let pointer = |s: &Option<CString>| s.as_ref().map_or(ptr::null(), |s| s.as_ptr());
        let mut list: *mut sys::fi_info = ptr::null_mut();
        // SAFETY: all pointers are valid for the call or null; `list` receives a
        // list that is ours and is freed below.
        let code = unsafe {
            sys::fi_getinfo(
                self.version.packed(),
                pointer(&node),
                pointer(&service),
                flags,
                hints.info.as_ptr(),
                &mut list,
            )
        };
        Error::check("fi_getinfo", i64::from(code))?;
        let mut offers = Vec::new();
        let mut entry = list;
        while !entry.is_null() {
            // SAFETY: `entry` is an element of the list returned above.
            let next = unsafe { (*entry).next };
            // SAFETY: as above; fi_dupinfo copies a single element.
            if let Some(info) = NonNull::new(unsafe { sys::fi_dupinfo(entry) }) {
                let offer = Offer::adopt(Info(info), self.threading);
                let exact = self
                    .provider
                    .as_ref()
                    .is_none_or(|name| *name == offer.capabilities().provider);
                if exact {
                    offers.push(offer);
                }
            }
            entry = next;
        }
        // SAFETY: the list came from fi_getinfo and nothing points into it any more.
        unsafe { sys::fi_freeinfo(list) };
        Ok(offers)
    }
}

fn c_string(what: &'static str, text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| {
        Error::new(
            ErrorKind::InvalidArgument,
            "fi_getinfo",
            format!("the {what} contains a zero byte"),
        )
    })
}

/// A `fi_info` that is ours.
pub(crate) struct Info(NonNull<sys::fi_info>);

// SAFETY: plain data behind the pointer, owned by this value and not changed
// through shared references.
unsafe impl Send for Info {}
// SAFETY: as above.
unsafe impl Sync for Info {}

impl Info {
    /// Takes over an element that libfabric handed out (a connection request's, say).
    ///
    /// # Safety
    /// `info` must be null or an element nobody else frees.
    pub(crate) unsafe fn adopt(info: *mut sys::fi_info) -> Option<Self> {
        NonNull::new(info).map(Self)
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::fi_info {
        self.0.as_ptr()
    }
}

impl Info {
    /// A copy that leads to this address.
    pub(crate) fn towards(&self, address: &[u8]) -> Result<Self> {
        let no_memory = || Error::from_code("fi_dupinfo", i64::from(sys::FI_ENOMEM));
        // SAFETY: the element is alive.
        let copy = NonNull::new(unsafe { sys::fi_dupinfo(self.as_ptr()) })
            .map(Self)
            .ok_or_else(no_memory)?;
        // Providers read whole sockaddr unions.
        let room = address.len().max(256);
        // SAFETY: the copy is ours; what it has and gets is malloc's, as
        // fi_freeinfo expects; `room` bytes are there for `address`.
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
        // SAFETY: owned; its `next` was cut or it came from fi_dupinfo, which copies one element.
        unsafe { sys::fi_freeinfo(self.as_ptr()) };
    }
}

impl std::fmt::Debug for Info {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "fi_info {:p}", self.0)
    }
}

struct Hints {
    info: Info,
}

impl Hints {
    fn new(query: &Query, order: Order, caps: Caps) -> Result<Self> {
        // SAFETY: fi_dupinfo(NULL) allocates an empty element of the library's own size.
        let info = NonNull::new(unsafe { sys::fi_dupinfo(ptr::null()) })
            .map(Info)
            .ok_or_else(|| Error::from_code("fi_allocinfo", i64::from(sys::FI_ENOMEM)))?;
        let kind = match query.kind {
            EndpointKind::Rdm => sys::FI_EP_RDM,
            EndpointKind::Msg => sys::FI_EP_MSG,
            EndpointKind::Datagram => sys::FI_EP_DGRAM,
        };
        let mut mr_mode = query.mr_mode;
        let mut mode = Mode::CONTEXT | Mode::CONTEXT2 | Mode::RX_CQ_DATA;
        if mr_mode == MrMode::BASIC {
            mode |= Mode::LOCAL_MR;
        } else if !caps.contains(Caps::DEVICE_MEMORY) {
            mr_mode.remove(MrMode::HMEM);
        }
        if !caps.contains(Caps::COLLECTIVE) {
            mr_mode.remove(MrMode::COLLECTIVE);
        }
        // SAFETY: the element and all its attribute structures were just allocated
        // by the library and are ours alone; strings are allocated with strdup,
        // as fi_freeinfo expects.
        unsafe {
            let raw = &mut *info.as_ptr();
            raw.caps = caps.bits();
            raw.mode = mode.bits();
            (*raw.ep_attr).type_ = kind;
            let domain = &mut *raw.domain_attr;
            domain.mr_mode = mr_mode.bits();
            domain.threading = threading_number(query.threading);
            if let Some(progress) = query.progress {
                let number = match progress {
                    Progress::Automatic => sys::FI_PROGRESS_AUTO,
                    Progress::Manual => sys::FI_PROGRESS_MANUAL,
                };
                domain.control_progress = number;
                sys::fcs_set_data_progress(domain, number as i32);
            }
            (*raw.tx_attr).msg_order = order.bits();
            (*raw.rx_attr).msg_order = order.bits();
            (*raw.tx_attr).size = query.transmit_depth;
            (*raw.rx_attr).size = query.receive_depth;
            let fabric = &mut *raw.fabric_attr;
            if let Some(name) = &query.provider {
                fabric.prov_name = strdup("provider", name)?;
            }
            if let Some(name) = &query.fabric {
                fabric.name = strdup("fabric", name)?;
            }
            if let Some(name) = &query.domain {
                domain.name = strdup("domain", name)?;
            }
        }
        Ok(Self { info })
    }
}

fn strdup(what: &'static str, text: &str) -> Result<*mut c_char> {
    let text = c_string(what, text)?;
    // SAFETY: a terminated string; the copy is owned by the fi_info it is put into.
    Ok(unsafe { libc::strdup(text.as_ptr()) })
}

pub(crate) fn threading_number(level: Threading) -> u32 {
    match level {
        Threading::Safe => sys::FI_THREAD_SAFE,
        Threading::Object => sys::FI_THREAD_FID,
        Threading::Domain => sys::FI_THREAD_DOMAIN,
        Threading::Completion => sys::FI_THREAD_COMPLETION,
        Threading::Endpoint => sys::FI_THREAD_ENDPOINT,
    }
}

/// One way to communicate that a provider offers: where, how, and on which terms.
#[derive(Debug, Clone)]
pub struct Offer {
    pub(crate) info: Arc<Info>,
    capabilities: Arc<Capabilities>,
}

impl Offer {
    pub(crate) fn adopt(info: Info, threading: Threading) -> Self {
        let capabilities = read_capabilities(&info, threading);
        Self { info: Arc::new(info), capabilities: Arc::new(capabilities) }
    }

    /// The facts.
    #[must_use]
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    pub(crate) fn share_capabilities(&self) -> Arc<Capabilities> {
        Arc::clone(&self.capabilities)
    }

    fn set_reach(&mut self, reaches: bool) {
        let mut capabilities = (*self.capabilities).clone();
        capabilities.reaches_other_machines = reaches;
        self.capabilities = Arc::new(capabilities);
    }

    /// Every attribute, as libfabric itself prints them.
    #[must_use]
    pub fn describe(&self) -> String {
        let mut buffer = vec![0_u8; 32 * 1024];
        // SAFETY: the buffer's length is passed; libfabric terminates what it writes.
        unsafe {
            sys::fi_tostr_r(
                buffer.as_mut_ptr().cast(),
                buffer.len(),
                self.info.as_ptr().cast(),
                sys::FI_TYPE_INFO,
            );
        }
        CStr::from_bytes_until_nul(&buffer)
            .map(|text| text.to_string_lossy().into_owned())
            .unwrap_or_default()
    }

    /// Is this the same provider at the same place, whatever the terms?
    fn is_same_place(&self, other: &Self) -> bool {
        let (a, b) = (self.capabilities(), other.capabilities());
        // Not by the fabric's name: some providers invent a new one at each call.
        a.provider == b.provider
            && a.domain == b.domain
            && a.endpoint == b.endpoint
            && a.protocol == b.protocol
            && a.address_format == b.address_format
            && without_port(a.source.as_deref()) == without_port(b.source.as_deref())
    }
}

/// A provider that invents a port, or puts its process number into its address,
/// gives another one at each call.
fn without_port(address: Option<&str>) -> Option<&str> {
    address.map(|a| a.rsplit_once(':').map_or(a, |(host, _)| host))
}

/// A string of libfabric's, if there is one.
///
/// # Safety
/// `text` must be null or a terminated string that outlives the call.
unsafe fn string(text: *const c_char) -> Option<String> {
    // SAFETY: by contract.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// Renders one value with libfabric's own printer.
fn printed<T>(value: &T, kind: u32) -> String {
    let mut buffer = [0_u8; 256];
    // SAFETY: the value has the type that `kind` names (callers in this file);
    // the buffer's length is passed.
    unsafe {
        sys::fi_tostr_r(
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            ptr::from_ref(value).cast(),
            kind,
        );
    }
    CStr::from_bytes_until_nul(&buffer)
        .map(|text| text.to_string_lossy().trim().to_owned())
        .unwrap_or_default()
}

fn progress(number: u32) -> Progress {
    // Unified control progress (2.x) is a promise about threads, not about who
    // moves data: the application still has to poll.
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
            .then(|| print_address(raw.addr_format, raw.src_addr.cast(), raw.src_addrlen));
        let provider = string(fabric.prov_name).unwrap_or_default();
        let mut caps = Caps::from_bits_retain(raw.caps);
        if crate::choice::breaks_atomics(&provider, Version::running()) {
            caps.remove(Caps::ATOMIC);
        }
        let writes = raw.caps & sys::FI_RMA != 0 && !crate::choice::lacks_write_data(&provider);
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
            protocol_name: printed(&endpoint.protocol, sys::FI_TYPE_PROTOCOL),
            caps,
            mode: Mode::from_bits_retain(raw.mode | domain.mode | rx.mode | tx.mode),
            mr_mode: MrMode::from_bits_retain(domain.mr_mode),
            mr_key_size: domain.mr_key_size,
            mr_iov_limit: domain.mr_iov_limit.max(1),
            cq_data_size: domain.cq_data_size,
            write_data_size: if writes { domain.cq_data_size } else { 0 },
            max_message_size: endpoint.max_msg_size,
            inject_size: tx.inject_size,
            send_order: Order::from_bits_retain(tx.msg_order),
            receive_order: Order::from_bits_retain(rx.msg_order),
            max_ordered_write: endpoint.max_order_waw_size,
            iov_limit: tx.iov_limit.max(1),
            rma_iov_limit: tx.rma_iov_limit,
            transmit_depth: tx.size,
            receive_depth: rx.size,
            data_progress: progress(sys::fcs_data_progress(domain) as u32),
            control_progress: progress(domain.control_progress),
            threading,
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

/// An address in readable form, for messages; the provider's own printer needs
/// an address vector, so the common formats are read here.
pub(crate) fn print_address(format: u32, address: *const u8, length: usize) -> String {
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
