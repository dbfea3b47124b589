//! Points in streams.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use crate::device::Device;
use crate::driver::EventDriver;
use crate::error::Result;
use crate::waiting;

/// Marks a point in a stream. It can be recorded repeatedly, and other streams and the host can
/// wait for it. It is the [`Point`] of its last record.
///
/// An event that was never recorded is done.
#[derive(Debug)]
pub struct Event(Point);

impl Deref for Event {
    type Target = Point;

    fn deref(&self) -> &Point {
        &self.0
    }
}

/// A [marked](crate::Stream::point) point of a stream: it is done when all operations before it
/// are done.
///
/// Any thread may query it, and it may outlive its stream. When it is dropped, its event
/// returns to the stream, which records it again after it was reached.
pub struct Point {
    device: Device,
    event: Arc<dyn EventDriver>,
}

impl fmt::Debug for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Point({})", self.device.name())
    }
}

impl Point {
    pub(crate) fn new(device: Device, event: Arc<dyn EventDriver>) -> Self {
        Self { device, event }
    }

    pub(crate) fn raw(&self) -> &dyn EventDriver {
        &*self.event
    }

    /// The device of its stream.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Does it use this event?
    pub(crate) fn uses(&self, event: &Arc<dyn EventDriver>) -> bool {
        Arc::ptr_eq(&self.event, event)
    }

    /// Are all operations before it done? Does not wait.
    ///
    /// # Errors
    /// If one of the operations failed.
    pub fn is_done(&self) -> Result<bool> {
        self.device.call("query point", |driver| driver.is_event_done(self.raw()))
    }

    /// The time that the device took from an earlier point to this one; None while either is not
    /// reached. Does not wait. Both are [events with time](Device::event_with_time).
    ///
    /// # Errors
    /// If one of the operations failed, or one of the points keeps no time.
    pub fn time_since(&self, earlier: &Self) -> Result<Option<Duration>> {
        self.device.call("read time of event", |_| self.raw().time_since(earlier.raw()))
    }

    /// Waits until all operations before it are done.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](crate::ErrorKind::DeadlineExceeded): the operations continue. Or
    /// the error of a failed operation.
    pub fn wait(&self, timeout: Duration) -> Result<()> {
        waiting::wait_until("wait for point", timeout, || self.is_done())
            .map_err(|error| error.on(self.device.name()))
    }
}

impl Device {
    /// Creates an event, which marks a point in a stream.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn event(&self) -> Result<Event> {
        let raw = self.call("create event", |driver| driver.event())?;
        Ok(Event(Point::new(self.clone(), raw)))
    }

    /// Creates an event that keeps the time at which its point was reached: for
    /// [`Point::time_since`]. Its record costs the device slightly more.
    ///
    /// ```
    /// let device = gpu::Device::open("emulated:0".parse()?)?;
    /// let (begin, end) = (device.event_with_time()?, device.event_with_time()?);
    /// let (stream, memory) = (device.stream()?, device.allocate(4096)?);
    /// stream.record(&begin)?;
    /// stream.fill(&memory.whole(), 1)?;
    /// stream.record(&end)?;
    /// end.wait(gpu::DEFAULT_TIMEOUT)?;
    /// assert!(end.time_since(&begin)?.is_some());
    /// # Ok::<(), gpu::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn event_with_time(&self) -> Result<Event> {
        let raw = self.call("create event", |driver| driver.event_with_time())?;
        Ok(Event(Point::new(self.clone(), raw)))
    }
}
