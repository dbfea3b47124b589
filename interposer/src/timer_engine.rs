//! Times of the operations of another library, by the moments at which the program synchronizes streams.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::engine::{AbortHandle, Engine, Mark};
use crate::error::{Flag, Result};
use crate::request::{Request, StreamHandle};

/// Measures from the call of an operation until its stream was synchronized.
#[derive(Debug, Default)]
pub(crate) struct TimerEngine {
    /// The next synchronization of each stream.
    next: HashMap<StreamHandle, Arc<OnceLock<Instant>>>,
    /// The next mark is the begin of an operation.
    is_begin: bool,
}

impl Engine for TimerEngine {
    fn is_left(&mut self, _stream: StreamHandle) -> bool {
        false
    }

    #[allow(unsafe_code)]
    unsafe fn run(&mut self, _request: &Request, _stream: StreamHandle) -> Result<()> {
        Ok(())
    }

    fn mark(&mut self, stream: StreamHandle) -> Result<Mark> {
        self.is_begin = !self.is_begin;
        Ok(match self.is_begin {
            true => Mark::Moment(Instant::now()),
            false => Mark::Synchronization(Arc::clone(self.next.entry(stream).or_default())),
        })
    }

    fn order(&mut self, _stream: StreamHandle, _after: &Mark) -> Result<()> {
        Ok(())
    }

    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn check_started(&self) -> Result<()> {
        Ok(())
    }

    fn abort_handle(&self) -> AbortHandle {
        AbortHandle::Flag(Flag::default())
    }

    fn drain(&mut self, _timeout: Duration) -> Result<()> {
        Ok(())
    }

    fn synchronized(&mut self, stream: StreamHandle) {
        if let Some(moment) = self.next.remove(&stream) {
            let _ = moment.set(Instant::now());
        }
    }
}
