//! Queries to the store, and its answers: bytes only, no sockets.
//!
//! A query is its number in one byte, then its arguments. Keys and values follow their length.
//! Lengths and counts have 64 bits, in the byte order of the processor: PyTorch requires that all
//! machines of a job have the same.
//!
//! ```text
//! query       since 2.2  until 2.1  arguments         answer
//! VALIDATE            0             u32 magic         none
//! SET                 1          0  key, value        none
//! GET                 3          2  key               value
//! ADD                 4          3  key, i64          i64: the sum
//! CHECK               5          4  u64 count, keys   u8: 0 if all exist, otherwise 1
//! WAIT                6          5  u64 count, keys   u8: 0, as soon as all exist
//! GETNUMKEYS          7          6                    i64
//! DELETE_KEY          8      7 / 8  key               i64: number of deleted keys
//! ```
//!
//! DELETE_KEY has 8 in PyTorch 2.0, which has another query with 7, and 7 in 2.1. Stores since 2.4
//! refuse keys above 8 KiB and values above 8 MiB.

/// First argument of a connection, since 2.2.
const MAGIC: u32 = 0x3C85_F7CE;
const VALIDATE: u8 = 0;
const SET: u8 = 1;
const GET: u8 = 3;
const ADD: u8 = 4;
const CHECK: u8 = 5;
const WAIT: u8 = 6;
const GETNUMKEYS: u8 = 7;
const DELETE_KEY: u8 = 8;

/// Longest key that stores accept.
pub(super) const MAX_KEY: usize = 8 * 1024;

/// The numbers of queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    /// PyTorch 2.2 and newer.
    Since22,
    /// PyTorch 2.0 and 2.1.
    Until21,
}

/// How many numbers answer [`opening`].
pub(super) const OPENING_ANSWERS: usize = 4;

/// The first bytes of a connection, which find out the dialect.
///
/// Since 2.2 they are VALIDATE and four GETNUMKEYS, which are answered. Until 2.1 they are a SET
/// whose key is longer than any memory: the store closes the connection at once. They must arrive
/// in one piece: the store of 2.4 and newer closes the connection after a part of VALIDATE.
pub(super) fn opening() -> Vec<u8> {
    let mut bytes = vec![VALIDATE];
    bytes.extend(MAGIC.to_ne_bytes());
    bytes.extend([GETNUMKEYS; OPENING_ANSWERS]);
    bytes
}

/// Queries to send at once.
#[derive(Debug)]
pub(super) struct Queries {
    dialect: Dialect,
    bytes: Vec<u8>,
}

impl Queries {
    pub(super) fn new(dialect: Dialect) -> Self {
        Self { dialect, bytes: Vec::new() }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn begin(&mut self, query: u8) {
        self.bytes.push(match self.dialect {
            Dialect::Since22 => query,
            Dialect::Until21 => query - 1,
        });
    }

    fn text(&mut self, content: &[u8]) {
        self.bytes.extend((content.len() as u64).to_ne_bytes());
        self.bytes.extend(content);
    }

    /// Sets the value of a key. No answer.
    pub(super) fn set(&mut self, key: &str, value: &[u8]) {
        self.begin(SET);
        self.text(key.as_bytes());
        self.text(value);
    }

    /// Answer: the value of a key that exists. For others it depends on the store.
    pub(super) fn get(&mut self, key: &str) {
        self.begin(GET);
        self.text(key.as_bytes());
    }

    /// Adds to the number that a key has, or 0. Answer: the sum.
    pub(super) fn add(&mut self, key: &str, summand: i64) {
        self.begin(ADD);
        self.text(key.as_bytes());
        self.bytes.extend(summand.to_ne_bytes());
    }

    /// Answer: does the key exist?
    pub(super) fn check(&mut self, key: &str) {
        self.begin(CHECK);
        self.bytes.extend(1_u64.to_ne_bytes());
        self.text(key.as_bytes());
    }

    /// Answer: as soon as all keys exist. A connection can only wait once at a time.
    pub(super) fn wait(&mut self, keys: &[String]) {
        self.begin(WAIT);
        self.bytes.extend((keys.len() as u64).to_ne_bytes());
        for key in keys {
            self.text(key.as_bytes());
        }
    }

    /// Answer: the number of keys.
    pub(super) fn count_keys(&mut self) {
        self.begin(GETNUMKEYS);
    }

    /// Deletes a key. Answer: the number of deleted keys. Until 2.1 it deletes only the value, and
    /// there is no answer.
    pub(super) fn remove(&mut self, key: &str) {
        match self.dialect {
            Dialect::Since22 => {
                self.begin(DELETE_KEY);
                self.text(key.as_bytes());
            }
            Dialect::Until21 => self.set(key, b""),
        }
    }
}

/// Received bytes, from which answers are taken. A method returns None until its answer is
/// complete, and what it found if that is no answer.
#[derive(Debug, Default)]
pub(super) struct Answers {
    bytes: Vec<u8>,
    /// Bytes that have been taken.
    taken: usize,
}

impl Answers {
    pub(super) fn extend(&mut self, received: &[u8]) {
        // Moves the rest seldom enough, and keeps no more than twice of what is needed.
        if self.taken >= self.bytes.len() - self.taken {
            self.bytes.drain(..self.taken);
            self.taken = 0;
        }
        self.bytes.extend_from_slice(received);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rest().is_empty()
    }

    fn rest(&self) -> &[u8] {
        &self.bytes[self.taken..]
    }

    fn array<const N: usize>(&self) -> Option<[u8; N]> {
        self.rest().first_chunk().copied()
    }

    pub(super) fn number(&mut self) -> Option<i64> {
        let bytes = self.array()?;
        self.taken += bytes.len();
        Some(i64::from_ne_bytes(bytes))
    }

    pub(super) fn existence(&mut self) -> Result<Option<bool>, String> {
        let Some([byte]) = self.array() else { return Ok(None) };
        self.taken += 1;
        match byte {
            0 => Ok(Some(true)),
            1 => Ok(Some(false)),
            _ => Err(format!("answer {byte} to the question whether keys exist")),
        }
    }

    /// A value of at most `most` bytes.
    pub(super) fn value(&mut self, most: usize) -> Result<Option<Vec<u8>>, String> {
        let Some(prefix) = self.array() else { return Ok(None) };
        let length = u64::from_ne_bytes(prefix);
        if length > most as u64 {
            return Err(format!("a value of {length} bytes, at most {most} were expected"));
        }
        let end = prefix.len() + length as usize;
        let Some(value) = self.rest().get(prefix.len()..end).map(<[u8]>::to_vec) else {
            return Ok(None);
        };
        self.taken += end;
        Ok(Some(value))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn queries_have_the_numbers_of_their_dialect() {
        let bytes = |dialect| {
            let mut queries = Queries::new(dialect);
            queries.set("k", b"vw");
            queries.add("k", -2);
            queries.wait(&["a".to_owned(), "bc".to_owned()]);
            queries.remove("k");
            queries.count_keys();
            queries.bytes().to_vec()
        };
        let number = |value: u64| value.to_ne_bytes().to_vec();
        let key = [number(1), b"k".to_vec()].concat();
        let arguments = [
            [key.clone(), number(2), b"vw".to_vec()].concat(),
            [key.clone(), (-2_i64).to_ne_bytes().to_vec()].concat(),
            [number(2), number(1), b"a".to_vec(), number(2), b"bc".to_vec()].concat(),
        ];
        let queries = |numbers: [u8; 3], last: Vec<u8>| {
            let pairs = numbers.iter().zip(&arguments);
            let mut bytes: Vec<u8> =
                pairs.flat_map(|(n, rest)| [vec![*n], rest.clone()].concat()).collect();
            bytes.extend(last);
            bytes
        };
        let delete = [vec![8], key.clone(), vec![7]].concat();
        assert_eq!(bytes(Dialect::Since22), queries([1, 4, 6], delete));
        let set_empty = [vec![0], key, number(0), vec![6]].concat();
        assert_eq!(bytes(Dialect::Until21), queries([0, 3, 5], set_empty));
    }

    #[test]
    fn opening_is_an_impossible_key_until_21() {
        let bytes = opening();
        assert_eq!(bytes.len(), 9);
        let length = u64::from_ne_bytes(bytes[1..].try_into().unwrap());
        // More than any processor can address, and less than C++ refuses to allocate.
        assert!((1 << 57..1 << 63).contains(&length), "{length:#x}");
    }

    #[test]
    fn impossible_answers_are_refused() {
        let mut answers = Answers::default();
        answers.extend(&u64::MAX.to_ne_bytes());
        assert!(answers.value(1 << 20).is_err());
        let mut answers = Answers::default();
        answers.extend(&[2]);
        assert!(answers.existence().is_err());
    }

    proptest! {
        #[test]
        fn answers_are_the_same_however_they_are_cut(
            values in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..20),
            cuts in prop::collection::vec(1usize..30, 1..20),
        ) {
            let mut sent = Vec::new();
            for value in &values {
                sent.extend((value.len() as u64).to_ne_bytes());
                sent.extend(value);
                sent.push(u8::from(value.is_empty()));
                sent.extend((value.len() as i64 - 20).to_ne_bytes());
            }
            let mut answers = Answers::default();
            let mut parts = cuts.iter().cycle();
            let mut rest = &sent[..];
            macro_rules! take {
                ($take:expr) => {
                    loop {
                        if let Some(answer) = $take {
                            break answer;
                        }
                        prop_assert!(!rest.is_empty());
                        let (part, others) = rest.split_at(rest.len().min(*parts.next().unwrap()));
                        answers.extend(part);
                        rest = others;
                    }
                };
            }
            for value in &values {
                prop_assert_eq!(&take!(answers.value(40).unwrap()), value);
                prop_assert_eq!(take!(answers.existence().unwrap()), !value.is_empty());
                prop_assert_eq!(take!(answers.number()), value.len() as i64 - 20);
            }
            prop_assert!(rest.is_empty() && answers.is_empty());
        }

        #[test]
        fn any_bytes_are_taken_or_refused(
            parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..10),
            most in 0usize..300,
        ) {
            let mut answers = Answers::default();
            let mut received = 0;
            for (turn, part) in parts.iter().enumerate() {
                received += part.len();
                answers.extend(part);
                match turn % 3 {
                    0 => drop(answers.value(most)),
                    1 => drop(answers.existence()),
                    _ => drop(answers.number()),
                }
                prop_assert!(answers.rest().len() <= received);
            }
        }
    }
}
