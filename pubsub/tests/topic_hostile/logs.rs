//! Log files of processes, and what was logged within a phase.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;

/// The log of a process, and how much of it belongs to phases before.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    seen: u64,
}

impl Log {
    /// A new file of this name, and the descriptor that the process writes to.
    pub fn create(path: PathBuf) -> (Self, File) {
        let file = File::create(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        (Self { path, seen: 0 }, file)
    }

    /// What was logged since the last call.
    pub fn take(&mut self) -> Logged {
        let mut bytes = Vec::new();
        let mut file = File::open(&self.path).expect("the log");
        file.seek(SeekFrom::Start(self.seen)).expect("the log");
        file.read_to_end(&mut bytes).expect("the log");
        // A line that is not whole yet belongs to the next phase.
        let length = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        self.seen += length as u64;
        let mut logged = Logged::default();
        for line in String::from_utf8_lossy(&bytes[..length]).lines() {
            logged.add(line);
        }
        logged
    }

    /// All that was logged since the process began.
    pub fn text(&self) -> String {
        std::fs::read_to_string(&self.path).unwrap_or_default()
    }
}

/// Lines of a log, by the distinct message.
#[derive(Debug, Clone, Default)]
pub struct Logged(BTreeMap<String, u64>);

impl Logged {
    fn add(&mut self, line: &str) {
        *self.0.entry(normalised(line)).or_default() += 1;
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

    /// The message that was logged most often, and how often.
    pub fn most(&self) -> (u64, &str) {
        let most = self.0.iter().max_by_key(|(_, count)| **count);
        most.map_or((0, ""), |(message, count)| (*count, message.as_str()))
    }

    /// Does a line have one of these words in it?
    pub fn has_one_of(&self, words: &[&str]) -> bool {
        self.0.keys().any(|message| words.iter().any(|word| message.contains(word)))
    }

    pub fn messages(&self) -> impl Iterator<Item = (&str, u64)> {
        self.0.iter().map(|(message, count)| (message.as_str(), *count))
    }
}

/// The line with numbers, addresses and identities in it replaced.
fn normalised(line: &str) -> String {
    let is_part = |character: char| character.is_ascii_alphanumeric();
    let mut text = String::new();
    let mut rest = line.trim();
    while let Some(first) = rest.chars().next() {
        if let Some(behind) = behind_identity(rest) {
            text.push_str("IDENTITY");
            rest = behind;
            continue;
        }
        let word = rest.find(|character| !is_part(character)).unwrap_or(rest.len());
        if word == 0 {
            text.push(first);
            rest = &rest[first.len_utf8()..];
            continue;
        }
        let (word, behind) = rest.split_at(word);
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
        rest = behind;
    }
    text
}

/// The rest behind an identity, such as "d79b79b9-a3f3-49a9-9e8a-475d93c14c7f", that begins the text.
fn behind_identity(text: &str) -> Option<&str> {
    const LENGTH: usize = 36;
    const DASHES: [usize; 4] = [8, 13, 18, 23];
    let identity = text.as_bytes().get(..LENGTH)?;
    let is_one = identity.iter().enumerate().all(|(at, byte)| match DASHES.contains(&at) {
        true => *byte == b'-',
        false => byte.is_ascii_hexdigit(),
    });
    is_one.then(|| &text[LENGTH..])
}
