//! Memory shared between processes, and bytes transferred between them.
//!
//! Builds on `gpu` (devices) and `ipc` (processes of one machine), and chooses the [path] of
//! each transfer and gives the reasons.
//!
//! - Sharing without a copy: a [`SharedBuffer`] makes [handles](Handle), which carry the tensor's
//!   description and the descriptors of its memory. An [`Opener`] maps them, each memory once. A
//!   [`ShareService`] hands them out by name.
//! - Transfers: an [`Agent`] puts into regions of other agents, gets from them, and notifies them
//!   when the data has arrived.

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

/// A poisoned mutex is used anyway: no critical section of this crate leaves its data half changed.
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
