//! Five nodes on a network: each in a network namespace of its own, with a cable to a hub. A
//! cable is cut and mended, and processes are killed.
#![allow(missing_docs, unreachable_pub)]

mod cables;
#[path = "../node/ground.rs"]
#[allow(dead_code)]
mod ground;
mod other_side;
mod peers;
mod recovery;
mod topics;
