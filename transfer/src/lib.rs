//! Memory handed from process to process, and bytes moved between them.
//!
//! Stands on `gpu` (devices) and `ipc` (processes of one machine), and owns the choice of
//! [paths](path): by which way bytes go, and why.
//!
//! - Shared without a copy: a [`SharedBuffer`] buffer gives [handles](Handle), which carry what
//!   the bytes mean along with the descriptors that reach them; an [`Opener`] maps them,
//!   each memory once. A [`ShareService`] gives them out by name.
//! - Moved: an [`Agent`] puts into regions of other agents and gets from them, and tells
//!   them when the data is there.

mod agent;
mod blocks;
mod error;
mod handle;
mod host_buffer;
pub mod path;
mod pinned;
mod private_memory;
mod rail;
mod region;
mod share;
mod share_service;
mod socket_server;
mod stream_copies;
mod tensor;
mod wire;

pub use agent::{
    Agent, AgentCard, AgentOptions, Condition, Done, Event, FabricAddress, Leftovers,
    MAX_LABEL_LENGTH, MAX_NOTICE_LENGTH, MAX_OPERATIONS, MAX_PUBLISHED_REGIONS, MemoryAttributes,
    Notice, PeerId, Route, Token, clean,
};
pub use blocks::{Blocks, MAX_STRIDES, Rows, Strided, Subarray};
pub use error::{Error, ErrorKind, Result};
pub use handle::{Handle, HandleMetadata, HandleType};
pub use host_buffer::HostBuffer;
pub use pinned::pin;
pub use region::{Buffer, FabricKey, Region, RegionDescriptor, Rights};
pub use share::{OpenedBuffer, Opener, SharedBuffer};
pub use share_service::{Admission, MAX_NAME_LENGTH, ShareClient, ShareService};
pub use tensor::{ElementType, MAX_DIMENSIONS, Tensor};

/// What a thread that panicked left is whole: nothing here breaks off in the middle of a change.
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
