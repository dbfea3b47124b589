//! One buffer in several processes: regular, faulty and malicious ones, in the same and in other
//! namespaces.
//!
//! On emulated devices, or on the device that `TEST_DEVICE` names.
#![allow(missing_docs, unreachable_pub)]

#[path = "../common/mod.rs"]
mod common;
mod fixture;
mod hostile;
mod peer_process;
mod processes;
mod tokens;
