//! Memory that processes share by a file descriptor only.
//!
//! A segment has no name in any file system. So nothing remains when its last owner is gone,
//! for whatever reason, and only processes that got its descriptor can open it. Its size is
//! sealed, so no process can truncate it and make another one fault.
//!
//! The first page is the header: a layout's name and version, where the body begins, and
//! whether its creator has finished. The body follows. It begins at a page of the system's
//! size, because it is pinned and mapped for devices by whole pages.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::page_size::page_size;
use crate::words::Words;
use errors::limits::{LimitReached, check_file_size};

/// The layout of a segment's body: a name of at most 32 bytes, and a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Layout {
    name: [u8; Self::MAX_NAME_LENGTH],
    version: u32,
}

impl Layout {
    const MAX_NAME_LENGTH: usize = 32;

    /// # Panics
    /// In a constant, at compile time: if the name is empty, or longer than 32 bytes.
    #[must_use]
    pub const fn new(name: &str, version: u32) -> Self {
        let bytes = name.as_bytes();
        assert!(!bytes.is_empty() && bytes.len() <= Self::MAX_NAME_LENGTH, "1 to 32 bytes");
        let mut padded = [0; Self::MAX_NAME_LENGTH];
        let mut at = 0;
        while at < bytes.len() {
            padded[at] = bytes[at];
            at += 1;
        }
        Self { name: padded, version }
    }

    fn words(&self) -> [u64; 5] {
        let mut words = [0, 0, 0, 0, u64::from(self.version)];
        for (word, bytes) in words.iter_mut().zip(self.name.chunks_exact(8)) {
            *word = bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        }
        words
    }

    fn from_words(words: [u64; 5]) -> Self {
        let mut name = [0; Self::MAX_NAME_LENGTH];
        for (bytes, word) in name.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        Self { name, version: words[4] as u32 }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let length = self.name.iter().position(|byte| *byte == 0).unwrap_or(Self::MAX_NAME_LENGTH);
        write!(f, "{} v{}", self.name[..length].escape_ascii(), self.version)
    }
}

/// Why a segment could not be created or opened.
#[non_exhaustive]
pub enum SegmentError {
    /// A system call failed.
    System {
        /// The call.
        call: &'static str,
        /// The length in bytes, if the call has one.
        length: u64,
        /// The cause.
        cause: io::Error,
    },
    /// The file descriptor is not a segment: not memory, not sealed, or truncated.
    NotASegment {
        /// The reason.
        why: &'static str,
    },
    /// The segment's body has another layout than expected.
    LayoutMismatch {
        /// The expected layout.
        expected: Layout,
        /// The layout in its header.
        found: Layout,
    },
    /// The segment's creator has not finished it.
    NotReady,
}

impl fmt::Display for SegmentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System { call, length, cause } => {
                write!(f, "{call} of a segment of {length} bytes: {cause}")
            }
            Self::NotASegment { why } => write!(f, "not a shared segment: {why}"),
            Self::LayoutMismatch { expected, found } => {
                write!(f, "the segment holds {found}, {expected} was expected")
            }
            Self::NotReady => f.write_str("the segment is not initialised yet"),
        }
    }
}

crate::debug::debug_for_people!(SegmentError {
    System { call, length, cause },
    NotASegment { why },
    LayoutMismatch { expected, found },
    NotReady,
});

impl std::error::Error for SegmentError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::System { cause, .. } => Some(cause),
            _ => None,
        }
    }
}

/// The result of segment calls.
pub type Result<T> = std::result::Result<T, SegmentError>;

const WORD: usize = size_of::<u64>();
const MAGIC: u64 = u64::from_le_bytes(*b"fabricsg");
const HEAD_VERSION: u64 = 2;
const READY: u64 = 1;
const WRITABLE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

// Words of the header.
const AT_KIND: usize = 0;
const AT_VERSION: usize = 1;
const AT_LAYOUT: usize = 2;
const AT_LENGTH: usize = 7;
const AT_STATE: usize = 8;
const AT_BODY: usize = 9;
const HEAD_WORDS: usize = 10;

/// Memory shared with other processes. Cheap to clone; unmapped with the last clone
/// and the last [`MappedWords`] of it.
///
/// ```
/// use std::os::fd::AsFd;
/// use std::sync::atomic::Ordering;
/// use ipc::{Layout, Segment, Words};
/// const COUNTERS: Layout = Layout::new("example counters", 1);
/// let made = Segment::create(COUNTERS, 1000)?;
/// made.words().store(3, 42, Ordering::Relaxed);
/// made.mark_ready();
///
/// // Another process would receive the file descriptor over a socket.
/// let opened = Segment::open(made.as_fd().try_clone_to_owned().unwrap(), COUNTERS)?;
/// assert_eq!(opened.words().load(3, Ordering::Relaxed), 42);
/// let other = Segment::open(made.as_fd().try_clone_to_owned().unwrap(), Layout::new("x", 1));
/// assert!(other.unwrap_err().to_string().contains("example counters v1"));
/// # Ok::<(), ipc::SegmentError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Segment(Arc<Mapping>);

#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    length: usize,
    /// Where the body begins: inside of the mapping, at a page.
    body: usize,
    file: OwnedFd,
}

// SAFETY: a mapping has no thread affinity, and its bytes are accessed by atomics only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping that was made; no reference to it exists any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

impl Mapping {
    /// Maps a whole file, without a body yet.
    fn new(file: OwnedFd, length: usize, protection: libc::c_int) -> Result<Self> {
        // SAFETY: a fresh mapping does not affect existing memory.
        let base = unsafe {
            libc::mmap(ptr::null_mut(), length, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if base == libc::MAP_FAILED {
            return Err(system("mmap", length as u64));
        }
        match NonNull::new(base.cast()) {
            Some(base) => Ok(Self { base, length, body: length, file }),
            None => Err(SegmentError::NotASegment { why: "mapped at address 0" }),
        }
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapped as long as `self`, page-aligned, of constant size (it is sealed), and
        // only accessed by atomics.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), self.length / WORD) }
    }

    fn body(&self) -> *mut u8 {
        // SAFETY: inside of the mapping, or its end.
        unsafe { self.base.as_ptr().add(self.body) }
    }

    #[inline]
    fn body_words(&self) -> &[AtomicU64] {
        let count = (self.length - self.body) / WORD;
        // SAFETY: as in `words`, of which these are the last.
        unsafe { std::slice::from_raw_parts(self.body().cast(), count) }
    }
}

fn system(call: &'static str, length: u64) -> SegmentError {
    let cause = LimitReached::explain(io::Error::last_os_error());
    SegmentError::System { call, length, cause }
}

impl Segment {
    /// Creates a segment with a zeroed body of at least this many bytes. Other processes can
    /// open it after it is [marked ready](Self::mark_ready).
    ///
    /// # Errors
    /// `System`, for example if there is not enough memory.
    pub fn create(layout: Layout, body: usize) -> Result<Self> {
        Self::create_with_pages(layout, body, page_size())
    }

    fn create_with_pages(layout: Layout, body: usize, page: usize) -> Result<Self> {
        let length = body.checked_next_multiple_of(page).and_then(|body| body.checked_add(page));
        let Some(length) = length.filter(|length| i64::try_from(*length).is_ok()) else {
            return Err(SegmentError::NotASegment { why: "longer than can be addressed" });
        };
        let name = CString::new(format!("fabricast {layout}")).unwrap_or_default();
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: a valid string; the result is checked.
        let file = unsafe { libc::memfd_create(name.as_ptr(), flags) };
        if file < 0 {
            return Err(system("memfd_create", length as u64));
        }
        // SAFETY: just opened, and not shared.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(file) });
        let sized = check_file_size(length as u64).and_then(|()| file.set_len(length as u64));
        sized.map_err(|cause| {
            let length = length as u64;
            let cause = LimitReached::explain(cause);
            SegmentError::System { call: "ftruncate", length, cause }
        })?;
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: a file descriptor owned here.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } < 0 {
            return Err(system("sealing", length as u64));
        }
        let mut mapping = Mapping::new(file.into(), length, WRITABLE)?;
        mapping.body = page;
        let head = mapping.words();
        head[AT_VERSION].store(HEAD_VERSION, Ordering::Relaxed);
        head[AT_BODY].store(page as u64, Ordering::Relaxed);
        for (at, word) in layout.words().into_iter().enumerate() {
            head[AT_LAYOUT + at].store(word, Ordering::Relaxed);
        }
        head[AT_LENGTH].store(length as u64, Ordering::Relaxed);
        head[AT_KIND].store(MAGIC, Ordering::Release);
        Ok(Self(Arc::new(mapping)))
    }

    /// Marks the body as initialised, for other processes.
    pub fn mark_ready(&self) {
        self.0.words()[AT_STATE].store(READY, Ordering::Release);
    }

    /// Opens an existing segment of this layout.
    ///
    /// # Errors
    /// `NotASegment`, `LayoutMismatch`, `NotReady`, `System`.
    pub fn open(file: OwnedFd, layout: Layout) -> Result<Self> {
        Self::open_with_pages(file, layout, page_size())
    }

    fn open_with_pages(file: OwnedFd, layout: Layout, page: usize) -> Result<Self> {
        Mapping::open(file, layout, page, WRITABLE).map(|mapping| Self(Arc::new(mapping)))
    }

    /// A read-only file descriptor of the same memory, for a [`ReadOnlySegment`]. Processes of
    /// other users cannot open it for writing with that.
    ///
    /// # Errors
    /// `System`: it is opened through /proc.
    pub fn read_only(&self) -> Result<OwnedFd> {
        // SAFETY: a file descriptor owned here.
        if unsafe { libc::fchmod(self.0.file.as_raw_fd(), 0o600) } < 0 {
            return Err(system("fchmod", self.0.length as u64));
        }
        let path = format!("/proc/self/fd/{}", self.0.file.as_raw_fd());
        let (call, length) = ("opening for reading", self.0.length as u64);
        let failed = |cause| {
            let cause = LimitReached::explain(cause);
            SegmentError::System { call, length, cause }
        };
        File::open(path).map(OwnedFd::from).map_err(failed)
    }

    /// Length of the body in bytes.
    #[must_use]
    pub fn body_length(&self) -> usize {
        self.0.length - self.0.body
    }

    /// The body, as words.
    #[must_use]
    pub fn words(&self) -> MappedWords {
        MappedWords { mapping: Arc::clone(&self.0) }
    }

    /// The first byte of the body. Valid as long as the segment. Other processes may write the
    /// memory at any time, so no reference to it may be created.
    #[must_use]
    pub fn body(&self) -> *mut u8 {
        self.0.body()
    }
}

/// Memory of another process that is mapped read-only here. Cheap to clone.
///
/// ```
/// use ipc::{Layout, ReadOnlySegment, Segment};
/// const EXAMPLE: Layout = Layout::new("example", 1);
/// let made = Segment::create(EXAMPLE, 1000)?;
/// made.mark_ready();
/// let opened = ReadOnlySegment::open(made.read_only()?, EXAMPLE)?;
/// assert!(opened.body_length() >= 1000);
/// // This file descriptor is read-only.
/// assert!(Segment::open(made.read_only()?, EXAMPLE).is_err());
/// # Ok::<(), ipc::SegmentError>(())
/// ```
#[derive(Debug, Clone)]
pub struct ReadOnlySegment(Arc<Mapping>);

impl ReadOnlySegment {
    /// Opens a segment of this layout for reading.
    ///
    /// # Errors
    /// As for [`Segment::open`].
    pub fn open(file: OwnedFd, layout: Layout) -> Result<Self> {
        Mapping::open(file, layout, page_size(), libc::PROT_READ)
            .map(|mapping| Self(Arc::new(mapping)))
    }

    /// Length of the body in bytes.
    #[must_use]
    pub fn body_length(&self) -> usize {
        self.0.length - self.0.body
    }

    /// The first byte of the body, as of a [`Segment`], but read-only.
    #[must_use]
    pub fn body(&self) -> *const u8 {
        self.0.body()
    }

    /// A word of the body, by an acquiring load; 0 beyond its end.
    #[inline]
    #[must_use]
    pub fn load(&self, at: usize) -> u64 {
        // Only relaxed loads are defined for read-only memory.
        let word = self.0.body_words().get(at).map_or(0, |word| word.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        word
    }
}

impl Mapping {
    fn open(file: OwnedFd, layout: Layout, page: usize, protection: libc::c_int) -> Result<Self> {
        let refuse = |why| Err(SegmentError::NotASegment { why });
        let needed = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
        // SAFETY: a file descriptor owned here.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 {
            return refuse("it is not a memory file");
        }
        if seals & needed != needed {
            return refuse(
                "its size is not sealed (F_SEAL_SHRINK, F_SEAL_GROW), so it could change",
            );
        }
        let file = File::from(file);
        let status = file.metadata();
        let failed = |cause| SegmentError::System { call: "fstat", length: 0, cause };
        let length = match usize::try_from(status.map_err(failed)?.len()) {
            Ok(length) if length >= HEAD_WORDS * WORD && length.is_multiple_of(WORD) => length,
            _ => return refuse("it is too short"),
        };
        let mut mapping = Self::new(file.into(), length, protection)?;
        let head = mapping.words();
        let word = |at: usize| head[at].load(Ordering::Relaxed);
        if head[AT_KIND].load(Ordering::Acquire) != MAGIC {
            return refuse("its magic number is wrong");
        }
        if word(AT_VERSION) != HEAD_VERSION {
            return refuse("its header has another version");
        }
        if word(AT_LENGTH) != length as u64 {
            return refuse("its length differs from its header");
        }
        let body = match usize::try_from(word(AT_BODY)) {
            Ok(body) if body >= HEAD_WORDS * WORD && body <= length => body,
            _ => return refuse("its body lies outside of it"),
        };
        if !body.is_multiple_of(page) {
            return refuse("its body does not begin at a page");
        }
        let found = Layout::from_words(std::array::from_fn(|at| word(AT_LAYOUT + at)));
        if found != layout {
            return Err(SegmentError::LayoutMismatch { expected: layout, found });
        }
        if head[AT_STATE].load(Ordering::Acquire) != READY {
            return Err(SegmentError::NotReady);
        }
        mapping.body = body;
        Ok(mapping)
    }
}

impl AsFd for Segment {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.file.as_fd()
    }
}

/// The words of a segment's body. Keeps the segment mapped.
#[derive(Debug, Clone)]
pub struct MappedWords {
    mapping: Arc<Mapping>,
}

impl Words for MappedWords {
    #[inline]
    fn count(&self) -> usize {
        self.mapping.body_words().len()
    }

    #[inline]
    fn word(&self, at: usize) -> Option<&AtomicU64> {
        self.mapping.body_words().get(at)
    }

    /// A word that is read and then written would be fetched twice: from its last writer, and
    /// again for ownership.
    #[inline]
    fn prefetch_for_write(&self, at: usize) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if let Some(word) = self.word(at) {
            // SAFETY: a hint, which changes neither memory nor registers, whatever the address.
            // Processors without it ignore it.
            unsafe {
                std::arch::asm!(
                    "prefetchw [{0}]",
                    in(reg) word.as_ptr(),
                    options(nostack, preserves_flags, readonly)
                );
            }
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let _ = at;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout::new("test", 3);

    fn copy(segment: &Segment) -> OwnedFd {
        segment.as_fd().try_clone_to_owned().unwrap()
    }

    #[test]
    fn layout_round_trips_through_words() {
        for name in ["a", "eightlet", "exactly thirty-two bytes of name"] {
            let layout = Layout::new(name, u32::MAX);
            assert_eq!(Layout::from_words(layout.words()), layout);
            assert_eq!(layout.to_string(), format!("{name} v{}", u32::MAX));
        }
    }

    #[test]
    fn writes_are_visible_in_another_mapping() {
        let made = Segment::create(LAYOUT, 10_000).unwrap();
        assert!(made.body_length() >= 10_000);
        made.mark_ready();
        let opened = Segment::open(copy(&made), LAYOUT).unwrap();
        let last = made.words().count() - 1;
        made.words().store(last, 17, Ordering::Release);
        assert_eq!(opened.words().load(last, Ordering::Acquire), 17);
        assert_ne!(made.body(), opened.body());
        // The words outlive their segment.
        let words = opened.words();
        drop((made, opened));
        assert_eq!(words.load(last, Ordering::Acquire), 17);
    }

    #[test]
    fn unfinished_or_different_segments_are_not_opened() {
        let made = Segment::create(LAYOUT, 1).unwrap();
        assert!(matches!(Segment::open(copy(&made), LAYOUT), Err(SegmentError::NotReady)));
        made.mark_ready();
        let newer = Layout::new("test", 4);
        let error = Segment::open(copy(&made), newer).unwrap_err();
        assert_eq!(error.to_string(), "the segment holds test v3, test v4 was expected");
        made.0.words()[AT_LENGTH].store(99, Ordering::Relaxed);
        let error = Segment::open(copy(&made), LAYOUT).unwrap_err();
        assert_eq!(error.to_string(), "not a shared segment: its length differs from its header");
    }

    #[test]
    fn other_files_are_refused() {
        let why = |file: OwnedFd| Segment::open(file, LAYOUT).unwrap_err().to_string();
        let null = File::open("/dev/null").unwrap();
        assert_eq!(why(null.into()), "not a shared segment: it is not a memory file");
        let memory = |flags, length| {
            // SAFETY: a valid name; the use of the file descriptor checks it.
            unsafe {
                let file = libc::memfd_create(c"x".as_ptr(), flags);
                libc::ftruncate(file, length);
                OwnedFd::from_raw_fd(file)
            }
        };
        assert!(why(memory(libc::MFD_CLOEXEC, 8192)).contains("not sealed"));
        let sealed = memory(libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING, 100);
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
        // SAFETY: a file descriptor owned here.
        unsafe { libc::fcntl(sealed.as_raw_fd(), libc::F_ADD_SEALS, seals) };
        assert_eq!(why(sealed), "not a shared segment: it is too short");
    }

    #[test]
    fn impossible_size_is_refused() {
        assert!(Segment::create(LAYOUT, usize::MAX).is_err());
        assert!(Segment::create(LAYOUT, usize::MAX - page_size()).is_err());
    }

    #[test]
    fn body_begins_at_a_page_of_any_size() {
        for page in [4 << 10, 16 << 10, 64 << 10] {
            if page % page_size() != 0 {
                continue;
            }
            let made = Segment::create_with_pages(LAYOUT, page + 1, page).unwrap();
            made.mark_ready();
            assert_eq!(made.body_length(), 2 * page);
            // Without an offset the kernel maps at its own page size, which may be smaller.
            assert_eq!(made.body().addr() - made.0.base.as_ptr().addr(), page);
            let opened = Segment::open(copy(&made), LAYOUT).unwrap();
            assert_eq!(opened.body_length(), 2 * page);
            made.words().store(0, 5, Ordering::Release);
            let last = made.words().count() - 1;
            made.words().store(last, 6, Ordering::Release);
            assert_eq!(last, 2 * page / WORD - 1);
            assert_eq!(opened.words().load(0, Ordering::Acquire), 5);
            assert_eq!(opened.words().load(last, Ordering::Acquire), 6);
            assert_eq!(opened.0.body_words().as_ptr().addr(), opened.body().addr());
            // The body does not overlap the header: the segment can still be opened.
            Segment::open(copy(&made), LAYOUT).unwrap();
        }
        assert_eq!(Segment::create(LAYOUT, 1).unwrap().body().addr() % page_size(), 0);
    }

    #[test]
    fn unaligned_or_outside_body_is_refused() {
        let page = page_size();
        let why = |body: usize, page: usize| {
            let made = Segment::create(LAYOUT, 1).unwrap();
            made.mark_ready();
            made.0.words()[AT_BODY].store(body as u64, Ordering::Relaxed);
            Segment::open_with_pages(copy(&made), LAYOUT, page).unwrap_err().to_string()
        };
        assert_eq!(why(page, 2 * page), "not a shared segment: its body does not begin at a page");
        assert_eq!(why(page + 8, page), "not a shared segment: its body does not begin at a page");
        for outside in [0, 8, 2 * page + 8, usize::MAX] {
            assert_eq!(why(outside, page), "not a shared segment: its body lies outside of it");
        }
    }
}
