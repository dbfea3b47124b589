//! Fabric handles in files, so that all memory is passed to other processes as descriptors.
//!
//! Some allocators request fabric handles only, as PyTorch does for expandable segments where
//! channels of IMEX allow it. Such a handle is 64 bytes; here it is the content of a sealed file in
//! memory.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use crate::error::{Error, Result};

/// `CUmemFabricHandle`.
pub(super) type FabricHandle = [u8; 64];

const MAGIC: [u8; 16] = *b"CUmemFabricHdl 1";
const LENGTH: usize = MAGIC.len() + size_of::<FabricHandle>();
const OPERATION: &str = "export memory";
const SEALS: i32 = libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// A file with this handle.
pub(super) fn to_file(handle: &FabricHandle) -> Result<OwnedFd> {
    sealed_file(&[&MAGIC[..], handle].concat()).map(OwnedFd::from)
}

fn sealed_file(bytes: &[u8]) -> Result<File> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: a zero-terminated literal.
    let number = unsafe { libc::memfd_create(c"fabricast-fabric-handle".as_ptr(), flags) };
    if number < 0 {
        return Err(Error::system(OPERATION, "memfd_create"));
    }
    // SAFETY: just made, and owned here.
    let mut file = File::from(unsafe { OwnedFd::from_raw_fd(number) });
    file.write_all(bytes).map_err(|_| Error::system(OPERATION, "write"))?;
    // SAFETY: no pointers.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } != 0 {
        return Err(Error::system(OPERATION, "fcntl F_ADD_SEALS"));
    }
    Ok(file)
}

/// The handle in a file of another process; None for a descriptor of the driver, or any other file.
pub(super) fn from_file(descriptor: BorrowedFd<'_>) -> Option<FabricHandle> {
    let file = File::from(descriptor.try_clone_to_owned().ok()?);
    let about = file.metadata().ok()?;
    if !about.is_file() || about.len() != LENGTH as u64 {
        return None;
    }
    let mut bytes = [0; LENGTH];
    file.read_exact_at(&mut bytes, 0).ok()?;
    let (magic, handle) = bytes.split_at(MAGIC.len());
    (magic == MAGIC).then(|| handle.try_into().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn handle_is_read_from_its_file_only() {
        let handle: FabricHandle = std::array::from_fn(|at| at as u8 * 3);
        let file = to_file(&handle).unwrap();
        assert_eq!(from_file(file.as_fd()), Some(handle));
        assert_eq!(from_file(file.as_fd()), Some(handle));
        assert!(File::from(file).write_at(&[1], 20).is_err(), "it is sealed");
        let null = File::open("/dev/null").unwrap();
        assert_eq!(from_file(null.as_fd()), None);
        let other = |bytes: &[u8]| from_file(sealed_file(bytes).unwrap().as_fd());
        assert_eq!(other(&[0; LENGTH]), None);
        assert_eq!(other(&[&MAGIC[..], &[1; 65]].concat()), None);
        assert_eq!(other(&[&MAGIC[..], &[1; 63]].concat()), None);
        assert_eq!(other(&[&MAGIC[..], &[1; 64]].concat()), Some([1; 64]));
    }
}
