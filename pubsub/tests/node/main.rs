//! Processes of one node: they join, leave, are killed, or violate the protocol.
//!
//! Messages are in host memory, or on the device that `TEST_DEVICE` names.
#![allow(missing_docs, unreachable_pub)]

mod child;
mod closing;
mod dedicated_service;
mod descriptors;
mod ends;
mod hidden_devices;
mod hostile;
mod joining;
mod limits;
mod loans;
mod messages;
mod stream_order;
mod support;
mod takeover;
mod typed;
