use super::*;

fn category(sources: &Sources, path: &str) -> Category {
    sources.files()[sources.find(path).unwrap()].category
}

fn sources<const N: usize>(texts: [(&str, &str); N]) -> Sources {
    Sources::new(texts.map(|(path, text)| (path.to_owned(), text.to_owned())).into())
}

#[test]
fn files_below_a_test_module_are_tests() {
    let sources = sources([
        ("ipc/src/lib.rs", "#[cfg(any(test, feature = \"fuzzing\"))] mod harness; mod queue;"),
        ("ipc/src/harness/mod.rs", "mod worker;"),
        ("ipc/src/harness/worker.rs", ""),
        ("ipc/src/queue.rs", "mod entry; #[cfg(test)] #[path = \"entry_checks.rs\"] mod checks;"),
        ("ipc/src/queue/entry.rs", ""),
        ("ipc/src/entry_checks.rs", ""),
        ("ipc/src/unreached.rs", ""),
    ]);
    for path in ["lib.rs", "queue.rs", "queue/entry.rs", "unreached.rs"] {
        assert_eq!(category(&sources, &format!("ipc/src/{path}")), Category::Production, "{path}");
    }
    for path in ["harness/mod.rs", "harness/worker.rs", "entry_checks.rs"] {
        assert_eq!(category(&sources, &format!("ipc/src/{path}")), Category::Tests, "{path}");
    }
}

#[test]
fn file_that_production_code_declares_too_is_no_test() {
    let sources = sources([
        (
            "gpu/src/lib.rs",
            "#[cfg(test)] mod faults; #[cfg(not(test))] #[path = \"none.rs\"] mod faults; mod inner { mod deep; }",
        ),
        ("gpu/src/faults.rs", "#[path = \"none.rs\"] mod none;"),
        ("gpu/src/none.rs", ""),
        ("gpu/src/inner/deep.rs", "#![cfg(test)]"),
    ]);
    assert_eq!(category(&sources, "gpu/src/faults.rs"), Category::Tests);
    assert_eq!(category(&sources, "gpu/src/none.rs"), Category::Production);
    assert_eq!(category(&sources, "gpu/src/inner/deep.rs"), Category::Tests);
}

#[test]
fn file_with_an_error_is_reported() {
    let sources = sources([("gpu/src/lib.rs", "\nfn () {}")]);
    assert!(sources.failures()[0].starts_with("gpu/src/lib.rs:2: "), "{:?}", sources.failures());
}
