//! Memory that can be registered.
//!
//! A registration needs an owner for its bytes that outlives every transfer. A borrowed `Vec`
//! does not qualify, nor does anything that may move or reallocate. So owners are consumed, and
//! promise by [`Memory`]'s contract that the range does not move.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use crate::{Error, ErrorKind, MemoryKind, Result};

/// Memory that a registration can own.
///
/// Memory that another library allocated needs a few lines:
///
/// ```
/// use fabric::{Memory, MemoryKind};
///
/// struct Borrowed {
///     base: *mut u8,
///     length: usize,
/// }
/// // SAFETY: one owner, whose allocation is not bound to a thread.
/// unsafe impl Send for Borrowed {}
/// // SAFETY: the bytes are accessed by raw copies only.
/// unsafe impl Sync for Borrowed {}
/// // SAFETY: pointer and length never change; the bytes live until the drop below.
/// unsafe impl Memory for Borrowed {
///     fn as_ptr(&self) -> *mut u8 {
///         self.base
///     }
///     fn len(&self) -> usize {
///         self.length
///     }
/// }
/// impl Drop for Borrowed {
///     fn drop(&mut self) {
///         // SAFETY: made by `Box::into_raw` below, freed once.
///         drop(unsafe { Box::from_raw(self.base.cast::<[u8; 256]>()) });
///     }
/// }
/// let memory = Borrowed { base: Box::into_raw(Box::new([0_u8; 256])).cast(), length: 256 };
/// assert_eq!((memory.len(), memory.kind()), (256, MemoryKind::Host));
/// ```
///
/// # Safety
/// From the first call until the value is dropped, `as_ptr` and `len` must name the same range.
/// The range must be valid for reads and writes by devices, peers and C code (a device pointer for
/// device memory), and no Rust reference to its bytes may exist.
pub unsafe trait Memory: Send + Sync + 'static {
    /// First byte.
    fn as_ptr(&self) -> *mut u8;
    /// Length in bytes.
    fn len(&self) -> usize;
    /// The kind of memory.
    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }
}

impl std::fmt::Debug for dyn Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes of {} memory", self.len(), self.kind())
    }
}

// SAFETY: the inner value fulfils the contract, does not move the bytes, and lives until its last
// owner drops it.
unsafe impl<M: Memory> Memory for std::sync::Arc<M> {
    fn as_ptr(&self) -> *mut u8 {
        (**self).as_ptr()
    }
    fn len(&self) -> usize {
        (**self).len()
    }
    fn kind(&self) -> MemoryKind {
        (**self).kind()
    }
}

/// Page-aligned, zeroed host memory.
///
/// A vector that is taken over keeps its alignment. Fresh mappings are private and not locked:
/// the provider pins them at registration, which counts against `ulimit -l`.
///
/// ```
/// use fabric::{HostMemory, Memory};
/// let pages = HostMemory::zeroed(10_000)?;
/// assert_eq!(pages.len(), 10_000);
/// assert_eq!(pages.as_ptr() as usize % 4096, 0);
/// assert!(HostMemory::from_vec(Vec::new()).is_err(), "an empty range has no address");
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug)]
pub struct HostMemory {
    base: NonNull<u8>,
    length: usize,
    /// Capacity of the vector that was taken over; none for a mapping.
    vector_capacity: Option<usize>,
}

// SAFETY: a plain range of memory without thread affinity.
unsafe impl Send for HostMemory {}
// SAFETY: shared access goes through raw pointers only.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Maps fresh zeroed pages.
    ///
    /// # Errors
    /// `InvalidArgument` for length 0, `ResourceExhausted` if the system has no more memory.
    pub fn zeroed(length: usize) -> Result<Self> {
        if length == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument, "mmap", "length is zero"));
        }
        // SAFETY: a fresh anonymous mapping does not affect existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            let detail = format!("{length} bytes: {}", std::io::Error::last_os_error());
            return Err(Error::new(ErrorKind::ResourceExhausted, "mmap", detail));
        }
        NonNull::new(base.cast())
            .map(|base| Self { base, length, vector_capacity: None })
            .ok_or_else(|| Error::new(ErrorKind::Other, "mmap", "mapped at address 0"))
    }

    /// Takes over a vector's bytes, without a copy.
    ///
    /// # Errors
    /// `InvalidArgument` for an empty vector.
    pub fn from_vec(bytes: Vec<u8>) -> Result<Self> {
        if bytes.is_empty() {
            return Err(Error::new(ErrorKind::InvalidArgument, "from_vec", "length is zero"));
        }
        let mut bytes = std::mem::ManuallyDrop::new(bytes);
        let (base, capacity) = (NonNull::from(&mut bytes[..]), bytes.capacity());
        Ok(Self { base: base.cast(), length: base.len(), vector_capacity: Some(capacity) })
    }
}

// SAFETY: the range is allocated in the constructor, never moved, freed on drop,
// and no reference to its bytes is ever made.
unsafe impl Memory for HostMemory {
    fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }
    fn len(&self) -> usize {
        self.length
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        match self.vector_capacity {
            // SAFETY: exactly the mapping made by `zeroed`.
            None => unsafe {
                libc::munmap(self.base.as_ptr().cast(), self.length);
            },
            // SAFETY: exactly the parts of the vector that `from_vec` took over.
            Some(capacity) => unsafe {
                drop(Vec::from_raw_parts(self.base.as_ptr(), self.length, capacity));
            },
        }
    }
}
