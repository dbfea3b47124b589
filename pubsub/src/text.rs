//! Words for people.

/// A number of things: `1 message`, `2 messages`.
pub(crate) fn counted(number: u64, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}
