//! The memory of an emulated device: sealed memory files, and ranges of addresses.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use threads::lock;

use super::state;
use crate::device_name::DeviceName;
use crate::driver::{self, AddressRangeDriver, Mapped, PhysicalMemory, PinnedBuffer};
use crate::error::{Error, ErrorKind, Result};
use crate::pointer_attributes::{Allocator, PointerAttributes};

/// The known addresses of this process.
static ALLOCATIONS: Mutex<BTreeMap<u64, KnownAllocation>> = Mutex::new(BTreeMap::new());

/// The id of the next allocation.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

struct KnownAllocation {
    attributes: PointerAttributes,
    /// The memory that is mapped there, if it was mapped.
    physical: Option<Physical>,
}

impl KnownAllocation {
    fn new(device: Option<u32>, allocator: Allocator, base: u64, length: u64) -> Self {
        let device = device.map(DeviceName::emulated);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let attributes = PointerAttributes { device, allocator, base, length, id };
        Self { attributes, physical: None }
    }

    fn remember(self) {
        allocations().insert(self.attributes.base, self);
    }
}

fn allocations() -> MutexGuard<'static, BTreeMap<u64, KnownAllocation>> {
    lock(&ALLOCATIONS)
}

fn with_allocation<T>(
    address: u64,
    answer: impl FnOnce(&KnownAllocation) -> Option<T>,
) -> Option<T> {
    let allocations = allocations();
    let (_, found) = allocations.range(..=address).next_back()?;
    let is_inside = address - found.attributes.base < found.attributes.length;
    is_inside.then(|| answer(found)).flatten()
}

pub(crate) fn attributes(address: u64) -> Option<PointerAttributes> {
    with_allocation(address, |found| Some(found.attributes.clone()))
}

/// The memory that is mapped at an address, by any library.
pub(super) fn retain(address: u64) -> Option<Mapped> {
    with_allocation(address, |found| {
        let physical = Box::new(found.physical.clone()?);
        let PointerAttributes { base, length, .. } = found.attributes;
        Some((physical as _, base, length))
    })
}

fn map(
    operation: &'static str,
    at: *mut libc::c_void,
    length: u64,
    protection: i32,
    flags: i32,
    file: Option<(BorrowedFd<'_>, u64)>,
) -> Result<u64> {
    let (descriptor, offset) = file.map_or((-1, 0), |(file, offset)| (file.as_raw_fd(), offset));
    // SAFETY: without MAP_FIXED it replaces no mapping; with it, the caller passes its own
    // range.
    let address = unsafe {
        libc::mmap(at, length as usize, protection, flags, descriptor, offset as libc::off_t)
    };
    if address == libc::MAP_FAILED {
        return Err(Error::system(operation, "mmap"));
    }
    Ok(address as u64)
}

fn unmap(address: u64, length: u64) -> Result<()> {
    // SAFETY: a mapping of this process that is no longer used.
    match unsafe { libc::munmap(address as *mut libc::c_void, length as usize) } {
        0 => Ok(()),
        _ => Err(Error::system("free memory", "munmap")),
    }
}

const READ_AND_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
const RESERVED: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

pub(super) fn allocate(device: Option<u32>, allocator: Allocator, length: u64) -> Result<u64> {
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let address = map("allocate memory", ptr::null_mut(), length, READ_AND_WRITE, flags, None)?;
    KnownAllocation::new(device, allocator, address, length).remember();
    Ok(address)
}

/// Returns its length.
pub(super) fn free(address: u64) -> Result<u64> {
    let Some(found) = allocations().remove(&address) else {
        let detail = "the address was not allocated";
        return Err(Error::new("free memory", ErrorKind::InvalidArgument, detail));
    };
    unmap(address, found.attributes.length)?;
    Ok(found.attributes.length)
}

pub(super) fn register(address: u64, length: u64) -> Result<()> {
    let mut allocations = allocations();
    let before = allocations.range(..address.saturating_add(length)).next_back();
    let overlaps = before.is_some_and(|(base, found)| base + found.attributes.length > address);
    if overlaps || length == 0 {
        let detail = format!("{length} bytes at {address:#x} are empty or already registered");
        return Err(Error::new("register host memory", ErrorKind::InvalidArgument, detail));
    }
    allocations.insert(address, KnownAllocation::new(None, Allocator::Host, address, length));
    Ok(())
}

pub(super) fn unregister(address: u64) {
    allocations().remove(&address);
}

/// Host memory that belongs to a stream.
#[derive(Debug)]
pub(super) struct PinnedBlock {
    address: u64,
    length: u64,
}

impl PinnedBlock {
    pub(super) fn new(length: usize) -> Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let length = length as u64;
        let operation = "allocate host memory";
        let address = map(operation, ptr::null_mut(), length, READ_AND_WRITE, flags, None)?;
        Ok(Self { address, length })
    }
}

impl PinnedBuffer for PinnedBlock {
    fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for PinnedBlock {
    fn drop(&mut self) {
        let _ = unmap(self.address, self.length);
    }
}

/// The page size, to which file offsets of mappings are aligned: it is the same in all
/// processes of a machine.
fn page_size() -> u64 {
    // SAFETY: queries a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    // Never fails; otherwise the largest page size of Linux is safe everywhere.
    u64::try_from(size).unwrap_or(64 << 10)
}

/// Header words of a memory file, which identify it: magic number, version, device, length and
/// offset of its bytes. They occupy a page, so that the rest can be mapped.
const HEADER_WORDS: usize = 5;
const MAGIC: u64 = u64::from_le_bytes(*b"FCSTNDIN");
const VERSION: u64 = 2;
const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// Physical memory, shared by its creator, its mappings and its retained handles.
#[derive(Debug, Clone)]
pub(super) struct Physical(Arc<Pages>);

/// A memory file that can no longer change its size.
#[derive(Debug)]
struct Pages {
    file: OwnedFd,
    resident: u32,
    /// The file offset of its bytes: a page boundary.
    offset: u64,
    length: u64,
    /// Is it charged to the device? Imported memory is not.
    is_charged: bool,
    is_exportable: bool,
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.is_charged {
            state(self.resident).give_back(self.length);
        }
    }
}

/// An empty file in memory, without a name.
fn memory_file(operation: &'static str, length: u64) -> Result<OwnedFd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: a zero-terminated literal.
    let number = unsafe { libc::memfd_create(c"fabricast-emulated".as_ptr(), flags) };
    if number < 0 {
        return Err(Error::system(operation, "memfd_create"));
    }
    // SAFETY: just made, and owned here.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(number) });
    check_file_size(operation, length)?;
    file.set_len(length).map_err(|_| Error::system(operation, "ftruncate"))?;
    // SAFETY: no pointers.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } != 0 {
        return Err(Error::system(operation, "fcntl F_ADD_SEALS"));
    }
    Ok(file.into())
}

/// Refuses a file length beyond the limit of this process: the system would kill the process by
/// `SIGXFSZ`.
fn check_file_size(operation: &'static str, length: u64) -> Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: space for the result.
    let is_known = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) } == 0;
    if !is_known || length <= limit.rlim_cur {
        return Ok(());
    }
    let detail = format!(
        "{length} bytes, where a file of this process, shared memory included, may have {}. Raise \
         the limit: ulimit -f",
        limit.rlim_cur
    );
    let error = Error::new(operation, ErrorKind::OutOfMemory, detail);
    Err(error.with_code(libc::EFBIG.into()))
}

/// A duplicate of the file descriptor of a sealed file, which has at least this many bytes, and
/// the length of the file.
fn checked(
    operation: &'static str,
    descriptor: BorrowedFd<'_>,
    length: u64,
) -> Result<(File, u64)> {
    let refuse = |detail: String| Error::new(operation, ErrorKind::InvalidHandle, detail);
    // SAFETY: no pointers.
    let seals = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 || seals & SEALS != SEALS {
        return Err(refuse("the file descriptor is not a sealed memory file".to_owned()));
    }
    let copy = descriptor.try_clone_to_owned();
    let file = File::from(copy.map_err(|_| Error::system(operation, "dup"))?);
    let size = file.metadata().map_err(|_| Error::system(operation, "fstat"))?.len();
    if size < length {
        return Err(refuse(format!("{size} bytes, {length} are required")));
    }
    Ok((file, size))
}

impl Physical {
    pub(super) fn create(resident: u32, length: u64, is_exportable: bool) -> Result<Self> {
        Self::create_with_pages(resident, length, is_exportable, page_size())
    }

    fn create_with_pages(
        resident: u32,
        length: u64,
        is_exportable: bool,
        offset: u64,
    ) -> Result<Self> {
        let operation = "allocate memory";
        let file = File::from(memory_file(operation, offset + length)?);
        let words: [u64; HEADER_WORDS] = [MAGIC, VERSION, u64::from(resident), length, offset];
        let header = words.map(u64::to_le_bytes);
        file.write_all_at(header.as_flattened(), 0)
            .map_err(|_| Error::system(operation, "pwrite"))?;
        let (file, is_charged) = (file.into(), true);
        Ok(Self(Arc::new(Pages { file, resident, offset, length, is_charged, is_exportable })))
    }

    /// The memory, and the number of its device.
    pub(super) fn import(descriptor: BorrowedFd<'_>, length: u64) -> Result<(Self, u32)> {
        let imported = Self::import_with_pages(descriptor, length, page_size())?;
        let resident = imported.0.resident;
        Ok((imported, resident))
    }

    fn import_with_pages(descriptor: BorrowedFd<'_>, length: u64, page: u64) -> Result<Self> {
        let operation = "import memory";
        let least = length.saturating_add(size_of::<[u64; HEADER_WORDS]>() as u64);
        let (file, size) = checked(operation, descriptor, least)?;
        let mut header = [[0; 8]; HEADER_WORDS];
        file.read_exact_at(header.as_flattened_mut(), 0)
            .map_err(|_| Error::system(operation, "pread"))?;
        let [magic, version, resident, allocated, offset] = header.map(u64::from_le_bytes);
        let end = offset.checked_add(length).filter(|end| *end <= size);
        let detail = if (magic, version) != (MAGIC, VERSION) {
            "not memory of an emulated device, or of another version".to_owned()
        } else if resident >= u64::from(super::COUNT) {
            format!("memory of emulated device {resident}, which does not exist")
        } else if allocated < length {
            format!("{allocated} bytes, {length} are required")
        } else if end.is_none() {
            format!("{size} bytes, {length} are required from offset {offset}")
        } else if offset == 0 || !offset.is_multiple_of(page) {
            format!("its bytes begin at {offset}, which is not a multiple of the page size {page}")
        } else {
            let (resident, file) = (resident as u32, file.into());
            let pages =
                Pages { file, resident, offset, length, is_charged: false, is_exportable: true };
            return Ok(Self(Arc::new(pages)));
        };
        Err(Error::new(operation, ErrorKind::InvalidHandle, detail))
    }
}

impl PhysicalMemory for Physical {
    fn export(&self) -> Result<OwnedFd> {
        let operation = "export memory";
        if !self.0.is_exportable {
            let detail = "the memory was created without a shareable handle";
            return Err(Error::new(operation, ErrorKind::NotSupported, detail));
        }
        self.0.file.try_clone().map_err(|_| Error::system(operation, "dup"))
    }
}

#[derive(Debug)]
pub(super) struct AddressRange {
    address: u64,
    length: u64,
}

impl AddressRange {
    pub(super) fn reserve(length: u64) -> Result<Self> {
        let operation = "reserve addresses";
        let address = map(operation, ptr::null_mut(), length, libc::PROT_NONE, RESERVED, None)?;
        Ok(Self { address, length })
    }

    fn is_inside(&self, offset: u64, length: u64) -> bool {
        offset.checked_add(length).is_some_and(|end| end <= self.length)
    }
}

impl AddressRangeDriver for AddressRange {
    fn address(&self) -> u64 {
        self.address
    }

    fn map(&self, offset: u64, physical: &dyn PhysicalMemory, _devices: &[u32]) -> Result<()> {
        let operation = "map memory";
        let physical: &Physical = driver::downcast(operation, physical)?;
        let Pages { file, resident, offset: first, length, is_exportable, .. } = &*physical.0;
        if !self.is_inside(offset, *length) {
            return Err(Error::new(operation, ErrorKind::OutOfBounds, "beyond the reserved range"));
        }
        let at = (self.address + offset) as *mut libc::c_void;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        let file = Some((file.as_fd(), *first));
        let address = map(operation, at, *length, READ_AND_WRITE, flags, file)?;
        let allocator = Allocator::Mapped { exportable: *is_exportable };
        let allocations = KnownAllocation::new(Some(*resident), allocator, address, *length);
        KnownAllocation { physical: Some(physical.clone()), ..allocations }.remember();
        Ok(())
    }

    unsafe fn unmap(&self, offset: u64, length: u64) -> Result<()> {
        let operation = "unmap memory";
        if !self.is_inside(offset, length) {
            return Err(Error::new(operation, ErrorKind::OutOfBounds, "beyond the reserved range"));
        }
        allocations().remove(&(self.address + offset));
        let at = (self.address + offset) as *mut libc::c_void;
        // Reserved again, so that no other mapping is placed there.
        map(operation, at, length, libc::PROT_NONE, RESERVED | libc::MAP_FIXED, None).map(drop)
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        let _ = unmap(self.address, self.length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: u64 = super::super::GRANULARITY;

    fn create(page: u64) -> Physical {
        state(0).take("test", LENGTH).unwrap();
        Physical::create_with_pages(0, LENGTH, true, page).unwrap()
    }

    #[test]
    fn memory_beyond_the_longest_file_is_an_error() {
        let child = testkit::children::ForkedChild::new(|| {
            let limit = libc::rlimit { rlim_cur: 4096, rlim_max: 4096 };
            // SAFETY: a valid limit.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
            // By SIGXFSZ, which ends a process by default.
            let error = memory_file("test", 8192).unwrap_err();
            assert_eq!(error.code(), Some(libc::EFBIG.into()));
            assert!(error.to_string().contains("ulimit -f"), "{error}");
        });
        assert!(child.wait().success());
    }

    #[test]
    fn memory_is_mapped_with_pages_of_any_size() {
        for page in [4 << 10, 16 << 10, 64 << 10] {
            if page % page_size() != 0 {
                continue;
            }
            let made = create(page);
            let imported =
                Physical::import_with_pages(made.export().unwrap().as_fd(), LENGTH, page).unwrap();
            let address_range = AddressRange::reserve(2 * LENGTH).unwrap();
            for (physical, at) in [&made, &imported].into_iter().zip([0, LENGTH]) {
                address_range.map(at, physical, &[]).unwrap();
            }
            let first = address_range.address() as *mut u8;
            let last = (address_range.address() + 2 * LENGTH - 1) as *mut u8;
            // SAFETY: the first and the last byte of the mapping, and of a second mapping of
            // the same memory, which only this test uses.
            unsafe {
                first.write_volatile(7);
                last.write_volatile(8);
                let read = |at: *mut u8| at.read_volatile();
                assert_eq!(read(first.add(LENGTH as usize)), 7);
                assert_eq!(read(last.sub(LENGTH as usize)), 8);
            }
            for at in [0, LENGTH] {
                // SAFETY: no reference to it exists any more.
                unsafe { address_range.unmap(at, LENGTH) }.unwrap();
            }
        }
    }

    #[test]
    fn unaligned_memory_file_is_refused() {
        let page = page_size();
        let made = create(page);
        let import = |page| {
            Physical::import_with_pages(made.export().unwrap().as_fd(), LENGTH, page)
                .map(drop)
                .map_err(|error| error.to_string())
        };
        import(page).unwrap();
        let why = import(2 * page).unwrap_err();
        assert!(
            why.contains(&format!(
                "begin at {page}, which is not a multiple of the page size {}",
                2 * page
            )),
            "{why}"
        );
    }
}
