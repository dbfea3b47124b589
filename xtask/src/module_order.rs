//! Order of the modules directly below the root of each crate.
//!
//! The crate's root lists them, `Modules, each importing only those before it: …`, and no module
//! imports one that comes after it, directly or in a cycle.

use std::collections::{BTreeMap, BTreeSet};

use crate::components;
use crate::doc_comments;
use crate::modules::Crate;
use crate::sources::Sources;

const LIST: &str = "Modules, each importing only those before it:";
/// Number of places that a message shows.
const PLACES: usize = 5;

/// Returns messages about imports that go against the order, and about modules without a place in it.
pub(crate) fn check(sources: &Sources, one: &Crate) -> Vec<String> {
    let root = &sources.files()[one.root_file()];
    // A program beside a library only starts what is in the library, or in its one module.
    if root
        .path
        .strip_suffix("main.rs")
        .is_some_and(|folder| sources.find(&format!("{folder}lib.rs")).is_some())
    {
        return Vec::new();
    }
    let modules = one.top_modules();
    let edges = imports(sources, one, &modules);
    let order = listed(sources, one);
    let mut messages = Vec::new();
    for cycle in components::cycles(edges.keys().copied()) {
        let names = cycle.into_iter().collect::<Vec<_>>().join(", ");
        messages.push(format!("{}: cycle of modules: {names}", root.path));
    }
    for module in modules.iter().filter(|module| !order.iter().any(|listed| listed == *module)) {
        messages.push(format!("{}: the list of modules lacks {module}", root.path));
    }
    let rank = |module: &str| order.iter().position(|listed| listed == module);
    for (edge, places) in &edges {
        if let (Some(from), Some(to)) = (rank(edge.from), rank(edge.to))
            && from < to
        {
            let mut message =
                format!("{}: {} imports {}, which comes after it:", root.path, edge.from, edge.to);
            for place in places.iter().take(PLACES) {
                message.push_str("\n    ");
                message.push_str(place);
            }
            messages.push(message);
        }
    }
    messages
}

/// Returns the imports between the modules below the root, with the places of each.
fn imports<'a>(
    sources: &Sources,
    one: &'a Crate,
    modules: &BTreeSet<&'a str>,
) -> BTreeMap<components::Edge<&'a str>, Vec<String>> {
    let mut edges: BTreeMap<_, Vec<String>> = BTreeMap::new();
    for (number, module) in one.modules().iter().enumerate() {
        let Some(from) = module.path.first().and_then(|name| modules.get(name.as_str()).copied())
        else {
            continue;
        };
        let imported = module.imports.iter().map(|import| &import.path);
        for path in imported.chain(&module.paths) {
            if let Some(to) = one.named_top_module(number, &path.segments)
                && to != from
                && modules.contains(to)
            {
                let file = &sources.files()[module.file].path;
                let place = format!("{file}:{}: {}", path.line, path.segments.join("::"));
                edges.entry(components::Edge { from, to }).or_default().push(place);
            }
        }
    }
    edges
}

/// Returns the modules that the crate's root lists.
fn listed(sources: &Sources, one: &Crate) -> Vec<String> {
    let Some(syntax) = &sources.files()[one.root_file()].syntax else { return Vec::new() };
    let paragraphs = doc_comments::paragraphs(&syntax.attrs);
    let list = paragraphs.iter().find_map(|paragraph| paragraph.split_once(LIST));
    list.map(|(_, names)| doc_comments::quoted(names)).unwrap_or_default()
}

#[cfg(test)]
#[path = "module_order_tests.rs"]
mod tests;
