//! Counts what was delivered, from the reports to the supervisor.

use std::fmt;
use std::time::Duration;

use fabric::ring::NotifyMode;
use serde::Serialize;

use crate::child::Memory;
use crate::failure::Failure;
use crate::message::Message;

/// Smallest large message.
const LARGE: u64 = 64 << 20;

/// Result of one provider's run: the line that is printed.
#[derive(Debug, Clone, Serialize)]
pub struct SoakResult {
    provider: String,
    libfabric: String,
    seed: u64,
    pub seconds: u64,
    messages: u64,
    bytes: u64,
    longest: u64,
    /// Messages of at least 64 MiB, and empty ones.
    large_messages: u64,
    empty_messages: u64,
    pub killed_writers: u64,
    pub killed_readers: u64,
    /// Writer and reader at once: not counted with the others.
    pub killed_both: u64,
    /// Connections abandoned while both were alive.
    pub reconnects: u64,
    pub epochs: u64,
    /// Epochs in which the reader kept its endpoint; and epochs by notify mode.
    pub reopened: u64,
    epochs_by_immediate: u64,
    epochs_by_message: u64,
    /// Drains that ended with writes in flight.
    pub drains_incomplete: u64,
    /// Longest time between two messages of a connection.
    pub longest_wait_ms: u64,
    lost: u64,
    duplicated: u64,
    pub corrupt: u64,
    /// Of the processes that lived longest.
    pub writer_memory: Memory,
    pub reader_memory: Memory,
    pub memory_stable: bool,
    pub passed: bool,
}

impl SoakResult {
    pub fn new(provider: &str, seed: u64) -> Self {
        Self {
            provider: provider.to_owned(),
            libfabric: fabric::Version::running().to_string(),
            seed,
            seconds: 0,
            messages: 0,
            bytes: 0,
            longest: 0,
            large_messages: 0,
            empty_messages: 0,
            killed_writers: 0,
            killed_readers: 0,
            killed_both: 0,
            reconnects: 0,
            epochs: 0,
            reopened: 0,
            epochs_by_immediate: 0,
            epochs_by_message: 0,
            drains_incomplete: 0,
            longest_wait_ms: 0,
            lost: 0,
            duplicated: 0,
            corrupt: 0,
            writer_memory: Memory::default(),
            reader_memory: Memory::default(),
            memory_stable: true,
            passed: false,
        }
    }

    /// Messages delivered: the number of the next one.
    pub fn messages(&self) -> u64 {
        self.messages
    }

    /// Counts a delivered message.
    pub fn count_delivered(&mut self, number: u64, length: u64, sum: u64) -> Result<(), Failure> {
        let next = self.messages;
        if number != next {
            let fault = if number > next { &mut self.lost } else { &mut self.duplicated };
            *fault += number.abs_diff(next);
            return Err(Failure::Defect(format!(
                "message {number} was delivered, expected {next}"
            )));
        }
        let message = Message::new(self.seed, number);
        if (message.length, message.sum()) != (length, sum) {
            self.corrupt += 1;
            let received = format!("{length} bytes with sum {sum:x}");
            return Err(Failure::Defect(format!("received {received} for {message:?}")));
        }
        self.messages += 1;
        self.bytes += length;
        self.longest = self.longest.max(length);
        self.large_messages += u64::from(length >= LARGE);
        self.empty_messages += u64::from(length == 0);
        Ok(())
    }

    /// Compares a side's number of messages with the delivered ones.
    pub fn compare(&mut self, side: &str, messages: u64) -> Result<(), Failure> {
        let delivered = self.messages;
        if messages == delivered {
            return Ok(());
        }
        let fault = if messages > delivered { &mut self.lost } else { &mut self.duplicated };
        *fault += messages.abs_diff(delivered);
        let text = format!("{messages} messages by the {side}'s count, {delivered} delivered");
        Err(Failure::Defect(text))
    }

    pub fn connected(&mut self, mode: Option<NotifyMode>, is_reopened: bool) {
        self.epochs += 1;
        self.reopened += u64::from(is_reopened);
        let count = match mode {
            Some(NotifyMode::Immediate) => &mut self.epochs_by_immediate,
            Some(NotifyMode::Message) => &mut self.epochs_by_message,
            None => return,
        };
        *count += 1;
    }

    pub fn waited(&mut self, wait: Duration) {
        self.longest_wait_ms = self.longest_wait_ms.max(wait.as_millis() as u64);
    }

    /// Keeps the figures of the process that lived longest.
    pub fn record_memory(&mut self, is_writer: bool, memory: Memory) {
        self.memory_stable &= memory.is_flat();
        let oldest = if is_writer { &mut self.writer_memory } else { &mut self.reader_memory };
        if memory.seconds >= oldest.seconds {
            *oldest = memory;
        }
    }
}

/// One line of JSON.
impl fmt::Display for SoakResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}
