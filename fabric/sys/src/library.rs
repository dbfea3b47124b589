//! Loading libfabric at its first use.
//!
//! A program that uses no fabric starts without libfabric, and runs where it is not installed.
//! The libfabric of Debian and Ubuntu loads the libraries of PSM and PSM2, which replace the
//! handlers of six signals, including SIGINT, and measure the processor's clock for 0.2 s.
//!
//! Functions are looked up by symbol version, so that a library newer than the headers uses the
//! structures of the bindings.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;
use std::ptr;
use std::sync::OnceLock;

use crate::handlers;
use crate::*;

const LIBRARY_NAME: &CStr = c"libfabric.so.1";

/// The symbol version of functions that take or return a `fi_info`, for the structures of the
/// bindings. libfabric adds a version when these change, and keeps the functions of earlier
/// ones.
const INFO_SYMBOL_VERSION: &CStr = match (FI_MAJOR_VERSION, FI_MINOR_VERSION) {
    (1, ..20) => c"FABRIC_1.3",
    (1, _) => c"FABRIC_1.7",
    (2, ..5) => c"FABRIC_1.8",
    (2, ..7) => c"FABRIC_1.9",
    _ => panic!("name the symbol version of fi_getinfo for these headers"),
};

/// `name @ symbol version (arguments) -> result, or the value that it returns without the
/// library`
macro_rules! functions {
    ($($name:ident @ $version:expr,
        ($($argument:ident: $type:ty),*) -> $result:ty, or $absent:expr;)*) => {
        struct Library {
            $($name: unsafe extern "C" fn($($type),*) -> $result,)*
        }

        impl Library {
            /// # Safety
            /// The handle is that of libfabric.
            unsafe fn find(handle: *mut c_void) -> Result<Self, String> {
                Ok(Self {
                    $($name: std::mem::transmute::<
                        *mut c_void,
                        unsafe extern "C" fn($($type),*) -> $result,
                    >(symbol(
                        handle,
                        CStr::from_bytes_with_nul_unchecked(
                            concat!(stringify!($name), "\0").as_bytes(),
                        ),
                        $version,
                    )?),)*
                })
            }
        }

        $(
            #[doc = concat!("`", stringify!($name), "`.")]
            pub unsafe fn $name($($argument: $type),*) -> $result {
                match library() {
                    Ok(library) => (library.$name)($($argument),*),
                    Err(_) => $absent,
                }
            }

            // The headers declare it with this type.
            const _: unsafe extern "C" fn($($type),*) -> $result = bindings::$name;
        )*
    };
}

functions! {
    fi_getinfo @ INFO_SYMBOL_VERSION, (
        version: u32, node: *const c_char, service: *const c_char, flags: u64,
        hints: *const fi_info, list: *mut *mut fi_info) -> c_int, or -FI_ENOSYS;
    fi_freeinfo @ INFO_SYMBOL_VERSION, (list: *mut fi_info) -> (), or ();
    fi_dupinfo @ INFO_SYMBOL_VERSION, (info: *const fi_info) -> *mut fi_info, or ptr::null_mut();
    fi_fabric @ c"FABRIC_1.1", (
        attributes: *mut fi_fabric_attr, fabric: *mut *mut fid_fabric,
        context: *mut c_void) -> c_int, or -FI_ENOSYS;
    fi_open @ c"FABRIC_1.5", (
        version: u32, name: *const c_char, attributes: *mut c_void, length: usize, flags: u64,
        object: *mut *mut fid, context: *mut c_void) -> c_int, or -FI_ENOSYS;
    fi_tostr_r @ c"FABRIC_1.4", (
        buffer: *mut c_char, length: usize, value: *const c_void,
        kind: fi_type) -> *mut c_char, or ptr::null_mut();
    fi_strerror @ c"FABRIC_1.0", (
        code: c_int) -> *const c_char, or c"libfabric is not loaded".as_ptr();
    fi_version @ c"FABRIC_1.0", () -> u32, or 0;
}

/// Loads libfabric and its providers, unless already loaded. Each libfabric function does so;
/// without the library they return `-FI_ENOSYS`, a null pointer or 0.
///
/// Signal handlers are restored. Signals that ask this thread to end are delivered when the
/// call is done.
///
/// # Errors
/// Why the library cannot be loaded, and the remedy.
pub fn load() -> Result<(), &'static str> {
    library().map(drop)
}

fn library() -> Result<&'static Library, &'static str> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    LIBRARY
        .get_or_init(|| handlers::preserve_signal_handlers(|| open(LIBRARY_NAME)))
        .as_ref()
        .map_err(String::as_str)
}

fn open(name: &CStr) -> Result<Library, String> {
    // SAFETY: a terminated name; the library's constructors run as in any program linked with it. It
    // stays loaded.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        return Err(explain_dlopen_failure(&name.to_string_lossy(), &dlerror_text()));
    }
    // SAFETY: the handle was just opened. A query for only the names and versions of providers
    // makes the library load them: some have constructors of their own. The list is freed.
    unsafe {
        let library = Library::find(handle)?;
        let mut list = ptr::null_mut();
        let version = fcs_headers_version().min((library.fi_version)());
        let (none, hints) = (ptr::null(), ptr::null());
        if (library.fi_getinfo)(version, none, none, FI_PROV_ATTR_ONLY, hints, &mut list) == 0 {
            (library.fi_freeinfo)(list);
        }
        Ok(library)
    }
}

/// Why a library was not found, from the message of the run-time linker.
fn explain_dlopen_failure(name: &str, linker_message: &str) -> String {
    // The linker's message is in the language of the process.
    let absent = io::Error::from_raw_os_error(libc::ENOENT).to_string();
    let absent = absent.split(" (os error").next().unwrap_or_default();
    // If a dependency is missing, the linker's message is the same, with the name of the
    // dependency.
    if linker_message.starts_with(&format!("{name}: ")) && linker_message.ends_with(absent) {
        return format!(
            "libfabric is not installed ({linker_message}). Install it with apt install libfabric1, or name its \
             directory in LD_LIBRARY_PATH"
        );
    }
    format!(
        "libfabric cannot be loaded ({linker_message}). Reinstall it with apt install --reinstall \
         libfabric1, \
         or name the directory of another one in LD_LIBRARY_PATH"
    )
}

/// # Safety
/// The handle is that of a library.
unsafe fn symbol(handle: *mut c_void, name: &CStr, version: &CStr) -> Result<*mut c_void, String> {
    let found = libc::dlvsym(handle, name.as_ptr(), version.as_ptr());
    if found.is_null() {
        return Err(format!(
            "libfabric is too old for this program, which was built for libfabric {}.{} ({}). Install \
             that version or a newer one",
            FI_MAJOR_VERSION,
            FI_MINOR_VERSION,
            dlerror_text()
        ));
    }
    Ok(found)
}

/// The run-time linker's message about its last failure.
fn dlerror_text() -> String {
    // SAFETY: the text is terminated, and valid until this thread's next call of the linker.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            return String::new();
        }
        CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_library_error_names_the_remedy() {
        let Err(error) = open(c"libfabric-absent.so.1") else { panic!("the library was loaded") };
        let start = "libfabric is not installed (libfabric-absent.so.1: ";
        assert!(error.starts_with(start), "{error}");
        assert!(error.contains("). Install it with apt install libfabric1, "), "{error}");
    }

    #[test]
    fn load_error_contains_the_message_of_the_linker() {
        let name = format!("libfabric-bogus-{}.so.1", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, "no library").unwrap();
        let bogus = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        let opened = open(&bogus);
        std::fs::remove_file(&path).unwrap();
        let Err(error) = opened else { panic!("the library was loaded") };
        let start = format!("libfabric cannot be loaded ({}: ", path.display());
        assert!(error.starts_with(&start), "{error}");
        // Messages of glibc.
        for linker_message in [
            "libfabric.so.1: wrong ELF class: ELFCLASS32",
            "libpsm2.so.2: cannot open shared object file: No such file or directory",
            "/usr/lib/libfabric.so.1: undefined symbol: ibv_open_device",
        ] {
            let error = explain_dlopen_failure("libfabric.so.1", linker_message);
            assert!(
                error.starts_with(&format!("libfabric cannot be loaded ({linker_message})")),
                "{error}"
            );
        }
    }

    #[test]
    fn library_without_a_symbol_version_is_too_old() {
        // SAFETY: the C library is loaded anyway, and no function of it is called.
        let error = unsafe {
            let handle = libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_NOW);
            symbol(handle, c"fi_getinfo", INFO_SYMBOL_VERSION).unwrap_err()
        };
        assert!(error.starts_with("libfabric is too old for this program"), "{error}");
        assert!(error.contains(INFO_SYMBOL_VERSION.to_str().unwrap()), "{error}");
    }

    /// The run-time linker accepts them if the bindings and the library have the same version.
    #[test]
    fn symbol_versions_match_the_headers() {
        // SAFETY: functions are only looked up, and `fi_version` has no precondition.
        unsafe {
            if fi_version() != (FI_MAJOR_VERSION << 16 | FI_MINOR_VERSION) {
                return;
            }
            let handle = libc::dlopen(LIBRARY_NAME.as_ptr(), libc::RTLD_NOW);
            for name in [c"fi_getinfo", c"fi_freeinfo", c"fi_dupinfo"] {
                let usual = libc::dlsym(handle, name.as_ptr());
                assert_eq!(symbol(handle, name, INFO_SYMBOL_VERSION).unwrap(), usual, "{name:?}");
            }
        }
    }
}
