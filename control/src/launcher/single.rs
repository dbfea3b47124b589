//! A job of one rank: a program that no launcher started.

use std::time::Duration;

use super::error::Result;
use super::exchange::{Exchange, LocalRank};

/// The only rank of a job.
#[derive(Debug, Clone)]
pub struct Single {
    job: String,
}

impl Single {
    /// A job of this process alone.
    #[must_use]
    pub fn new() -> Self {
        Self { job: format!("single-{}", std::process::id()) }
    }
}

impl Default for Single {
    fn default() -> Self {
        Self::new()
    }
}

impl Exchange for Single {
    fn name(&self) -> &str {
        "no launcher"
    }

    fn job(&self) -> &str {
        &self.job
    }

    fn rank(&self) -> u32 {
        0
    }

    fn size(&self) -> u32 {
        1
    }

    fn local(&self) -> Option<LocalRank> {
        Some(LocalRank { rank: 0, size: 1 })
    }

    fn all_gather(&mut self, own: &[u8], _: Duration) -> Result<Vec<Vec<u8>>> {
        Ok(vec![own.to_vec()])
    }
}
