//! Memory that processes share, by a file descriptor and by nothing else.
//!
//! A segment has no name in any file system, so nothing of it stays behind when its
//! last holder is gone, however that came about, and nobody finds it who was not
//! given its descriptor. It cannot change its size any more, so a process that maps
//! it cannot be made to fault by another one that cuts it off.
//!
//! The first page says what is inside: a layout's name and version, where the body begins, and
//! whether its maker has finished. What follows is the body. A page is what the system says it is,
//! since the body is pinned and let to devices by whole pages.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use crate::limits::{LimitReached, check_file_size};
use crate::page_size::page_size;
use crate::words::{FutexWords, Words, words_of_a_slice};

/// What the body of a segment is: a name of at most 32 bytes, and a version.
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

/// Why a segment could not be made or opened.
#[non_exhaustive]
pub enum SegmentError {
    /// The system refused.
    System {
        /// The call.
        call: &'static str,
        /// Bytes, where it is about so many.
        length: u64,
        /// Why.
        cause: io::Error,
    },
    /// The descriptor is that of something else: no memory, not sealed, cut off.
    NotASegment {
        /// What is wrong.
        why: &'static str,
    },
    /// Its body is something else than was expected.
    LayoutMismatch {
        /// What was expected.
        expected: Layout,
        /// What it says it is.
        found: Layout,
    },
    /// Its maker has not finished it.
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

/// What segment calls give.
pub type Result<T> = std::result::Result<T, SegmentError>;

const WORD: usize = size_of::<u64>();
const MAGIC: u64 = u64::from_le_bytes(*b"fabricsg");
const HEAD_VERSION: u64 = 2;
const READY: u64 = 1;
const WRITABLE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

// Words of the head.
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
/// // Another process would have got the descriptor over a socket.
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

// SAFETY: a mapping has no thread affinity, and its bytes are reached by atomics only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping that was made; nothing refers to it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

impl Mapping {
    /// Maps all of a file, of which nothing is body yet.
    fn new(file: OwnedFd, length: usize, protection: libc::c_int) -> Result<Self> {
        // SAFETY: a fresh mapping touches nothing that exists.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                protection,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
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
        // SAFETY: mapped as long as `self`, page-aligned, never changing its size (it
        // is sealed), and only ever reached by atomics.
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
    /// Makes a segment with a zeroed body of at least so many bytes. Others can open
    /// it once it is [marked ready](Self::mark_ready).
    ///
    /// # Errors
    /// `System`, if there is not enough memory, say.
    pub fn create(layout: Layout, body: usize) -> Result<Self> {
        Self::create_with_pages(layout, body, page_size())
    }

    fn create_with_pages(layout: Layout, body: usize, page: usize) -> Result<Self> {
        let too_long = SegmentError::NotASegment { why: "longer than can be addressed" };
        let length = body.checked_next_multiple_of(page).and_then(|body| body.checked_add(page));
        let Some(length) = length.filter(|length| i64::try_from(*length).is_ok()) else {
            return Err(too_long);
        };
        let name = CString::new(format!("fabricast {layout}")).unwrap_or_default();
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: a valid string; what comes back is checked.
        let file = unsafe { libc::memfd_create(name.as_ptr(), flags) };
        if file < 0 {
            return Err(system("memfd_create", length as u64));
        }
        // SAFETY: just opened, and nobody else's.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        let failed =
            |cause| SegmentError::System { call: "ftruncate", length: length as u64, cause };
        check_file_size(length as u64).map_err(failed)?;
        // SAFETY: a descriptor of ours.
        if unsafe { libc::ftruncate(file.as_raw_fd(), length as i64) } < 0 {
            return Err(system("ftruncate", length as u64));
        }
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: as above.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } < 0 {
            return Err(system("sealing", length as u64));
        }
        let mut mapping = Mapping::new(file, length, WRITABLE)?;
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

    /// Tells others that the body is made.
    pub fn mark_ready(&self) {
        self.0.words()[AT_STATE].store(READY, Ordering::Release);
    }

    /// Opens a segment of this layout that somebody made.
    ///
    /// # Errors
    /// `NotASegment`, `LayoutMismatch`, `NotReady`, `System`.
    pub fn open(file: OwnedFd, layout: Layout) -> Result<Self> {
        Self::open_with_pages(file, layout, page_size())
    }

    fn open_with_pages(file: OwnedFd, layout: Layout, page: usize) -> Result<Self> {
        Mapping::open(file, layout, page, WRITABLE).map(|mapping| Self(Arc::new(mapping)))
    }

    /// A descriptor of the same memory by which it can only be read, as a
    /// [`ReadOnlySegment`]. Processes of other users cannot open it for writing by that.
    ///
    /// # Errors
    /// `System`: it is opened by way of /proc.
    pub fn read_only(&self) -> Result<OwnedFd> {
        // SAFETY: a descriptor of ours.
        if unsafe { libc::fchmod(self.0.file.as_raw_fd(), 0o600) } < 0 {
            return Err(system("fchmod", self.0.length as u64));
        }
        let path = format!("/proc/self/fd/{}", self.0.file.as_raw_fd());
        let file = std::fs::File::open(path);
        file.map(OwnedFd::from).map_err(|cause| SegmentError::System {
            call: "opening for reading",
            length: self.0.length as u64,
            cause,
        })
    }

    /// Bytes of the body.
    #[must_use]
    pub fn body_length(&self) -> usize {
        self.0.length - self.0.body
    }

    /// The body, as words.
    #[must_use]
    pub fn words(&self) -> MappedWords {
        MappedWords { mapping: Arc::clone(&self.0) }
    }

    /// The first byte of the body. Valid as long as the segment; other processes may
    /// write what it points to at any time, so no reference may be made of it.
    #[must_use]
    pub fn body(&self) -> *mut u8 {
        self.0.body()
    }
}

/// Memory shared by another process that may only be read here. Cheap to clone.
///
/// ```
/// use ipc::{Layout, ReadOnlySegment, Segment};
/// const EXAMPLE: Layout = Layout::new("example", 1);
/// let made = Segment::create(EXAMPLE, 1000)?;
/// made.mark_ready();
/// let opened = ReadOnlySegment::open(made.read_only()?, EXAMPLE)?;
/// assert!(opened.body_length() >= 1000);
/// // By this descriptor it cannot be written.
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

    /// Bytes of the body.
    #[must_use]
    pub fn body_length(&self) -> usize {
        self.0.length - self.0.body
    }

    /// The first byte of the body: as that of a [`Segment`], to be read alone.
    #[must_use]
    pub fn body(&self) -> *const u8 {
        self.0.body()
    }

    /// A word of the body, by an acquiring load; 0 beyond its end.
    #[inline]
    #[must_use]
    pub fn load(&self, at: usize) -> u64 {
        // Of memory that cannot be written only relaxed loads are defined.
        let word = self.0.body_words().get(at).map_or(0, |word| word.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        word
    }
}

impl Mapping {
    fn open(file: OwnedFd, layout: Layout, page: usize, protection: libc::c_int) -> Result<Self> {
        let refuse = |why| Err(SegmentError::NotASegment { why });
        let needed = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
        // SAFETY: a descriptor of ours.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 {
            return refuse("not a memory file");
        }
        if seals & needed != needed {
            return refuse("its size is not sealed (F_SEAL_SHRINK)");
        }
        // SAFETY: all bytes zero is a valid value.
        let mut status: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the result goes where there is room for it.
        if unsafe { libc::fstat(file.as_raw_fd(), &raw mut status) } < 0 {
            return Err(system("fstat", 0));
        }
        let length = match usize::try_from(status.st_size) {
            Ok(length) if length >= HEAD_WORDS * WORD && length.is_multiple_of(WORD) => length,
            _ => return refuse("too short"),
        };
        let mut mapping = Self::new(file, length, protection)?;
        let head = mapping.words();
        if head[AT_KIND].load(Ordering::Acquire) != MAGIC {
            return refuse("its magic number is wrong");
        }
        if head[AT_VERSION].load(Ordering::Relaxed) != HEAD_VERSION {
            return refuse("its head is of another version");
        }
        if head[AT_LENGTH].load(Ordering::Relaxed) != length as u64 {
            return refuse("its length is not what it says");
        }
        let body = match usize::try_from(head[AT_BODY].load(Ordering::Relaxed)) {
            Ok(body) if body >= HEAD_WORDS * WORD && body <= length => body,
            _ => return refuse("its body is not inside of it"),
        };
        if !body.is_multiple_of(page) {
            return refuse("its body does not begin at a page");
        }
        let word = |at: usize| head[AT_LAYOUT + at].load(Ordering::Relaxed);
        let found = Layout::from_words([word(0), word(1), word(2), word(3), word(4)]);
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

/// The words of a segment's body. Keeps it mapped.
#[derive(Debug, Clone)]
pub struct MappedWords {
    mapping: Arc<Mapping>,
}

impl MappedWords {
    #[inline]
    fn slice(&self) -> &[AtomicU64] {
        self.mapping.body_words()
    }
}

impl Words for MappedWords {
    words_of_a_slice!();

    /// A word that was read first and is written then is fetched twice: from whoever wrote it, and
    /// for its owner.
    #[inline]
    fn prefetch_for_write(&self, at: usize) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if let Some(word) = self.slice().get(at) {
            // SAFETY: a hint, which changes neither memory nor registers, whatever the address.
            // Processors without it do nothing instead.
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

impl FutexWords for MappedWords {
    fn word(&self, at: usize) -> Option<&AtomicU64> {
        self.slice().get(at)
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
    fn a_layout_survives_its_words() {
        for name in ["a", "eightlet", "exactly thirty-two bytes of name"] {
            let layout = Layout::new(name, u32::MAX);
            assert_eq!(Layout::from_words(layout.words()), layout);
            assert_eq!(layout.to_string(), format!("{name} v{}", u32::MAX));
        }
    }

    #[test]
    fn what_one_mapping_writes_another_reads() {
        let made = Segment::create(LAYOUT, 10_000).unwrap();
        assert!(made.body_length() >= 10_000);
        made.mark_ready();
        let opened = Segment::open(copy(&made), LAYOUT).unwrap();
        let last = made.words().count() - 1;
        made.words().store(last, 17, Ordering::Release);
        assert_eq!(opened.words().load(last, Ordering::Acquire), 17);
        assert_ne!(made.body(), opened.body());
        // The words outlive the segment they are of.
        let words = opened.words();
        drop((made, opened));
        assert_eq!(words.load(last, Ordering::Acquire), 17);
    }

    #[test]
    fn only_a_finished_segment_of_the_same_layout_is_opened() {
        let made = Segment::create(LAYOUT, 1).unwrap();
        assert!(matches!(Segment::open(copy(&made), LAYOUT), Err(SegmentError::NotReady)));
        made.mark_ready();
        let newer = Layout::new("test", 4);
        let error = Segment::open(copy(&made), newer).unwrap_err();
        assert_eq!(error.to_string(), "the segment holds test v3, test v4 was expected");
        made.0.words()[AT_LENGTH].store(99, Ordering::Relaxed);
        let error = Segment::open(copy(&made), LAYOUT).unwrap_err();
        assert_eq!(error.to_string(), "not a shared segment: its length is not what it says");
    }

    #[test]
    fn other_files_are_no_segments() {
        let why = |file: OwnedFd| Segment::open(file, LAYOUT).unwrap_err().to_string();
        let null = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(why(null.into()), "not a shared segment: not a memory file");
        let memory = |flags, length| {
            // SAFETY: a valid name; the descriptor is checked by its use.
            unsafe {
                let file = libc::memfd_create(c"x".as_ptr(), flags);
                libc::ftruncate(file, length);
                OwnedFd::from_raw_fd(file)
            }
        };
        assert!(why(memory(libc::MFD_CLOEXEC, 8192)).contains("not sealed"));
        let sealed = memory(libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING, 100);
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
        // SAFETY: a descriptor of ours.
        unsafe { libc::fcntl(sealed.as_raw_fd(), libc::F_ADD_SEALS, seals) };
        assert_eq!(why(sealed), "not a shared segment: too short");
    }

    #[test]
    fn a_size_that_cannot_be_is_refused() {
        assert!(Segment::create(LAYOUT, usize::MAX).is_err());
        assert!(Segment::create(LAYOUT, usize::MAX - page_size()).is_err());
    }

    #[test]
    fn the_body_begins_at_a_page_of_any_size() {
        for page in [4 << 10, 16 << 10, 64 << 10] {
            if page % page_size() != 0 {
                continue;
            }
            let made = Segment::create_with_pages(LAYOUT, page + 1, page).unwrap();
            made.mark_ready();
            assert_eq!(made.body_length(), 2 * page);
            // Without an offset the kernel maps at a page of its own, which may be smaller.
            assert_eq!(made.body().addr() - made.0.base.as_ptr().addr(), page);
            let opened = Segment::open(copy(&made), LAYOUT).unwrap();
            assert_eq!(opened.body_length(), 2 * page);
            made.words().store(0, 5, Ordering::Release);
            let last = made.words().count() - 1;
            made.words().store(last, 6, Ordering::Release);
            assert_eq!(last, 2 * page / WORD - 1);
            assert_eq!(opened.words().load(0, Ordering::Acquire), 5);
            assert_eq!(opened.words().load(last, Ordering::Acquire), 6);
            assert_eq!(opened.words().slice().as_ptr().addr(), opened.body().addr());
            // Nothing of the head is body: the segment can still be opened.
            Segment::open(copy(&made), LAYOUT).unwrap();
        }
        assert_eq!(Segment::create(LAYOUT, 1).unwrap().body().addr() % page_size(), 0);
    }

    #[test]
    fn a_body_that_is_no_page_or_outside_is_refused() {
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
            assert_eq!(why(outside, page), "not a shared segment: its body is not inside of it");
        }
    }
}
