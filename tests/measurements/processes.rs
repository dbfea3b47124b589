//! Processes that the command starts, as the system sees them.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Only reached by what fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// Asks again and again until there is an answer.
#[track_caller]
pub(crate) fn until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A process, told from others that get its number later.
pub(crate) type Process = (i32, String);

/// The process that has this number now.
pub(crate) fn process(number: i32) -> Option<Process> {
    let state = std::fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
    // Behind the name, which may have anything in it: what it does, …, when it began.
    let mut fields = state.rsplit_once(')')?.1.split_whitespace();
    let is_gone = fields.next()? == "Z";
    (!is_gone).then(|| fields.nth(18).map(|began| (number, began.to_owned())))?
}

/// Those that it started itself.
pub(crate) fn children(number: i32) -> BTreeSet<Process> {
    let text = std::fs::read_to_string(format!("/proc/{number}/task/{number}/children"));
    let text = text.unwrap_or_default();
    text.split_whitespace().filter_map(|number| process(number.parse().ok()?)).collect()
}

/// Waits until all of them are gone.
#[track_caller]
pub(crate) fn until_gone(all: &BTreeSet<Process>) {
    until("processes stay", || {
        all.iter().all(|it| process(it.0).as_ref() != Some(it)).then_some(())
    });
}
