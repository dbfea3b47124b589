//! A ring between two programs, established over a TCP connection: the reader listens at an
//! address, the writer connects to it.
//!
//! The TCP connection carries the handshake: providers, addresses, ring offer and answer.
//! Afterwards it carries nothing, and its end tells each side that the other has exited. Messages
//! go over the fabric.
//!
//! | file | contents |
//! |---|---|
//! | `setup` | the options; listening and connecting |
//! | `frame` | frames of the handshake, on a non-blocking socket |
//! | `provider_choice` | the provider that both sides have |
//! | `listener` | handshakes of the reader's side, several at a time |
//! | `connector` | the handshake of the writer's side |
//! | `progress_thread` | the thread that drives a ring while its user does not |
//! | `reader`, `writer` | the public handles of the two sides |

mod connector;
mod frame;
mod listener;
mod progress_thread;
mod provider_choice;
mod reader;
mod setup;
mod writer;

#[cfg(test)]
mod tests;

pub use listener::RingListener;
pub use reader::RingReader;
pub use setup::{RingSetup, connect, listen};
pub use writer::RingWriter;

const OPERATION: &str = "connect ring";
