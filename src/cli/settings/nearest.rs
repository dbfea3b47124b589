//! What may have been meant by a name that is none.

/// The most letters by which a name may differ that is proposed, for a name of this length.
fn most(length: usize) -> usize {
    (length / 3).max(1)
}

/// The one of these names that is nearest to what was written, if one is near.
pub(crate) fn nearest<'a>(
    written: &str,
    names: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let written = written.to_lowercase().replace('-', "_");
    let distances = names.into_iter().map(|name| (distance(&written, name), name));
    let (distance, name) = distances.min()?;
    (distance <= most(name.len())).then_some(name)
}

/// How many letters have to be put in, taken out, changed, or swapped with their neighbours.
fn distance(one: &str, other: &str) -> usize {
    let one: Vec<char> = one.chars().collect();
    let other: Vec<char> = other.chars().collect();
    // Rows of the table for what was seen of `one`: two back, one back, and now.
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, b) in other.iter().enumerate() {
            let changed = last[j] + usize::from(a != b);
            let mut least = changed.min(last[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && *a == other[j - 1] && one[i - 1] == *b {
                least = least.min(before[j - 1] + 1);
            }
            row.push(least);
        }
        before = std::mem::replace(&mut last, row);
    }
    last.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_count_changes() {
        for (one, other, expected) in [
            ("", "", 0),
            ("a", "", 1),
            ("depth", "dephth", 1),
            ("dpeth", "depth", 1),
            ("ab", "xy", 2),
        ] {
            assert_eq!(distance(one, other), expected, "{one} {other}");
            assert_eq!(distance(other, one), expected, "{other} {one}");
        }
    }

    #[test]
    fn only_what_is_near_is_proposed() {
        let names = ["depth", "directory", "lost_after"];
        assert_eq!(nearest("dephth", names), Some("depth"));
        assert_eq!(nearest("Lost-After", names), Some("lost_after"));
        assert_eq!(nearest("colour", names), None);
        assert_eq!(nearest("depth", []), None);
    }
}
