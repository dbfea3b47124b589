//! Counts notices of peers.

use std::collections::HashMap;
use std::time::Duration;

use crate::Result;
use crate::job::Job;

/// Notices that arrived, by tag. A peer may be a step ahead, so notices of a later step are kept.
#[derive(Debug, Default)]
pub struct Arrivals(HashMap<u64, u32>);

impl Arrivals {
    /// Waits until this number of notices with this tag has arrived, and forgets them.
    ///
    /// # Errors
    /// If a rank leaves, or they do not arrive in time.
    pub fn wait(&mut self, job: &mut Job, tag: u64, count: u32, timeout: Duration) -> Result<()> {
        while self.0.get(&tag).copied().unwrap_or(0) < count {
            *self.0.entry(job.next_notice(timeout)?.tag).or_default() += 1;
        }
        self.0.remove(&tag);
        Ok(())
    }
}
