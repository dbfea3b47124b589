//! Detects whether an MPI library uses the launcher in this process, too.
//!
//! Such a library is not linked here, but may be loaded by the program: `MPI_Initialized` and
//! `MPI_Finalized` may be called at any time.
#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::ffi::{c_char, c_int};
use std::path::PathBuf;

use libloading::os::unix::{Library, RTLD_LAZY};
use nix::libc;

/// What an MPI library has done in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MpiState {
    /// Nothing yet, or there is none.
    NotInitialized,
    /// `MPI_Init` has been called.
    Initialized,
    /// `MPI_Finalize` has been called.
    Finalized,
}

pub(super) fn state() -> MpiState {
    // A library that another one loaded for itself is not among the global symbols.
    let loaded = libraries().into_iter().filter_map(|path| {
        // SAFETY: the library is loaded already, so no code of it runs now.
        unsafe { Library::open(Some(path), RTLD_LAZY | libc::RTLD_NOLOAD) }.ok()
    });
    let states: Vec<_> = std::iter::once(Library::this()).chain(loaded).map(state_in).collect();
    match states.iter().find(|state| **state == MpiState::Initialized) {
        Some(state) => *state,
        None if states.contains(&MpiState::Finalized) => MpiState::Finalized,
        None => MpiState::NotInitialized,
    }
}

fn state_in(library: Library) -> MpiState {
    match (flag(&library, b"MPI_Initialized\0"), flag(&library, b"MPI_Finalized\0")) {
        (_, Some(true)) => MpiState::Finalized,
        (Some(true), _) => MpiState::Initialized,
        _ => MpiState::NotInitialized,
    }
}

/// The flag that this function of an MPI library reports; None if there is no such function.
fn flag(library: &Library, name: &[u8]) -> Option<bool> {
    let mut value: c_int = 0;
    // SAFETY: the MPI standard defines both functions with this type, and that they may be called
    // before MPI_Init, after MPI_Finalize, and by any thread.
    let code = unsafe {
        let function = library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(name).ok()?;
        function(&raw mut value)
    };
    (code == 0).then_some(value != 0)
}

/// The paths of loaded MPI libraries: `libmpi.so.40`, `libmpich.so.12`, `libmpi_cray.so.12`.
fn libraries() -> BTreeSet<PathBuf> {
    unsafe extern "C" fn collect(
        found: *mut libc::dl_phdr_info,
        _: libc::size_t,
        paths: *mut libc::c_void,
    ) -> c_int {
        // SAFETY: the linker passes a valid entry, and the pointer that was given to it.
        let (name, paths) =
            unsafe { ((*found).dlpi_name, &mut *paths.cast::<BTreeSet<PathBuf>>()) };
        if let Some(path) = path(name).filter(|path| is_mpi(path)) {
            paths.insert(path);
        }
        0
    }
    let mut paths = BTreeSet::new();
    // SAFETY: the function is called before this returns only, with the pointer to `paths`.
    unsafe { libc::dl_iterate_phdr(Some(collect), (&raw mut paths).cast()) };
    paths
}

fn path(name: *const c_char) -> Option<PathBuf> {
    if name.is_null() {
        return None;
    }
    // SAFETY: the linker's names are texts with an end.
    let name = unsafe { std::ffi::CStr::from_ptr(name) };
    name.to_str().ok().map(PathBuf::from)
}

fn is_mpi(path: &std::path::Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.starts_with("libmpi") && name.contains(".so")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn without_a_library_mpi_is_not_initialized() {
        assert_eq!(state(), MpiState::NotInitialized);
    }

    #[test]
    fn libraries_are_recognized_by_their_name() {
        for name in ["/usr/lib/libmpi.so.40.30.4", "/opt/libmpich.so.12", "libmpi_cray.so.12"] {
            assert!(is_mpi(Path::new(name)), "{name}");
        }
        for name in ["/usr/lib/libmpfr.so.6", "/opt/mpi/libc.so.6", "", "/usr/lib/libmpi.a"] {
            assert!(!is_mpi(Path::new(name)), "{name}");
        }
    }
}
