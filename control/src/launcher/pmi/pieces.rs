//! A rank's bytes as values of the launcher's key-value store, which limits their length.
//!
//! The first value is the number of values, a point, and the beginning of the text.

use std::iter;

use super::super::text;

/// Most bytes of a rank.
pub(super) const MAX_BYTES: usize = 16 << 20;
/// Space for the number of values and the point.
const HEAD: usize = 8;
/// Shortest limit of values that is used, so that the number of values is bounded.
pub(super) const MIN_VALUE: usize = 32;
const MAX_TEXT: usize = MAX_BYTES.div_ceil(3) * 4;
const MAX_PIECES: usize = MAX_TEXT / MIN_VALUE + 2;

/// The values for these bytes, none longer than this.
pub(super) fn split(bytes: &[u8], longest: usize) -> Vec<String> {
    let text = text::encode(bytes);
    let (first, rest) = text.split_at(text.len().min(longest - HEAD));
    let rest = rest.as_bytes().chunks(longest);
    let first = format!("{}.{first}", 1 + rest.len());
    // The text is ASCII.
    let rest = rest.map(|piece| String::from_utf8_lossy(piece).into_owned());
    iter::once(first).chain(rest).collect()
}

/// The bytes of the values that `get` returns for 0, 1, and so on; None if they are no such values.
pub(super) fn join<E>(
    mut get: impl FnMut(usize) -> Result<String, E>,
) -> Result<Option<Vec<u8>>, E> {
    let first = get(0)?;
    let head = first.split_once('.').and_then(|(count, text)| Some((count.parse().ok()?, text)));
    let Some((count @ 1..=MAX_PIECES, text)) = head else { return Ok(None) };
    let mut text = text.to_owned();
    for piece in 1..count {
        text.push_str(&get(piece)?);
        if text.len() > MAX_TEXT {
            return Ok(None);
        }
    }
    Ok(text::decode(&text).filter(|bytes| bytes.len() <= MAX_BYTES))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use proptest::prelude::*;

    use super::*;

    fn joined(pieces: &[String]) -> Option<Vec<u8>> {
        join(|piece| Ok::<_, Infallible>(pieces.get(piece).cloned().unwrap_or_default())).unwrap()
    }

    #[test]
    fn no_bytes_are_one_value() {
        assert_eq!(split(&[], MIN_VALUE), ["1."]);
        assert_eq!(joined(&["1.".to_owned()]), Some(Vec::new()));
    }

    #[test]
    fn most_bytes_fit_into_the_number_of_values() {
        let pieces = split(&vec![7; MAX_BYTES], MIN_VALUE);
        assert!(pieces.len() <= MAX_PIECES && pieces.iter().all(|it| it.len() <= MIN_VALUE));
        assert_eq!(joined(&pieces).map(|bytes| bytes.len()), Some(MAX_BYTES));
        let pieces = split(&vec![7; MAX_BYTES + 1], MIN_VALUE);
        assert_eq!(joined(&pieces), None);
    }

    #[test]
    fn other_first_values_are_refused() {
        for first in ["", "1", "0.", "-1.", "1.=", "99999999999999999999.", "9999999.AA"] {
            assert_eq!(joined(&[first.to_owned()]), None, "{first}");
        }
    }

    proptest! {
        #[test]
        fn bytes_are_restored_from_their_values(
            bytes in prop::collection::vec(any::<u8>(), 0..3000),
            longest in MIN_VALUE..1008,
        ) {
            let pieces = split(&bytes, longest);
            prop_assert!(pieces.iter().all(|piece| piece.len() <= longest));
            prop_assert_eq!(joined(&pieces), Some(bytes));
        }

        #[test]
        fn any_values_are_joined_or_refused(pieces in prop::collection::vec("[0-9.A-Z=]{0,9}", 1..4)) {
            let _ = joined(&pieces);
        }
    }
}
