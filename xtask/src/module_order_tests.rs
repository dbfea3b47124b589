use super::*;

fn messages<const N: usize>(texts: [(&str, &str); N]) -> Vec<String> {
    let sources =
        Sources::new(texts.map(|(path, text)| (format!("src/{path}"), text.to_owned())).into());
    check(&sources, &Crate::new(&sources, "src/lib.rs").unwrap())
}

const ROOT: &str = "\
//! A library.
//!
//! Modules, each importing only those
//! before it: `error`, `lock`,
//! `queue`.

mod error;
mod lock;
mod queue;
#[cfg(test)]
mod tests;
pub use lock::Lock;
";

#[test]
fn imports_of_earlier_modules_are_allowed() {
    let found = messages([
        ("lib.rs", ROOT),
        ("error.rs", "#[cfg(test)] use crate::queue::Queue;"),
        (
            "lock.rs",
            "use super::error::Error; mod inner { use super::super::error; } pub struct Lock;",
        ),
        ("queue.rs", "use crate::{Lock, error::Error};"),
        ("tests.rs", "use crate::queue;"),
    ]);
    assert_eq!(found, Vec::<String>::new());
}

#[test]
fn import_of_a_later_module_is_reported() {
    let found = messages([
        ("lib.rs", ROOT),
        ("error.rs", "fn text() -> String { format!(\"{}\", crate::Lock::NAME) }"),
        ("lock.rs", "\nuse crate::queue;\npub struct Lock;"),
        ("queue.rs", ""),
    ]);
    let expected = [
        "src/lib.rs: error imports lock, which comes after it:\n    src/error.rs:1: crate::Lock::NAME",
        "src/lib.rs: lock imports queue, which comes after it:\n    src/lock.rs:2: crate::queue",
    ];
    assert_eq!(found, expected);
}

#[test]
fn cycle_and_unlisted_module_are_reported() {
    let found = messages([
        ("lib.rs", "//! Modules, each importing only those before it: `a`.\nmod a; mod b;"),
        ("a.rs", "use crate::b::B;"),
        ("b.rs", "use crate::a::A;"),
    ]);
    assert_eq!(
        found,
        ["src/lib.rs: cycle of modules: a, b", "src/lib.rs: the list of modules lacks b"]
    );
}
