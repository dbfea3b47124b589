//! Where a channel that is authenticated and encrypted goes: between frames on the wire
//! and what is in them.

use std::fmt;

use super::reason::Reason;

/// Looks after what goes over a connection. Handed over in order, each body once.
pub(super) trait Guard: fmt::Debug + Send {
    /// What is to be sent before anything came.
    fn begin(&mut self) -> Option<Vec<u8>>;

    /// Knows it with whom it speaks, so that frames can be sealed?
    fn is_ready(&self) -> bool;

    /// A body came.
    fn hear(&mut self, body: &[u8]) -> Result<Heard, Reason>;

    /// As it goes over the wire.
    fn seal(&mut self, body: Vec<u8>) -> Vec<u8>;
}

/// What a body was.
#[derive(Debug)]
pub(super) struct Heard {
    /// What is to be answered, between the guards.
    pub(super) answer: Option<Vec<u8>>,
    /// A frame that the other side sealed.
    pub(super) frame: Option<Vec<u8>>,
}

/// Believes everything, and hides nothing.
#[derive(Debug)]
pub(super) struct Open;

impl Guard for Open {
    fn begin(&mut self) -> Option<Vec<u8>> {
        None
    }

    fn is_ready(&self) -> bool {
        true
    }

    fn hear(&mut self, body: &[u8]) -> Result<Heard, Reason> {
        Ok(Heard { answer: None, frame: Some(body.to_vec()) })
    }

    fn seal(&mut self, body: Vec<u8>) -> Vec<u8> {
        body
    }
}
