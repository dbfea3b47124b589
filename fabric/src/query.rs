//! Querying the providers for offers (`fi_getinfo`).
//!
//! `fi_getinfo` takes hints, and a provider may return less than it has. It drops ordering
//! unless a hint requests it, and a provider without ordering is not listed if a hint does. So
//! one query calls it several times and merges the results. The first call of a process loads
//! libfabric, which takes 0.3 s with Debian's 1.17.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::net::IpAddr;
use std::ptr;
use std::sync::Arc;

use libfabric_sys as sys;

use crate::flags::names;
use crate::offer::Info;
use crate::version::load_library;
use crate::{
    Caps, EndpointKind, Error, ErrorKind, Mode, MrMode, Offer, Order, Progress, Result, Threading,
    Version,
};

/// A query to `fi_getinfo`. Unset fields are left to the providers.
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
    source: Option<(String, Option<String>)>,
    /// Lists providers without IP addresses although a source is set.
    lists_others: bool,
    destination: Option<(String, Option<String>)>,
    threading: Threading,
    progress: Option<Progress>,
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
            mr_mode: MrMode::SUPPORTED,
            required_order: None,
            provider: None,
            source: None,
            lists_others: false,
            destination: None,
            threading: Threading::Safe,
            progress: None,
        }
    }

    /// Capabilities that every offer must have.
    #[must_use]
    pub fn caps(mut self, caps: Caps) -> Self {
        self.caps = caps;
        self
    }

    /// Registration modes that the caller supports. The default is all modes that this library
    /// supports; narrowing them narrows the offers. The deprecated [`MrMode::BASIC`] and
    /// [`MrMode::SCALABLE`] cannot be combined with others.
    #[must_use]
    pub fn mr_mode(mut self, mode: MrMode) -> Self {
        self.mr_mode = mode;
        self
    }

    /// Ordering that every offer must promise. By default write-after-write and
    /// send-after-write are requested where a provider has them, and offers without any order
    /// are listed too.
    #[must_use]
    pub fn order(mut self, order: Order) -> Self {
        self.required_order = Some(order);
        self
    }

    /// Only this provider, by its exact name with layers (`tcp;ofi_rxm`).
    ///
    /// ```
    /// use fabric::*;
    /// let query = Query::new(EndpointKind::Rdm).provider("tcp;ofi_rxm").source("127.0.0.1");
    /// assert_eq!(query.first()?.capabilities().layers(), 2);
    /// let none = query.provider("no-such-provider").offers().unwrap_err();
    /// assert_eq!(none.kind(), ErrorKind::NoProvider);
    /// # Ok::<(), fabric::Error>(())
    /// ```
    #[must_use]
    pub fn provider(mut self, name: impl Into<String>) -> Self {
        self.provider = Some(name.into());
        self
    }

    /// Bind to this local address or host name.
    ///
    /// For IP providers this selects the interface; the port is picked when the endpoint is
    /// opened. Providers without IP addresses may not be listed. shm takes a name instead, and
    /// ignores an IP address.
    #[must_use]
    pub fn source(mut self, node: impl Into<String>) -> Self {
        self.source = Some((node.into(), None));
        self
    }

    /// Reach other machines from the interface with this address: providers with IP addresses bind to
    /// it. Unlike for [`source`](Self::source), providers of networks with other addresses (cxi, efa,
    /// opx) are listed too, unless it is a loopback address: they answer no query with an IP source.
    ///
    /// ```
    /// use fabric::{EndpointKind, Query};
    /// let query = Query::new(EndpointKind::Rdm).interface("127.0.0.1".parse()?);
    /// assert!(!query.offers()?.is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn interface(mut self, address: IpAddr) -> Self {
        self.lists_others = !address.is_loopback();
        self.source(address.to_string())
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

    /// How data makes progress.
    ///
    /// Sets both data and control progress. An offer with manual progress moves data, including
    /// arrivals, only while its queues are polled.
    #[must_use]
    pub fn progress(mut self, progress: Progress) -> Self {
        self.progress = Some(progress);
        self
    }

    /// Disables the provider's locks: saves a few nanoseconds per call, without any check.
    /// `docs/internals/threading.md` has the measurement.
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

    /// Queries all providers.
    ///
    /// # Errors
    /// `NoProvider` if nothing matches; `NoLibrary` if libfabric is not installed.
    pub fn offers(&self) -> Result<Vec<Offer>> {
        load_library("fi_getinfo")?;
        let deprecated = [MrMode::BASIC, MrMode::SCALABLE];
        if deprecated.iter().any(|mode| self.mr_mode.contains(*mode) && self.mr_mode != *mode) {
            let detail = "the deprecated registration modes BASIC and SCALABLE stand alone";
            return Err(Error::new(ErrorKind::InvalidArgument, "fi_getinfo", detail));
        }
        let wanted = Order::WRITE_AFTER_WRITE | Order::SEND_AFTER_WRITE;
        let orders = match self.required_order {
            Some(order) => vec![order],
            None => vec![wanted, Order::empty()],
        };
        let (mut offers, failure) =
            merge(orders.into_iter().map(|order| self.getinfo_of_all(order, self.caps)));
        // Few providers report remote reach, so the query tests it: does the provider still
        // answer when remote communication is requested?
        let order = self.required_order.unwrap_or_default();
        let far =
            self.getinfo_of_all(order, self.caps | Caps::REMOTE_COMMUNICATION).unwrap_or_default();
        for offer in &mut offers {
            let reaches = far.iter().any(|f| f.is_duplicate_of(offer));
            Arc::make_mut(&mut offer.capabilities).reaches_other_machines = reaches;
        }
        if offers.is_empty() {
            let no_data = || Error::from_code("fi_getinfo", sys::FI_ENODATA);
            return Err(self.explain_no_match(failure.unwrap_or_else(no_data)));
        }
        Ok(offers)
    }

    /// The first offer, for a precise query.
    ///
    /// # Errors
    /// As [`offers`](Self::offers).
    pub fn first(&self) -> Result<Offer> {
        Ok(self.offers()?.remove(0))
    }

    /// A chosen offer of this query with device memory, so that network cards can access it
    /// themselves. The offer itself if its provider has no device memory, or is [known to report its
    /// operations too early](crate::Capabilities::completes_device_copies_early): such a provider
    /// would only lose its fast path for host memory.
    ///
    /// ```
    /// use fabric::{Caps, EndpointKind, Query};
    /// let query = Query::new(EndpointKind::Rdm).provider("shm");
    /// let offer = query.with_device_memory(query.first()?);
    /// assert!(!offer.capabilities().caps.contains(Caps::DEVICE_MEMORY));
    /// # Ok::<(), fabric::Error>(())
    /// ```
    #[must_use]
    pub fn with_device_memory(&self, offer: Offer) -> Offer {
        let facts = offer.capabilities();
        if facts.completes_device_copies_early() {
            return offer;
        }
        let query = self.clone().provider(&facts.provider).caps(self.caps | Caps::DEVICE_MEMORY);
        let found = query.offers().unwrap_or_default();
        found.into_iter().find(|other| other.is_duplicate_of(&offer)).unwrap_or(offer)
    }

    fn explain_no_match(&self, error: Error) -> Error {
        let mut what = format!("no {:?} endpoint with {}", self.kind, names(&self.caps).join(", "));
        if let Some(provider) = &self.provider {
            what.push_str(&format!(" from provider \"{provider}\""));
        }
        if let Some((node, _)) = &self.source {
            what.push_str(&format!(" bound to {node}"));
        }
        if let Some(order) = self.required_order {
            what.push_str(&format!(" that promises {}", names(&order).join(", ")));
        }
        if let Ok(filter) = std::env::var("FI_PROVIDER") {
            what.push_str(&format!(" (FI_PROVIDER={filter} is set and filters all offers)"));
        }
        error.with_detail(what)
    }

    fn getinfo_of_all(&self, order: Order, caps: Caps) -> Result<Vec<Offer>> {
        let bound = self.getinfo(order, caps);
        if !self.lists_others {
            return bound;
        }
        let unbound = Self { source: None, ..self.clone() };
        let others = unbound.getinfo(order, caps).map(|mut offers| {
            offers.retain(|offer| has_network_address(offer.capabilities().address_format));
            offers
        });
        let (offers, failure) = merge([bound, others].into_iter());
        match failure {
            Some(failure) if offers.is_empty() => Err(failure),
            _ => Ok(offers),
        }
    }

    fn getinfo(&self, order: Order, caps: Caps) -> Result<Vec<Offer>> {
        let hints = self.hints(order, caps)?;
        let (node, service, flags) = match (&self.source, &self.destination) {
            (Some((node, service)), _) => (Some(node), service.as_ref(), sys::FI_SOURCE),
            (None, Some((node, service))) => (Some(node), service.as_ref(), 0),
            (None, None) => (None, None, 0),
        };
        let node = node.map(|n| c_string("node", n)).transpose()?;
        let service = service.map(|s| c_string("service", s)).transpose()?;
        let pointer = |s: &Option<CString>| s.as_ref().map_or(ptr::null(), |s| s.as_ptr());
        let mut list: *mut sys::fi_info = ptr::null_mut();
        let (version, node, service) =
            (Version::api_version().packed(), pointer(&node), pointer(&service));
        let code = {
            // Providers are initialised at the first query.
            let _blocked = threads::BlockedSignals::new();
            // SAFETY: all pointers are valid for the call or null; `list` receives an owned list,
            // which is freed below.
            unsafe { sys::fi_getinfo(version, node, service, flags, hints.as_ptr(), &mut list) }
        };
        Error::check("fi_getinfo", code)?;
        let mut offers = Vec::new();
        let mut entry = list;
        while !entry.is_null() {
            // SAFETY: `entry` is an element of the list returned above.
            let next = unsafe { (*entry).next };
            // SAFETY: as above; fi_dupinfo copies a single element.
            if let Some(info) = unsafe { Info::adopt(sys::fi_dupinfo(entry)) } {
                info.make_source_name_unique();
                let mut offer = Offer::adopt(info, self.threading);
                offer.reports_source = self.caps.contains(Caps::SOURCE);
                let provider = &offer.capabilities().provider;
                if self.provider.as_ref().is_none_or(|name| name == provider) {
                    offers.push(offer);
                }
            }
            entry = next;
        }
        // SAFETY: the list came from fi_getinfo and no pointer into it remains.
        unsafe { sys::fi_freeinfo(list) };
        Ok(offers)
    }

    fn hints(&self, order: Order, caps: Caps) -> Result<Info> {
        // SAFETY: fi_dupinfo(NULL) allocates an empty element of the library's own size.
        let info = unsafe { Info::adopt(sys::fi_dupinfo(ptr::null())) }
            .ok_or_else(|| Error::from_code("fi_allocinfo", sys::FI_ENOMEM))?;
        let kind = match self.kind {
            EndpointKind::Rdm => sys::FI_EP_RDM,
            EndpointKind::Msg => sys::FI_EP_MSG,
            EndpointKind::Datagram => sys::FI_EP_DGRAM,
        };
        let mut mr_mode = self.mr_mode;
        let mut mode = Mode::CONTEXT | Mode::CONTEXT2 | Mode::RX_CQ_DATA;
        if mr_mode == MrMode::BASIC {
            mode |= Mode::LOCAL_MR;
        } else if !caps.contains(Caps::DEVICE_MEMORY) {
            mr_mode.remove(MrMode::HMEM);
        }
        if !caps.contains(Caps::COLLECTIVE) {
            mr_mode.remove(MrMode::COLLECTIVE);
        }
        // SAFETY: the library just allocated the element and all its attribute structures, and
        // nothing else owns them; strings are allocated with strdup, as fi_freeinfo expects.
        unsafe {
            let raw = &mut *info.as_ptr();
            raw.caps = caps.bits();
            raw.mode = mode.bits();
            (*raw.ep_attr).type_ = kind;
            let domain = &mut *raw.domain_attr;
            domain.mr_mode = mr_mode.bits();
            domain.threading = match self.threading {
                Threading::Safe => sys::FI_THREAD_SAFE,
                Threading::Object => sys::FI_THREAD_FID,
                Threading::Domain => sys::FI_THREAD_DOMAIN,
                Threading::Completion => sys::FI_THREAD_COMPLETION,
                Threading::Endpoint => sys::FI_THREAD_ENDPOINT,
            };
            if let Some(progress) = self.progress {
                let number = match progress {
                    Progress::Automatic => sys::FI_PROGRESS_AUTO,
                    Progress::Manual => sys::FI_PROGRESS_MANUAL,
                };
                domain.control_progress = number;
                sys::fcs_set_data_progress(domain, number as i32);
            }
            (*raw.tx_attr).msg_order = order.bits();
            (*raw.rx_attr).msg_order = order.bits();
            if let Some(name) = &self.provider {
                (*raw.fabric_attr).prov_name = libc::strdup(c_string("provider", name)?.as_ptr());
            }
        }
        Ok(info)
    }
}

/// Is it the format of a network whose addresses are no IP addresses? Names (`FI_ADDR_STR`) are
/// those of processes of one machine, or of providers that are bound by other means.
fn has_network_address(format: u32) -> bool {
    !matches!(
        format,
        sys::FI_FORMAT_UNSPEC
            | sys::FI_SOCKADDR
            | sys::FI_SOCKADDR_IN
            | sys::FI_SOCKADDR_IN6
            | sys::FI_SOCKADDR_IB
            | sys::FI_ADDR_STR
    )
}

/// All offers of several queries without duplicates, and the first failure.
pub(crate) fn merge(
    lists: impl Iterator<Item = Result<Vec<Offer>>>,
) -> (Vec<Offer>, Option<Error>) {
    let (mut offers, mut failure) = (Vec::<Offer>::new(), None);
    for list in lists {
        match list {
            Ok(list) => list.into_iter().for_each(|offer| {
                if !offers.iter().any(|known| known.is_duplicate_of(&offer)) {
                    offers.push(offer);
                }
            }),
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    (offers, failure)
}

fn c_string(what: &'static str, text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| {
        let detail = format!("the {what} contains a zero byte");
        Error::new(ErrorKind::InvalidArgument, "fi_getinfo", detail)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_without_ip_addresses_are_recognized() {
        let other = [sys::FI_ADDR_EFA, sys::FI_ADDR_OPX, sys::FI_ADDR_PSMX3, sys::FI_ADDR_CXI];
        assert!(other.into_iter().all(has_network_address));
        let bound = [sys::FI_SOCKADDR, sys::FI_SOCKADDR_IN, sys::FI_SOCKADDR_IN6, sys::FI_ADDR_STR];
        assert!(!bound.into_iter().any(has_network_address));
    }

    #[test]
    fn loopback_interface_selects_as_a_source_does() {
        let names = |query: Query| -> Vec<_> {
            let offers = query.offers().unwrap_or_default();
            offers.iter().map(|offer| offer.capabilities().provider.clone()).collect()
        };
        let query = || Query::new(EndpointKind::Rdm);
        let loopback = names(query().source("127.0.0.1"));
        assert_eq!(names(query().interface("127.0.0.1".parse().unwrap())), loopback);
    }
}
