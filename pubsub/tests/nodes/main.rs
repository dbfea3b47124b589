//! Several nodes, whose messages go from one to the other: in one process, and in several
//! that are killed.
#![allow(missing_docs, unreachable_pub)]

mod between;
mod child;
mod gaps;
mod losses;
mod start_order;
mod stream_order;
#[path = "../node/support.rs"]
#[allow(dead_code)]
mod support;
mod survivors;
mod takeovers;
