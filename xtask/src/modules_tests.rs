use super::*;

/// A crate of these files in `src`.
fn sources<const N: usize>(texts: [(&str, &str); N]) -> Sources {
    Sources::new(texts.map(|(path, text)| (format!("src/{path}"), text.to_owned())).into())
}

/// Path of the file that defines what a path in the module `from` means.
fn defining(sources: &Sources, from: &str, path: &str) -> Option<String> {
    let one = Crate::new(sources, "src/lib.rs").unwrap();
    let from = one.modules().iter().position(|module| module.path.join("::") == from).unwrap();
    let segments: Vec<String> = path.split("::").map(str::to_owned).collect();
    match one.resolve(from, &segments)? {
        Target::Module(number) => Some(format!("module {}", one.modules()[number].path.join("::"))),
        Target::ItemOf(number) => Some(sources.files()[one.modules()[number].file].path.clone()),
    }
}

#[test]
fn reexports_lead_to_the_definition() {
    let sources = sources([
        ("lib.rs", "mod queue; pub use queue::Queue as Line;"),
        (
            "queue/mod.rs",
            "mod entry; mod lock; pub(crate) use self::entry::{Entry, Kind}; use lock::*; pub struct Queue;",
        ),
        ("queue/entry.rs", "pub struct Entry; pub enum Kind { Full }"),
        ("queue/lock.rs", "pub fn lock() {}"),
    ]);
    let expect = |from, path, target: &str| {
        assert_eq!(defining(&sources, from, path).as_deref(), Some(target), "{path}");
    };
    expect("queue::lock", "super::Entry", "src/queue/entry.rs");
    expect("queue::lock", "super::Kind::Full", "src/queue/entry.rs");
    expect("queue::entry", "super::lock", "module queue::lock");
    expect("queue", "lock::lock", "src/queue/lock.rs");
    expect("queue::entry", "crate::Line", "src/queue/mod.rs");
    expect("queue::entry", "self::Entry::new", "src/queue/entry.rs");
}

#[test]
fn globs_are_searched_and_may_form_circles() {
    let sources = sources([
        ("lib.rs", "mod a; mod b; pub use a::*; pub use b::*;"),
        ("a.rs", "pub use crate::b::*; pub struct A;"),
        ("b.rs", "pub use crate::a::*; pub struct B;"),
    ]);
    assert_eq!(defining(&sources, "a", "B").as_deref(), Some("src/b.rs"));
    assert_eq!(defining(&sources, "", "a::B").as_deref(), Some("src/b.rs"));
    assert_eq!(defining(&sources, "b", "crate::C"), None);
}

#[test]
fn other_crates_are_not_resolved() {
    let sources = sources([
        ("lib.rs", "mod fabric; mod bench;"),
        ("fabric.rs", "pub struct Domain;"),
        ("bench.rs", "use fabric::Domain;"),
    ]);
    assert_eq!(defining(&sources, "bench", "fabric::Domain"), None);
    assert_eq!(defining(&sources, "bench", "Domain"), None);
    assert_eq!(defining(&sources, "bench", "std::fs::File"), None);
}

#[test]
fn names_that_macros_define_are_guessed() {
    let sources = sources([
        ("lib.rs", "mod error; mod queue;"),
        ("error.rs", "errors::define! { pub struct Error(Kind) }"),
        (
            "queue.rs",
            "use crate::error::Error; macro_rules! local { () => {} } pub(crate) use local;",
        ),
    ]);
    assert_eq!(defining(&sources, "queue", "Error").as_deref(), Some("src/error.rs"));
    assert_eq!(defining(&sources, "error", "super::queue::local").as_deref(), Some("src/queue.rs"));
}

#[test]
fn modules_within_a_file_are_of_that_file() {
    let sources = sources([
        ("lib.rs", "mod queue;"),
        ("queue.rs", "mod inner { mod deep; pub struct Inner; }"),
        ("queue/inner/deep.rs", "use super::Inner;"),
    ]);
    assert_eq!(defining(&sources, "queue::inner::deep", "Inner").as_deref(), Some("src/queue.rs"));
}

#[test]
fn paths_are_collected_from_all_code_but_visibilities() {
    let sources = sources([
        ("lib.rs", "mod queue; pub struct Limit;"),
        (
            "queue.rs",
            "pub(in crate::queue) fn push<T: crate::Entry>(limit: &super::Limit) { \
             use crate::lock::{self as guard, Lock}; \
             assert!(limit.is(crate::FULL), \"{}\", std::line!()); \
             match 1 { crate::ONE => {}, _ => {} } }",
        ),
    ]);
    let one = Crate::new(&sources, "src/lib.rs").unwrap();
    let module = &one.modules()[1];
    let local = |path: &&UsedPath| ["crate", "super"].contains(&path.segments[0].as_str());
    let paths: Vec<_> =
        module.paths.iter().filter(local).map(|path| path.segments.join("::")).collect();
    assert_eq!(paths, ["crate::Entry", "super::Limit", "crate::FULL", "crate::ONE"]);
    let imports: Vec<_> = module
        .imports
        .iter()
        .map(|import| {
            format!(
                "{} as {}",
                import.path.segments.join("::"),
                import.name.as_deref().unwrap_or("*")
            )
        })
        .collect();
    assert_eq!(imports, ["crate::lock as guard", "crate::lock::Lock as Lock"]);
}
