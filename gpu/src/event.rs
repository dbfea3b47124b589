//! Points in streams.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use crate::device::Device;
use crate::driver;
use crate::error::Result;
use crate::waiting;

/// Marks a point in a stream: recorded in one, again and again, waited for by others and by the
/// host. It is the [`Point`] where it was recorded last.
///
/// One that was never recorded is done.
#[derive(Debug)]
pub struct Event(pub(crate) Point);

impl Deref for Event {
    type Target = Point;

    fn deref(&self) -> &Point {
        &self.0
    }
}

/// A point of a stream that was [marked](crate::Stream::point): everything that was begun
/// before it is done, or is not done yet.
///
/// It may be asked by any thread, and may outlive its stream. Whenever it is dropped, reached
/// or not, its event goes back to the stream, which records it again once it was reached.
pub struct Point {
    device: Device,
    pub(crate) event: Arc<driver::Event>,
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
        let driver = self.device.driver("query point")?;
        driver.is_event_done(&self.event).map_err(|error| error.on(self.device.name()))
    }

    /// Waits until everything is done that was begun before it.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](crate::ErrorKind::DeadlineExceeded): it goes on nevertheless. Or
    /// what failed.
    pub fn wait(&self, timeout: Duration) -> Result<()> {
        waiting::wait_until("wait for a point", timeout, || self.is_done())
            .map_err(|error| error.on(self.device.name()))
    }
}
