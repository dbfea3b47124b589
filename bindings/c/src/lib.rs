//! Fabricast for C and C++: what `include/fabricast.h` and `include/rgaps.h` declare.
//!
//! Arguments are checked in [`ffi`], the only module that accesses memory of the caller, except
//! [`device`]. Handles are looked up in tables ([`registry`], [`handle_table`]), so that a closed
//! one is an error and never a wild pointer. The rest is safe code over `pubsub`.

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
