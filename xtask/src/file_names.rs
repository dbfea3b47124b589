//! Names of files that occur more than once in a crate.

use std::collections::BTreeMap;

/// Names that say only what kind of module the file has.
const EXCEPTIONS: [&str; 4] = ["lib.rs", "main.rs", "mod.rs", "tests.rs"];

/// Returns the names that several of the files below `src` of one crate have, with those files: one
/// entry for each file that makes a name ambiguous.
pub(crate) fn repeated<'a>(folder: &str, paths: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut named: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for path in paths.filter(|path| path.starts_with(folder) && path.ends_with(".rs")) {
        let name = path.rsplit_once('/').map_or(path, |(_, name)| name);
        if !EXCEPTIONS.contains(&name) {
            named.entry(name).or_default().push(path);
        }
    }
    let mut found = Vec::new();
    for (name, paths) in named {
        found.extend(
            paths[1..]
                .iter()
                .map(|path| format!("{path}: the name {name} is that of {}", paths[0])),
        );
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_further_file_of_a_name_is_found() {
        let paths = [
            "ipc/src/lock.rs",
            "fabric/src/lock.rs",
            "fabric/src/queue/lock.rs",
            "fabric/src/queue/mod.rs",
            "fabric/src/ring/lock.rs",
            "fabric/src/ring/mod.rs",
            "fabric/tests/lock.rs",
        ];
        let found = repeated("fabric/src/", paths.into_iter());
        assert_eq!(found.len(), 2);
        assert_eq!(
            found[0],
            "fabric/src/queue/lock.rs: the name lock.rs is that of fabric/src/lock.rs"
        );
    }
}
