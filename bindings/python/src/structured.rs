//! Types of records: elements of several named fields, as structured arrays of NumPy have.

use std::sync::OnceLock;

/// Maximum number of different types of records in a process. Messages name them.
const MAX_TYPES: usize = 4096;
/// Of these, those that messages may add: the program itself can always name further ones.
const MAX_RECEIVED: usize = MAX_TYPES / 2;
/// Maximum number of fields.
const MAX_FIELDS: usize = 64;
/// Maximum length of a description.
const MAX_TEXT: usize = 4096;
/// Types of fields, with their sizes.
const FIELD_TYPES: [(&str, u64); 14] = [
    ("b1", 1),
    ("i1", 1),
    ("i2", 2),
    ("i4", 4),
    ("i8", 8),
    ("u1", 1),
    ("u2", 2),
    ("u4", 4),
    ("u8", 8),
    ("f2", 2),
    ("f4", 4),
    ("f8", 8),
    ("c8", 8),
    ("c16", 16),
];

/// The types that this process knows, which stay until its end, one after the other. A forked child
/// knows them, too, and no lock of another thread can be held in it.
static KNOWN: [OnceLock<Known>; MAX_TYPES] = [const { OnceLock::new() }; MAX_TYPES];

/// A description, and the size of its records.
#[derive(Debug, Clone, Copy)]
struct Known {
    text: &'static str,
    size: u64,
}

/// A type of records. Its description is `{id:u8,pose:f4(3x4),name:u1(16)@64}96`: fields with their types, which
/// are those of NumPy in little-endian order, extents of a field that is an array, the offset if the
/// field does not follow the one before, and the size if there are bytes behind the last field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Structured {
    number: u16,
}

impl Structured {
    /// By its description. None if that is malformed, or the process knows too many.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        Self::find_or_add(text, MAX_TYPES)
    }

    /// By the description in a message, which can add fewer types.
    pub(crate) fn received(text: &str) -> Option<Self> {
        Self::find_or_add(text, MAX_RECEIVED)
    }

    /// Adds it if there are fewer types than that.
    fn find_or_add(text: &str, max: usize) -> Option<Self> {
        let mut own = None;
        for (number, slot) in KNOWN.iter().enumerate() {
            let known = match slot.get() {
                Some(known) => known,
                None if number >= max => return None,
                None => {
                    let made = match own {
                        Some(made) => made,
                        None => {
                            let size = size_of(text)?;
                            *own.insert(Known { text: text.to_owned().leak(), size })
                        }
                    };
                    // Another thread may have been faster.
                    slot.get_or_init(|| made)
                }
            };
            if known.text == text {
                return Some(Self { number: number as u16 });
            }
        }
        None
    }

    /// The type of this number, which [`number`](Self::number) returned.
    pub(crate) fn numbered(number: u16) -> Self {
        Self { number }
    }

    pub(crate) fn number(self) -> u16 {
        self.number
    }

    fn known(self) -> Known {
        let unknown = Known { text: "{}", size: 0 };
        KNOWN.get(usize::from(self.number)).and_then(OnceLock::get).copied().unwrap_or(unknown)
    }

    /// The description of the fields.
    pub(crate) fn text(self) -> &'static str {
        self.known().text
    }

    /// Bytes of a record.
    pub(crate) fn size(self) -> u64 {
        self.known().size
    }
}

/// The size of the records of a description; None if it is malformed.
fn size_of(text: &str) -> Option<u64> {
    let (fields, size) = text.strip_prefix('{')?.split_once('}')?;
    let mut end: u64 = 0;
    let mut names = Vec::new();
    for field in fields.split(',') {
        let (name, rest) = field.split_once(':')?;
        let (rest, offset) = match rest.split_once('@') {
            Some((rest, offset)) => (rest, number(offset)?),
            None => (rest, end),
        };
        let (kind, extents) = match rest.split_once('(') {
            Some((kind, extents)) => (kind, extents.strip_suffix(')')?),
            None => (rest, "1"),
        };
        let (_, mut length) = *FIELD_TYPES.iter().find(|(known, _)| *known == kind)?;
        for extent in extents.split('x') {
            length = length.checked_mul(number(extent).filter(|extent| *extent > 0)?)?;
        }
        // Fields that overlap could not be compared, nor in C.
        if offset < end || names.contains(&name) || !is_name(name) || names.len() == MAX_FIELDS {
            return None;
        }
        end = offset.checked_add(length)?;
        names.push(name);
    }
    let size = if size.is_empty() { end } else { number(size).filter(|size| *size > end)? };
    (text.len() <= MAX_TEXT && u32::try_from(size).is_ok()).then_some(size)
}

/// A number without sign or leading zeros.
fn number(text: &str) -> Option<u64> {
    let is_canonical = text == "0" || !text.starts_with(['0', '+']);
    text.parse().ok().filter(|_| is_canonical)
}

fn is_name(text: &str) -> bool {
    let is_first = |found: char| found.is_ascii_alphabetic() || found == '_';
    text.starts_with(is_first)
        && text.chars().all(|found| is_first(found) || found.is_ascii_digit())
}
