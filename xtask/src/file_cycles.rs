//! Cycles of imports between the files of a crate.
//!
//! A file imports another if a path in its code names an item that the other defines, or a part of
//! such an item. A re-export is followed to the definition, and is no import by itself; nor are the
//! declaration of a module, and the import of a module by its name.
//!
//! A cycle that has to be is justified in the documentation of one of its files, by a paragraph that
//! names all its other files, a `mod.rs` by its folder:
//!
//! ```text
//! //! Import cycle with `lane`, `send_queue`: a lane owns the queue, which tells it of failures.
//! ```

use std::collections::{BTreeMap, BTreeSet};

use crate::components::{self, Edge};
use crate::doc_comments;
use crate::modules::{Crate, Target};
use crate::sources::Sources;
use crate::tokens::UsedPath;

const JUSTIFICATION: &str = "Import cycle with ";

/// A cycle of files.
pub(crate) struct Cycle {
    pub(crate) files: BTreeSet<usize>,
    /// The files, and one place of each import between them.
    pub(crate) report: String,
    pub(crate) is_justified: bool,
}

/// What there is in a crate.
pub(crate) struct FileCycles {
    pub(crate) cycles: Vec<Cycle>,
    /// Those that are left if imports from the files of modules around a file are not counted.
    pub(crate) cycles_below_parents: Vec<Cycle>,
    /// Messages about justifications of cycles that do not exist.
    pub(crate) needless: Vec<String>,
}

/// Finds the cycles of imports between the files of a crate.
pub(crate) fn find(sources: &Sources, one: &Crate) -> FileCycles {
    let path = |file: usize| sources.files()[file].path.as_str();
    let justifications = justifications(sources, one);
    let mut imports = imports(one);
    let cycles = cycles_of(sources, &imports, &justifications);
    imports.retain(|edge, _| !is_around(path(edge.to), path(edge.from)));
    let cycles_below_parents = cycles_of(sources, &imports, &justifications);
    let mut needless = Vec::new();
    for one in justifications {
        let mut all = cycles.iter().chain(&cycles_below_parents);
        if !all.any(|cycle| one.is_for(sources, &cycle.files)) {
            let path = path(one.file);
            let names = one.names.into_iter().collect::<Vec<_>>().join(", ");
            needless
                .push(format!("{path}: no import cycle with {names}: remove its justification"));
        }
    }
    FileCycles { cycles, cycles_below_parents, needless }
}

/// Returns the cycles that imports form.
fn cycles_of(
    sources: &Sources,
    imports: &BTreeMap<Edge<usize>, &UsedPath>,
    justifications: &[Justification],
) -> Vec<Cycle> {
    let path = |file: usize| sources.files()[file].path.as_str();
    let mut found = Vec::new();
    for files in components::cycles(imports.keys().copied()) {
        let paths: Vec<&str> = files.iter().map(|file| path(*file)).collect();
        let mut report = format!("{} files: {}", files.len(), paths.join(", "));
        for (edge, used) in imports {
            if files.contains(&edge.from) && files.contains(&edge.to) {
                let place = format!("{}:{}", path(edge.from), used.line);
                let segments = used.segments.join("::");
                report.push_str(&format!("\n    {place}: {segments} in {}", path(edge.to)));
            }
        }
        let is_justified = justifications.iter().any(|one| one.is_for(sources, &files));
        found.push(Cycle { files, report, is_justified });
    }
    found
}

/// Returns the imports between files, with the first place of each.
fn imports(one: &Crate) -> BTreeMap<Edge<usize>, &UsedPath> {
    let mut edges: BTreeMap<Edge<usize>, &UsedPath> = BTreeMap::new();
    for (number, module) in one.modules().iter().enumerate() {
        let imported =
            module.imports.iter().filter(|import| !import.is_reexport).map(|import| &import.path);
        for used in imported.chain(&module.paths) {
            let Some(Target::ItemOf(defining)) = one.resolve(number, &used.segments) else {
                continue;
            };
            let edge = Edge { from: module.file, to: one.modules()[defining].file };
            if edge.from != edge.to {
                let first = edges.entry(edge).or_insert(used);
                if used.line < first.line {
                    *first = used;
                }
            }
        }
    }
    edges
}

struct Justification {
    file: usize,
    /// Names of the other files of the cycle.
    names: BTreeSet<String>,
}

impl Justification {
    /// Finds out whether a cycle consists of these files.
    fn is_for(&self, sources: &Sources, files: &BTreeSet<usize>) -> bool {
        let others = files.iter().filter(|file| **file != self.file);
        let others = others.map(|file| module_name(&sources.files()[*file].path));
        let others: BTreeSet<&str> = others.collect();
        files.contains(&self.file) && others.iter().eq(&self.names)
    }
}

fn justifications(sources: &Sources, one: &Crate) -> Vec<Justification> {
    let files: BTreeSet<usize> = one.modules().iter().map(|module| module.file).collect();
    let mut found = Vec::new();
    for file in files {
        let Some(syntax) = &sources.files()[file].syntax else { continue };
        for paragraph in doc_comments::paragraphs(&syntax.attrs) {
            let Some(rest) = paragraph.strip_prefix(JUSTIFICATION) else { continue };
            if let Some((names, _)) = rest.split_once(": ") {
                found.push(Justification {
                    file,
                    names: doc_comments::quoted(names).into_iter().collect(),
                });
            }
        }
    }
    found
}

/// Returns the name of the module in a file.
fn module_name(path: &str) -> &str {
    let stem = path.trim_end_matches(".rs").trim_end_matches("/mod");
    stem.rsplit_once('/').map_or(stem, |(_, name)| name)
}

/// Finds out whether the module in `outer` is around that in `inner`.
fn is_around(outer: &str, inner: &str) -> bool {
    let stem = outer.trim_end_matches(".rs");
    let stem =
        ["/mod", "/lib", "/main"].iter().find_map(|end| stem.strip_suffix(end)).unwrap_or(stem);
    inner.strip_prefix(stem).is_some_and(|rest| rest.starts_with('/'))
}

#[cfg(test)]
#[path = "file_cycles_tests.rs"]
mod tests;
