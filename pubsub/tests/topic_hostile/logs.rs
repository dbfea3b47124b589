//! Log files of processes, and the lines of a phase.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;

/// The log of a process, and the length that belongs to earlier phases.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    seen: u64,
}

impl Log {
    /// Creates a log file, and the descriptor that the process writes to.
    pub fn create(path: PathBuf) -> (Self, File) {
        let file = File::create(&path).unwrap_or_else(|error| panic!("create {path:?}: {error}"));
        (Self { path, seen: 0 }, file)
    }

    /// The lines since the last call.
    pub fn take(&mut self) -> Logged {
        let mut bytes = Vec::new();
        let mut file = File::open(&self.path).expect("open the log");
        file.seek(SeekFrom::Start(self.seen)).expect("seek in the log");
        file.read_to_end(&mut bytes).expect("read the log");
        // An incomplete line belongs to the next phase.
        let length = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        self.seen += length as u64;
        let mut logged = Logged::default();
        for line in String::from_utf8_lossy(&bytes[..length]).lines() {
            logged.add(line);
        }
        logged
    }

    /// The whole log.
    pub fn text(&self) -> String {
        std::fs::read_to_string(&self.path).unwrap_or_default()
    }
}

/// Number of lines of a log, by distinct message.
#[derive(Debug, Clone, Default)]
pub struct Logged(BTreeMap<String, u64>);

impl Logged {
    fn add(&mut self, line: &str) {
        *self.0.entry(normalise(line)).or_default() += 1;
    }

    pub fn merge(&mut self, other: &Self) {
        for (message, count) in &other.0 {
            *self.0.entry(message.clone()).or_default() += count;
        }
    }

    pub fn lines(&self) -> u64 {
        self.0.values().sum()
    }

    pub fn distinct(&self) -> usize {
        self.0.len()
    }

    /// The most frequent message and its count.
    pub fn most_frequent(&self) -> (u64, &str) {
        let most = self.0.iter().max_by_key(|(_, count)| **count);
        most.map_or((0, ""), |(message, count)| (*count, message.as_str()))
    }

    /// Does a line contain one of these texts?
    pub fn has_one_of(&self, words: &[&str]) -> bool {
        self.0.keys().any(|message| words.iter().any(|word| message.contains(word)))
    }

    pub fn messages(&self) -> impl Iterator<Item = (&str, u64)> {
        self.0.iter().map(|(message, count)| (message.as_str(), *count))
    }
}

/// Replaces numbers, addresses and node ids in a line.
fn normalise(line: &str) -> String {
    let is_part = |character: char| character.is_ascii_alphanumeric();
    let mut text = String::new();
    let mut rest = line.trim();
    while let Some(first) = rest.chars().next() {
        if let Some(tail) = strip_node_id(rest) {
            text.push_str("NODE-ID");
            rest = tail;
            continue;
        }
        let word = rest.find(|character| !is_part(character)).unwrap_or(rest.len());
        if word == 0 {
            text.push(first);
            rest = &rest[first.len_utf8()..];
            continue;
        }
        let (word, tail) = rest.split_at(word);
        let is_number = word.chars().any(|character| character.is_ascii_digit());
        let is_name = word.chars().next().is_some_and(|first| first.is_ascii_alphabetic())
            && !(word.len() >= 8 && word.chars().all(|character| character.is_ascii_hexdigit()));
        match (is_number, is_name) {
            (true, false) => text.push('#'),
            // A name with a number, such as "t17".
            (true, true) => {
                text.push_str(word.trim_end_matches(|it: char| it.is_ascii_digit()));
                text.push('#');
            }
            _ => text.push_str(word),
        }
        rest = tail;
    }
    text
}

/// Strips a node id, such as "d79b79b9-a3f3-49a9-9e8a-475d93c14c7f", from the start of a text.
fn strip_node_id(text: &str) -> Option<&str> {
    const LENGTH: usize = 36;
    const DASHES: [usize; 4] = [8, 13, 18, 23];
    let bytes = text.as_bytes().get(..LENGTH)?;
    let is_node_id = bytes.iter().enumerate().all(|(index, byte)| match DASHES.contains(&index) {
        true => *byte == b'-',
        false => byte.is_ascii_hexdigit(),
    });
    is_node_id.then(|| &text[LENGTH..])
}
