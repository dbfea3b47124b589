//! Several nodes, whose messages go from one to the other: in one process, and in several
//! that are killed.
#![allow(missing_docs, unreachable_pub)]

mod between;
mod gaps;
#[path = "../node/ground.rs"]
#[allow(dead_code)]
mod ground;
mod losses;
mod ordered;
mod orders;
mod other_side;
mod survivors;
mod takeovers;
