//! Words that end the process at a chosen store: for tests that kill a process before and after
//! every store to shared memory.
//!
//! A test names the [sources](Sources) whose stores are kill points, builds its structures on
//! [`CrashingWords`], and forks children. Each child's [`Crash`] [kills it](Crash::crash_at) at
//! the first point, the second, and so on, until a child runs to its end. Then no store may be
//! [uncovered](Sources::missed): a store without a kill is an untested case.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::panic::Location;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{self, Relaxed};
use std::time::Duration;

use crate::segment::{Layout, MappedWords, Segment};
use crate::words::{WordRange, Words};

const MAX_LINES: usize = 1000;

/// A line of a source that stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StoreSite {
    source: &'static str,
    line: usize,
}

impl fmt::Display for StoreSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.source, self.line)
    }
}

/// The sources whose stores are kill points, and the points where children were killed.
#[derive(Debug)]
pub struct Sources {
    paths: &'static [&'static str],
    covered: usize,
    times: u32,
    /// Before and after: one word for each line, in memory that is shared with the children.
    killed_at: OnceLock<MappedWords>,
}

impl Sources {
    /// The files with these paths, relative to the workspace root. The first `covered` of them
    /// must have every store reached; the others only add points. A point counts up to `times`
    /// times: in a loop the first iterations differ, the rest are alike.
    #[must_use]
    pub const fn new(paths: &'static [&'static str], covered: usize, times: u32) -> Self {
        Self { paths, covered, times, killed_at: OnceLock::new() }
    }

    fn killed_at(&self) -> &MappedWords {
        self.killed_at.get_or_init(|| {
            let length = self.paths.len() * MAX_LINES * 8;
            let segment = Segment::create(Layout::new("kill points", 1), length);
            segment.expect("allocate memory for the points").words()
        })
    }

    fn index(&self, caller: &Location<'_>) -> Option<usize> {
        self.paths.iter().position(|path| caller.file().ends_with(path))
    }

    /// The stores where a child was killed, both before and after the store.
    #[must_use]
    pub fn reached(&self) -> BTreeSet<StoreSite> {
        let sites = self.paths.iter().enumerate().flat_map(|(number, source)| {
            (0..MAX_LINES).map(move |line| (number * MAX_LINES + line, StoreSite { source, line }))
        });
        let reached = sites.filter(|(at, _)| self.killed_at().load(*at, Relaxed) == 3);
        reached.map(|(_, site)| site).collect()
    }

    /// The stores where no child was killed before and after. `root` is the workspace root.
    ///
    /// # Panics
    /// If a source cannot be read, or contains no store.
    #[must_use]
    pub fn missed(&self, root: &Path) -> BTreeSet<StoreSite> {
        let mut sites = BTreeSet::new();
        for source in &self.paths[..self.covered] {
            let text = std::fs::read_to_string(root.join(source)).expect("a source");
            assert!(text.lines().count() < MAX_LINES, "{source} is too long");
            sites.extend(lines_that_store(&text).map(|line| StoreSite { source, line }));
        }
        assert!(!sites.is_empty(), "no source contains a store");
        sites.difference(&self.reached()).copied().collect()
    }
}

fn lines_that_store(text: &str) -> impl Iterator<Item = usize> {
    const CALLS: [&str; 7] = [
        ".store(",
        ".compare_exchange(",
        ".swap(",
        ".fetch_and(",
        ".fetch_or(",
        ".fetch_add(",
        "store_all(",
    ];
    let lines: Vec<&str> = text.lines().collect();
    // Tests come last in a file; the declaration of a test module does not count.
    let begins_tests =
        |pair: &[&str]| pair[0].starts_with("#[cfg(test)]") && pair[1].ends_with('{');
    let end = lines.windows(2).position(begins_tests).unwrap_or(lines.len());
    let stores = |line: &str| {
        !line.trim_start().starts_with("//") && CALLS.iter().any(|call| line.contains(call))
    };
    lines.into_iter().take(end).zip(1..).filter(move |(line, _)| stores(line)).map(|(_, at)| at)
}

/// The point to die at, if any.
pub struct Crash {
    sources: &'static Sources,
    state: RefCell<State>,
    /// An action right before the next compare-and-exchange in a source.
    interleaving: RefCell<Option<Interleaving>>,
}

type Interleaving = (&'static str, Box<dyn FnOnce()>);

impl fmt::Debug for Crash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.state.fmt(f)
    }
}

#[derive(Debug, Default)]
struct State {
    /// Points before the kill; None: never killed.
    left: Option<u64>,
    times: HashMap<(StoreSite, bool), u32>,
}

impl Crash {
    /// A crash at no point yet.
    #[must_use]
    pub fn new(sources: &'static Sources) -> Self {
        // Before any child is forked, because the children share it.
        sources.killed_at();
        Self { sources, state: RefCell::default(), interleaving: RefCell::default() }
    }

    /// Kills this process at its `point`th point from now on, if it gets that far.
    pub fn crash_at(&self, point: u64) {
        *self.state.borrow_mut() = State { left: Some(point), ..State::default() };
    }

    /// Runs an action, for another process, right before the next compare-and-exchange in this
    /// source.
    pub fn at_next_exchange_in(&self, source: &'static str, act: impl FnOnce() + 'static) {
        *self.interleaving.borrow_mut() = Some((source, Box::new(act)));
    }

    fn before_exchange(&self, caller: &Location<'_>) {
        let is_here = |(source, _): &Interleaving| caller.file().ends_with(source);
        let act = self.interleaving.borrow_mut().take_if(|interleaving| is_here(interleaving));
        if let Some((_, act)) = act {
            act();
        }
    }

    fn point(&self, caller: &Location<'_>, is_after: bool) {
        let mut state = self.state.borrow_mut();
        let Some(left) = state.left else { return };
        let Some(source) = self.sources.index(caller) else { return };
        let line = caller.line() as usize;
        let site = StoreSite { source: self.sources.paths[source], line };
        let times = state.times.entry((site, is_after)).or_default();
        *times += 1;
        if *times > self.sources.times {
            return;
        }
        if left > 0 {
            state.left = Some(left - 1);
            return;
        }
        let at = source * MAX_LINES + line;
        self.sources.killed_at().fetch_or(at, 1 << u32::from(is_after));
        // SAFETY: ends this process, a child, at once.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        unreachable!("a killed process continued");
    }
}

/// Words whose stores are kill points.
#[derive(Debug, Clone)]
pub struct CrashingWords<'a> {
    words: WordRange<MappedWords>,
    crash: &'a Crash,
}

impl<'a> CrashingWords<'a> {
    /// Wraps these words.
    #[must_use]
    pub fn new(words: WordRange<MappedWords>, crash: &'a Crash) -> Self {
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

impl Words for CrashingWords<'_> {
    fn count(&self) -> usize {
        self.words.count()
    }
    fn word(&self, _: usize) -> Option<&AtomicU64> {
        None
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
        self.crash.before_exchange(Location::caller());
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
    fn sleep(&self, at: usize, low: u32, timeout: Duration) {
        self.words.sleep(at, low, timeout);
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
