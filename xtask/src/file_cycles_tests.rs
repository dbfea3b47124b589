use super::*;

fn cycles<const N: usize>(texts: [(&str, &str); N]) -> FileCycles {
    let sources =
        Sources::new(texts.map(|(path, text)| (format!("src/{path}"), text.to_owned())).into());
    find(&sources, &Crate::new(&sources, "src/lib.rs").unwrap())
}

fn reports(found: &FileCycles) -> Vec<&str> {
    found.cycles.iter().map(|cycle| cycle.report.as_str()).collect()
}

#[test]
fn parent_that_only_declares_and_reexports_is_in_no_cycle() {
    let found = cycles([
        ("lib.rs", "mod queue; pub use queue::Queue;"),
        ("queue/mod.rs", "mod entry; mod length; pub use entry::Entry; pub use length::Queue;"),
        ("queue/entry.rs", "pub struct Entry;"),
        ("queue/length.rs", "use super::Entry; pub struct Queue(Entry);"),
    ]);
    assert_eq!(reports(&found), Vec::<&str>::new());
}

#[test]
fn child_that_uses_an_item_of_a_parent_that_uses_it_is_a_cycle() {
    let found = cycles([
        ("lib.rs", "mod queue;"),
        (
            "queue/mod.rs",
            "mod entry;\npub use entry::Entry;\npub struct Length;\nfn first() -> Entry { entry::make() }",
        ),
        ("queue/entry.rs", "pub struct Entry(super::Length);\n#[cfg(test)] use crate::queue;"),
    ]);
    let expected = "2 files: src/queue/entry.rs, src/queue/mod.rs\
        \n    src/queue/entry.rs:1: super::Length in src/queue/mod.rs\
        \n    src/queue/mod.rs:4: Entry in src/queue/entry.rs";
    assert_eq!(reports(&found), [expected]);
    assert!(found.cycles_below_parents.is_empty());
}

#[test]
fn item_of_the_parent_without_use_of_the_child_is_no_cycle() {
    let found = cycles([
        ("lib.rs", "mod queue;"),
        ("queue/mod.rs", "mod entry;\npub use entry::Entry;\npub struct Length;"),
        ("queue/entry.rs", "pub struct Entry(super::Length);"),
    ]);
    assert_eq!(reports(&found), Vec::<&str>::new());
}

const LANE: &str = "use crate::send_queue::SendQueue; pub struct Lane;";
const SEND_QUEUE: &str = "use crate::lane::Lane; pub struct SendQueue;";

#[test]
fn justified_cycle_of_siblings() {
    let justified =
        format!("//! A lane.\n//!\n//! Import cycle with\n//! `send_queue`: reason.\n{LANE}");
    let found = cycles([
        ("lib.rs", "mod lane; mod send_queue;"),
        ("lane.rs", &justified),
        ("send_queue.rs", SEND_QUEUE),
    ]);
    assert!(found.cycles[0].is_justified && found.cycles[0].files.len() == 2);
    assert_eq!(found.cycles_below_parents.len(), 1);
    assert_eq!(found.needless, Vec::<String>::new());
}

#[test]
fn justification_names_all_other_files() {
    let justified = format!("//! Import cycle with `queue`: reason.\n{LANE}");
    let found = cycles([
        ("lib.rs", "mod lane; mod send_queue;"),
        ("lane.rs", &justified),
        ("send_queue.rs", SEND_QUEUE),
    ]);
    assert!(!found.cycles[0].is_justified);
    let expected = "src/lane.rs: no import cycle with queue: remove its justification";
    assert_eq!(found.needless, [expected]);
}

#[test]
fn parents_are_the_modules_around_a_file() {
    assert!(is_around("src/lib.rs", "src/queue.rs"));
    assert!(is_around("src/queue/mod.rs", "src/queue/entry/part.rs"));
    assert!(is_around("src/queue.rs", "src/queue/entry.rs"));
    assert!(!is_around("src/queue.rs", "src/queue_budget.rs"));
    assert!(!is_around("src/queue/entry.rs", "src/queue/mod.rs"));
}
