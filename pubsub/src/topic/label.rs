//! Labels in shared memory: the names of processes and nodes.

use crate::ids::bytes_to_words;
use crate::text::shortened;

/// Bytes of the longest label; a longer one is shortened.
const MAX_BYTES: usize = 64;
const BYTES_IN_WORD: usize = size_of::<u64>();

/// Words of a label: its length, and its bytes.
pub(super) const LABEL_WORDS: usize = 1 + MAX_BYTES / BYTES_IN_WORD;

pub(super) fn to_words(label: &str) -> [u64; LABEL_WORDS] {
    let label = shortened(label, MAX_BYTES).as_bytes();
    let mut words = [0; LABEL_WORDS];
    words[0] = label.len() as u64;
    words[1..].iter_mut().zip(bytes_to_words(label)).for_each(|(to, word)| *to = word);
    words
}

/// The label of these words, which any process may have written.
pub(super) fn from_words(words: &[u64; LABEL_WORDS]) -> String {
    let length = usize::try_from(words[0]).unwrap_or(usize::MAX).min(MAX_BYTES);
    let bytes: Vec<u8> = words[1..].iter().flat_map(|word| word.to_le_bytes()).collect();
    String::from_utf8_lossy(&bytes[..length]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_is_kept_up_to_its_maximum() {
        for label in ["", "camera", "sixteen bytes ok", &"x".repeat(MAX_BYTES)] {
            assert_eq!(from_words(&to_words(label)), label);
        }
        let long = from_words(&to_words(&"é".repeat(MAX_BYTES)));
        assert_eq!(long, "é".repeat(MAX_BYTES / 2));
        assert_eq!(from_words(&[u64::MAX; LABEL_WORDS]).chars().count(), MAX_BYTES);
    }
}
