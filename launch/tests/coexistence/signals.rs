//! Signals and exit handlers of a process in which a group and MPI run.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process;
use std::time::Duration;

use launch::Group;
use testkit::children::say;

use crate::mpi::{Implementation, Mpi, ThreadLevel};
use crate::rank::{LONG, over, put_around};

/// Handled by the program, ignored by it, and waited for by it.
const HANDLED: [i32; 3] = [libc::SIGUSR1, libc::SIGTERM, libc::SIGSEGV];
const IGNORED: i32 = libc::SIGHUP;
const WAITED_FOR: [i32; 3] = [libc::SIGUSR2, libc::SIGINT, libc::SIGALRM];

/// Signals of a thread itself, which cannot wait.
const FAULTS: [i32; 7] = [
    libc::SIGABRT,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGSEGV,
    libc::SIGSYS,
    libc::SIGTRAP,
];

/// A flag of the system's own interface.
const SA_RESTORER: i32 = 0x0400_0000;

extern "C" fn handle(_: i32) {}

extern "C" fn say_first() {
    write_line(b"exit handler before the group\n");
}

extern "C" fn say_second() {
    write_line(b"exit handler after the group\n");
}

/// Rust's output is closed when exit handlers run.
fn write_line(line: &[u8]) {
    // SAFETY: as many bytes as are given.
    unsafe { libc::write(1, line.as_ptr().cast(), line.len()) };
}

/// Order `group-first`: the group, then MPI; `mpi-first`: the reverse.
pub(crate) fn run(implementation: Implementation, directory: &Path, order: &str, provider: &str) {
    let mpi = Mpi::load(implementation);
    at_exit(say_first);
    for signal in HANDLED {
        set_handler(signal, handle as *const () as usize);
    }
    set_handler(IGNORED, libc::SIG_IGN);
    block(&WAITED_FOR);
    if order == "mpi-first" {
        mpi.init(ThreadLevel::Funneled);
    }
    let (handlers, mask, threads) = (handlers(), mask(), threads());
    let unchanged = |when: &str| {
        assert_eq!(self::handlers(), handlers, "signal handlers {when}");
        assert_eq!(self::mask(), mask, "signal mask {when}");
    };
    let mut group = Group::start_with(over(directory, provider)).unwrap();
    unchanged("after the start");
    let node = group.node(pubsub::NodeOptions::default(), LONG).unwrap();
    put_around(&mut group, 2).unwrap();
    unchanged("while the group runs");
    for (thread, blocked) in self::threads() {
        let asynchronous = all_signals().filter(|signal| !FAULTS.contains(signal));
        let free: Vec<_> = asynchronous.filter(|it| blocked >> (it - 1) & 1 == 0).collect();
        let is_of_others = threads.contains_key(&thread);
        assert!(is_of_others || free.is_empty(), "{thread:?} does not block {free:?}");
    }
    if order == "group-first" {
        // The threads of MPI would take them.
        for signal in WAITED_FOR {
            send(signal);
            assert_eq!(take(Duration::from_secs(10)), Some(signal));
        }
    }
    drop(node);
    group.close(LONG).unwrap();
    unchanged("after the end");
    at_exit(say_second);
    if order == "group-first" {
        mpi.init(ThreadLevel::Funneled);
    }
    mpi.finalize();
    say("done");
}

/// The lines of the loaded files that contain this name.
pub(crate) fn libraries(name: &str) -> usize {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let mut paths: Vec<_> = maps.lines().filter_map(|line| line.split(' ').next_back()).collect();
    paths.retain(|path| path.contains(name));
    paths.sort_unstable();
    paths.dedup();
    paths.len()
}

/// The names of the threads with their masks, by number.
fn threads() -> BTreeMap<(u32, String), u64> {
    let read = |task: fs::DirEntry| {
        let number = task.file_name().to_str()?.parse().ok()?;
        let name = fs::read_to_string(task.path().join("comm")).ok()?.trim_end().to_owned();
        let status = fs::read_to_string(task.path().join("status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("SigBlk:"))?;
        Some(((number, name), u64::from_str_radix(line.trim(), 16).ok()?))
    };
    fs::read_dir("/proc/self/task").unwrap().flatten().filter_map(read).collect()
}

/// The signals that a program may use.
fn all_signals() -> impl Iterator<Item = i32> {
    let unblockable = [libc::SIGKILL, libc::SIGSTOP];
    (1..=31).chain(libc::SIGRTMIN()..=libc::SIGRTMAX()).filter(move |it| !unblockable.contains(it))
}

/// Handler, flags and mask of each signal.
fn handlers() -> Vec<(i32, usize, i32, Vec<i32>)> {
    let get = |signal| {
        // SAFETY: all zeros are a valid value, which is overwritten; nothing is set.
        let found = unsafe {
            let mut found: libc::sigaction = std::mem::zeroed();
            assert_eq!(libc::sigaction(signal, std::ptr::null(), &raw mut found), 0);
            found
        };
        // The C library sets this bit itself.
        let flags = found.sa_flags & !SA_RESTORER;
        (signal, found.sa_sigaction, flags, members(&found.sa_mask))
    };
    all_signals().map(get).collect()
}

fn members(set: &libc::sigset_t) -> Vec<i32> {
    // SAFETY: an initialised set.
    all_signals().filter(|signal| unsafe { libc::sigismember(set, *signal) } == 1).collect()
}

/// The signals that this thread blocks.
fn mask() -> Vec<i32> {
    members(&change_mask(&[]))
}

fn set_of(signals: &[i32]) -> libc::sigset_t {
    // SAFETY: the set is initialised before it is used.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in signals {
            libc::sigaddset(&raw mut set, *signal);
        }
        set
    }
}

fn change_mask(added: &[i32]) -> libc::sigset_t {
    let (added, mut before) = (set_of(added), set_of(&[]));
    // SAFETY: two initialised sets.
    let code = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const added, &raw mut before) };
    assert_eq!(code, 0);
    before
}

fn block(signals: &[i32]) {
    change_mask(signals);
}

fn set_handler(signal: i32, handler: usize) {
    // SAFETY: all zeros are a valid value; the handler does nothing.
    let code = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(signal, &raw const action, std::ptr::null_mut())
    };
    assert_eq!(code, 0);
}

/// Sends a signal to this process, for any of its threads.
fn send(signal: i32) {
    // SAFETY: no pointers.
    assert_eq!(unsafe { libc::kill(process::id() as i32, signal) }, 0);
}

/// The next blocked signal of this thread or process.
fn take(timeout: Duration) -> Option<i32> {
    let limit = libc::timespec { tv_sec: timeout.as_secs() as _, tv_nsec: 0 };
    let set = set_of(&WAITED_FOR);
    // SAFETY: an initialised set and a valid time; no information is wanted.
    let signal =
        unsafe { libc::sigtimedwait(&raw const set, std::ptr::null_mut(), &raw const limit) };
    (signal > 0).then_some(signal)
}

fn at_exit(handler: extern "C" fn()) {
    // SAFETY: a function of this program.
    assert_eq!(unsafe { libc::atexit(handler) }, 0);
}

pub(crate) fn kill_this_process() -> ! {
    send(libc::SIGKILL);
    unreachable!("a killed process goes on");
}

pub(crate) fn end_without_handlers() -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(0) }
}
