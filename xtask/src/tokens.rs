//! What the arguments of macros and attributes contain, which the parser leaves as tokens.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::{Expr, Lit, Meta};

/// A path such as `crate::queue::Entry`, with the line where it stands.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct UsedPath {
    pub(crate) segments: Vec<String>,
    pub(crate) line: usize,
}

/// A line of a documentation comment, or all lines of a `/** … */`.
#[derive(Debug)]
pub(crate) struct DocText {
    pub(crate) text: String,
    pub(crate) first_line: usize,
    pub(crate) last_line: usize,
}

/// Returns the paths among tokens. A single word is one if it begins with a capital letter: others
/// are mostly variables.
pub(crate) fn paths(tokens: TokenStream) -> Vec<UsedPath> {
    let mut found = Vec::new();
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut at = 0;
    while at < tokens.len() {
        if let TokenTree::Group(group) = &tokens[at] {
            found.extend(paths(group.stream()));
        }
        let TokenTree::Ident(first) = &tokens[at] else {
            at += 1;
            continue;
        };
        // A field, a lifetime, a parameter of a macro, or a part of a path in another crate.
        let is_other = at > 0
            && (is_mark(&tokens, at - 1, '.')
                || is_mark(&tokens, at - 1, '\'')
                || is_mark(&tokens, at - 1, '$') && first != "crate"
                || at > 1 && is_colons(&tokens, at - 2));
        let mut segments = vec![first.to_string()];
        at += 1;
        while is_colons(&tokens, at)
            && let Some(TokenTree::Ident(next)) = tokens.get(at + 2)
        {
            segments.push(next.to_string());
            at += 3;
        }
        let is_name = segments.len() > 1 || segments[0].starts_with(char::is_uppercase);
        if !is_other && is_name {
            found.push(UsedPath { segments, line: first.span().start().line });
        }
    }
    found
}

fn is_mark(tokens: &[TokenTree], at: usize, mark: char) -> bool {
    matches!(tokens.get(at), Some(TokenTree::Punct(one)) if one.as_char() == mark)
}

/// Finds out whether `::` stands at a place.
fn is_colons(tokens: &[TokenTree], at: usize) -> bool {
    is_mark(tokens, at, ':') && is_mark(tokens, at + 1, ':')
}

/// Returns the words among tokens that are not parts of longer paths.
pub(crate) fn words(tokens: TokenStream) -> Vec<String> {
    let mut found = Vec::new();
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    for at in 0..tokens.len() {
        match &tokens[at] {
            TokenTree::Ident(word) => {
                let is_part = is_colons(&tokens, at + 1) || at >= 2 && is_colons(&tokens, at - 2);
                found.extend((!is_part).then(|| word.to_string()));
            }
            TokenTree::Group(group) => found.extend(words(group.stream())),
            _ => {}
        }
    }
    found
}

/// Returns the documentation comments among tokens.
pub(crate) fn doc_texts(tokens: TokenStream) -> Vec<DocText> {
    let mut found = Vec::new();
    for token in tokens {
        let TokenTree::Group(group) = token else { continue };
        let meta = syn::parse2::<Meta>(group.stream());
        match meta.ok().as_ref().and_then(doc_text) {
            Some(text) if group.delimiter() == Delimiter::Bracket => {
                let span = group.span();
                let (first_line, last_line) = (span.start().line, span.end().line);
                found.push(DocText { text, first_line, last_line });
            }
            _ => found.extend(doc_texts(group.stream())),
        }
    }
    found
}

/// Returns the text of an attribute `doc`.
pub(crate) fn doc_text(meta: &Meta) -> Option<String> {
    let Meta::NameValue(pair) = meta else { return None };
    let Expr::Lit(literal) = &pair.value else { return None };
    let Lit::Str(text) = &literal.lit else { return None };
    pair.path.is_ident("doc").then(|| text.value())
}

#[cfg(test)]
#[path = "tokens_tests.rs"]
mod tests;
