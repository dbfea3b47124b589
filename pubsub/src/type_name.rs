//! Name of a type whose values are the messages of a topic.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind};
use crate::ids::bytes_to_words;

/// Name of the type of a topic's values: the same in all programs that use the topic, in any
/// language and module.
///
/// A name has 1 to 64 bytes and no control or invisible characters.
///
/// ```
/// use pubsub::{ErrorKind, TypeName};
/// let name: TypeName = "Pose".parse()?;
/// assert_eq!((name.as_str(), name.to_string()), ("Pose", "Pose".to_owned()));
/// assert_eq!("".parse::<TypeName>().unwrap_err().kind(), ErrorKind::InvalidArgument);
/// # Ok::<(), pubsub::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TypeName {
    length: u8,
    /// Zero behind the length.
    bytes: [u8; Self::MAX_LEN],
}

impl TypeName {
    /// Maximum length of a name in bytes.
    pub const MAX_LEN: usize = 64;
    pub(crate) const WORDS: usize = Self::MAX_LEN / 8;

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        // Always created from valid text.
        str::from_utf8(&self.bytes[..usize::from(self.length)]).unwrap_or_default()
    }

    pub(crate) fn words(&self) -> (u64, [u64; Self::WORDS]) {
        let mut words = bytes_to_words(&self.bytes);
        (self.length.into(), std::array::from_fn(|_| words.next().unwrap_or_default()))
    }

    /// From words that any process may have written; None if they are no valid name.
    pub(crate) fn from_words(length: u64, words: [u64; Self::WORDS]) -> Option<Self> {
        let length = usize::try_from(length).ok().filter(|length| *length <= Self::MAX_LEN)?;
        let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
        str::from_utf8(&bytes[..length]).ok()?.parse().ok()
    }
}

/// Characters that are invisible or misleading in messages: names are received from other programs.
fn is_unprintable(character: char) -> bool {
    // The escape of a quotation mark or a backslash has two characters.
    character.is_control() || character.escape_debug().count() > 2
}

impl FromStr for TypeName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (length, most) = (text.len(), Self::MAX_LEN);
        if length == 0 || length > most || text.chars().any(is_unprintable) {
            let detail = format!(
                "\"{}\" has {length} bytes: 1 to {most} without control and invisible characters \
                 are possible",
                text.escape_debug()
            );
            return Err(Error::new("parse type name", ErrorKind::InvalidArgument, detail));
        }
        let mut bytes = [0; Self::MAX_LEN];
        bytes[..length].copy_from_slice(text.as_bytes());
        Ok(Self { length: length as u8, bytes })
    }
}

impl TryFrom<String> for TypeName {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl From<TypeName> for String {
    fn from(name: TypeName) -> Self {
        name.as_str().to_owned()
    }
}

impl fmt::Display for TypeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for TypeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TypeName({:?})", self.as_str())
    }
}

/// A name as [`std::any::type_name`] returns it, without the modules: programs declare the same
/// type in different ones.
pub(crate) fn without_modules(name: &str) -> String {
    let (mut plain, mut segment) = (String::new(), 0);
    for c in name.chars() {
        match c {
            ':' => plain.truncate(segment),
            _ if c.is_alphanumeric() || c == '_' => plain.push(c),
            _ => {
                plain.push(c);
                segment = plain.len();
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_removed_and_generics_stay() {
        for (name, plain) in [
            ("f64", "f64"),
            ("robot::geometry::Pose", "Pose"),
            ("[robot::Pose; 3]", "[Pose; 3]"),
            ("a::Stamped<b::c::Pose, d::Clock>", "Stamped<Pose, Clock>"),
            ("(a::B, &c::D)", "(B, &D)"),
        ] {
            assert_eq!(without_modules(name), plain, "{name}");
        }
    }

    #[test]
    fn valid_names_are_read_back_and_others_rejected() {
        for text in ["x", "Pose", "Größe<[f64; 3]>", &"n".repeat(64)] {
            let name: TypeName = text.parse().unwrap();
            let (length, words) = name.words();
            assert_eq!(TypeName::from_words(length, words), Some(name));
            assert_eq!(name.as_str(), text);
        }
        let (length, words) = "Pose".parse::<TypeName>().unwrap().words();
        for (length, words) in [
            (0, words),
            (65, words),
            (u64::MAX, words),
            // A zero byte is a control character.
            (length + 1, words),
            (1, [0xff; TypeName::WORDS]),
        ] {
            assert_eq!(TypeName::from_words(length, words), None);
        }
        for text in ["", "a\nb", "Po\u{202e}se", "Po\u{200b}se", &"n".repeat(65)] {
            assert_eq!(text.parse::<TypeName>().unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
    }

    #[test]
    fn encoded_names_are_checked_text() {
        let name: TypeName = "Pose".parse().unwrap();
        let bytes = control::codec::encode(1, &name);
        assert_eq!(bytes, control::codec::encode(1, "Pose"));
        assert_eq!(control::codec::decode::<TypeName>(1, &bytes), Ok(name));
        for text in ["", "a\nb", "Po\u{202e}se", "Po\u{200b}se", &"n".repeat(65)] {
            let bytes = control::codec::encode(1, text);
            assert!(control::codec::decode::<TypeName>(1, &bytes).is_err(), "{text:?}");
        }
    }
}
