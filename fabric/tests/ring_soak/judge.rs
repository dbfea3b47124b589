//! What was delivered, by all that the supervisor was told, and what it makes of it.

use std::fmt;
use std::time::Duration;

use fabric::ring::Notify;
use serde::Serialize;

use crate::child::Memory;
use crate::failure::Failure;
use crate::message::Message;

/// Bytes from which on a message is a large one.
const LARGE: u64 = 64 << 20;

/// What came of a turn of one provider: the line that is printed.
#[derive(Debug, Clone, Serialize)]
pub struct Judge {
    provider: String,
    libfabric: String,
    seed: u64,
    pub seconds: u64,
    messages: u64,
    bytes: u64,
    longest: u64,
    /// Messages of at least 64 MiB, and without bytes.
    large: u64,
    empty: u64,
    pub killed_writers: u64,
    pub killed_readers: u64,
    /// Writer and reader at once: not counted with the others.
    pub killed_both: u64,
    /// Connections that were given up while both lived.
    pub reconnects: u64,
    pub epochs: u64,
    /// Of these, those that a ring lived on in, opened again; and how the reader was told.
    pub reopened: u64,
    immediates: u64,
    notices: u64,
    polls: u64,
    /// Writers that closed an endpoint, or were to rest, with writes that would not end.
    pub undrained: u64,
    /// From one message to the next, within a connection.
    pub longest_wait_ms: u64,
    lost: u64,
    duplicated: u64,
    pub bad: u64,
    /// Of those that lived longest.
    pub writer_memory: Memory,
    pub reader_memory: Memory,
    pub is_memory_flat: bool,
    pub is_good: bool,
}

impl Judge {
    pub fn new(provider: &str, seed: u64) -> Self {
        Self {
            provider: provider.to_owned(),
            libfabric: fabric::Version::running().to_string(),
            seed,
            seconds: 0,
            messages: 0,
            bytes: 0,
            longest: 0,
            large: 0,
            empty: 0,
            killed_writers: 0,
            killed_readers: 0,
            killed_both: 0,
            reconnects: 0,
            epochs: 0,
            reopened: 0,
            immediates: 0,
            notices: 0,
            polls: 0,
            undrained: 0,
            longest_wait_ms: 0,
            lost: 0,
            duplicated: 0,
            bad: 0,
            writer_memory: Memory::default(),
            reader_memory: Memory::default(),
            is_memory_flat: true,
            is_good: false,
        }
    }

    /// Messages that were delivered: the number of the next one.
    pub fn messages(&self) -> u64 {
        self.messages
    }

    /// A reader reported a message.
    pub fn deliver(&mut self, number: u64, length: u64, sum: u64) -> Result<(), Failure> {
        let next = self.messages;
        if number != next {
            let fault = if number > next { &mut self.lost } else { &mut self.duplicated };
            *fault += number.abs_diff(next);
            return Err(Failure::Found(format!("message {number} came, where {next} is next")));
        }
        let message = Message::new(self.seed, number);
        if (message.length, message.sum()) != (length, sum) {
            self.bad += 1;
            let came = format!("{length} bytes with sum {sum:x}");
            return Err(Failure::Found(format!("{came} came for {message:?}")));
        }
        self.messages += 1;
        self.bytes += length;
        self.longest = self.longest.max(length);
        self.large += u64::from(length >= LARGE);
        self.empty += u64::from(length == 0);
        Ok(())
    }

    /// The two sides say how many messages there were.
    pub fn compare(&mut self, whose: &str, messages: u64) -> Result<(), Failure> {
        let delivered = self.messages;
        if messages == delivered {
            return Ok(());
        }
        let fault = if messages > delivered { &mut self.lost } else { &mut self.duplicated };
        *fault += messages.abs_diff(delivered);
        let text = format!("{messages} messages by the {whose}'s count, {delivered} delivered");
        Err(Failure::Found(text))
    }

    pub fn connected(&mut self, form: Option<Notify>, is_again: bool) {
        self.epochs += 1;
        self.reopened += u64::from(is_again);
        let count = match form {
            Some(Notify::Immediate) => &mut self.immediates,
            Some(Notify::Message) => &mut self.notices,
            Some(Notify::Polling) => &mut self.polls,
            None => return,
        };
        *count += 1;
    }

    pub fn waited(&mut self, wait: Duration) {
        self.longest_wait_ms = self.longest_wait_ms.max(wait.as_millis() as u64);
    }

    /// Keeps what is known of the process that lived longest.
    pub fn remember(&mut self, is_writer: bool, memory: Memory) {
        self.is_memory_flat &= memory.is_flat();
        let kept = if is_writer { &mut self.writer_memory } else { &mut self.reader_memory };
        if memory.seconds >= kept.seconds {
            *kept = memory;
        }
    }
}

/// One line of JSON.
impl fmt::Display for Judge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}
