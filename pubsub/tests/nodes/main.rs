//! Messages between nodes: of one process, and of several processes that are killed.
#![allow(missing_docs, unreachable_pub)]

mod between;
mod child;
mod ends;
mod gaps;
mod losses;
mod start_order;
mod stream_order;
#[path = "../node/support.rs"]
#[allow(dead_code)]
mod support;
mod survivors;
mod takeovers;
