//! Agents in several processes: they put and get, tell each other, are killed, and lie.
//!
//! On the stand-in, or on the device that `FABRICAST_TEST_DEVICE` names (and the next one,
//! if there is one).
#![allow(missing_docs, unreachable_pub)]

mod cables;
#[path = "../common/mod.rs"]
mod common;
mod devices;
mod endings;
mod fences;
mod halos;
mod hostile;
mod house;
mod leftovers;
mod losses;
mod moves;
mod orders;
mod other_side;
mod own_memory;
mod own_use;
mod printed;
mod rails;
mod spinning;
mod unreachable;
