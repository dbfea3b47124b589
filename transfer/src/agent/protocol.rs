//! What agents of one machine say to each other at the socket.
//!
//! | from | message | its parts | descriptors |
//! |---|---|---|---|
//! | who comes | `FcAH` hello | identity 16, node 16, label | its life |
//! | the other | `FcAW` welcome | identity 16, node 16, label | its life, the board, the bell, the notices |
//! | who comes | `FcAO` open | number 8, ticket 8 | |
//! | the other | `FcAP` pieces | number 8, in all 4, first 4, bytes of all 8, lengths 8 each | one for each length |
//! | the other | `FcAR` refusal | code 1, why | |
//!
//! An answer to `open` is as many messages of pieces as it takes, in order, or a refusal.
//! Regions that leave by legacy handle have no pieces: their answer is one message without.

use std::os::fd::OwnedFd;

use ipc::Message;

use super::card::LONGEST_LABEL;
use crate::error::{Error, ErrorKind, Result};
use crate::region::MOST_PIECES;
use crate::wire::{Form, Reader, put_counted};

const HELLO: Form = Form { magic: *b"FcAH", version: 1, operation: "read a hello" };
const WELCOME: Form = Form { magic: *b"FcAW", version: 1, operation: "read a welcome" };
const OPEN: Form = Form { magic: *b"FcAO", version: 1, operation: "read a request" };
const PIECES: Form = Form { magic: *b"FcAP", version: 2, operation: "read pieces" };
const REFUSAL: Form = Form { magic: *b"FcAR", version: 1, operation: "read a refusal" };
const LONGEST_REASON: usize = 512;
/// Pieces of one message: as many descriptors as it can carry.
pub(super) const PIECES_AT_ONCE: usize = ipc::channel::MOST_DESCRIPTORS;
/// Descriptors of a welcome.
pub(super) const OF_A_WELCOME: usize = 4;

/// Who speaks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Introduction {
    pub(super) identity: [u8; 16],
    pub(super) node: [u8; 16],
    pub(super) label: String,
}

/// A part of a region's pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pieces {
    pub(super) number: u64,
    pub(super) in_all: u32,
    pub(super) first: u32,
    /// Bytes of all the region's pieces: who maps them needs to know before the last has come.
    pub(super) bytes: u64,
    pub(super) lengths: Vec<u64>,
}

/// What one who comes may ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Open {
    pub(super) number: u64,
    pub(super) ticket: u64,
}

/// Why not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) kind: ErrorKind,
    pub(crate) why: String,
}

/// What came as an answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer<T> {
    Granted(T),
    Refused(Refusal),
}

/// The kinds of refusals that travel.
const KINDS: [(u8, ErrorKind); 10] = [
    (1, ErrorKind::Malformed),
    (2, ErrorKind::VersionMismatch),
    (3, ErrorKind::Denied),
    (4, ErrorKind::Stale),
    (5, ErrorKind::Failed),
    (6, ErrorKind::NotAllowed),
    (7, ErrorKind::OutOfBounds),
    (8, ErrorKind::TooMany),
    (9, ErrorKind::Unknown),
    (10, ErrorKind::NoPath),
];

impl Introduction {
    fn encode(&self, form: &Form) -> Vec<u8> {
        let mut bytes = form.begin();
        bytes.extend(self.identity);
        bytes.extend(self.node);
        put_counted(&mut bytes, self.label.as_bytes());
        // A label has an end.
        form.seal(bytes).unwrap_or_default()
    }

    fn decode(form: &Form, bytes: &[u8]) -> Result<Self> {
        let mut reader = form.open(bytes)?;
        let (identity, node) = (reader.take()?, reader.take()?);
        let label = String::from_utf8_lossy(reader.counted(LONGEST_LABEL)?).into_owned();
        reader.finish()?;
        Ok(Self { identity, node, label })
    }

    pub(super) fn hello(&self) -> Vec<u8> {
        self.encode(&HELLO)
    }

    pub(super) fn welcome(&self) -> Vec<u8> {
        self.encode(&WELCOME)
    }

    /// The hello, and the life that comes with it.
    pub(super) fn read_hello(mut message: Message) -> Result<(Self, OwnedFd)> {
        let introduction = Self::decode(&HELLO, &message.bytes)?;
        match (message.descriptors.pop(), message.descriptors.is_empty()) {
            (Some(life), true) => Ok((introduction, life)),
            _ => Err(HELLO.malformed("one descriptor was expected")),
        }
    }

    /// The welcome, and what comes with it.
    pub(super) fn read_welcome(
        message: Message,
    ) -> Result<Answer<(Self, [OwnedFd; OF_A_WELCOME])>> {
        if let Some(refusal) = Refusal::recognise(&message.bytes)? {
            return Ok(Answer::Refused(refusal));
        }
        let introduction = Self::decode(&WELCOME, &message.bytes)?;
        match message.descriptors.try_into() {
            Ok(descriptors) => Ok(Answer::Granted((introduction, descriptors))),
            Err(_) => Err(WELCOME.malformed(format!("{OF_A_WELCOME} descriptors were expected"))),
        }
    }
}

impl Open {
    pub(super) fn encode(self) -> Vec<u8> {
        let mut bytes = OPEN.begin();
        bytes.extend(self.number.to_le_bytes());
        bytes.extend(self.ticket.to_le_bytes());
        OPEN.seal(bytes).unwrap_or_default()
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self> {
        let mut reader = OPEN.open(bytes)?;
        let (number, ticket) = (reader.u64()?, reader.u64()?);
        reader.finish()?;
        Ok(Self { number, ticket })
    }
}

impl Pieces {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = PIECES.begin();
        bytes.extend(self.number.to_le_bytes());
        bytes.extend(self.in_all.to_le_bytes());
        bytes.extend(self.first.to_le_bytes());
        bytes.extend(self.bytes.to_le_bytes());
        let lengths = self.lengths.iter().take(PIECES_AT_ONCE);
        lengths.for_each(|length| bytes.extend(length.to_le_bytes()));
        PIECES.seal(bytes).unwrap_or_default()
    }

    /// The pieces, of which the descriptors stand in the message.
    pub(super) fn read(message: &Message) -> Result<Answer<Self>> {
        if let Some(refusal) = Refusal::recognise(&message.bytes)? {
            return Ok(Answer::Refused(refusal));
        }
        let mut reader = PIECES.open(&message.bytes)?;
        let (number, in_all, first) = (reader.u64()?, reader.u32()?, reader.u32()?);
        let bytes = reader.u64()?;
        let count = message.descriptors.len();
        let end = (count as u64).saturating_add(u64::from(first));
        if in_all > MOST_PIECES || end > u64::from(in_all) {
            let detail = format!("{count} pieces from {first} on, of {in_all}");
            return Err(PIECES.malformed(detail));
        }
        let lengths = (0..count).map(|_| read_length(&mut reader)).collect::<Result<_>>()?;
        reader.finish()?;
        Ok(Answer::Granted(Self { number, in_all, first, bytes, lengths }))
    }
}

fn read_length(reader: &mut Reader<'_>) -> Result<u64> {
    match reader.u64()? {
        0 => Err(PIECES.malformed("an empty piece")),
        length => Ok(length),
    }
}

impl Refusal {
    pub(crate) fn new(kind: ErrorKind, why: impl Into<String>) -> Self {
        Self { kind, why: why.into() }
    }

    pub(crate) fn of(error: &Error) -> Self {
        Self::new(error.kind(), error.to_string())
    }

    pub(crate) fn into_error(self, operation: &'static str) -> Error {
        Error::new(operation, self.kind, self.why)
    }

    /// Its code, which is not 0, and why.
    pub(crate) fn put(&self, bytes: &mut Vec<u8>) {
        let code = KINDS.iter().find(|(_, kind)| *kind == self.kind).map_or(5, |(code, _)| *code);
        bytes.push(code);
        let mut end = self.why.len().min(LONGEST_REASON);
        while !self.why.is_char_boundary(end) {
            end -= 1;
        }
        put_counted(bytes, &self.why.as_bytes()[..end]);
    }

    /// None where the code is 0: then nothing follows.
    pub(crate) fn take(reader: &mut Reader<'_>) -> Result<Option<Self>> {
        let [code] = reader.take()?;
        if code == 0 {
            return Ok(None);
        }
        let why = String::from_utf8_lossy(reader.counted(LONGEST_REASON)?).into_owned();
        let kind = KINDS.iter().find(|(known, _)| *known == code).map(|(_, kind)| *kind);
        Ok(Some(Self { kind: kind.unwrap_or(ErrorKind::Failed), why }))
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = REFUSAL.begin();
        self.put(&mut bytes);
        REFUSAL.seal(bytes).unwrap_or_default()
    }

    fn recognise(bytes: &[u8]) -> Result<Option<Self>> {
        if !bytes.starts_with(&REFUSAL.magic) {
            return Ok(None);
        }
        let mut reader = REFUSAL.open(bytes)?;
        let refusal = Self::take(&mut reader)?;
        reader.finish()?;
        refusal.map(Some).ok_or_else(|| REFUSAL.malformed("a refusal that is none"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    fn message(bytes: Vec<u8>, descriptors: usize) -> Message {
        Message { bytes, descriptors: (0..descriptors).map(|_| file()).collect() }
    }

    #[test]
    fn what_was_written_is_read() {
        let who = Introduction { identity: [1; 16], node: [2; 16], label: "me".to_owned() };
        let (read, _) = Introduction::read_hello(message(who.hello(), 1)).unwrap();
        assert_eq!(read, who);
        let welcome = Introduction::read_welcome(message(who.welcome(), OF_A_WELCOME)).unwrap();
        let Answer::Granted((read, _)) = welcome else { panic!("{welcome:?}") };
        assert_eq!(read, who);
        let open = Open { number: 3, ticket: 4 };
        assert_eq!(Open::decode(&open.encode()).unwrap(), open);
        let pieces = Pieces { number: 3, in_all: 5, first: 2, bytes: 40, lengths: vec![7, 8, 9] };
        let read = Pieces::read(&message(pieces.encode(), 3)).unwrap();
        assert_eq!(read, Answer::Granted(pieces));
        let refusal = Refusal::new(ErrorKind::Stale, "it is gone");
        let read = Pieces::read(&message(refusal.encode(), 0)).unwrap();
        assert_eq!(read, Answer::Refused(refusal.clone()));
        let read = Introduction::read_welcome(message(refusal.encode(), 0)).unwrap();
        assert!(matches!(read, Answer::Refused(read) if read == refusal));
    }

    #[test]
    fn descriptors_and_counts_that_do_not_fit_are_refused() {
        let who = Introduction { identity: [1; 16], node: [2; 16], label: String::new() };
        assert!(Introduction::read_hello(message(who.hello(), 0)).is_err());
        assert!(Introduction::read_hello(message(who.hello(), 2)).is_err());
        assert!(Introduction::read_hello(message(who.welcome(), 1)).is_err());
        assert!(Introduction::read_welcome(message(who.welcome(), 3)).is_err());
        let pieces = Pieces { number: 3, in_all: 5, first: 2, bytes: 40, lengths: vec![7, 8, 9] };
        assert!(Pieces::read(&message(pieces.encode(), 2)).is_err());
        assert!(Pieces::read(&message(pieces.encode(), 4)).is_err());
        let beyond = Pieces { first: 3, ..pieces.clone() };
        assert!(Pieces::read(&message(beyond.encode(), 3)).is_err());
        let empty = Pieces { lengths: vec![7, 0, 9], ..pieces };
        assert!(Pieces::read(&message(empty.encode(), 3)).is_err());
    }

    #[test]
    fn a_long_reason_is_cut_and_an_unknown_kind_is_a_failure() {
        let refusal = Refusal::new(ErrorKind::WrongMemory, "ä".repeat(LONGEST_REASON));
        let Answer::Refused(read) = Pieces::read(&message(refusal.encode(), 0)).unwrap() else {
            panic!("a refusal")
        };
        assert_eq!(read.kind, ErrorKind::Failed);
        assert_eq!(read.why, "ä".repeat(LONGEST_REASON / 2));
    }

    proptest! {
        #[test]
        fn garbage_with_a_good_frame_never_panics(
            which in 0..5_usize,
            body in proptest::collection::vec(any::<u8>(), 0..200),
            descriptors in 0..5_usize,
        ) {
            let form = [&HELLO, &WELCOME, &OPEN, &PIECES, &REFUSAL][which];
            let mut bytes = form.begin();
            bytes.extend(body);
            let bytes = form.seal(bytes).unwrap();
            let _ = Introduction::read_hello(message(bytes.clone(), descriptors));
            let _ = Introduction::read_welcome(message(bytes.clone(), descriptors));
            let _ = Pieces::read(&message(bytes.clone(), descriptors));
            let _ = Open::decode(&bytes);
        }
    }
}
