//! Processes at a node: those that come and go, those that are killed, and those that lie.
//!
//! Messages lie in host memory, or in that of the device that `FABRICAST_TEST_DEVICE` names.
#![allow(missing_docs, unreachable_pub)]

mod descriptors;
mod ground;
mod hostile;
mod joining;
mod limits;
mod loans;
mod messages;
mod ordered;
mod other_side;
mod standing;
mod succession;
