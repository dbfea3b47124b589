//! Points in streams.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
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

/// An event on its way to another process: some bytes, or a descriptor.
#[derive(Debug)]
pub struct EventTicket(pub(crate) driver::ExportedEvent);

impl EventTicket {
    /// The bytes, if it consists of bytes.
    #[must_use]
    pub fn bytes(&self) -> Option<[u8; 64]> {
        match &self.0 {
            driver::ExportedEvent::Legacy(bytes) => Some(*bytes),
            driver::ExportedEvent::File(_) => None,
        }
    }

    /// The descriptor, if it is one.
    #[must_use]
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.0 {
            driver::ExportedEvent::Legacy(_) => None,
            driver::ExportedEvent::File(file) => Some(file.as_fd()),
        }
    }
}

impl From<[u8; 64]> for EventTicket {
    fn from(bytes: [u8; 64]) -> Self {
        Self(driver::ExportedEvent::Legacy(bytes))
    }
}

impl From<OwnedFd> for EventTicket {
    fn from(descriptor: OwnedFd) -> Self {
        Self(driver::ExportedEvent::File(descriptor))
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

    /// For another process; of a [shared event](Device::shared_event) only. An event that
    /// was exported stays with the driver until this process ends: others may wait for it.
    ///
    /// # Errors
    /// If it is not shared.
    pub fn export(&self) -> Result<EventTicket> {
        let driver = self.device.driver("export an event")?;
        let exported = driver.export_event(&self.raw).map_err(|e| e.on(self.device.name()))?;
        Ok(EventTicket(exported))
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
