//! Compares received messages with the expected ones, chunk by chunk.

use fabric::ring::ChunkView;

use crate::failure::Failure;
use crate::message::{Message, PIECE, WORD};

#[derive(Debug)]
pub struct MessageCheck {
    message: Message,
    at: u64,
    /// Sum of the received words, which the supervisor compares.
    sum: u64,
    received: Box<[u8]>,
    expected: Box<[u8]>,
}

impl MessageCheck {
    pub fn new(message: Message) -> Self {
        let piece = || vec![0; PIECE].into_boxed_slice();
        Self { message, at: 0, sum: 0, received: piece(), expected: piece() }
    }

    /// Begins the next message.
    pub fn begin(&mut self, message: Message) {
        (self.message, self.at, self.sum) = (message, 0, 0);
    }

    pub fn message(&self) -> Message {
        self.message
    }

    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// Compares a chunk: header, and every byte.
    pub fn take(&mut self, view: &ChunkView) -> Result<(), Failure> {
        let (header, message) = (view.header(), &self.message);
        let found = (header.message, header.length, header.topic, header.offset);
        if found != (message.number, message.length, message.topic, self.at) {
            let at = self.at;
            return Err(Failure::Defect(format!("{header:?}, where {message:?} is at {at}")));
        }
        let mut from = 0;
        while from < view.len() {
            from += self.piece(view, from)?;
        }
        if view.is_last() != (self.at == self.message.length) {
            let (at, message) = (self.at, &self.message);
            return Err(Failure::Defect(format!("{header:?} ends {message:?} at {at}")));
        }
        Ok(())
    }

    /// Compares a piece of a chunk and returns its length. A chunk may begin inside a word, whose
    /// earlier bytes count as 0, so that sums of pieces add up.
    fn piece(&mut self, view: &ChunkView, from: usize) -> Result<usize, Failure> {
        let before = self.at as usize % WORD;
        let end = PIECE.min(before + view.len() - from);
        let words = end.next_multiple_of(WORD);
        self.received[..before].fill(0);
        view.read(from, &mut self.received[before..end])?;
        self.received[end..words].fill(0);
        self.message.words(self.at / WORD as u64, &mut self.expected[..words]);
        if self.received[before..end] != self.expected[before..end] {
            return Err(self.mismatch(view, before..end));
        }
        for word in self.received[..words].chunks_exact(WORD) {
            let word = word.try_into().map_or(0, u64::from_le_bytes);
            self.sum = self.sum.wrapping_add(word);
        }
        self.at += (end - before) as u64;
        Ok(end - before)
    }

    #[cold]
    fn mismatch(&self, view: &ChunkView, piece: std::ops::Range<usize>) -> Failure {
        let differs = |index: &usize| self.received[*index] != self.expected[*index];
        let first = piece.clone().find(differs).unwrap_or(piece.start);
        let count = piece.clone().filter(differs).count();
        let shown = first..piece.end.min(first + 16);
        Failure::Defect(format!(
            "wrong bytes in {:?}, {:?}: {count} of {} from {}, the first at {}: {:02x?} for {:02x?}",
            self.message,
            view.header(),
            piece.len(),
            self.at,
            self.at + (first - piece.start) as u64,
            &self.received[shown.clone()],
            &self.expected[shown],
        ))
    }
}
