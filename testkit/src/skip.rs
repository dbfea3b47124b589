//! Tests that cannot run on a machine report this, and are counted.
//!
//! The standard harness knows only "passed" and "failed", so a test that returns early counts as
//! passed. [`skip!`](crate::skip!) therefore also appends a line to the file that
//! `TEST_SKIPS` names. `scripts/test` prints these lines in its summary, and in CI fails for
//! those that `tests/skips` does not list.

use std::fs::OpenOptions;
use std::io::Write;

/// The file to which skipped tests are appended, if it is set.
pub const VARIABLE: &str = "TEST_SKIPS";

/// Ends the current test as skipped, with a reason in the form of `format!`.
///
/// ```no_run
/// # fn has_namespaces() -> bool { false }
/// fn two_nodes_find_each_other() {
///     if !has_namespaces() {
///         testkit::skip!("creating network namespaces is not permitted");
///     }
///     unreachable!()
/// }
/// two_nodes_find_each_other();
/// ```
#[macro_export]
macro_rules! skip {
    ($($reason:tt)+) => {{
        $crate::skip::record(module_path!(), &format!($($reason)+));
        return;
    }};
}

/// Records that the test that runs on this thread is skipped; [`skip!`](crate::skip!) calls this.
/// For tests that run under another name than that of their thread, see [`record_as`].
pub fn record(module: &str, reason: &str) {
    // The harness names the thread of a test after the test, without the crate.
    let package = module.split("::").next().unwrap_or(module);
    let thread = std::thread::current();
    record_as(&format!("{package}::{}", thread.name().unwrap_or("unnamed")), reason);
}

/// Records that a test is skipped.
///
/// # Panics
///
/// If the file that `TEST_SKIPS` names cannot be written: the skip would go unnoticed.
pub fn record_as(test: &str, reason: &str) {
    let line = format!("{test}: {}\n", reason.replace('\n', " "));
    print!("skipped: {line}");
    let Some(path) = std::env::var_os(VARIABLE) else { return };
    let mut file = OpenOptions::new().append(true).create(true).open(&path).expect(VARIABLE);
    // One write, so that lines of processes that run at the same time stay whole.
    file.write_all(line.as_bytes()).expect(VARIABLE);
}
