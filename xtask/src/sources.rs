//! The source files with their categories, and with the syntax of those that are not tests.

use std::collections::{BTreeMap, BTreeSet};

use syn::{Expr, Item, ItemMod, Lit, Meta};

use crate::production::{self, Category};

/// A source file.
pub(crate) struct Source {
    pub(crate) path: String,
    pub(crate) text: String,
    pub(crate) category: Category,
    /// Syntax without the test code, of Rust files that are not tests as a whole.
    pub(crate) syntax: Option<syn::File>,
    /// Numbers of the lines of test code in it.
    pub(crate) test_lines: BTreeSet<usize>,
}

/// All source files.
pub(crate) struct Sources {
    files: Vec<Source>,
    /// Messages about files that the parser refuses.
    failures: Vec<String>,
}

impl Sources {
    /// Parses and classifies files, given by their paths.
    pub(crate) fn new(texts: BTreeMap<String, String>) -> Self {
        let paths: BTreeSet<String> = texts.keys().cloned().collect();
        let mut sources = Self { files: Vec::new(), failures: Vec::new() };
        // Files of modules that each file declares outside of test code.
        let mut children: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut declared = BTreeSet::new();
        for (path, text) in texts {
            let mut source = Source {
                category: Category::of(&path),
                path,
                text,
                syntax: None,
                test_lines: BTreeSet::new(),
            };
            if source.path.ends_with(".rs") && source.category.has_items() {
                match syn::parse_file(&source.text) {
                    Ok(mut file) => {
                        let find =
                            |file: &syn::File| child_files(&source.path, &[], &file.items, &paths);
                        declared.extend(find(&file));
                        if production::has_test_attribute(&file.attrs) {
                            source.category = Category::Tests;
                        } else {
                            source.test_lines = production::remove_tests(&mut file);
                            children.insert(source.path.clone(), find(&file));
                            source.syntax = Some(file);
                        }
                    }
                    Err(error) => {
                        let line = error.span().start().line;
                        sources.failures.push(format!("{}:{line}: {error}", source.path));
                    }
                }
            }
            sources.files.push(source);
        }
        sources.drop_test_modules(&children, &declared);
        sources
    }

    pub(crate) fn files(&self) -> &[Source] {
        &self.files
    }

    pub(crate) fn failures(&self) -> &[String] {
        &self.failures
    }

    /// Returns the files that the rules for sources are about, with their syntax.
    pub(crate) fn checked(&self) -> impl Iterator<Item = (&Source, &syn::File)> {
        self.files
            .iter()
            .filter(|source| source.category.is_checked())
            .filter_map(|source| Some((source, source.syntax.as_ref()?)))
    }

    pub(crate) fn find(&self, path: &str) -> Option<usize> {
        self.files.binary_search_by(|source| source.path.as_str().cmp(path)).ok()
    }

    /// Makes those files test code that are only declared in test code.
    fn drop_test_modules(
        &mut self,
        children: &BTreeMap<String, Vec<String>>,
        declared: &BTreeSet<String>,
    ) {
        let mut waiting: Vec<&String> =
            children.keys().filter(|path| !declared.contains(*path)).collect();
        let mut reached: BTreeSet<&String> = waiting.iter().copied().collect();
        while let Some(path) = waiting.pop() {
            let below = children.get(path).into_iter().flatten();
            waiting.extend(below.filter(|child| reached.insert(*child)));
        }
        for source in &mut self.files {
            if source.syntax.is_some() && !reached.contains(&source.path) {
                source.category = Category::Tests;
                source.syntax = None;
                source.test_lines.clear();
            }
        }
    }
}

/// Returns the files of the modules that `items` declare; `inline` are the modules within the file
/// around them.
fn child_files(
    path: &str,
    inline: &[String],
    items: &[Item],
    paths: &BTreeSet<String>,
) -> Vec<String> {
    let mut found = Vec::new();
    for item in items {
        let Item::Mod(module) = item else { continue };
        match &module.content {
            Some((_, items)) => {
                let mut inner = inline.to_vec();
                inner.push(module.ident.to_string());
                found.extend(child_files(path, &inner, items, paths));
            }
            None => {
                let candidates = candidates(path, inline, module);
                found.extend(candidates.into_iter().find(|one| paths.contains(one)));
            }
        }
    }
    found
}

/// Returns the paths where the file of a module may be that a file declares.
pub(crate) fn candidates(path: &str, inline: &[String], module: &ItemMod) -> Vec<String> {
    let (folder, name) = path.rsplit_once('/').unwrap_or((".", path));
    let mut base: Vec<&str> = folder.split('/').filter(|step| *step != ".").collect();
    let given = module.attrs.iter().find_map(|attribute| given_path(&attribute.meta));
    let is_direct = inline.is_empty() && given.is_some();
    if !is_direct && !["mod.rs", "lib.rs", "main.rs", "build.rs"].contains(&name) {
        base.push(name.trim_end_matches(".rs"));
    }
    base.extend(inline.iter().map(String::as_str));
    match given {
        Some(given) => {
            for step in given.split('/') {
                match step {
                    "." => {}
                    ".." => drop(base.pop()),
                    _ => base.push(step),
                }
            }
            vec![base.join("/")]
        }
        None => {
            let module = module.ident.to_string();
            base.push(&module);
            let stem = base.join("/");
            vec![format!("{stem}.rs"), format!("{stem}/mod.rs")]
        }
    }
}

/// Returns the path in an attribute `#[path = "…"]`.
fn given_path(meta: &Meta) -> Option<String> {
    let Meta::NameValue(pair) = meta else { return None };
    let Expr::Lit(literal) = &pair.value else { return None };
    let Lit::Str(text) = &literal.lit else { return None };
    pair.path.is_ident("path").then(|| text.value())
}

#[cfg(test)]
#[path = "sources_tests.rs"]
mod tests;
