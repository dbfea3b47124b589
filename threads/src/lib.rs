//! The threads of the library: how they start, lock, sleep and pause between retries, what they drop
//! for others, and which objects belong to a process that forked.
//!
//! ```
//! let thread = threads::spawn("fabricast-sum", || 1 + 1)?;
//! assert_eq!(thread.join().unwrap(), 2);
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! Modules, each importing only those before it: `retry_backoff`, `lock`, `fork_generation`,
//! `spawn`, `deferred_drop`, `exact_timer`.

mod deferred_drop;
mod exact_timer;
mod fork_generation;
mod lock;
mod retry_backoff;
mod spawn;

pub use deferred_drop::{DeferredDrop, DeferredValue};
pub use exact_timer::ExactTimer;
pub use fork_generation::ForkGeneration;
pub use lock::lock;
pub use retry_backoff::RetryBackoff;
pub use spawn::{BlockedSignals, spawn};
