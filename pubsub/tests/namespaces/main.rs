//! Five nodes on a network: each in a network namespace of its own, with a cable to a hub. A
//! cable is cut and mended, and processes are killed.
#![allow(missing_docs, unreachable_pub)]

mod child;
mod network;
mod peers;
mod recovery;
#[path = "../node/support.rs"]
#[allow(dead_code)]
mod support;
mod topics;
