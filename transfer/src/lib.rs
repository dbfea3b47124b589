//! Memory handed from process to process, and bytes moved between them.
//!
//! Stands on `gpu` (devices) and `ipc` (processes of one machine), and owns the choice of
//! [paths](path): by which way bytes go, and why.
//!
//! - Shared without a copy: a [`Shared`] buffer gives [handles](Handle), which carry what
//!   the bytes mean along with the descriptors that reach them; an [`Opener`] maps them,
//!   each memory once. A [`ShareService`] gives them out by name.
//! - Moved: an [`Agent`] puts into regions of other agents and gets from them, and tells
//!   them when the data is there.

mod agent;
mod blocks;
mod copies;
mod error;
mod handle;
mod host;
pub mod path;
mod pinned;
mod private;
mod rail;
mod region;
mod service;
mod share;
mod socket_server;
mod tensor;
mod wire;

pub use agent::{
    Agent, AgentCard, AgentOptions, Condition, Done, Event, FabricAddress, LONGEST_LABEL,
    LONGEST_NOTICE, MOST_OPERATIONS, MOST_REGIONS, Notice, PeerId, Remains, Route, Token,
    Whereabouts, clean,
};
pub use blocks::{Blocks, InArray, MOST_STRIDES, Rows, Strided};
pub use error::{Error, ErrorKind, Result};
pub use handle::{Facts, Handle, Way};
pub use host::HostBuffer;
pub use pinned::pin;
pub use region::{Buffer, FabricKey, Region, RegionDescriptor, Rights};
pub use service::{Admission, Client, LONGEST_NAME, ShareService};
pub use share::{Opened, Opener, Shared};
pub use tensor::{ElementType, MOST_DIMENSIONS, Tensor};

/// What a thread that panicked left is whole: nothing here breaks off in the middle of a change.
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
