//! Fabricast for C and C++: what `include/fabricast.h` and `include/rgaps.h` declare.
//!
//! What crosses the boundary is checked in [`boundary`], the only file that touches memory of
//! the caller's but for [`device`]. Handles are names, looked up in tables ([`registry`],
//! [`table`]), so that one that was closed is an error and never a wild pointer. Everything
//! else is safe code over `pubsub`.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("handles have 64 bits: for machines with 64-bit pointers only");

mod device;
mod exclusive;
mod failure;
#[cfg(test)]
mod fake_driver_tests;
mod ffi;
mod handle;
mod handle_table;
mod layout;
mod log;
mod network;
mod node;
mod publisher;
mod registry;
mod report;
mod rgaps;
mod status;
mod stream;
mod subscriber;
mod topic;
mod variables;
