//! libpmix, looked up at run time.
//!
//! Nothing is linked: a machine without PMIx runs the same program. All functions are looked up at
//! once, so that a library that lacks one is refused with the name of the missing function.
//!
//! These calls may block without a deadline while the launcher's server does not answer:
//! [`initialize`](Library::initialize), [`commit`](Library::commit) and [`get`](Library::get). The
//! caller makes them on a thread that it can abandon.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, OsString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use libloading::os::unix::{Library as Loaded, RTLD_GLOBAL, RTLD_NOW};
use nix::libc;
use threads::RetryBackoff;

use super::abi::{self, Info, Proc, kind};
use crate::launcher::error::{CONNECT, Error, ErrorKind, Result};

/// The path of a libpmix, instead of the one that the system finds.
const VARIABLE: &str = "FABRICAST_PMIX_LIBRARY";
/// The name of all versions since 2, and the name that a development package adds.
const NAMES: [&str; 2] = ["libpmix.so.2", "libpmix.so"];
/// Longest bytes of one rank. Longer ones are a corrupt length.
pub(super) const MAX_LENGTH: usize = 64 << 20;
/// How long the exit of the process waits for the server, which itself waits 2 s.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// What a callback reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    /// The fence ended with this status.
    Fence(i32),
    /// The question for a rank's key was answered with this status.
    Answer { rank: u32, status: i32 },
}

/// A value that the library returned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Value {
    Bytes(Vec<u8>),
    Text(String),
    Number(u64),
}

/// Why there is no value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failure {
    /// A status of the library.
    Status(i32),
    /// The library returned something else than it promises.
    Malformed(String),
}

type FenceDone = unsafe extern "C" fn(i32, *mut c_void);
type GetDone = unsafe extern "C" fn(i32, *mut abi::Value, *mut c_void);
type Finalize = unsafe extern "C" fn(*const Info, usize) -> i32;

/// A structure of functions that a library has.
macro_rules! functions {
    (
        $(#[$meta:meta])* $name:ident
        $($field:ident = $symbol:literal: fn($($argument:ty),* $(,)?) -> $result:ty;)*
    ) => {
        $(#[$meta])*
        struct $name {
            $($field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl $name {
            /// The functions, or the name of a missing one.
            ///
            /// # Safety
            /// The library has functions of these types, and is never unloaded.
            unsafe fn find(library: &Loaded) -> std::result::Result<Self, &'static str> {
                Ok(Self {
                    // SAFETY: the caller's promise.
                    $($field: *unsafe {
                        library.get::<unsafe extern "C" fn($($argument),*) -> $result>(
                            $symbol.as_bytes(),
                        )
                    }.map_err(|_| $symbol)?,)*
                })
            }
        }
    };
}

functions! {
    #[derive(Debug)]
    Functions
    version = "PMIx_Get_version": fn() -> *const c_char;
    error_string = "PMIx_Error_string": fn(i32) -> *const c_char;
    init = "PMIx_Init": fn(*mut Proc, *mut Info, usize) -> i32;
    finalize = "PMIx_Finalize": fn(*const Info, usize) -> i32;
    put = "PMIx_Put": fn(u8, *const c_char, *mut abi::Value) -> i32;
    commit = "PMIx_Commit": fn() -> i32;
    fence = "PMIx_Fence_nb":
        fn(*const Proc, usize, *const Info, usize, FenceDone, *mut c_void) -> i32;
    get = "PMIx_Get":
        fn(*const Proc, *const c_char, *const Info, usize, *mut *mut abi::Value) -> i32;
    ask = "PMIx_Get_nb":
        fn(*const Proc, *const c_char, *const Info, usize, GetDone, *mut c_void) -> i32;
}

#[derive(Debug)]
pub(super) struct Library {
    functions: Functions,
}

impl Library {
    /// Finds the library and loads it, for the rest of the process.
    pub(super) fn load() -> Result<Self> {
        let (loaded, name) = find()?;
        let unavailable = |detail| Err(Error::new(CONNECT, ErrorKind::Unavailable, detail));
        // SAFETY: it is libpmix, by its file name or by PMIx_Init, whose functions have had these
        // types since version 3; it is not unloaded, see below.
        let functions = match unsafe { Functions::find(&loaded) } {
            Ok(functions) => functions,
            Err(symbol) => return unavailable(format!("{name} has no {symbol}. {REMEDY}")),
        };
        // Its threads run until the process ends.
        std::mem::forget(loaded);
        let library = Self { functions };
        // SAFETY: no arguments.
        let version = text(unsafe { (library.functions.version)() });
        match major_of(&version) {
            Some(major) if major >= abi::MIN_MAJOR_VERSION => Ok(library),
            _ => unavailable(format!(
                "{name} is of version \"{}\", {} is the oldest supported version. {REMEDY}",
                version.escape_debug(),
                abi::MIN_MAJOR_VERSION
            )),
        }
    }

    /// A status as text, with its number.
    pub(super) fn describe(&self, status: i32) -> String {
        // SAFETY: a number.
        let text = text(unsafe { (self.functions.error_string)(status) });
        format!("{} ({status})", text.escape_debug())
    }

    /// Connects to the server, and has the exit of the process close the connection. The library
    /// counts these calls: MPI may have connected before, or connect later.
    pub(super) fn initialize(&self) -> std::result::Result<Proc, i32> {
        let mut own = Proc { nspace: [0; 256], rank: 0 };
        // SAFETY: a valid place for the result, no options.
        let status = unsafe { (self.functions.init)(&raw mut own, std::ptr::null_mut(), 0) };
        if status != abi::SUCCESS {
            return Err(status);
        }
        finalize_at_exit(self.functions.finalize);
        Ok(own)
    }

    /// Stores bytes under a key, until [`commit`](Self::commit) sends them.
    pub(super) fn put(&self, key: &CStr, bytes: &[u8]) -> std::result::Result<(), i32> {
        let mut value = abi::Value::bytes(bytes);
        // SAFETY: a terminated key and a value, which the library copies.
        let put = unsafe { (self.functions.put)(abi::SCOPE_GLOBAL, key.as_ptr(), &raw mut value) };
        check(put)
    }

    /// Sends to the server what was put.
    pub(super) fn commit(&self) -> std::result::Result<(), i32> {
        // SAFETY: no arguments.
        check(unsafe { (self.functions.commit)() })
    }

    /// Starts a fence among all ranks that distributes what they put. Its end is an
    /// [`Event::Fence`].
    pub(super) fn fence(&self, events: &Sender<Event>) -> std::result::Result<(), i32> {
        let call = FenceCall { options: [Info::flag(abi::COLLECT_DATA)], events: events.clone() };
        let call = Box::into_raw(Box::new(call));
        // SAFETY: no list of processes means all of the job. The options live until the callback,
        // which frees them; it is called once after a success.
        let status = unsafe {
            let options = (&raw const (*call).options).cast();
            (self.functions.fence)(std::ptr::null(), 0, options, 1, fence_done, call.cast())
        };
        // After any other status no callback follows. The call is kept all the same: a library
        // with a defect there would find freed memory.
        if status == abi::OPERATION_SUCCEEDED {
            let _ = events.send(Event::Fence(abi::SUCCESS));
            return Ok(());
        }
        check(status)
    }

    /// The value of a process' key.
    pub(super) fn get(&self, process: &Proc, key: &CStr) -> std::result::Result<Value, Failure> {
        let mut value = std::ptr::null_mut();
        // SAFETY: a process, a terminated key and a valid place for the result, no options.
        let status = unsafe {
            let no_options = std::ptr::null();
            (self.functions.get)(process, key.as_ptr(), no_options, 0, &raw mut value)
        };
        check(status).map_err(Failure::Status)?;
        if value.is_null() {
            return Err(Failure::Malformed("no value".to_owned()));
        }
        // SAFETY: a value that the library allocated for the caller.
        unsafe { take(value) }
    }

    /// Asks whether a process has committed this key. The reply is an [`Event::Answer`].
    pub(super) fn ask(
        &self,
        process: &Proc,
        key: &CStr,
        option: Info,
        events: &Sender<Event>,
    ) -> std::result::Result<(), i32> {
        let call = AskCall {
            process: *process,
            key: key.to_owned(),
            options: [option],
            events: events.clone(),
        };
        let call = Box::into_raw(Box::new(call));
        // SAFETY: all arguments live until the callback, which frees them; it is called once after
        // a success. After a failure they are kept, as in fence.
        let status = unsafe {
            let options = (&raw const (*call).options).cast();
            let (process, key) = (&raw const (*call).process, (*call).key.as_ptr());
            (self.functions.ask)(process, key, options, 1, ask_done, call.cast())
        };
        check(status)
    }
}

/// What a fence uses until its callback.
struct FenceCall {
    options: [Info; 1],
    events: Sender<Event>,
}

/// What a question uses until its callback.
struct AskCall {
    process: Proc,
    key: CString,
    options: [Info; 1],
    events: Sender<Event>,
}

/// Called by a thread of the library, maybe after the exchange has given up.
extern "C" fn fence_done(status: i32, call: *mut c_void) {
    // SAFETY: the pointer that fence passed; the library calls this once.
    let call = unsafe { Box::from_raw(call.cast::<FenceCall>()) };
    // The receiver may be gone.
    let _ = call.events.send(Event::Fence(status));
}

/// Called by a thread of the library, maybe after the exchange has given up. The value is not
/// freed: the versions differ in whether the library does it.
extern "C" fn ask_done(status: i32, _: *mut abi::Value, call: *mut c_void) {
    // SAFETY: the pointer that ask passed; the library calls this once.
    let call = unsafe { Box::from_raw(call.cast::<AskCall>()) };
    let _ = call.events.send(Event::Answer { rank: call.process.rank, status });
}

fn check(status: i32) -> std::result::Result<(), i32> {
    if status == abi::SUCCESS { Ok(()) } else { Err(status) }
}

/// A text of the library.
fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: the library's texts are constants.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

/// The first number of a version: `OpenPMIx 4.2.2`, `3.1.5`.
fn major_of(version: &str) -> Option<u32> {
    let at = version.find(|character: char| character.is_ascii_digit())?;
    version[at..].split(|character: char| !character.is_ascii_digit()).next()?.parse().ok()
}

/// The content of a value, which is freed.
///
/// # Safety
/// A value that the library allocated for its caller, with its string or its bytes.
unsafe fn take(value: *mut abi::Value) -> std::result::Result<Value, Failure> {
    // SAFETY: the caller's promise; the member of the union is the one of the type.
    unsafe {
        let abi::Value { kind, data } = *value;
        let content = match kind {
            kind::BYTE_OBJECT => {
                let object = data.bytes;
                let content = copy(object);
                libc::free(object.bytes.cast());
                content
            }
            kind::STRING => {
                let content = text(data.string);
                libc::free(data.string.cast());
                Ok(Value::Text(content))
            }
            kind::UINT16 => Ok(Value::Number(data.uint16.into())),
            kind::UINT32 | kind::UINT | kind::PROC_RANK => Ok(Value::Number(data.uint32.into())),
            kind::UINT64 => Ok(Value::Number(data.uint64)),
            kind::SIZE => Ok(Value::Number(data.size as u64)),
            kind::INT | kind::INT32 => match data.int32.try_into() {
                Ok(number) => Ok(Value::Number(number)),
                Err(_) => Err(Failure::Malformed(format!("number {}", data.int32))),
            },
            other => Err(Failure::Malformed(format!("value of type {other}"))),
        };
        libc::free(value.cast());
        content
    }
}

/// The bytes of an object.
///
/// # Safety
/// The pointer is null or points to as many bytes, if they are not too many.
unsafe fn copy(object: abi::ByteObject) -> std::result::Result<Value, Failure> {
    if object.size == 0 {
        return Ok(Value::Bytes(Vec::new()));
    }
    if object.bytes.is_null() || object.size > MAX_LENGTH {
        let at = if object.bytes.is_null() { " at a null pointer" } else { "" };
        return Err(Failure::Malformed(format!("{} bytes{at}", object.size)));
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { std::slice::from_raw_parts(object.bytes.cast(), object.size) };
    Ok(Value::Bytes(bytes.to_vec()))
}

const REMEDY: &str = "Install libpmix2 or run \"module load pmix\", set FABRICAST_PMIX_LIBRARY to \
                      the path of a libpmix.so.2, or pass an exchange over an MPI communicator";

/// A loaded libpmix, and its name.
fn find() -> Result<(Loaded, String)> {
    // The one of this process has the connection of MPI. First, one whose names are global:
    let this = Loaded::this();
    // SAFETY: only looked up, not called.
    let symbol = unsafe { this.get::<unsafe extern "C" fn()>(b"PMIx_Init") }.map(|it| *it);
    if let Ok(function) = symbol {
        return Ok(match containing(function) {
            Some((loaded, path)) => (loaded, path),
            None => (this, "this program".to_owned()),
        });
    }
    // One that a plugin of MPI loaded, which others do not see:
    // SAFETY: does not load, so no initialiser runs.
    if let Ok(loaded) = unsafe { Loaded::open(Some(NAMES[0]), RTLD_NOW | libc::RTLD_NOLOAD) } {
        return Ok((loaded, NAMES[0].to_owned()));
    }
    let names: Vec<OsString> = match std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) {
        Some(path) => vec![path],
        None => NAMES.map(OsString::from).to_vec(),
    };
    let mut errors = Vec::new();
    for name in names {
        let shown = String::from_utf8_lossy(name.as_bytes()).into_owned();
        // Global, as if the program were linked with it: the plugins of versions before 3.2 find
        // the library's functions only that way.
        // SAFETY: its initialisers are those of libpmix.
        match unsafe { Loaded::open(Some(&name), RTLD_NOW | RTLD_GLOBAL) } {
            Ok(loaded) => return Ok((loaded, shown)),
            Err(error) => errors.push(loader_text(&error, &shown)),
        }
    }
    let detail = format!("no libpmix: {}. {REMEDY}", errors.join("; "));
    Err(Error::new(CONNECT, ErrorKind::Unavailable, detail))
}

/// The loaded library that contains a function, and its path. It then stays loaded: MPI unloads
/// its plugins when it ends, and libpmix with the last one.
fn containing(function: unsafe extern "C" fn()) -> Option<(Loaded, String)> {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: an address and a valid place for the result; the path lives as long as the library.
    // The library is loaded already, so no initialiser runs.
    unsafe {
        if libc::dladdr(function as *const c_void, &raw mut info) == 0 {
            return None;
        }
        let path = text(info.dli_fname);
        let loaded = Loaded::open(Some(&path), RTLD_NOW | libc::RTLD_NOLOAD).ok()?;
        Some((loaded, path))
    }
}

/// What the loader says, with the name that was tried.
fn loader_text(error: &libloading::Error, name: &str) -> String {
    let text = std::error::Error::source(error).map_or(error.to_string(), ToString::to_string);
    if text.contains(name) { text } else { format!("{name}: {text}") }
}

/// The function that closes the connection, and the process that has it.
static AT_EXIT: OnceLock<(u32, Finalize)> = OnceLock::new();
static IS_CLOSED: AtomicBool = AtomicBool::new(false);

/// Closes the connection when the process exits, and not before: with Open MPI 4 a process whose
/// last user closed the connection cannot call `MPI_Init` afterwards. A process that exits without
/// closing it counts as failed.
fn finalize_at_exit(finalize: Finalize) {
    if AT_EXIT.set((std::process::id(), finalize)).is_ok() {
        // SAFETY: a function of this program.
        unsafe { libc::atexit(at_exit) };
    }
}

extern "C" fn at_exit() {
    let Some(&(process, finalize)) = AT_EXIT.get() else { return };
    // A fork has the connection, but none of the library's threads: there the call never returns.
    if process != std::process::id() {
        return;
    }
    // On a thread of its own, because another thread may be inside the library and hold its lock.
    let close = move || {
        // SAFETY: no options; initialize succeeded once in this process.
        unsafe { finalize(std::ptr::null(), 0) };
        IS_CLOSED.store(true, Ordering::Release);
    };
    // Without channels and joins: the data of the thread that exits is gone already.
    let start = || threads::spawn("fabricast-exit", close).is_ok();
    if !std::panic::catch_unwind(start).unwrap_or(false) {
        return;
    }
    let end = Instant::now() + EXIT_TIMEOUT;
    let mut backoff = RetryBackoff::new(Duration::from_micros(50), Duration::from_millis(10));
    while !IS_CLOSED.load(Ordering::Acquire) && Instant::now() < end {
        std::thread::sleep(backoff.next_pause());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn major_version_is_the_first_number() {
        assert_eq!(major_of("OpenPMIx 4.2.2rc2 (PMIx Standard: 4.2)"), Some(4));
        assert_eq!(major_of("3.1.5"), Some(3));
        assert_eq!(major_of("OpenPMIx 10.0.0a1, repo rev: v1"), Some(10));
        assert_eq!(major_of("99999999999"), None);
        assert_eq!(major_of("unknown"), None);
    }

    fn allocated(bytes: &[u8]) -> *mut c_char {
        // SAFETY: as many bytes as were allocated.
        unsafe {
            let memory = libc::malloc(bytes.len().max(1)).cast::<u8>();
            assert!(!memory.is_null());
            memory.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            memory.cast()
        }
    }

    fn taken(kind: u16, data: abi::Data) -> std::result::Result<Value, Failure> {
        // SAFETY: allocated as the library does it.
        unsafe {
            let value = libc::malloc(size_of::<abi::Value>()).cast::<abi::Value>();
            assert!(!value.is_null());
            value.write(abi::Value { kind, data });
            take(value)
        }
    }

    #[test]
    fn values_of_all_types_are_taken_or_refused() {
        let object = |bytes, size| abi::Data { bytes: abi::ByteObject { bytes, size } };
        let bytes = taken(kind::BYTE_OBJECT, object(allocated(b"card"), 4));
        assert_eq!(bytes, Ok(Value::Bytes(b"card".to_vec())));
        let empty = taken(kind::BYTE_OBJECT, object(std::ptr::null_mut(), 0));
        assert_eq!(empty, Ok(Value::Bytes(Vec::new())));
        for (pointer, size) in [(std::ptr::null_mut(), 4), (allocated(b"card"), MAX_LENGTH + 1)] {
            let refused = taken(kind::BYTE_OBJECT, object(pointer, size));
            assert!(matches!(refused, Err(Failure::Malformed(_))), "{refused:?}");
        }
        let text = taken(kind::STRING, abi::Data { string: allocated(b"0,1\0") });
        assert_eq!(text, Ok(Value::Text("0,1".to_owned())));
        assert_eq!(taken(kind::UINT16, abi::Data { uint16: 7 }), Ok(Value::Number(7)));
        assert_eq!(taken(kind::UINT32, abi::Data { uint32: 8 }), Ok(Value::Number(8)));
        assert_eq!(taken(kind::UINT64, abi::Data { uint64: 9 }), Ok(Value::Number(9)));
        assert_eq!(taken(kind::INT, abi::Data { int32: 10 }), Ok(Value::Number(10)));
        assert!(taken(kind::INT, abi::Data { int32: -1 }).is_err());
        assert!(taken(99, abi::Data { words: [1; 3] }).is_err());
    }
}
