//! Devices.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use crate::budget::Budget;
use crate::deferred_free::DeferredFrees;
use crate::device_name::{DeviceName, Implementation};
use crate::driver::DeviceDriver;
use crate::error::{Error, ErrorKind, Result};
use crate::event::{Event, Point};
use crate::fork::ForkGeneration;
use crate::legacy_handle;
use crate::pointer_attributes::PointerAttributes;
use crate::properties::{PeerAccess, Properties, Uuid};
use crate::stream::Stream;
use crate::{cuda, emulated};

/// A device, opened. Copies of the handle are the same device.
///
/// All handles of a process share one context and one budget, however often the device
/// is opened.
///
/// ```
/// use gpu::Device;
/// let device = Device::open("emulated:0".parse()?)?;
/// let memory = device.allocate(1 << 20)?;
/// let stream = device.stream()?;
/// stream.fill(&memory.slice(0, 4096)?, 7)?;
/// let mut bytes = [0; 4096];
/// stream.download(&memory.slice(0, 4096)?, &mut bytes, gpu::DEFAULT_TIMEOUT)?;
/// assert_eq!(bytes, [7; 4096]);
/// # Ok::<(), gpu::Error>(())
/// ```
#[derive(Clone)]
pub struct Device(pub(crate) Arc<DeviceInner>);

pub(crate) struct DeviceInner {
    pub(crate) name: DeviceName,
    pub(crate) fork_generation: ForkGeneration,
    pub(crate) driver: Box<dyn DeviceDriver>,
    pub(crate) budget: Budget,
    /// Devices whose plain memory this one may reach, a bit each.
    peers: AtomicU64,
    pub(crate) legacy: Mutex<legacy_handle::Table>,
    pub(crate) deferred_frees: DeferredFrees,
}

impl Drop for DeviceInner {
    fn drop(&mut self) {
        if !self.fork_generation.is_current() {
            // The context is the parent's: nothing of it may be closed here.
            let nothing: Box<dyn DeviceDriver> = Box::new(emulated::Device::none());
            std::mem::forget(std::mem::replace(&mut self.driver, nothing));
            // No locks, either: a thread that is not there may hold them.
            std::mem::forget(std::mem::take(&mut self.deferred_frees));
            return;
        }
        self.free_deferred();
        // A stream of another device waits: what is left stays as it is, and what is registered stays
        // mapped. Nobody will come by who could free it.
        std::mem::forget(std::mem::take(&mut self.deferred_frees));
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.0.name)
    }
}

/// Devices that are open in this process.
static OPEN: LazyLock<Mutex<HashMap<DeviceName, Weak<DeviceInner>>>> =
    LazyLock::new(Mutex::default);

/// What is there.
#[derive(Debug)]
pub struct DeviceSurvey {
    /// Devices that can be opened, and are.
    pub devices: Vec<Device>,
    /// What is not there, or cannot be opened, and why.
    pub missing: Vec<(Implementation, Error)>,
}

impl DeviceName {
    /// What the device is called for everybody on this machine. It is not opened for that:
    /// a context takes a while to make, and a part of the device's memory.
    ///
    /// # Errors
    /// If there is no such device.
    pub fn uuid(self) -> Result<Uuid> {
        match self.implementation {
            Implementation::Cuda => cuda::uuid(self.number).map_err(|error| error.on(self)),
            Implementation::Emulated => Ok(emulated::uuid(self.number)),
        }
    }
}

impl Device {
    /// Opens a device, or gives the one that is open.
    ///
    /// # Errors
    /// [`Unavailable`](ErrorKind::Unavailable) with the reason if there is no driver;
    /// [`NoSuchDevice`](ErrorKind::NoSuchDevice).
    pub fn open(name: DeviceName) -> Result<Self> {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let found = open
            .get(&name)
            .and_then(Weak::upgrade)
            .filter(|inner| inner.fork_generation.is_current());
        if let Some(inner) = found {
            return Ok(Self(inner));
        }
        let driver: Box<dyn DeviceDriver> = match name.implementation {
            Implementation::Cuda => Box::new(cuda::Device::open(name.number)?),
            Implementation::Emulated => Box::new(emulated::Device::open(name.number)?),
        };
        let budget = Budget::new(driver.properties().total_memory);
        let inner = Arc::new(DeviceInner {
            name,
            fork_generation: ForkGeneration::now(),
            driver,
            budget,
            peers: AtomicU64::new(0),
            legacy: Mutex::default(),
            deferred_frees: DeferredFrees::default(),
        });
        open.insert(name, Arc::downgrade(&inner));
        Ok(Self(inner))
    }

    /// How many devices of an implementation there are.
    ///
    /// # Errors
    /// [`Unavailable`](ErrorKind::Unavailable), with the reason.
    pub fn count(implementation: Implementation) -> Result<u32> {
        match implementation {
            Implementation::Cuda => cuda::count(),
            Implementation::Emulated => Ok(emulated::COUNT),
        }
    }

    /// Opens the device that has this name on the machine, whatever its number here.
    ///
    /// # Errors
    /// [`NoSuchDevice`](ErrorKind::NoSuchDevice) if this process sees none of that name.
    pub fn find(uuid: Uuid) -> Result<Self> {
        let mut detail = format!("this process sees no device {uuid}");
        for implementation in [Implementation::Emulated, Implementation::Cuda] {
            let count = Self::count(implementation).unwrap_or_else(|error| {
                detail.push_str(&format!("; {error}"));
                0
            });
            for number in 0..count {
                let name = DeviceName { implementation, number };
                match name.uuid() {
                    Ok(found) if found == uuid => return Self::open(name),
                    Ok(_) => {}
                    // One that is broken does not hide the others.
                    Err(error) => detail.push_str(&format!("; {error}")),
                }
            }
        }
        Err(Error::new("find device by UUID", ErrorKind::NoSuchDevice, detail))
    }

    /// Looks at everything there is. Contexts are made for it, which takes a while.
    #[must_use]
    pub fn survey() -> DeviceSurvey {
        let mut survey = DeviceSurvey { devices: Vec::new(), missing: Vec::new() };
        for implementation in [Implementation::Cuda, Implementation::Emulated] {
            let count = Self::count(implementation).unwrap_or_else(|error| {
                survey.missing.push((implementation, error));
                0
            });
            for number in 0..count {
                let name = DeviceName { implementation, number };
                match Self::open(name) {
                    Ok(device) => survey.devices.push(device),
                    Err(error) => survey.missing.push((implementation, error)),
                }
            }
        }
        survey
    }

    /// What it is called here.
    #[must_use]
    pub fn name(&self) -> DeviceName {
        self.0.name
    }

    /// What is known of it.
    #[must_use]
    pub fn properties(&self) -> &Properties {
        self.0.driver.properties()
    }

    /// Free now, in bytes, on the whole device.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn free_memory(&self) -> Result<u64> {
        self.driver("free memory")?.free_memory().map_err(|error| error.on(self.0.name))
    }

    /// What all allocations of this process may take together, in bytes.
    pub fn set_budget(&self, bytes: u64) {
        self.0.budget.set_limit(bytes);
    }

    /// What they may take, and what they have taken, in bytes.
    #[must_use]
    pub fn budget(&self) -> (u64, u64) {
        (self.0.budget.limit(), self.0.budget.used())
    }

    /// How this device reaches another one's memory.
    ///
    /// # Errors
    /// If the other is of another implementation.
    pub fn peer_access(&self, peer: &Self) -> Result<PeerAccess> {
        self.peer_access_to(peer.0.name)
    }

    /// How this device would reach another one's memory, which is not opened for that: a
    /// context takes a while to make, and a part of the device's memory.
    ///
    /// # Errors
    /// If the other is of another implementation.
    pub fn peer_access_to(&self, peer: DeviceName) -> Result<PeerAccess> {
        let operation = "peer access";
        let driver = self.driver(operation)?;
        if peer == self.0.name {
            return Ok(PeerAccess::Same);
        }
        if peer.implementation != self.0.name.implementation {
            return Err(crate::driver::implementation_mismatch(operation).on(self.0.name));
        }
        driver.peer_access(peer.number).map_err(|error| error.on(self.0.name))
    }

    /// Lets this device reach another one's plain memory directly. Without it a driver
    /// copies by way of the host at a tenth of the speed, and says nothing; here such a
    /// copy is refused.
    ///
    /// # Errors
    /// [`NoPeerAccess`](ErrorKind::NoPeerAccess) if it cannot.
    pub fn enable_peer(&self, peer: &Self) -> Result<()> {
        let operation = "enable peer access";
        let bit = 1_u64 << (peer.0.name.number & 63);
        match self.peer_access(peer)? {
            PeerAccess::Same => return Ok(()),
            _ if self.0.peers.load(Ordering::Acquire) & bit != 0 => return Ok(()),
            PeerAccess::Direct { .. } => {}
            PeerAccess::None => {
                let detail = format!("{} cannot reach {} directly", self.0.name, peer.0.name);
                let error = Error::new(operation, ErrorKind::NoPeerAccess, detail);
                return Err(error.on(self.0.name));
            }
        }
        self.0.driver.enable_peer(peer.0.name.number).map_err(|error| error.on(self.0.name))?;
        self.0.peers.fetch_or(bit, Ordering::Release);
        Ok(())
    }

    /// May it reach that device's plain memory?
    pub(crate) fn has_peer_access(&self, number: u32) -> bool {
        self.0.peers.load(Ordering::Acquire) & 1 << (number & 63) != 0
    }

    /// Makes a stream: a queue of operations that are done in order.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn stream(&self) -> Result<Stream> {
        let raw = self.driver("create stream")?.stream().map_err(|e| e.on(self.0.name))?;
        Ok(Stream::new(self.clone(), raw))
    }

    /// The default stream, on which copies are done that programs begin without naming a stream,
    /// and which waits for all streams but those that were made not to be waited for.
    ///
    /// A emulated has none, and gives a new stream.
    ///
    /// # Errors
    /// If the driver refuses; while it is being captured.
    #[allow(unsafe_code)]
    pub fn default_stream(&self) -> Result<Stream> {
        // SAFETY: there is always a default stream.
        unsafe { self.adopt_stream(0) }
    }

    /// Takes in a stream that something else made, such as a framework's current one: by the
    /// driver's name for it (a `cudaStream_t`; 0 is the default stream). What is begun on it
    /// here and there is done in the order in which it was begun. It is not destroyed with what
    /// is made here; that waits for what was begun here, and not for the rest.
    ///
    /// A emulated has no default stream: 0 gives a new one there.
    ///
    /// # Errors
    /// [`NotSupported`](crate::ErrorKind::NotSupported) for the default stream of each thread
    /// (2), which would be another one in another thread; for a stream that is being captured;
    /// on a emulated, but for 0.
    ///
    /// # Safety
    /// It is a stream of this device's primary context, until all is dropped that was made of
    /// it here, and nobody captures it meanwhile.
    #[allow(unsafe_code)]
    pub unsafe fn adopt_stream(&self, handle: u64) -> Result<Stream> {
        let driver = self.driver("adopt a stream")?;
        // SAFETY: the caller's promise.
        let raw = unsafe { driver.adopt_stream(handle) }.map_err(|e| e.on(self.0.name))?;
        Ok(Stream::adopted(self.clone(), raw))
    }

    /// Makes an event, which marks a point in a stream.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn event(&self) -> Result<Event> {
        let raw = self.driver("create event")?.event().map_err(|e| e.on(self.0.name))?;
        Ok(Event(Point::new(self.clone(), Arc::new(raw))))
    }

    /// What the driver knows of an address.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if it knows nothing of it.
    pub fn attributes(&self, address: u64) -> Result<PointerAttributes> {
        let driver = self.driver("query pointer attributes")?;
        driver.attributes(address).map_err(|error| error.on(self.0.name))
    }

    /// The driver, unless the process forked.
    pub(crate) fn driver(&self, operation: &'static str) -> Result<&dyn DeviceDriver> {
        self.0.fork_generation.check(operation).map_err(|error| error.on(self.0.name))?;
        Ok(&*self.0.driver)
    }
}
