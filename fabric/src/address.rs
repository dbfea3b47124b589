//! Peers of connectionless endpoints.
//!
//! The application exchanges addresses over its own channel. Providers read as many bytes as
//! their format has and check nothing, so the length of an address is checked and the address
//! padded before it is inserted. Providers also use a removed entry without a check. A [`Peer`]
//! is therefore an index into a table of this library, which records removals.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use libfabric_sys as sys;
use threads::lock;

use crate::handle::Handle;
use crate::hazard::{HazardPointer, barrier_on_all_threads};
use crate::offer::format_address_bytes;
use crate::{Domain, Error, ErrorKind, Result};

/// The address of an endpoint: opaque bytes, to be sent to peers.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Address(pub Vec<u8>);

impl Address {
    /// In readable form, for messages.
    pub(crate) fn display(&self, domain: &Domain) -> String {
        let format = domain.capabilities().address_format;
        format_address_bytes(format, self.0.as_ptr(), self.0.len())
    }
}

/// A peer in an address vector: a small number that can be copied and stored. It is valid only
/// for the vector that returned it; another vector refuses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Peer {
    index: u32,
    /// Distinguishes the vectors of a process, so that a peer of one is not used with another.
    vector: u32,
}

impl Peer {
    /// The peer of a connected endpoint.
    pub const CONNECTED: Self = Self { index: 0, vector: 0 };

    /// No particular peer: a receive that accepts messages from any peer.
    pub(crate) const ANY: Self = Self { index: u32::MAX, vector: 0 };
}

static NEXT_VECTOR: AtomicU32 = AtomicU32::new(1);

/// A table of peers (`fid_av`), shared by the endpoints bound to it. Cheap to clone.
///
/// A removed peer is refused from then on, because providers use removed entries without a
/// check.
///
/// ```
/// use fabric::*;
/// let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
/// let domain = Domain::open(&offer)?;
/// let addresses = AddressVector::open(&domain)?;
/// let mut queue = CompletionQueue::open(&domain)?;
/// let endpoint = Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open()?;
///
/// let mine = endpoint.address()?;
/// let peer = addresses.insert(&mine)?;
/// assert!(!addresses.lookup(peer)?.0.is_empty());
/// addresses.remove(peer)?;
/// assert_eq!(addresses.lookup(peer).unwrap_err().kind(), ErrorKind::Closed);
/// assert!(addresses.insert(&Address(Vec::new())).is_err());
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct AddressVector(Arc<VectorInner>);

#[derive(Debug)]
struct VectorInner {
    handle: Handle<sys::fid_av>,
    domain: Domain,
    number: u32,
    peers: PeerTable,
    /// Held during insertion, removal and lookup, so that the provider's table and this one
    /// change together.
    changes: Mutex<Changes>,
}

/// State for removals.
#[derive(Debug, Default)]
struct Changes {
    /// The hazard pointer of each endpoint.
    hazards: Vec<Arc<HazardPointer>>,
    /// Removed peers that are already refused, while an earlier post may still use the
    /// provider's number.
    pending_removals: Vec<PendingRemoval>,
}

#[derive(Debug)]
struct PendingRemoval {
    /// The peers that had this provider number, oldest first.
    peers: Vec<u32>,
    raw: u64,
    /// The provider has assigned the number to a new peer.
    was_reinserted: bool,
}

const REMOVED: u64 = u64::MAX;

/// Addresses by index. The table grows without moving its entries, so that readers need no
/// lock. Bucket `n` holds 2^n times the entries of the first bucket.
#[derive(Debug, Default)]
struct PeerTable {
    buckets: [OnceLock<Box<[AtomicU64]>>; 20],
    /// The number of peers, and the index by address.
    index_by_address: Mutex<(u32, HashMap<u64, u32>)>,
}

impl PeerTable {
    const FIRST_BUCKET: u32 = 64;

    fn bucket_of(index: u32) -> (usize, usize) {
        let shifted = index + Self::FIRST_BUCKET;
        let bucket = shifted.ilog2() - Self::FIRST_BUCKET.ilog2();
        (bucket as usize, (shifted - (Self::FIRST_BUCKET << bucket)) as usize)
    }

    fn push(&self, address: u64) -> Option<u32> {
        let mut index_by_address = lock(&self.index_by_address);
        let (next, indices) = &mut *index_by_address;
        // An address that is inserted again yields the same provider number and the same peer.
        // After one removal the peer is refused for all users that inserted it.
        if let Some(index) = indices.get(&address)
            && self.entry(*index).is_some_and(|e| e.load(Ordering::Acquire) == address)
        {
            return Some(*index);
        }
        let (bucket, at) = Self::bucket_of(*next);
        let entries = self.buckets.get(bucket)?.get_or_init(|| {
            (0..Self::FIRST_BUCKET << bucket).map(|_| AtomicU64::new(REMOVED)).collect()
        });
        entries[at].store(address, Ordering::Release);
        indices.insert(address, *next);
        *next += 1;
        Some(*next - 1)
    }

    #[inline]
    fn entry(&self, index: u32) -> Option<&AtomicU64> {
        let (bucket, at) = Self::bucket_of(index);
        self.buckets.get(bucket)?.get()?.get(at)
    }

    fn find(&self, address: u64) -> Option<u32> {
        let index_by_address = lock(&self.index_by_address);
        let index = *index_by_address.1.get(&address)?;
        self.entry(index).is_some_and(|e| e.load(Ordering::Acquire) == address).then_some(index)
    }
}

impl AddressVector {
    /// Opens an address vector.
    ///
    /// # Errors
    /// The provider's error.
    pub fn open(domain: &Domain) -> Result<Self> {
        let mut attributes = sys::fi_av_attr::default();
        // SAFETY: the domain is alive; the object is owned here.
        let handle = unsafe {
            Handle::open("fi_av_open", &domain.capabilities().provider, |vector| {
                let mut open = |form| {
                    attributes.type_ = form;
                    sys::fi_av_open(domain.as_ptr(), &mut attributes, vector, ptr::null_mut())
                };
                let code = open(sys::FI_AV_TABLE);
                if code < 0 { open(sys::FI_AV_MAP) } else { code }
            })?
        };
        Ok(Self(Arc::new(VectorInner {
            handle,
            domain: domain.clone(),
            number: NEXT_VECTOR.fetch_add(1, Ordering::Relaxed),
            peers: PeerTable::default(),
            changes: Mutex::default(),
        })))
    }

    /// Adds a peer by the address that it sent. An address that is already present yields the
    /// same peer.
    ///
    /// # Errors
    /// `InvalidArgument` for an address of a wrong length; the provider's error.
    pub fn insert(&self, address: &Address) -> Result<Peer> {
        self.check_length(address)?;
        let inserted = self.insert_packed(std::slice::from_ref(address))?;
        Ok(inserted[0])
    }

    /// Adds many peers by their addresses, as [`insert`](Self::insert) each, with few calls of the
    /// provider.
    ///
    /// ```
    /// use fabric::*;
    /// let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
    /// let domain = Domain::open(&offer)?;
    /// let addresses = AddressVector::open(&domain)?;
    /// let mut queue = CompletionQueue::open(&domain)?;
    /// let endpoint = Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open()?;
    /// let ranks = vec![endpoint.address()?; 3];
    /// let peers = addresses.insert_all(&ranks)?;
    /// assert_eq!(peers.len(), 3);
    /// # Ok::<(), fabric::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`insert`](Self::insert), with the index of the address. Those before it may have been
    /// added.
    pub fn insert_all(&self, addresses: &[Address]) -> Result<Vec<Peer>> {
        addresses.iter().try_for_each(|address| self.check_length(address))?;
        let format = self.0.domain.capabilities().address_format;
        let are_packed = |one: &Address, other: &Address| {
            has_exact_length(format, one) && has_exact_length(format, other)
        };
        let mut peers = Vec::with_capacity(addresses.len());
        for packed in addresses.chunk_by(are_packed) {
            peers.extend(self.insert_packed(packed)?);
        }
        Ok(peers)
    }

    /// Providers read as many bytes as their format has: a short address from a peer must not make
    /// them read beyond it.
    fn check_length(&self, address: &Address) -> Result<()> {
        let format = self.0.domain.capabilities().address_format;
        let least = min_address_length(format);
        let terminated = format != sys::FI_ADDR_STR || address.0.contains(&0);
        if address.0.len() < least || !terminated {
            let length = address.0.len();
            let detail =
                format!("the address has {length} bytes, its format needs at least {least}");
            return Err(self.0.domain.error(ErrorKind::InvalidArgument, "fi_av_insert", detail));
        }
        Ok(())
    }

    /// Adds one address, or several that have exactly the length of their format.
    fn insert_packed(&self, addresses: &[Address]) -> Result<Vec<Peer>> {
        let operation = "fi_av_insert";
        let mut bytes = Vec::with_capacity(addresses.iter().map(|one| one.0.len()).sum());
        addresses.iter().for_each(|address| bytes.extend(&address.0));
        // Some formats are unions of several lengths: the provider must not read past the end.
        bytes.resize(bytes.len() + 256, 0);
        let mut changes = lock(&self.0.changes);
        self.finish_removals(&mut changes, None);
        let mut numbers = vec![sys::FI_ADDR_UNSPEC; addresses.len()];
        // SAFETY: the addresses follow each other as the provider reads them; behind the last are as
        // many bytes as any address format has. There is a number for each.
        let inserted = unsafe {
            let (vector, bytes) = (self.0.handle.as_ptr(), bytes.as_ptr().cast());
            sys::fi_av_insert(
                vector,
                bytes,
                addresses.len(),
                numbers.as_mut_ptr(),
                0,
                ptr::null_mut(),
            )
        };
        self.0.domain.check(operation, inserted)?;
        let mut peers = Vec::with_capacity(addresses.len());
        for (index, raw) in numbers.into_iter().enumerate() {
            if raw == sys::FI_ADDR_UNSPEC || inserted < 1 {
                let detail = match addresses.len() {
                    1 => "the provider does not accept this address".to_owned(),
                    count => format!("the provider does not accept address {index} of {count}"),
                };
                return Err(self.0.domain.error(ErrorKind::InvalidArgument, operation, detail));
            }
            for pending in changes.pending_removals.iter_mut().filter(|one| one.raw == raw) {
                pending.was_reinserted = true;
            }
            let index = self.0.peers.push(raw).ok_or_else(|| {
                Error::new(ErrorKind::ResourceExhausted, operation, "more than 67 million peers")
            })?;
            peers.push(Peer { index, vector: self.0.number });
        }
        Ok(peers)
    }

    /// Removes a peer: it is refused from then on (`Closed`). Operations in flight to it may
    /// still finish or fail.
    ///
    /// Other threads may post to the peer at the same time. A post that began earlier
    /// continues. A post that waits for space in the provider's queue ends with `Closed`. The
    /// provider's number is returned when these posts are done, and is not assigned to another
    /// peer before. An address that was inserted several times is one peer, and one call
    /// removes it; the provider may keep it until the vector is closed.
    ///
    /// # Errors
    /// `Closed` if the peer was removed before; the provider's error.
    pub fn remove(&self, peer: Peer) -> Result<()> {
        let mut changes = lock(&self.0.changes);
        let raw = self.resolve("fi_av_remove", peer)?;
        if let Some(entry) = self.0.peers.entry(peer.index) {
            entry.store(REMOVED, Ordering::Release);
        }
        self.finish_removals(&mut changes, None);
        let (peers, was_reinserted) = (vec![peer.index], false);
        match changes.pending_removals.iter_mut().find(|one| one.raw == raw) {
            Some(pending) => {
                pending.peers.extend(peers);
                pending.was_reinserted = false;
            }
            None => changes.pending_removals.push(PendingRemoval { peers, raw, was_reinserted }),
        }
        let code = self.finish_removals(&mut changes, Some(raw));
        self.0.domain.check("fi_av_remove", code)
    }

    /// Returns the numbers of removed peers to the provider if no endpoint is posting to them.
    /// Returns the provider's result for this peer, if it was among them.
    fn finish_removals(&self, changes: &mut Changes, wanted: Option<u64>) -> i32 {
        let Changes { hazards, pending_removals } = changes;
        if pending_removals.is_empty() {
            return 0;
        }
        // A closed endpoint posts nothing.
        hazards.retain(|hazard| Arc::strong_count(hazard) > 1);
        // Without the barrier, hazard pointers prove nothing: the peers stay until all
        // endpoints are closed.
        if !barrier_on_all_threads() && !hazards.is_empty() {
            return 0;
        }
        let mut answer = 0;
        pending_removals.retain(|PendingRemoval { peers, raw, was_reinserted }| {
            if hazards.iter().any(|hazard| peers.iter().any(|peer| hazard.is(*peer))) {
                return true;
            }
            if *was_reinserted {
                return false;
            }
            let mut raw = *raw;
            // SAFETY: the address was inserted and not removed since. No post uses it: a post
            // that published it before the removal is over, and later posts were refused.
            let code = unsafe { sys::fi_av_remove(self.0.handle.as_ptr(), &mut raw, 1, 0) };
            if wanted == Some(raw) {
                answer = code;
            } else if code < 0 {
                tracing::warn!(code, "removing a peer from its address vector failed");
            }
            false
        });
        answer
    }

    /// Where an endpoint publishes the peer that it posts to.
    pub(crate) fn add_hazard(&self) -> Arc<HazardPointer> {
        let hazard = Arc::new(HazardPointer::default());
        let mut changes = lock(&self.0.changes);
        changes.hazards.retain(|hazard| Arc::strong_count(hazard) > 1);
        changes.hazards.push(Arc::clone(&hazard));
        hazard
    }

    /// The address of a peer.
    ///
    /// # Errors
    /// `Closed` if the peer was removed; the provider's error.
    pub fn lookup(&self, peer: Peer) -> Result<Address> {
        // Prevents a removal at the same time.
        let _changes = lock(&self.0.changes);
        let raw = self.resolve("fi_av_lookup", peer)?;
        let mut bytes = vec![0_u8; 256];
        let mut length = bytes.len();
        // SAFETY: the buffer's length is passed.
        let code = unsafe {
            sys::fi_av_lookup(self.0.handle.as_ptr(), raw, bytes.as_mut_ptr().cast(), &mut length)
        };
        self.0.domain.check("fi_av_lookup", code)?;
        bytes.truncate(length);
        Ok(Address(bytes))
    }

    /// An address in the provider's own notation.
    #[must_use]
    pub fn display(&self, address: &Address) -> String {
        address.display(&self.0.domain)
    }

    /// A peer's address in readable form, for messages; its number if the address is not
    /// available.
    #[cold]
    pub(crate) fn name_of(&self, peer: Peer) -> String {
        match self.lookup(peer) {
            Ok(address) => self.display(&address),
            Err(_) => format!("peer {}", peer.index),
        }
    }

    /// The provider's number of a peer, for a post. It stays the peer's until the hazard
    /// pointer is cleared or names another peer.
    #[inline]
    pub(crate) fn protect(
        &self,
        operation: &'static str,
        peer: Peer,
        hazard: &HazardPointer,
    ) -> Result<u64> {
        hazard.publish(peer.index);
        self.resolve(operation, peer)
    }

    /// The provider's number of a peer, while the removal lock is held.
    #[inline]
    fn resolve(&self, operation: &'static str, peer: Peer) -> Result<u64> {
        if peer.vector == self.0.number
            && let Some(entry) = self.0.peers.entry(peer.index)
            && let raw = entry.load(Ordering::Acquire)
            && raw != REMOVED
        {
            return Ok(raw);
        }
        Err(self.unknown_peer(operation, peer))
    }

    #[cold]
    fn unknown_peer(&self, operation: &'static str, peer: Peer) -> Error {
        let why = if peer.vector == self.0.number {
            "the peer was removed from the address vector"
        } else {
            "the peer belongs to another address vector"
        };
        self.0.domain.error(ErrorKind::Closed, operation, why)
    }

    /// The peer that sent what a completion reports.
    pub(crate) fn peer_of(&self, raw: u64) -> Option<Peer> {
        let index = (raw != sys::FI_ADDR_UNSPEC).then(|| self.0.peers.find(raw))??;
        Some(Peer { index, vector: self.0.number })
    }

    pub(crate) fn domain(&self) -> &Domain {
        &self.0.domain
    }

    pub(crate) fn as_fid(&self) -> *mut sys::fid {
        self.0.handle.as_fid()
    }
}

fn min_address_length(format: u32) -> usize {
    match format {
        sys::FI_SOCKADDR | sys::FI_SOCKADDR_IN => 16,
        sys::FI_SOCKADDR_IN6 => 28,
        sys::FI_SOCKADDR_IB => 48,
        sys::FI_ADDR_STR => 2,
        _ => 1,
    }
}

/// Does an address end where the provider expects the next one?
fn has_exact_length(format: u32, address: &Address) -> bool {
    let Address(bytes) = address;
    match format {
        sys::FI_SOCKADDR_IN | sys::FI_SOCKADDR_IN6 | sys::FI_SOCKADDR_IB => {
            bytes.len() == min_address_length(format)
        }
        sys::FI_ADDR_STR => bytes.iter().position(|byte| *byte == 0) == Some(bytes.len() - 1),
        // The length of other formats is not known.
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use crate::{CompletionQueue, Endpoint, EndpointKind, Query};

    use super::*;

    /// The addresses of as many ranks as a large job has.
    #[test]
    fn thousands_of_addresses_are_inserted_together() {
        let query = Query::new(EndpointKind::Rdm).source("127.0.0.1");
        let offers = query.offers().unwrap();
        let formats = [sys::FI_SOCKADDR_IN, sys::FI_ADDR_STR];
        let mut tested = 0;
        for format in formats {
            let is_wanted = |offer: &&crate::Offer| {
                let capabilities = offer.capabilities();
                capabilities.address_format == format && capabilities.provider != "sockets"
            };
            let Some(offer) = offers.iter().find(is_wanted) else { continue };
            let domain = Domain::open(offer).unwrap();
            let addresses = AddressVector::open(&domain).unwrap();
            let mut queue = CompletionQueue::open(&domain).unwrap();
            let endpoint =
                Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open().unwrap();
            let own = endpoint.address().unwrap();
            let count: u16 = if format == sys::FI_ADDR_STR { 64 } else { 4096 };
            let address = |number: u16| {
                let mut bytes = own.0.clone();
                match format {
                    // The port.
                    sys::FI_SOCKADDR_IN => {
                        bytes[2..4].copy_from_slice(&(number + 1024).to_be_bytes())
                    }
                    _ => bytes = format!("fi_shm://{number}\0").into_bytes(),
                }
                Address(bytes)
            };
            let all: Vec<_> = (0..count).map(address).collect();
            let peers = addresses.insert_all(&all).unwrap();
            for (peer, address) in peers.iter().zip(&all).step_by(61) {
                if format == sys::FI_SOCKADDR_IN {
                    let found = addresses.lookup(*peer).unwrap();
                    assert_eq!(found.0[..8], address.0[..8], "{}", offer.capabilities().provider);
                }
                assert_eq!(addresses.insert(address).unwrap(), *peer);
            }
            // An address that is longer than its format is not followed by the next one.
            let mut long = all[1].clone();
            long.0.push(0);
            let mixed = [all[0].clone(), long, all[2].clone()];
            assert_eq!(addresses.insert_all(&mixed).unwrap(), peers[..3]);
            assert!(addresses.insert_all(&[all[0].clone(), Address(vec![1])]).is_err());
            tested += 1;
        }
        assert!(tested > 0);
    }

    #[test]
    fn growing_the_peer_table_keeps_its_entries() {
        let table = PeerTable::default();
        for i in 0..10_000_u64 {
            assert_eq!(table.push(i * 3), Some(i as u32));
        }
        for i in 0..10_000_u32 {
            assert_eq!(table.entry(i).unwrap().load(Ordering::Relaxed), u64::from(i) * 3);
        }
        assert!(table.entry(20_000).is_none_or(|e| e.load(Ordering::Relaxed) == REMOVED));
        assert_eq!(table.find(2997), Some(999));
        assert_eq!(table.find(1), None);
        assert_eq!(table.push(2997), Some(999), "the same address is the same peer");
        table.entry(999).unwrap().store(REMOVED, Ordering::Relaxed);
        assert_eq!(table.find(2997), None);
        assert_eq!(table.push(2997), Some(10_000), "a removed peer is not reused");
    }
}
