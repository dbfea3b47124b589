use super::*;

fn found(text: &str) -> Vec<String> {
    paths(text.parse().unwrap()).iter().map(|path| path.segments.join("::")).collect()
}

#[test]
fn paths_in_arguments_of_macros() {
    assert_eq!(
        found("\"{}\", super::queue::length(&self.entries[crate::LIMIT])"),
        ["super::queue::length", "crate::LIMIT"]
    );
    assert_eq!(found("$crate::error::Error, $name::new, Queue"), ["crate::error::Error", "Queue"]);
}

#[test]
fn fields_lifetimes_and_other_crates_are_no_paths() {
    assert_eq!(found("value.Field, &'Life u8, ::std::fs::File, variable"), Vec::<String>::new());
}

#[test]
fn words_are_not_parts_of_paths() {
    let tokens = "struct Queue { entry: [crate::Entry; std::LENGTH] }".parse().unwrap();
    assert_eq!(words(tokens), ["struct", "Queue", "entry"]);
}
