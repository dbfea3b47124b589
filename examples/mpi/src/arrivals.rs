//! Counts notices of peers.

use std::collections::HashMap;
use std::time::Duration;

use fabricast::transfer::{Agent, Event};

use crate::Result;

/// Notices that arrived, by tag. A peer may be a step ahead, so notices of a later step are kept.
#[derive(Debug, Default)]
pub struct Arrivals(HashMap<u64, u32>);

impl Arrivals {
    /// Waits until this number of notices with this tag has arrived, and forgets them.
    ///
    /// # Errors
    /// If a peer leaves, or they do not arrive in time.
    pub fn wait(
        &mut self,
        agent: &mut Agent,
        tag: u64,
        count: u32,
        timeout: Duration,
    ) -> Result<()> {
        while self.0.get(&tag).copied().unwrap_or(0) < count {
            match agent.next_event(timeout)? {
                Event::Notice { notice, .. } => *self.0.entry(notice.tag).or_default() += 1,
                Event::Left { label, .. } => {
                    return Err(format!("wait for peers failed: \"{label}\" has left").into());
                }
                _ => {}
            }
        }
        self.0.remove(&tag);
        Ok(())
    }
}
