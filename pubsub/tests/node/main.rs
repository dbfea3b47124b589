//! Processes at a node: those that come and go, those that are killed, and those that lie.
//!
//! Messages lie in host memory, or in that of the device that `FABRICAST_TEST_DEVICE` names.
#![allow(missing_docs, unreachable_pub)]

mod child;
mod dedicated_service;
mod descriptors;
mod hostile;
mod joining;
mod limits;
mod loans;
mod messages;
mod stream_order;
mod support;
mod takeover;
mod typed;
