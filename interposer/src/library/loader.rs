//! The functions that this library replaces, and the way to them.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::{CStr, CString, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::interposer::{Interposer, Library};

/// Where the originals of a library are.
#[derive(Debug)]
pub(crate) struct Originals {
    /// A part of the names of its files.
    file: &'static str,
    /// What is loaded if the process has none.
    default: &'static CStr,
    /// The variable with the path of another one to load then.
    variable: &'static str,
}

impl Originals {
    pub(crate) const fn new(
        file: &'static str,
        default: &'static CStr,
        variable: &'static str,
    ) -> Self {
        Self { file, default, variable }
    }

    /// The address of a function in the library; None without one.
    pub(crate) fn find(&self, symbol: &CStr) -> Option<usize> {
        // A library that the program is linked to, or one that was loaded later, as by Python.
        // SAFETY: a name that ends with 0.
        let next = || unsafe { libc::dlsym(libc::RTLD_NEXT, symbol.as_ptr()) };
        let of = |library: *mut c_void| {
            // SAFETY: an open library, which stays loaded, and a name that ends with 0.
            let found = unsafe { libc::dlsym(library, symbol.as_ptr()) };
            (!found.is_null()).then(|| found.expose_provenance())
        };
        let found = next();
        if !found.is_null() {
            return Some(found.expose_provenance());
        }
        if let Some(library) = loaded(self.file).and_then(|path| open(&path, libc::RTLD_NOLOAD)) {
            return of(library);
        }
        let named = std::env::var(self.variable).ok().filter(|path| !path.is_empty());
        let named = named.and_then(|path| CString::new(path).ok());
        open(named.as_deref().unwrap_or(self.default), 0).and_then(of)
    }
}

fn open(path: &CStr, flags: c_int) -> Option<*mut c_void> {
    // SAFETY: a path that ends with 0; the initialisers are those of the library that the program uses.
    let library =
        unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL | flags) };
    (!library.is_null()).then_some(library)
}

/// The path of a library of this process whose file name has this part.
fn loaded(file: &'static str) -> Option<CString> {
    struct Search {
        file: &'static str,
        found: Option<CString>,
    }
    unsafe extern "C" fn visit(
        info: *mut libc::dl_phdr_info,
        _size: libc::size_t,
        search: *mut c_void,
    ) -> c_int {
        // SAFETY: the system passes a valid structure; `search` is the place below.
        let (name, search) = unsafe { ((*info).dlpi_name, &mut *search.cast::<Search>()) };
        if name.is_null() {
            return 0;
        }
        // SAFETY: a text that ends with 0.
        let path = unsafe { CStr::from_ptr(name) };
        let base = path.to_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        let part = search.file.as_bytes();
        if base.starts_with(part) {
            search.found = Some(path.to_owned());
            return 1;
        }
        0
    }
    let mut search = Search { file, found: None };
    // SAFETY: the place lives longer than the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found
}

/// A function of the original library that has this name and these types.
macro_rules! original {
    ($originals:expr, $name:ident: fn($($type:ty),* $(,)?) -> $result:ty) => {{
        static FOUND: std::sync::OnceLock<Option<usize>> = std::sync::OnceLock::new();
        let symbol = || {
            let text = concat!(stringify!($name), "\0");
            std::ffi::CStr::from_bytes_until_nul(text.as_bytes()).ok()
        };
        let address = *FOUND.get_or_init(|| $originals.find(symbol()?));
        address.map(|address| {
            // SAFETY: the function of this name has this type in all versions that have it.
            unsafe {
                std::mem::transmute::<*const std::ffi::c_void, unsafe extern "C" fn($($type),*) -> $result>(
                    std::ptr::with_exposed_provenance(address),
                )
            }
        })
    }};
}
pub(crate) use original;

thread_local! {
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
}

struct Inside;

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = IS_INSIDE.try_with(|inside| inside.set(false));
    }
}

/// Runs a replaced function. Calls from inside the original library, and all without this library being on, are
/// for the original. A panic does not leave: its code is `panicked`.
pub(crate) fn outermost<T>(
    is_on: bool,
    panicked: T,
    replaced: impl FnOnce() -> T,
    original: impl FnOnce() -> T,
) -> T {
    // A thread that ends has no thread-local values any more.
    if !is_on || IS_INSIDE.try_with(|inside| inside.replace(true)).unwrap_or(true) {
        return original();
    }
    let _inside = Inside;
    catch_unwind(AssertUnwindSafe(replaced)).unwrap_or(panicked)
}

/// Lets the end of the process write the report of these communicators, once, if one is wanted.
pub(crate) fn at_exit<L: Library>(of: &Interposer<L>, report: extern "C" fn()) {
    if of.begins_report() {
        // SAFETY: a function without arguments, which stays loaded as this library does.
        unsafe { libc::atexit(report) };
    }
}

/// A function of this library, which replaces the original one of the same name. In its body, `$original` calls
/// that.
macro_rules! replaced {
    ($originals:expr, $library:ty;
     $(fn $name:ident($($argument:ident: $type:ty),* $(,)?) |$original:ident| $body:expr;)*) => {$(
        /// # Safety
        /// As the original.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $crate::interposer::Code {
            use $crate::interposer::Library as _;
            let original = || match $crate::library::loader::original!(
                $originals, $name: fn($($type),*) -> $crate::interposer::Code
            ) {
                // SAFETY: the caller's arguments.
                Some(function) => unsafe { function($($argument),*) },
                None => {
                    eprintln!("fabricast: call {} failed: no loaded library has it", stringify!($name));
                    <$library>::SYSTEM_ERROR
                }
            };
            let replaced = || {
                let $original = &original;
                $body
            };
            let is_on = $crate::settings::settings().is_on();
            $crate::library::loader::outermost(
                is_on, <$library>::INTERNAL_ERROR, replaced, &original,
            )
        }
    )*};
}
pub(crate) use replaced;
