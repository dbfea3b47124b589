//! Streams of messages: a window of messages, then an acknowledgement.

use std::time::{Duration, Instant};

use crate::benchmark::{Checked, Load, Outcome};
use crate::channel::Channel;
use crate::{Job, Result};

/// Messages in flight.
pub const WINDOW: usize = 64;
/// Windows of small messages, and of large ones.
pub const ITERATIONS: [u32; 2] = [1000, 200];
/// Bytes of an acknowledgement.
const ACKNOWLEDGEMENT: usize = 1;

/// Which rank of a pair sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// The lower one.
    FromLowerRank,
    /// Both.
    Both,
}

/// The result of a rank.
#[derive(Debug, Default)]
pub struct Stream {
    elapsed: Duration,
    bytes: u64,
    mistakes: u64,
}

impl Stream {
    /// Bytes in one direction, in millions a second.
    #[must_use]
    pub fn megabytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.elapsed.as_secs_f64() / 1e6
    }
}

impl From<Stream> for Outcome {
    fn from(stream: Stream) -> Self {
        Self { mistakes: stream.mistakes, ..Self::default() }
    }
}

/// Sends or receives windows of messages. Ranks without a partner do nothing.
///
/// # Errors
/// Errors of the channel.
pub fn run(
    job: &mut Job,
    channel: &mut dyn Channel,
    load: &Load,
    direction: Direction,
) -> Result<Stream> {
    let Some(partner) = load.partner else { return Ok(Stream::default()) };
    let is_lower = job.group.rank() < partner;
    let (sends, receives) =
        (is_lower || direction == Direction::Both, !is_lower || direction == Direction::Both);
    let mut checked = Checked::new(job, load);
    let mut start = Instant::now();
    for iteration in 0..load.warmup + load.iterations {
        if iteration == load.warmup {
            start = Instant::now();
        }
        if receives {
            channel.expect(job, load.window, load.bytes)?;
        }
        if sends {
            for _ in 0..load.window {
                checked.fill(channel)?;
                channel.send(job, load.bytes)?;
            }
        }
        if receives {
            channel.receive(job, load.window, load.bytes)?;
            checked.check(channel, load.window)?;
        }
        channel.flush(job)?;
        // The next window writes to the same slots.
        if receives {
            channel.send(job, ACKNOWLEDGEMENT)?;
        }
        if sends {
            channel.expect(job, 1, ACKNOWLEDGEMENT)?;
            channel.receive(job, 1, ACKNOWLEDGEMENT)?;
        }
        channel.flush(job)?;
    }
    let elapsed = start.elapsed();
    let messages = u64::from(load.iterations) * load.window as u64;
    let bytes = messages * load.bytes as u64;
    Ok(Stream { elapsed, bytes, mistakes: checked.mistakes })
}
