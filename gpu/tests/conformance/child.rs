//! Child processes: their inputs and actions.
//!
//! A child inherits file descriptors, gets texts as arguments, and writes "ready" to its
//! standard output. It exits when its standard input is closed, or when it is killed.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child as Process, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use gpu::{Device, LegacyHandle, Memory, Stream};
use testkit::children::{self, say, wait_for_end_of_input};

use crate::fixture::Fixture;

/// The first file descriptor of a child.
const FIRST: i32 = 100;
/// Time limit for a child to write a line, or to exit.
const TIMEOUT: Duration = Duration::from_secs(100);

/// Kills a process and all its children.
pub fn end_group(process: &Process) {
    // SAFETY: no pointers; a group that was made for this child, which is not reaped yet.
    unsafe { libc::kill(-(process.id() as libc::pid_t), libc::SIGKILL) };
}

/// A child, killed at the latest when it is dropped.
pub struct Child(children::Child);

impl Child {
    pub fn start(role: &str, descriptors: &[&OwnedFd], arguments: &[String]) -> Self {
        let numbers: Vec<_> = descriptors.iter().map(|fd| fd.as_fd().as_raw_fd()).collect();
        let words = std::iter::once(role).chain(arguments.iter().map(String::as_str));
        let mut command = children::respawn(words);
        command.stdout(Stdio::piped());
        // SAFETY: only dup2, which is safe between fork and exec; copies are not close-on-exec.
        unsafe {
            command.pre_exec(move || {
                for (number, to) in numbers.iter().zip(FIRST..) {
                    if libc::dup2(*number, to) < 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        Self(children::Child::start(&mut command))
    }

    /// The next line that it writes; empty if it has exited.
    #[track_caller]
    pub fn line(&mut self) -> String {
        self.0.line(TIMEOUT).unwrap_or_default()
    }

    /// Lets it exit by itself.
    #[track_caller]
    pub fn finish(mut self) {
        self.0.end(TIMEOUT);
    }

    /// Kills it at once.
    pub fn kill(mut self) {
        self.0.kill();
    }
}

fn inherited(number: i32) -> OwnedFd {
    // SAFETY: the parent passed this descriptor to this process; it is taken once.
    unsafe { OwnedFd::from_raw_fd(FIRST + number) }
}

/// Bytes as text, and back.
pub fn to_text(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn from_text(text: &str) -> Vec<u8> {
    (0..text.len() / 2)
        .map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap())
        .collect()
}

pub fn handle_to_text(handle: &LegacyHandle) -> [String; 3] {
    [to_text(&handle.bytes), handle.offset.to_string(), handle.length.to_string()]
}

pub fn handle_from_text(text: &[&str]) -> LegacyHandle {
    LegacyHandle {
        bytes: from_text(text[0]).try_into().unwrap(),
        offset: text[1].parse().unwrap(),
        length: text[2].parse().unwrap(),
    }
}

testkit::child_entry!(enter);

/// The actions of a child.
fn enter(words: &[&str]) {
    let [role, arguments @ ..] = words else { panic!("no role") };
    if *role == "drop-at-exit" {
        return drop_at_exit();
    }
    let fixture = Fixture::open().unwrap();
    match *role {
        "import" => import(&fixture, arguments),
        "import-pieces" => import_pieces(&fixture, arguments),
        "export-and-die" => export_and_die(&fixture, arguments),
        "open-legacy" => open_legacy(&fixture, arguments),
        "hold-legacy" => hold_legacy(&fixture, arguments),
        "take-memory" => take_memory(&fixture, arguments),
        other => panic!("no role {other}"),
    }
}

/// Memory of one piece.
pub fn imported(device: &Device, piece: &OwnedFd, length: u64) -> gpu::Result<Memory> {
    let importer = device.importer(length)?;
    importer.add(piece.as_fd(), length)?;
    importer.finish(0, length)
}

/// Finds seed 1 in the memory, and writes seed 2.
fn import(fixture: &Fixture, arguments: &[&str]) {
    let length = arguments[0].parse().unwrap();
    let memory = imported(&fixture.first, &inherited(0), length).unwrap();
    fixture.check(&memory.whole(), 1);
    fixture.fill(&memory.whole(), 2);
    say("ready");
    wait_for_end_of_input();
}

/// Imports memory in pieces, each of which is closed as soon as it is mapped.
fn import_pieces(fixture: &Fixture, arguments: &[&str]) {
    let numbers: Vec<u64> = arguments.iter().map(|number| number.parse().unwrap()).collect();
    let [offset, length, lengths @ ..] = &numbers[..] else {
        panic!("expected: offset, length, lengths")
    };
    let importer = fixture.first.importer(lengths.iter().sum()).unwrap();
    for (number, length) in lengths.iter().enumerate() {
        importer.add(inherited(number as i32).as_fd(), *length).unwrap();
    }
    let memory = importer.finish(*offset, *length).unwrap();
    fixture.check(&memory.whole(), 1);
    fixture.fill(&memory.whole(), 2);
    say("ready");
    wait_for_end_of_input();
}

/// Allocates memory with seed 3, sends it to the parent over the inherited socket, and waits to
/// be killed.
fn export_and_die(fixture: &Fixture, arguments: &[&str]) {
    let length = arguments[0].parse().unwrap();
    let memory = fixture.first.allocate_shared(length, &[]).unwrap();
    fixture.fill(&memory.whole(), 3);
    let (exported, _) = memory.export_piece(0).unwrap();
    send(&inherited(0), &exported);
    say("ready");
    wait_for_end_of_input();
}

fn open_legacy(fixture: &Fixture, arguments: &[&str]) {
    let memory = fixture.first.open_legacy_handle(&handle_from_text(arguments)).unwrap();
    // Opened once, however often it is requested.
    let again = fixture.first.open_legacy_handle(&handle_from_text(arguments)).unwrap();
    assert_eq!(memory.address(), again.address());
    assert_eq!(gpu::open_legacy_handles(), 1);
    drop(again);
    assert_eq!(gpu::open_legacy_handles(), 1);
    fixture.check(&memory.whole(), 1);
    fixture.fill(&memory.whole(), 2);
    drop(memory);
    assert_eq!(gpu::open_legacy_handles(), 0);
    say("ready");
    wait_for_end_of_input();
}

/// Allocates `cuMemAlloc` memory with seed 4, writes its handle, and waits to be killed.
fn hold_legacy(fixture: &Fixture, arguments: &[&str]) {
    let memory = fixture.first.allocate(arguments[0].parse().unwrap()).unwrap();
    fixture.fill(&memory.whole(), 4);
    say(&handle_to_text(&memory.export_legacy().unwrap()).join(" "));
    wait_for_end_of_input();
}

/// Allocates and fills this much memory, so that memory that was free before is in use.
fn take_memory(fixture: &Fixture, arguments: &[&str]) {
    let memory = fixture.first.allocate(arguments[0].parse().unwrap()).unwrap();
    fixture.stream.fill(&memory.whole(), 0xee).unwrap();
    fixture.stream.synchronize(gpu::DEFAULT_TIMEOUT).unwrap();
    say("ready");
    wait_for_end_of_input();
}

/// Drops a stream, like a static object of C++, after the driver's own exit handlers have run,
/// and prints how many milliseconds that took.
fn drop_at_exit() {
    static LAST: Mutex<Option<(Stream, Memory)>> = Mutex::new(None);
    extern "C" fn drop_last() {
        let start = Instant::now();
        drop(LAST.lock().unwrap().take());
        say(&format!("{} {}", start.elapsed().as_millis(), gpu::leaked_streams()));
    }
    // SAFETY: a function without arguments. It runs last, since it is registered before the
    // driver is loaded.
    assert_eq!(unsafe { libc::atexit(drop_last) }, 0);
    let fixture = Fixture::open().unwrap();
    let (stream, memory) = (fixture.first.stream().unwrap(), fixture.first.allocate(4096).unwrap());
    stream.fill(&memory.whole(), 1).unwrap();
    *LAST.lock().unwrap() = Some((stream, memory));
}

/// Sends a file descriptor over a socket: `gpu` itself does not.
fn send(socket: &OwnedFd, descriptor: &OwnedFd) {
    let mut byte = [1_u8];
    let mut vector = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    let mut control = Control::default();
    // SAFETY: zeros are a valid message; space for one file descriptor.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut vector;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(4) as usize;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(4) as usize;
        libc::CMSG_DATA(header).cast::<i32>().write_unaligned(descriptor.as_raw_fd());
        assert_eq!(libc::sendmsg(socket.as_raw_fd(), &raw const message, 0), 1);
    }
}

pub fn receive(socket: &OwnedFd) -> OwnedFd {
    let mut byte = [0_u8];
    let mut vector = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    let mut control = Control::default();
    // SAFETY: as in `send`; this process owns a received file descriptor.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut vector;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control.0);
        let flags = libc::MSG_CMSG_CLOEXEC;
        assert_eq!(libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags), 1);
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        assert!(!header.is_null(), "no descriptor arrived");
        OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<i32>().read_unaligned())
    }
}

#[derive(Default)]
#[repr(align(8))]
struct Control([u64; 4]);
