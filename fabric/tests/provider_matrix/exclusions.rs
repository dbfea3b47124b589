//! Exclusions of cells, as data.

use fabric::Version;

use crate::cells::{Cell, kind_name};

const TEXT: &str = include_str!("exclusions.txt");

/// One line of the file.
pub struct Exclusion {
    provider: &'static str,
    kind: &'static str,
    memory: &'static str,
    case: &'static str,
    when: &'static str,
    pub reason: &'static str,
}

/// Facts about this run that lines can depend on.
pub struct Conditions {
    pub library: Version,
    pub has_cuda: bool,
    /// Another stage runs all cells on this library, built against other headers.
    pub headers_only: bool,
}

pub fn load() -> Result<Vec<Exclusion>, String> {
    let mut list = Vec::new();
    for (number, line) in TEXT.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let at = number + 1;
        let (columns, reason) =
            line.split_once(" : ").ok_or_else(|| format!("exclusions.txt:{at}: no reason"))?;
        let columns: Vec<&str> = columns.split_whitespace().collect();
        let [provider, kind, memory, case, when] = columns[..] else {
            return Err(format!("exclusions.txt:{at}: {} columns, 5 needed", columns.len()));
        };
        list.push(Exclusion { provider, kind, memory, case, when, reason: reason.trim() });
    }
    Ok(list)
}

/// `*` matches anything, `a*` anything that begins with a, `a|b` either.
fn matches(pattern: &str, text: &str) -> bool {
    pattern.split('|').any(|pattern| match pattern.strip_suffix('*') {
        Some(start) => text.starts_with(start),
        None => pattern == text,
    })
}

fn holds(when: &str, conditions: &Conditions, absent: bool) -> bool {
    let version = |text: &str| {
        let (major, minor) = text.split_once('.').unwrap_or((text, "0"));
        Version { major: major.parse().unwrap_or(0), minor: minor.parse().unwrap_or(0) }
    };
    match when {
        "always" => true,
        "absent" => absent,
        "no-cuda" => !conditions.has_cuda,
        "headers-only" => conditions.headers_only,
        "root" => is_root(),
        _ => match (when.strip_prefix("lib<"), when.strip_prefix("lib>=")) {
            (Some(bound), _) => conditions.library < version(bound),
            (_, Some(bound)) => conditions.library >= version(bound),
            _ => false,
        },
    }
}

fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|m| std::os::unix::fs::MetadataExt::uid(&m) == 0)
}

/// The reason why this cell is not run, if it is excluded. `absent`: the provider is not in
/// this library, or finds no device.
pub fn find<'a>(
    list: &'a [Exclusion],
    cell: &Cell,
    conditions: &Conditions,
    absent: bool,
) -> Option<&'a Exclusion> {
    list.iter().find(|e| {
        matches(e.provider, &cell.provider)
            && matches(e.kind, kind_name(cell.kind))
            && matches(e.memory, cell.memory.name())
            && matches(e.case, &cell.case)
            && holds(e.when, conditions, absent)
    })
}
