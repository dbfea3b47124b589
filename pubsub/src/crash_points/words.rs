//! Words that end the process at a chosen store, and children that use them.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{self, Relaxed};
use std::time::Duration;

use ipc::{Layout, Life, MappedWords, Part, Segment, Words};

/// The sources whose stores are points.
const SOURCES: &[&str] = &[
    "pubsub/src/pool/ledger.rs",
    "pubsub/src/pool/ledger/ordered.rs",
    "pubsub/src/pool/note.rs",
    "pubsub/src/topic/alarm.rs",
    "pubsub/src/topic/destinations.rs",
    "pubsub/src/topic/elsewhere.rs",
    "pubsub/src/topic/given_up.rs",
    "pubsub/src/topic/intent.rs",
    "pubsub/src/topic/words.rs",
    "pubsub/src/topic/origins.rs",
    "pubsub/src/topic/pressure.rs",
    "pubsub/src/topic/publishers.rs",
    "ipc/src/allocator/mod.rs",
    "ipc/src/allocator/change.rs",
    "ipc/src/bell.rs",
    "ipc/src/queue/members.rs",
    "ipc/src/queue/publish.rs",
    "ipc/src/queue/subscribe.rs",
];
/// Of these every place that stores has to be reached; of the others the test of `ipc` sees
/// to that, and here they are the moments between.
const OURS: usize = 12;
const MOST_LINES: usize = 1000;
/// In a loop the first times are all different, the rest are much the same.
const TIMES: u32 = 2;

/// A line of the source that stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Place {
    source: usize,
    line: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", SOURCES[self.source], self.line)
    }
}

/// Where children were killed, before and after: one word for each line, kept in memory that
/// they share with us.
fn killed_at() -> &'static MappedWords {
    static WORDS: OnceLock<MappedWords> = OnceLock::new();
    WORDS.get_or_init(|| {
        let layout = Layout::new("places", 1);
        Segment::create(layout, SOURCES.len() * MOST_LINES * 8).unwrap().words()
    })
}

/// The places where a child was killed, before the store and after it.
pub(super) fn reached() -> BTreeSet<Place> {
    let all = (0..SOURCES.len())
        .flat_map(|source| (0..MOST_LINES).map(move |line| Place { source, line }));
    let index = |place: &Place| place.source * MOST_LINES + place.line;
    all.filter(|place| killed_at().load(index(place), Relaxed) == 3).collect()
}

/// The places in our sources that store.
pub(super) fn places_that_store() -> BTreeSet<Place> {
    let calls =
        [".store(", ".compare_exchange(", ".swap(", ".fetch_and(", ".fetch_or(", ".fetch_add("];
    let mut places = BTreeSet::new();
    for (source, path) in SOURCES.iter().enumerate().take(OURS) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
        let text = std::fs::read_to_string(path).unwrap();
        assert!(text.lines().count() < MOST_LINES);
        for (at, line) in text.lines().enumerate() {
            let is_comment = line.trim_start().starts_with("//");
            if !is_comment && calls.iter().any(|call| line.contains(call)) {
                places.insert(Place { source, line: at + 1 });
            }
        }
    }
    places
}

/// Which point to die at, if any.
#[derive(Debug, Default)]
pub(super) struct Crash(RefCell<State>);

#[derive(Debug, Default)]
struct State {
    /// Points still to be passed; None: immortal.
    left: Option<u64>,
    times: HashMap<(Place, bool), u32>,
}

impl Crash {
    fn point(&self, caller: &Location<'_>, is_after: bool) {
        let mut state = self.0.borrow_mut();
        let Some(left) = state.left else { return };
        let Some(source) = SOURCES.iter().position(|source| caller.file().ends_with(source)) else {
            return;
        };
        let place = Place { source, line: caller.line() as usize };
        let times = state.times.entry((place, is_after)).or_default();
        *times += 1;
        if *times > TIMES {
            return;
        }
        if left > 0 {
            state.left = Some(left - 1);
            return;
        }
        killed_at().fetch_or(place.source * MOST_LINES + place.line, 1 << u32::from(is_after));
        // SAFETY: ends this process, a child, like a stroke of lightning.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        unreachable!("a killed process goes on");
    }
}

/// Words whose stores are points.
#[derive(Debug, Clone)]
pub(super) struct Crashing<'a> {
    words: Part<MappedWords>,
    crash: &'a Crash,
}

impl<'a> Crashing<'a> {
    pub(super) fn new(words: Part<MappedWords>, crash: &'a Crash) -> Self {
        Self { words, crash }
    }

    #[track_caller]
    fn around<T>(&self, store: impl FnOnce() -> T) -> T {
        let caller = Location::caller();
        self.crash.point(caller, false);
        let result = store();
        self.crash.point(caller, true);
        result
    }
}

impl Words for Crashing<'_> {
    fn count(&self) -> usize {
        self.words.count()
    }
    fn load(&self, at: usize, order: Ordering) -> u64 {
        self.words.load(at, order)
    }
    #[track_caller]
    fn store(&self, at: usize, value: u64, order: Ordering) {
        self.around(|| self.words.store(at, value, order));
    }
    #[track_caller]
    fn compare_exchange(&self, at: usize, current: u64, new: u64) -> Result<u64, u64> {
        self.around(|| self.words.compare_exchange(at, current, new))
    }
    #[track_caller]
    fn swap(&self, at: usize, value: u64) -> u64 {
        self.around(|| self.words.swap(at, value))
    }
    #[track_caller]
    fn fetch_and(&self, at: usize, bits: u64) -> u64 {
        self.around(|| self.words.fetch_and(at, bits))
    }
    #[track_caller]
    fn fetch_or(&self, at: usize, bits: u64) -> u64 {
        self.around(|| self.words.fetch_or(at, bits))
    }
    #[track_caller]
    fn fetch_add(&self, at: usize, value: u64) -> u64 {
        self.around(|| self.words.fetch_add(at, value))
    }
    fn sleep(&self, at: usize, low: u32, longest: Duration) {
        self.words.sleep(at, low, longest);
    }
    fn wake(&self, at: usize, how_many: u32) {
        self.words.wake(at, how_many);
    }
    fn pause(&self) {
        self.words.pause();
    }
    fn fence(&self) {
        self.words.fence();
    }
}

/// A child process.
#[derive(Debug)]
pub(super) struct Fork(libc::pid_t);

impl Fork {
    /// A child that does this, and dies at the given point if it comes there.
    pub(super) fn new(crash: &Crash, point: u64, act: impl FnOnce()) -> Self {
        killed_at();
        // SAFETY: the child goes on alone, with a copy of everything. It uses what this
        // thread uses, and never returns from here.
        let number = unsafe { libc::fork() };
        assert!(number >= 0, "fork: {}", std::io::Error::last_os_error());
        if number == 0 {
            *crash.0.borrow_mut() = State { left: Some(point), ..State::default() };
            let code = i32::from(catch_unwind(AssertUnwindSafe(act)).is_err());
            // SAFETY: ends the child without running anything that is the parent's.
            unsafe { libc::_exit(code) };
        }
        Self(number)
    }

    pub(super) fn life(&self) -> Life {
        // SAFETY: no pointers; the child is not reaped yet, so the number is its own.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, self.0, 0) };
        assert!(fd >= 0, "pidfd_open: {}", std::io::Error::last_os_error());
        // SAFETY: just opened, and nobody else's.
        Life::from_fd(unsafe { OwnedFd::from_raw_fd(fd as RawFd) }).unwrap()
    }

    /// Waits for its end; true if it was killed, false if it came to its end.
    pub(super) fn wait(self) -> bool {
        let mut status = 0;
        // SAFETY: a child of ours, not reaped yet.
        let found = unsafe { libc::waitpid(self.0, &raw mut status, 0) };
        assert_eq!(found, self.0);
        if libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL {
            return true;
        }
        assert!(
            libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
            "the child failed: status {status:#x}"
        );
        false
    }
}
