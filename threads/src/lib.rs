//! The threads of the library: how they start, and how long they pause between retries.
//!
//! ```
//! let thread = threads::spawn("fabricast-sum", || 1 + 1)?;
//! assert_eq!(thread.join().unwrap(), 2);
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! Modules, each importing only those before it: `retry_backoff`, `spawn`.

mod retry_backoff;
mod spawn;

pub use retry_backoff::RetryBackoff;
pub use spawn::{BlockedSignals, spawn};
