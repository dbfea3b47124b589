use super::*;

/// Lines of a file that remain after the removal of its tests.
fn remaining(text: &str) -> Vec<&str> {
    let mut file = syn::parse_file(text).unwrap();
    let removed = remove_tests(&mut file);
    let lines = text.lines().enumerate();
    lines.filter(|(at, _)| !removed.contains(&(at + 1))).map(|(_, line)| line).collect()
}

fn is_test(predicate: &str) -> bool {
    let text = format!("#[cfg({predicate})]\nmod tests {{}}\n");
    remaining(&text).is_empty()
}

#[test]
fn paths_have_categories() {
    let categories = [
        ("ipc/src/queue/mod.rs", Category::Production),
        ("packaging/package.py", Category::Production),
        ("ipc/src/queue_tests.rs", Category::Tests),
        ("ipc/src/ring_tests/wrap.rs", Category::Tests),
        ("bench/tests/topic.rs", Category::Tests),
        ("testkit/src/lib.rs", Category::Tests),
        ("bench/src/topic/mod.rs", Category::Benchmarks),
        ("benches/raw/raw_fabric.c", Category::Benchmarks),
        ("examples/ring.rs", Category::Examples),
        ("fabric/sys/src/bindings/libfabric-2.1.c", Category::Generated),
        ("xtask/src/main.rs", Category::Tools),
    ];
    for (path, category) in categories {
        assert_eq!(Category::of(path), category, "{path}");
    }
}

#[test]
fn predicates_that_only_tests_satisfy() {
    for predicate in [
        "test",
        "doctest",
        "all(test, not(loom))",
        "all(target_os = \"linux\", test)",
        "any(test, feature = \"fuzzing\")",
        "any(test, all(feature = \"crash-test\", unix))",
        "not(not(test))",
    ] {
        assert!(is_test(predicate), "{predicate}");
    }
}

#[test]
fn predicates_of_other_builds() {
    for predicate in [
        "not(test)",
        "not(feature = \"fault-injection\")",
        "any(test, feature = \"mpi\")",
        "all(unix, not(test))",
        "feature = \"regenerate\"",
        "target_arch = \"x86_64\"",
    ] {
        assert!(!is_test(predicate), "{predicate}");
    }
}

#[test]
fn nested_modules_of_tests_are_removed() {
    let text = r##"
mod queue {
    #[cfg(any(test, feature = "fuzzing"))]
    pub mod fuzzing {
        mod inner {
            const TEXT: &str = r#"}}} mod outside { "#;
        }
    }
    fn push() {}
}
/// Documentation.
#[cfg(test)]
#[allow(unused)]
mod tests {}
"##;
    assert_eq!(remaining(text), ["", "mod queue {", "    fn push() {}", "}"]);
}

#[test]
fn braces_in_strings_and_macros_end_nothing() {
    let text = r###"
#[cfg(test)]
const END: &str = "}\"";
#[test]
fn prints() {
    assert_eq!(format!("{{"), r##"{"#"##);
    let brace = '{';
}
macro_rules! open { () => { #[cfg(test)] struct InMacro { } } }
"###;
    let kept = "macro_rules! open { () => { #[cfg(test)] struct InMacro { } } }";
    assert_eq!(remaining(text), ["", kept]);
}

#[test]
fn parts_of_items_are_removed() {
    let text = r#"
struct Offer {
    length: u64,
    #[cfg(feature = "fault-injection")]
    emulated: bool,
}
enum Fault {
    #[cfg(test)]
    Injected,
    Real,
}
impl Offer {
    #[cfg(test)]
    fn emulated(&self) -> bool {
        true
    }
    fn length(&mut self) -> u64 {
        #[cfg(test)]
        self.log.push(Offer { length: 1 });
        #[cfg(test)]
        if self.emulated {
            return 0;
        }
        match self.length {
            #[cfg(test)]
            1 => 2,
            length => length,
        }
    }
}
"#;
    let expected = r#"
struct Offer {
    length: u64,
}
enum Fault {
    Real,
}
impl Offer {
    fn length(&mut self) -> u64 {
        match self.length {
            length => length,
        }
    }
}
"#;
    assert_eq!(remaining(text), expected.lines().collect::<Vec<_>>());
}

#[test]
fn attribute_of_a_whole_file() {
    let is_test = |text| has_test_attribute(&syn::parse_file(text).unwrap().attrs);
    assert!(is_test("#![cfg(test)]\nfn works() {}"));
    assert!(!is_test("#![cfg(unix)]\n#![allow(unused)]\nfn works() {}"));
}
