//! A ring between two programs, made over a TCP connection: the reader listens at an address, the
//! writer connects to it.
//!
//! The TCP connection carries the handshake: which providers there are, addresses, the terms of the
//! ring. After that it carries nothing, and its end tells each side that the other one is gone.
//! Messages go by the fabric.
//!
//! | file | what it has |
//! |---|---|
//! | `setup` | the options; listening and connecting |
//! | `frame` | frames of the handshake, on a socket that never blocks |
//! | `offers` | the provider that both sides have |
//! | `listener` | handshakes of the reader's side, several at a time |
//! | `connector` | the handshake of the writer's side |
//! | `progress_thread` | the thread that drives a ring while its user does not |
//! | `reader`, `writer` | the two sides, as a user has them |

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

const OPERATION: &str = "connecting a ring";
