//! Agents in several processes: transfers, notices, kills and false claims.
//!
//! On emulated devices, or on the device that `TEST_DEVICE` names (and the next one,
//! if there is one).
#![allow(missing_docs, unreachable_pub)]

mod cables;
#[path = "../common/mod.rs"]
mod common;
mod copy_service;
mod debug_output;
mod devices;
mod direct;
mod endings;
mod fences;
mod fixture;
mod halos;
mod hostile;
mod leftovers;
mod limits;
mod local_only;
mod losses;
mod moves;
mod orders;
mod own_memory;
mod peer_process;
mod pods;
mod rails;
mod requests;
mod spinning;
mod staged;
mod unreachable;
