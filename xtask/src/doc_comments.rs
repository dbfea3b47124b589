//! Documentation comments.

use proc_macro2::TokenStream;
use syn::Attribute;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use crate::tokens::{self, DocText};

/// Words that a documentation comment does not begin with: they do not say what the thing is.
const POOR_BEGINNINGS: [&str; 5] = ["It", "Its", "The same", "Whether", "As"];

/// Returns the paragraphs of a documentation comment, each in one line.
pub(crate) fn paragraphs(attributes: &[Attribute]) -> Vec<String> {
    let texts: Vec<String> =
        attributes.iter().filter_map(|one| tokens::doc_text(&one.meta)).collect();
    let mut found = vec![String::new()];
    for line in texts.iter().flat_map(|text| text.split('\n')).map(str::trim) {
        match found.last_mut() {
            Some(paragraph) if !line.is_empty() => {
                paragraph.push_str(line);
                paragraph.push(' ');
            }
            _ => found.push(String::new()),
        }
    }
    found
}

/// Returns the names between backticks.
pub(crate) fn quoted(text: &str) -> Vec<String> {
    text.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// A documentation comment that begins with a word of [`POOR_BEGINNINGS`].
pub(crate) struct PoorBeginning {
    pub(crate) line: usize,
    pub(crate) text: String,
}

/// Returns the documentation comments of a file that begin badly.
pub(crate) fn poor_beginnings(file: &syn::File) -> Vec<PoorBeginning> {
    let mut comments = Comments::default();
    comments.visit_file(file);
    comments.texts.sort_by_key(|text| text.first_line);
    let mut found = Vec::new();
    // The text of a comment begins with its first line that is not empty.
    let mut last_line = 0;
    let mut has_begun = false;
    for text in &comments.texts {
        has_begun &= text.first_line == last_line + 1;
        last_line = text.last_line;
        let Some(line) = text.text.lines().map(str::trim).find(|line| !line.is_empty()) else {
            continue;
        };
        if !has_begun && POOR_BEGINNINGS.iter().any(|words| begins_with(line, words)) {
            found.push(PoorBeginning { line: text.first_line, text: line.to_owned() });
        }
        has_begun = true;
    }
    found
}

fn begins_with(line: &str, words: &str) -> bool {
    line.strip_prefix(words).is_some_and(|rest| !rest.starts_with(char::is_alphanumeric))
}

/// Collects the texts of a file's documentation comments.
#[derive(Default)]
struct Comments {
    texts: Vec<DocText>,
}

impl<'ast> Visit<'ast> for Comments {
    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if let Some(text) = tokens::doc_text(&attribute.meta) {
            let span = attribute.span();
            let (first_line, last_line) = (span.start().line, span.end().line);
            self.texts.push(DocText { text, first_line, last_line });
        }
        visit::visit_attribute(self, attribute);
    }

    fn visit_token_stream(&mut self, tokens: &'ast TokenStream) {
        self.texts.extend(tokens::doc_texts(tokens.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn poor(text: &str) -> Vec<String> {
        let found = poor_beginnings(&syn::parse_file(text).unwrap());
        found.iter().map(|one| format!("{}: {}", one.line, one.text)).collect()
    }

    #[test]
    fn only_the_beginning_of_a_comment_counts() {
        let text = "\
//! As for queues.

/// Number of entries.
/// It is even.
struct Length {
    /// Whether it is known.
    known: bool,
    /// Assigned by the peer.
    peer: u8,
    ///
    /// Its owner.
    owner: u8,
}

// It is not documentation.
/** The same
 * in a block. */
fn block() {
    //! It has a comment within.
}
";
        let expected = [
            "1: As for queues.",
            "6: Whether it is known.",
            "11: Its owner.",
            "16: The same",
            "19: It has a comment within.",
        ];
        assert_eq!(poor(text), expected);
    }

    #[test]
    fn comments_in_macros_count() {
        let text = "\
declare! {
    /// It waits.
    [1] struct Timeout
    { #[doc = \"Whether it is set\"] set: bool }
}
";
        assert_eq!(poor(text), ["2: It waits.", "4: Whether it is set"]);
    }

    #[test]
    fn paragraphs_are_joined() {
        let file = syn::parse_file("//! Modules: `a`,\n//! `b`.\n//!\n//! More.\n").unwrap();
        let found = paragraphs(&file.attrs);
        assert_eq!(found, ["Modules: `a`, `b`. ", "More. "]);
        assert_eq!(quoted(&found[0]), ["a", "b"]);
    }
}
