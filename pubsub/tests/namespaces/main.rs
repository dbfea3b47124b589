//! Five nodes, each in its own network namespace, on one hub. Links are cut and restored, and
//! processes are killed.
#![allow(missing_docs, unreachable_pub)]

mod child;
mod network;
mod peers;
mod recovery;
#[path = "../node/support.rs"]
#[allow(dead_code)]
mod support;
mod topics;
