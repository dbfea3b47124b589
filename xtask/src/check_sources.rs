//! All checks of the sources, and the constants that limit what they count.

use std::collections::BTreeSet;

use crate::file_cycles::{Cycle, FileCycles};
use crate::modules::Crate;
use crate::sources::Sources;
use crate::{doc_comments, file_cycles, file_names, module_order, structs, tuple_parameters};

// These only fall: write a smaller number here when the check prints one.
const MOST_CYCLES: usize = 23;
const MOST_CYCLES_BELOW_PARENTS: usize = 0;
const MOST_OPEN: usize = 301;
const MOST_POOR_BEGINNINGS: usize = 0;
const MOST_TUPLE_PARAMETERS: usize = 100;
const MOST_REPEATED_NAMES: usize = 1;
/// Most fields of one struct.
const MOST_FIELDS: usize = 20;

const CYCLES: &str = "cycles of imports between files";
const CYCLES_BELOW_PARENTS: &str =
    "cycles of imports between files without those from the modules around a file";

/// Something that there should be less of.
struct Count {
    what: &'static str,
    number: usize,
    most: usize,
    /// A line for each, or for several at one place.
    places: Vec<String>,
}

/// Prints the numbers and what is wrong, and with `lists_all` everything that is counted. Returns
/// `false` if something is wrong.
pub(crate) fn check(sources: &Sources, lists_all: bool) -> bool {
    let crates = Crate::all(sources);
    let mut errors = sources.failures().to_vec();
    errors.extend(crates.iter().flat_map(|one| module_order::check(sources, one)));
    errors.extend(large_structs(sources));
    let file_cycles: Vec<FileCycles> =
        crates.iter().map(|one| file_cycles::find(sources, one)).collect();
    errors.extend(file_cycles.iter().flat_map(|found| found.needless.clone()));
    let counts = [
        count(CYCLES, MOST_CYCLES, unjustified(file_cycles.iter().flat_map(|found| &found.cycles))),
        count(
            CYCLES_BELOW_PARENTS,
            MOST_CYCLES_BELOW_PARENTS,
            unjustified(file_cycles.iter().flat_map(|found| &found.cycles_below_parents)),
        ),
        open_fields(sources),
        count(
            "documentation comments that do not begin with what the thing is",
            MOST_POOR_BEGINNINGS,
            poor_beginnings(sources),
        ),
        count(
            "functions with tuples as parameters",
            MOST_TUPLE_PARAMETERS,
            tuple_parameters(sources),
        ),
        count(
            "files with the name of another file of the crate",
            MOST_REPEATED_NAMES,
            repeated_names(sources, &crates),
        ),
    ];
    for count in &counts {
        let is_too_much = count.number > count.most;
        if lists_all || is_too_much {
            count.places.iter().for_each(|place| println!("{place}"));
        }
        let Count { what, number, most, .. } = count;
        println!("{number} {what} (at most {most}){}", if is_too_much { ": TOO MANY" } else { "" });
    }
    let cycles =
        file_cycles.iter().flat_map(|found| found.cycles.iter().chain(&found.cycles_below_parents));
    for cycle in cycles.filter(|cycle| lists_all && cycle.is_justified) {
        println!("justified cycle of {}", cycle.report);
    }
    errors.iter().for_each(|error| println!("{error}"));
    errors.is_empty() && counts.iter().all(|count| count.number <= count.most)
}

/// Prints the cycles of imports between files.
pub(crate) fn print_cycles(sources: &Sources) {
    let crates = Crate::all(sources);
    let found: Vec<FileCycles> = crates.iter().map(|one| file_cycles::find(sources, one)).collect();
    println!("{CYCLES}:");
    for cycle in found.iter().flat_map(|found| &found.cycles) {
        println!("{}", cycle.report);
    }
    println!("{CYCLES_BELOW_PARENTS}:");
    for cycle in found.iter().flat_map(|found| &found.cycles_below_parents) {
        println!("{}", cycle.report);
    }
}

fn unjustified<'a>(cycles: impl Iterator<Item = &'a Cycle>) -> Vec<String> {
    cycles.filter(|cycle| !cycle.is_justified).map(|cycle| cycle.report.clone()).collect()
}

fn count(what: &'static str, most: usize, places: Vec<String>) -> Count {
    Count { what, number: places.len(), most, places }
}

fn open_fields(sources: &Sources) -> Count {
    let mut number = 0;
    let mut places = Vec::new();
    for (source, file) in sources.checked() {
        for one in structs::structs(file).iter().filter(|one| one.open_fields > 0) {
            number += one.open_fields;
            let structs::Struct { name, line, open_fields, .. } = one;
            places.push(format!("{}:{line}: {name} has {open_fields} open fields", source.path));
        }
    }
    Count { what: "fields open to other files of the crate", number, most: MOST_OPEN, places }
}

fn large_structs(sources: &Sources) -> Vec<String> {
    let mut messages = Vec::new();
    for (source, file) in sources.checked() {
        for one in structs::structs(file).iter().filter(|one| one.fields > MOST_FIELDS) {
            let structs::Struct { name, line, fields, .. } = one;
            let path = &source.path;
            messages.push(format!(
                "{path}:{line}: {name} has {fields} fields, more than {MOST_FIELDS}"
            ));
        }
    }
    messages
}

fn poor_beginnings(sources: &Sources) -> Vec<String> {
    let mut places = Vec::new();
    for (source, file) in sources.checked() {
        for comment in doc_comments::poor_beginnings(file) {
            places.push(format!("{}:{}: {}", source.path, comment.line, comment.text));
        }
    }
    places
}

fn tuple_parameters(sources: &Sources) -> Vec<String> {
    let mut places = Vec::new();
    for (source, file) in sources.checked() {
        for function in tuple_parameters::functions(file) {
            places.push(format!("{}:{}: fn {}", source.path, function.line, function.name));
        }
    }
    places
}

fn repeated_names(sources: &Sources, crates: &[Crate]) -> Vec<String> {
    let roots = crates.iter().map(|one| sources.files()[one.root_file()].path.as_str());
    let folders: BTreeSet<&str> =
        roots.filter_map(|root| Some(&root[..root.rfind('/')? + 1])).collect();
    let repeated = |folder: &str| {
        file_names::repeated(folder, sources.files().iter().map(|source| source.path.as_str()))
    };
    folders.into_iter().flat_map(repeated).collect()
}
