//! Processes, from the system's view.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

/// Only reached if a test fails.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Polls until there is a result.
///
/// # Panics
/// If there is none within a minute.
#[track_caller]
pub fn poll_until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + TIMEOUT;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A process, distinguished from later ones with the same process id.
pub type Process = (i32, String);

/// The process that has this id now.
#[must_use]
pub fn process(number: i32) -> Option<Process> {
    let state = std::fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
    // After the name, which may contain any characters: state, …, start time.
    let mut fields = state.rsplit_once(')')?.1.split_whitespace();
    let is_gone = fields.next()? == "Z";
    (!is_gone).then(|| fields.nth(18).map(|began| (number, began.to_owned())))?
}

/// The processes that it started itself.
#[must_use]
pub fn children(number: i32) -> BTreeSet<Process> {
    let text = std::fs::read_to_string(format!("/proc/{number}/task/{number}/children"));
    let text = text.unwrap_or_default();
    text.split_whitespace().filter_map(|number| process(number.parse().ok()?)).collect()
}

/// The processes that it started, and their descendants.
#[must_use]
pub fn descendants(number: i32) -> BTreeSet<Process> {
    let own = children(number);
    let further: Vec<_> = own.iter().flat_map(|(number, _)| descendants(*number)).collect();
    own.into_iter().chain(further).collect()
}

/// The number of descriptors that this process has open.
///
/// # Panics
/// If /proc is not mounted.
#[must_use]
pub fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// The system's status line of a process or a thread; empty if it has exited.
#[must_use]
pub fn status(of: &Path, name: &str) -> String {
    let all = std::fs::read_to_string(of.join("status")).unwrap_or_default();
    let line = all.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_default().trim().to_owned()
}

/// The cores that this process may use.
///
/// # Panics
/// If the system's format is unknown.
#[must_use]
pub fn cores() -> Vec<usize> {
    let mut all = Vec::new();
    for part in status(Path::new("/proc/self"), "Cpus_allowed_list").split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let [first, last] = [first, last].map(|core| core.parse::<usize>().unwrap());
        all.extend(first..=last);
    }
    all
}

/// Waits until all of these processes have exited.
///
/// # Panics
/// If some remain for a minute.
#[track_caller]
pub fn wait_until_gone(all: &BTreeSet<Process>) {
    poll_until("processes stay", || {
        all.iter().all(|it| process(it.0).as_ref() != Some(it)).then_some(())
    });
}
