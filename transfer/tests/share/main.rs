//! One buffer in several processes: honest ones, broken ones, malicious ones; in the same
//! namespaces and in others.
//!
//! On the emulated, or on the device that `FABRICAST_TEST_DEVICE` names.
#![allow(missing_docs, unreachable_pub)]

#[path = "../common/mod.rs"]
mod common;
mod fixture;
mod hostile;
mod peer_process;
mod processes;
