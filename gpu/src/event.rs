//! Points in streams.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::device::Device;
use crate::driver;
use crate::error::Result;
use crate::waiting;

/// Marks a point in a stream: recorded in one, waited for by others and by the host.
///
/// One that was never recorded is done.
pub struct Event {
    device: Device,
    pub(crate) raw: Arc<driver::Event>,
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event({})", self.device.name())
    }
}

impl Event {
    pub(crate) fn new(device: Device, raw: driver::Event) -> Self {
        Self { device, raw: Arc::new(raw) }
    }

    /// Is everything done that was begun before it was recorded?
    ///
    /// # Errors
    /// If something of it failed.
    pub fn is_done(&self) -> Result<bool> {
        let driver = self.device.driver("look at an event")?;
        driver.is_event_done(&self.raw).map_err(|error| error.on(self.device.name()))
    }

    /// Waits until it is done.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](crate::ErrorKind::DeadlineExceeded), or what failed.
    pub fn wait(&self, longest: Duration) -> Result<()> {
        waiting::until("wait for an event", longest, || self.is_done())
            .map_err(|error| error.on(self.device.name()))
    }
}

/// A point of a stream that was [marked](crate::Stream::point): everything that was begun
/// before it is done, or is not done yet.
///
/// It may be asked by any thread, and may outlive its stream. Whenever it is dropped, reached
/// or not, its event goes back to the stream, which records it again once it was reached.
pub struct Point {
    device: Device,
    event: Arc<driver::Event>,
}

impl fmt::Debug for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Point({})", self.device.name())
    }
}

impl Point {
    pub(crate) fn new(device: Device, event: Arc<driver::Event>) -> Self {
        Self { device, event }
    }

    /// Is everything done that was begun before it? Does not wait.
    ///
    /// # Errors
    /// If something of it failed.
    pub fn is_done(&self) -> Result<bool> {
        let driver = self.device.driver("look at a point")?;
        driver.is_event_done(&self.event).map_err(|error| error.on(self.device.name()))
    }

    /// Waits until everything is done that was begun before it.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](crate::ErrorKind::DeadlineExceeded): it goes on nevertheless. Or
    /// what failed.
    pub fn wait(&self, longest: Duration) -> Result<()> {
        waiting::until("wait for a point", longest, || self.is_done())
            .map_err(|error| error.on(self.device.name()))
    }
}
