//! Operations in host memory, for libraries whose streams are synchronous: those of tests.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::time::{Duration, Instant};

use collective::{CommDomain, CommDomainKey, DomainOptions};

use crate::engine::{AbortHandle, Engine, Mark};
use crate::error::{Error, Flag, Result};
use crate::request::{Request, StreamHandle};

/// How long an operation waits for other ranks. NCCL has no such limit, but devices do not exist here.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What the library tells about its emulated streams.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EmulatedStreams {
    is_capturing: fn(StreamHandle) -> bool,
    /// Added to each operation, so that tests decide which library is faster.
    delay: Duration,
}

impl EmulatedStreams {
    pub(crate) fn new(is_capturing: fn(StreamHandle) -> bool, delay: Duration) -> Self {
        Self { is_capturing, delay }
    }
}

thread_local! {
    /// The flag of the operation that this thread carries out.
    static ABORT: RefCell<Option<Flag>> = const { RefCell::new(None) };
}

fn is_aborted() -> bool {
    ABORT.with_borrow(|flag| flag.as_ref().is_some_and(Flag::is_set))
}

#[derive(Debug)]
pub(crate) struct HostEngine {
    domain: CommDomain,
    streams: EmulatedStreams,
    abort: Flag,
    failure: Option<Error>,
}

impl HostEngine {
    pub(crate) fn join(
        key: &CommDomainKey,
        rank: u32,
        options: &DomainOptions,
        streams: EmulatedStreams,
    ) -> Result<Self> {
        let options = options.clone().interruption(is_aborted);
        let domain = CommDomain::join(key, rank, &options)?;
        Ok(Self { domain, streams, abort: Flag::default(), failure: None })
    }
}

impl Engine for HostEngine {
    fn is_left(&mut self, stream: StreamHandle) -> bool {
        (self.streams.is_capturing)(stream)
    }

    unsafe fn run(&mut self, request: &Request, _stream: StreamHandle) -> Result<()> {
        self.check()?;
        if !self.streams.delay.is_zero() {
            std::thread::sleep(self.streams.delay);
        }
        ABORT.set(Some(self.abort.clone()));
        // SAFETY: the caller's promise; it is done at the return.
        let done = unsafe { self.domain.run(&request.call(), TIMEOUT) };
        ABORT.set(None);
        done.map_err(|error| self.failure.insert(error.into()).clone())
    }

    fn mark(&mut self, _stream: StreamHandle) -> Result<Mark> {
        Ok(Mark::Moment(Instant::now()))
    }

    fn order(&mut self, _stream: StreamHandle, _after: &Mark) -> Result<()> {
        Ok(())
    }

    fn check(&self) -> Result<()> {
        match &self.failure {
            _ if self.abort.is_set() => Err(Error::Aborted),
            Some(failure) => Err(failure.clone()),
            None => Ok(()),
        }
    }

    fn check_started(&self) -> Result<()> {
        self.check()
    }

    fn abort_handle(&self) -> AbortHandle {
        AbortHandle::Flag(self.abort.clone())
    }

    fn drain(&mut self, _timeout: Duration) -> Result<()> {
        Ok(())
    }
}
