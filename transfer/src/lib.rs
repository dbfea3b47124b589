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
//!
//! Modules, each importing only those before it: `error`, `admission`, `blocks`, `notice`,
//! `refusal`, `path`, `operations`, `private_memory`, `pinned`, `host_copy`, `host_buffer`, `stream_copies`,
//! `copy_queue`, `tensor`, `wire`, `region`, `copy_requests`, `handle`, `share`, `socket_server`, `share_service`, `device_memory`, `rail`,
//! `agent`, `copy_service`, `service_copies`.

mod admission;
mod agent;
mod blocks;
mod copy_queue;
mod copy_requests;
mod copy_service;
#[doc(hidden)] // for topics
pub mod device_memory;
mod error;
mod handle;
mod host_buffer;
pub mod host_copy;
mod notice;
mod operations;
pub mod path;
mod pinned;
mod private_memory;
mod rail;
mod refusal;
mod region;
mod service_copies;
mod share;
mod share_service;
mod socket_server;
mod stream_copies;
mod tensor;
mod wire;

pub use admission::Admission;
pub use agent::{
    Agent, AgentCard, AgentOptions, Condition, Departure, Event, EventWatch, FabricAddress,
    Leftovers, MAX_PUBLISHED_REGIONS, MemoryAttributes, PeerId, PreparedTransfer, Route,
    choose_fabric, clean,
};
pub use blocks::{Blocks, MAX_STRIDES, Rows, Strided, Subarray};
pub use copy_service::CopyService;
pub use error::{Error, ErrorKind, Result};
pub use handle::{Handle, HandleMetadata, HandleType};
pub use host_buffer::HostBuffer;
pub use notice::{MAX_NOTICE_LENGTH, Notice};
pub use operations::{Done, MAX_OPERATIONS, Token};
pub use pinned::pin;
pub use region::{Buffer, FabricKey, Region, RegionDescriptor, Rights};
#[doc(hidden)] // for topics
pub use service_copies::{CopyPair, ServiceCopies};
pub use share::{OpenedBuffer, Opener, SharedBuffer};
pub use share_service::{
    MAX_NAME_LENGTH, MAX_SHARED_NAME_LENGTH, SHORT_TOKEN_LENGTH, Share, ShareClient, ShareService,
    SharedName, clean_names, default_directory, is_token, open, open_of, share, share_with,
    shared_under_name, wait_for_receivers,
};
pub use tensor::{ElementType, MAX_DIMENSIONS, Tensor};
pub use wire::MAX_LABEL_LENGTH;

fn remaining(end: std::time::Instant) -> std::time::Duration {
    end.saturating_duration_since(std::time::Instant::now())
}
