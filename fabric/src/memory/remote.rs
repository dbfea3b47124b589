//! A peer's region, ready for writes and reads.
//!
//! A region descriptor comes from a peer, and is attached once. After that every operation
//! takes slices whose bounds are proved by construction, so the hot path only compares two
//! lengths and two bit sets. All slices share a mapped key (`FI_MR_RAW`), which is unmapped
//! after the last operation that uses it: a provider may look it up when the transfer is made,
//! not when it is posted.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use super::descriptor::{RemoteKey, RemoteRegion};
use crate::{Access, Domain, Error, ErrorKind, MrMode, Result};

/// A mapped raw key: released when the last user is gone.
pub(crate) struct MappedKey {
    domain: Domain,
    key: u64,
}

impl Drop for MappedKey {
    fn drop(&mut self) {
        if !self.domain.is_inherited() {
            self.domain.unmap_key(self.key);
        }
    }
}

/// A region of a peer, attached to one domain. Bounds and access are checked here, before
/// anything is sent.
///
/// ```
/// use fabric::*;
/// # let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
/// # let domain = Domain::open(&offer)?;
/// let access = Access::LOCAL | Access::REMOTE_READ;
/// let region = domain.register(HostMemory::zeroed(4096)?, access)?;
/// let remote = domain.attach(&region.describe()?)?;
/// assert_eq!(remote.len(), 4096);
/// assert_eq!(remote.access(), Access::REMOTE_READ);
/// assert_eq!(remote.slice(4000..5000).unwrap_err().kind(), ErrorKind::OutOfBounds);
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Clone)]
pub struct RemoteMemory {
    region: RemoteRegion,
    /// The key for operations.
    key: u64,
    /// Present if the key was mapped; operations in flight hold it too.
    mapped_key: Option<Arc<MappedKey>>,
}

/// Omits the key, which is a capability.
impl fmt::Debug for RemoteMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteMemory").field("region", &self.region).finish_non_exhaustive()
    }
}

impl Domain {
    /// Makes a peer's region usable from this domain. A raw key is mapped, and released when
    /// the last user of the result is gone.
    ///
    /// # Errors
    /// `VersionMismatch` if the region needs another wire protocol than this domain's; the
    /// provider's error about a raw key.
    pub fn attach(&self, region: &RemoteRegion) -> Result<RemoteMemory> {
        let operation = "attach remote region";
        let facts = self.capabilities();
        let (theirs, ours) = (region.protocol(), facts.protocol);
        if theirs != ours {
            let detail =
                format!("the region needs wire protocol {theirs}, this domain uses {ours}");
            return Err(self.error(ErrorKind::VersionMismatch, operation, detail));
        }
        // Some providers would take a raw key in place of a plain one, or the reverse, for an
        // address.
        let takes_raw = facts.registration.mr_mode.contains(MrMode::RAW);
        let key_size = facts.registration.mr_key_size;
        let (key, mapped_key) = match region.key() {
            RemoteKey::Plain(key) if !takes_raw => (*key, None),
            RemoteKey::Raw(raw) if takes_raw && raw.len() == key_size => {
                let key = self.map_raw_key(region.base(), raw)?;
                (key, Some(Arc::new(MappedKey { domain: self.clone(), key })))
            }
            other => {
                let form = match other {
                    RemoteKey::Plain(_) => "a plain key".to_owned(),
                    RemoteKey::Raw(raw) => format!("a raw key of {} bytes", raw.len()),
                };
                let ours = if takes_raw { "raw" } else { "plain" };
                let detail = format!("{form}, where keys are {ours}, of {key_size} bytes");
                return Err(self.error(ErrorKind::MalformedDescriptor, operation, detail));
            }
        };
        Ok(RemoteMemory { region: region.clone(), key, mapped_key })
    }
}

/// Length, access and kind are those of the region.
impl Deref for RemoteMemory {
    type Target = RemoteRegion;

    fn deref(&self) -> &RemoteRegion {
        &self.region
    }
}

impl RemoteMemory {
    /// Was its key mapped (`fi_mr_map_raw`)?
    #[must_use]
    pub fn is_mapped(&self) -> bool {
        self.mapped_key.is_some()
    }

    /// To be kept until an operation that uses the region is done.
    #[inline]
    pub(crate) fn mapped_key(&self) -> Option<&Arc<MappedKey>> {
        self.mapped_key.as_ref()
    }

    /// The address of an offset, which must be inside the region, and the key.
    #[inline]
    pub(crate) fn address(&self, offset: u64) -> (u64, u64) {
        (self.base() + offset, self.key)
    }

    /// A part of the region.
    ///
    /// # Errors
    /// `OutOfBounds`.
    #[inline]
    pub fn slice(&self, range: Range<u64>) -> Result<RemoteSlice> {
        if range.start > range.end || range.end > self.len() {
            let detail = format!("{range:?} of a remote region of {} bytes", self.len());
            return Err(Error::new(ErrorKind::OutOfBounds, "slice remote region", detail));
        }
        Ok(self.part(range.start, range.end - range.start))
    }

    /// The whole region.
    #[must_use]
    pub fn all(&self) -> RemoteSlice {
        self.part(0, self.len())
    }

    #[inline]
    fn part(&self, offset: u64, length: u64) -> RemoteSlice {
        RemoteSlice {
            // Cannot wrap: base + length was checked when the descriptor was read.
            address: self.base() + offset,
            length,
            key: self.key,
            access: self.access(),
            mapped_key: self.mapped_key.clone(),
        }
    }
}

/// A part of a peer's region, for use in an operation.
#[derive(Clone)]
pub struct RemoteSlice {
    address: u64,
    length: u64,
    key: u64,
    access: Access,
    mapped_key: Option<Arc<MappedKey>>,
}

impl fmt::Debug for RemoteSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("RemoteSlice");
        shown.field("address", &self.address).field("length", &self.length);
        shown.field("access", &self.access).finish_non_exhaustive()
    }
}

impl RemoteSlice {
    /// Length in bytes.
    #[must_use]
    #[inline]
    pub fn len(&self) -> u64 {
        self.length
    }

    #[inline]
    pub(crate) fn access(&self) -> Access {
        self.access
    }

    /// The slice's address, and the key.
    #[inline]
    pub(crate) fn address(&self) -> (u64, u64) {
        (self.address, self.key)
    }

    /// To be kept until an operation that uses the slice is done.
    #[inline]
    pub(crate) fn mapped_key(&self) -> Option<&Arc<MappedKey>> {
        self.mapped_key.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capabilities::EndpointKind;
    use crate::host_memory::HostMemory;
    use crate::query::Query;

    #[test]
    fn printed_remote_memory_does_not_show_its_key() {
        let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first().unwrap();
        let domain = Domain::open(&offer).unwrap();
        let region = domain.register(HostMemory::zeroed(64).unwrap(), Access::ALL).unwrap();
        let remote = domain.attach(&region.describe().unwrap()).unwrap();
        let slice = remote.slice(0..8).unwrap();
        // Whatever the key: a small number could also appear elsewhere in the text.
        let (remote, slice) = (
            RemoteMemory { key: 0x1234_5678_9abc_def0, ..remote },
            RemoteSlice { key: 0x1234_5678_9abc_def0, ..slice },
        );
        let shown = format!("{remote:?} {slice:?} {remote:#?} {slice:#?}");
        assert!(!shown.contains(&remote.key.to_string()), "{shown}");
    }

    #[test]
    fn part_that_ends_a_byte_late_is_refused() {
        let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first().unwrap();
        let domain = Domain::open(&offer).unwrap();
        let region = domain.register(HostMemory::zeroed(64).unwrap(), Access::ALL).unwrap();
        let remote = domain.attach(&region.describe().unwrap()).unwrap();
        for range in [0..64, 63..64, 64..64] {
            assert!(remote.slice(range.clone()).is_ok(), "{range:?}");
        }
        for range in [0..65, 64..65, 65..65] {
            let error = remote.slice(range.clone()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{range:?}");
        }
    }

    #[test]
    fn key_of_the_wrong_form_is_refused() {
        let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first().unwrap();
        let domain = Domain::open(&offer).unwrap();
        let region = domain.register(HostMemory::zeroed(64).unwrap(), Access::ALL).unwrap();
        let good = region.describe().unwrap();
        assert!(matches!(good.key(), RemoteKey::Plain(_)), "{good:?}");
        assert!(domain.attach(&good).is_ok());
        let (length, base) = (good.len(), good.base());
        let key = RemoteKey::Raw(vec![0; 16]);
        let forged =
            RemoteRegion::new(good.protocol(), good.kind(), good.access(), length, base, key);
        let error = domain.attach(&forged).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::MalformedDescriptor, "{error}");
        assert!(error.to_string().contains("a raw key of 16 bytes"), "{error}");
    }
}
