//! Devices.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::OwnedFd;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, Weak};

use threads::{ForkGeneration, lock};

use crate::budget::Budget;
use crate::deferred_free::{DeferredFree, DeferredFrees};
use crate::device_name::{DeviceName, Implementation};
use crate::driver::DeviceDriver;
use crate::error::{Error, ErrorKind, Result};
use crate::legacy_handle::Table;
use crate::pointer_attributes::{Allocator, PointerAttributes};
use crate::properties::{PeerAccess, Properties, Uuid};
use crate::stream_waits::FreeGuard;
use crate::{cuda, emulated};

/// An open device. Clones of the handle are the same device.
///
/// All handles of a process share one context and one budget, however often the device is
/// opened.
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
pub struct Device(Arc<DeviceInner>);

struct DeviceInner {
    name: DeviceName,
    fork_generation: ForkGeneration,
    driver: Box<dyn DeviceDriver>,
    budget: Budget,
    /// The devices whose cuMemAlloc memory this one may access, one bit each.
    peers: AtomicU64,
    legacy: Mutex<Table>,
    deferred_frees: DeferredFrees,
}

impl DeviceInner {
    /// Frees deferred memory, if the guard is available and no stream waits.
    fn free_deferred(&self, guard: impl FnOnce() -> Option<FreeGuard>) {
        self.deferred_frees.free_all(guard, self.name.implementation, |one| self.free(one));
    }

    /// Called while no stream waits.
    #[allow(unsafe_code)]
    fn free(&self, deferred_free: &DeferredFree) {
        // A driver that cannot free has failed as a whole; no caller can handle that here.
        let _ = match deferred_free {
            DeferredFree::Plain { address, length, .. } => {
                self.budget.give_back(*length);
                // SAFETY: allocated with cuMemAlloc, and no slice, thus no operation, was left.
                unsafe { self.driver.free(*address) }
            }
            // SAFETY: registered here, and no operation was left.
            DeferredFree::Host { address, .. } => unsafe { self.driver.unregister(*address) },
            DeferredFree::Legacy { bytes } => {
                // Closed under the table's lock, so that the next user opens it again.
                lock(&self.legacy).close(bytes).map_or(Ok(()), |address| {
                    // SAFETY: opened here; no slice, thus no operation, was left.
                    unsafe { self.driver.legacy_close(address) }
                })
            }
        };
    }
}

impl Drop for DeviceInner {
    fn drop(&mut self) {
        if !self.fork_generation.is_current() {
            // The context belongs to the parent: nothing of it may be closed here.
            let nothing: Box<dyn DeviceDriver> = Box::new(emulated::Device::none());
            std::mem::forget(std::mem::replace(&mut self.driver, nothing));
            // No locks, either: a thread that does not exist here may hold them.
            std::mem::forget(std::mem::take(&mut self.deferred_frees));
            return;
        }
        self.free_deferred(FreeGuard::begin);
        // A stream of another device waits: deferred memory stays allocated, and host memory
        // stays registered. Nothing will free it later.
        std::mem::forget(std::mem::take(&mut self.deferred_frees));
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.0.name)
    }
}

static OPEN: LazyLock<Mutex<HashMap<DeviceName, Weak<DeviceInner>>>> =
    LazyLock::new(Mutex::default);

/// The devices of this machine.
#[derive(Debug)]
pub struct DeviceSurvey {
    /// Devices that were opened.
    pub devices: Vec<Device>,
    /// Devices that are missing or cannot be opened, with the reason.
    pub missing: Vec<(Implementation, Error)>,
}

impl FromStr for DeviceName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parsed = text.split_once(':').and_then(|(implementation, number)| {
            let number = number.parse().ok()?;
            match implementation {
                "cuda" => Some(Self::cuda(number)),
                "emulated" => Some(Self::emulated(number)),
                _ => None,
            }
        });
        parsed.ok_or_else(|| {
            let detail = format!("\"{text}\" is not a device name such as cuda:0 or emulated:0");
            Error::new("parse device name", ErrorKind::InvalidArgument, detail)
        })
    }
}

impl DeviceName {
    /// The UUID of a device, which is the same in all processes of this machine. Does not open
    /// the device: creating a context takes time and device memory.
    ///
    /// # Errors
    /// If there is no such device.
    pub fn uuid(self) -> Result<Uuid> {
        match self.implementation {
            Implementation::Cuda => cuda::uuid(self.number).map_err(|error| error.on(self)),
            Implementation::Emulated if !emulated::is_visible(self.number) => {
                let detail = "a test hides it";
                Err(Error::new("read properties", ErrorKind::NoSuchDevice, detail).of(self))
            }
            Implementation::Emulated => Ok(emulated::uuid(self.number)),
        }
    }

    /// The name, in this process, of the device with this UUID. Does not open the device.
    ///
    /// ```
    /// let name: gpu::DeviceName = "emulated:1".parse()?;
    /// assert_eq!(gpu::DeviceName::find(name.uuid()?)?, name);
    /// # Ok::<(), gpu::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`NoSuchDevice`](ErrorKind::NoSuchDevice) if this process sees no device with that UUID.
    pub fn find(uuid: Uuid) -> Result<Self> {
        let mut detail = format!("this process sees no device {uuid}");
        for implementation in [Implementation::Emulated, Implementation::Cuda] {
            if let Err(error) = Device::count(implementation) {
                detail.push_str(&format!("; {error}"));
            }
            for name in Self::all(implementation) {
                match name.uuid() {
                    Ok(found) if found == uuid => return Ok(name),
                    Ok(_) => {}
                    // A broken device does not hide the others.
                    Err(error) => detail.push_str(&format!("; {error}")),
                }
            }
        }
        Err(Error::new("find device by UUID", ErrorKind::NoSuchDevice, detail))
    }

    /// The devices of an implementation, if it is available.
    fn all(implementation: Implementation) -> impl Iterator<Item = Self> {
        let count = Device::count(implementation).unwrap_or(0);
        (0..count).map(move |number| Self { implementation, number })
    }

    /// Orders devices by what opening them costs: nothing if this library has opened the device, a
    /// little if another one has created its context.
    fn cost_of_opening(self) -> u8 {
        let open = lock(&OPEN).get(&self).and_then(Weak::upgrade);
        match self.implementation {
            _ if open.is_some_and(|inner| inner.fork_generation.is_current()) => 0,
            Implementation::Cuda if cuda::has_context(self.number) => 1,
            _ => 2,
        }
    }
}

impl PointerAttributes {
    /// Information about an address in this process, on any device. None if no driver knows it:
    /// then it is host memory or unmapped.
    ///
    /// CUDA is queried only if a library in this process has loaded it, and is not loaded for
    /// that: without it there is no memory of its devices.
    ///
    /// ```
    /// use gpu::{Allocator, PointerAttributes, Device};
    /// let device = Device::open("emulated:0".parse()?)?;
    /// let memory = device.allocate(1 << 20)?;
    /// let found = PointerAttributes::of(memory.address() + 100).expect("memory of a device");
    /// assert_eq!((found.device, found.base), (Some(device.name()), memory.address()));
    /// let on_the_host = 7_u8;
    /// assert_eq!(PointerAttributes::of(&raw const on_the_host as u64), None);
    /// # Ok::<(), gpu::Error>(())
    /// ```
    #[must_use]
    pub fn of(address: u64) -> Option<Self> {
        if let Some(found) = emulated::attributes(address) {
            return Some(found);
        }
        let name = match cuda::locate(address)? {
            cuda::PointerLocation::Host { base, length } => {
                let allocator = Allocator::Host;
                return Some(Self { device: None, allocator, base, length, id: 0 });
            }
            cuda::PointerLocation::Device(number) => DeviceName::cuda(number),
        };
        Device::open(name).and_then(|device| device.attributes(address)).ok()
    }
}

impl Device {
    /// Opens a device, or returns the open one.
    ///
    /// # Errors
    /// [`Unavailable`](ErrorKind::Unavailable) with the reason if there is no driver;
    /// [`NoSuchDevice`](ErrorKind::NoSuchDevice).
    pub fn open(name: DeviceName) -> Result<Self> {
        let mut open = lock(&OPEN);
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
            fork_generation: ForkGeneration::current(),
            driver,
            budget,
            peers: AtomicU64::new(0),
            legacy: Mutex::default(),
            deferred_frees: DeferredFrees::default(),
        });
        open.insert(name, Arc::downgrade(&inner));
        Ok(Self(inner))
    }

    /// The number of devices of an implementation.
    ///
    /// # Errors
    /// [`Unavailable`](ErrorKind::Unavailable), with the reason.
    pub fn count(implementation: Implementation) -> Result<u32> {
        match implementation {
            Implementation::Cuda => cuda::device_count(),
            Implementation::Emulated => Ok(emulated::COUNT),
        }
    }

    /// Opens the device with this UUID, whatever its number in this process.
    ///
    /// # Errors
    /// [`NoSuchDevice`](ErrorKind::NoSuchDevice) if this process sees no device with that UUID.
    pub fn find(uuid: Uuid) -> Result<Self> {
        DeviceName::find(uuid).and_then(Self::open)
    }

    /// Opens the device with this UUID or, if this process does not see it, a device of the process
    /// that may map its memory: importing it shows whether that one can. Of several, one that this
    /// process uses already is preferred, since a context takes time and device memory.
    ///
    /// ```
    /// let seen = gpu::Device::open("emulated:1".parse()?)?;
    /// let found = gpu::Device::for_memory_of(seen.properties().uuid)?;
    /// assert_eq!(found.name(), seen.name());
    /// # Ok::<(), gpu::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`NoSuchDevice`](ErrorKind::NoSuchDevice) if this process sees no device that might map it.
    pub fn for_memory_of(uuid: Uuid) -> Result<Self> {
        let not_found = match DeviceName::find(uuid) {
            Err(error) if error.kind() == ErrorKind::NoSuchDevice => error,
            found => return found.and_then(Self::open),
        };
        let implementation = match emulated::has_uuid(uuid) {
            true => Implementation::Emulated,
            false => Implementation::Cuda,
        };
        let visible = DeviceName::all(implementation).filter(|name| name.uuid().is_ok());
        match visible.min_by_key(|name| name.cost_of_opening()) {
            Some(name) => Self::open(name),
            None => Err(not_found.with_remedy(
                "Its memory can be mapped for another device: let CUDA_VISIBLE_DEVICES name one",
            )),
        }
    }

    /// Opens all devices. This creates contexts, which takes time.
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

    /// The name of the device in this process.
    #[must_use]
    pub fn name(&self) -> DeviceName {
        self.0.name
    }

    /// The properties of the device.
    #[must_use]
    pub fn properties(&self) -> &Properties {
        self.0.driver.properties()
    }

    /// Free memory of the whole device now, in bytes.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn free_memory(&self) -> Result<u64> {
        self.call("query free memory", |driver| driver.free_memory())
    }

    /// Sets the limit of all allocations of this process together, in bytes.
    pub fn set_budget(&self, bytes: u64) {
        self.0.budget.set_limit(bytes);
    }

    /// The limit, and the allocated memory, in bytes.
    #[must_use]
    pub fn budget(&self) -> (u64, u64) {
        (self.0.budget.limit(), self.0.budget.used())
    }

    /// How this device could access another one's memory. Does not open the other device:
    /// creating a context takes time and device memory.
    ///
    /// # Errors
    /// If the other device has another implementation.
    pub fn peer_access(&self, peer: DeviceName) -> Result<PeerAccess> {
        let operation = "query peer access";
        self.call(operation, |driver| match peer {
            _ if peer == self.0.name => Ok(PeerAccess::Same),
            _ if peer.implementation != self.0.name.implementation => {
                Err(crate::driver::implementation_mismatch(operation))
            }
            _ => driver.peer_access(peer.number),
        })
    }

    /// The other devices of its implementation that it accesses directly. Does not open them.
    ///
    /// ```
    /// let device = gpu::Device::open("emulated:0".parse()?)?;
    /// assert!(device.peers().contains(&"emulated:1".parse()?));
    /// # Ok::<(), gpu::Error>(())
    /// ```
    #[must_use]
    pub fn peers(&self) -> Vec<DeviceName> {
        let count = Self::count(self.0.name.implementation).unwrap_or(0);
        let others = (0..count).map(|number| DeviceName { number, ..self.0.name });
        let is_peer =
            |other: &DeviceName| matches!(self.peer_access(*other), Ok(PeerAccess::Direct));
        others.filter(is_peer).collect()
    }

    /// Enables direct access of this device to another one's cuMemAlloc memory. Without it a
    /// driver copies through the host at a tenth of the speed, without an error; this library
    /// refuses such a copy.
    ///
    /// # Errors
    /// [`NoPeerAccess`](ErrorKind::NoPeerAccess) if direct access is impossible.
    pub fn enable_peer(&self, peer: &Self) -> Result<()> {
        let operation = "enable peer access";
        let bit = 1_u64 << (peer.0.name.number & 63);
        match self.peer_access(peer.0.name)? {
            PeerAccess::Same => return Ok(()),
            _ if self.0.peers.load(Ordering::Acquire) & bit != 0 => return Ok(()),
            PeerAccess::Direct => {}
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

    /// Calls a function while this device is the current one of the thread, as functions of the CUDA
    /// runtime and of frameworks see it.
    ///
    /// ```
    /// let device = gpu::Device::open("emulated:0".parse()?)?;
    /// let exported = device.with_context(|| "the framework exports a tensor of this device")?;
    /// assert!(exported.ends_with("device"));
    /// # Ok::<(), gpu::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the driver refuses; the function was not called then.
    pub fn with_context<R>(&self, call: impl FnOnce() -> R) -> Result<R> {
        let operation = "make device current";
        let (mut call, mut outcome) = (Some(call), None);
        self.call(operation, |driver| {
            driver.with_context(&mut || outcome = call.take().map(|call| call()))
        })?;
        outcome.ok_or_else(|| Error::new(operation, ErrorKind::Other, "nothing was called"))
    }

    /// The driver's answer, unless the process forked. An error names the device.
    pub(crate) fn call<T>(
        &self,
        operation: &'static str,
        call: impl FnOnce(&dyn DeviceDriver) -> Result<T>,
    ) -> Result<T> {
        call(self.driver(operation)?).map_err(|error| error.on(self.0.name))
    }

    /// Exports the pages of a range as a dma-buf, for network cards: also beyond the bounds of a
    /// [`Memory`](crate::Memory), whose first page may begin before it.
    ///
    /// # Errors
    /// [`NotSupported`](ErrorKind::NotSupported) if the device has none; errors of the driver if the
    /// range is not of whole pages of one allocation.
    pub fn dma_buf(&self, address: u64, length: u64) -> Result<OwnedFd> {
        self.call("export as dma-buf", |driver| driver.dma_buf(address, length))
    }

    /// Makes earlier writes of network cards to memory of this device visible to all devices, before
    /// anything that announces them. Does nothing where [the device orders
    /// them](crate::GpuDirect::writes_ordering).
    ///
    /// ```
    /// let device = gpu::Device::open("emulated:0".parse()?)?;
    /// // … a network card has written …
    /// device.flush_remote_writes()?;
    /// # Ok::<(), gpu::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`NotSupported`](ErrorKind::NotSupported) if its driver cannot flush; errors of the driver.
    pub fn flush_remote_writes(&self) -> Result<()> {
        let operation = "flush remote writes";
        let gpu_direct = self.properties().gpu_direct;
        if !gpu_direct.needs_flush() {
            return Ok(());
        }
        self.call(operation, |driver| {
            if gpu_direct.can_flush {
                return driver.flush_remote_writes();
            }
            let detail = "the driver cannot flush writes of network cards to this device";
            Err(Error::new(operation, ErrorKind::NotSupported, detail))
        })
    }

    /// May it access that device's cuMemAlloc memory?
    pub(crate) fn has_peer_access(&self, number: u32) -> bool {
        self.0.peers.load(Ordering::Acquire) & 1 << (number & 63) != 0
    }

    /// The driver's information about an address.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the driver does not know the address.
    pub fn attributes(&self, address: u64) -> Result<PointerAttributes> {
        self.call("query pointer attributes", |driver| driver.attributes(address))
    }

    /// The driver, unless the process forked.
    pub(crate) fn driver(&self, operation: &'static str) -> Result<&dyn DeviceDriver> {
        if !self.is_current() {
            return Err(Error::forked(operation).on(self.0.name));
        }
        Ok(&*self.0.driver)
    }

    /// False in a forked child.
    pub(crate) fn is_current(&self) -> bool {
        self.0.fork_generation.is_current()
    }

    /// The budget, to which allocated memory is charged.
    pub(crate) fn charges(&self) -> &Budget {
        &self.0.budget
    }

    /// Frees memory now if no stream waits, otherwise later.
    pub(crate) fn give_back(&self, deferred_free: DeferredFree) {
        self.0.deferred_frees.push(deferred_free);
        self.0.free_deferred(FreeGuard::begin);
    }

    /// Frees deferred memory, unless a stream waits, another thread is freeing, or one is
    /// starting a wait.
    pub(crate) fn try_free_deferred(&self) {
        self.0.free_deferred(FreeGuard::try_begin);
    }

    /// Frees what can be freed now, and returns the rest, for reuse.
    pub(crate) fn deferred_frees(&self) -> &DeferredFrees {
        self.0.free_deferred(FreeGuard::begin);
        &self.0.deferred_frees
    }

    /// The legacy handles that are open for this device.
    pub(crate) fn legacy_table(&self) -> MutexGuard<'_, Table> {
        lock(&self.0.legacy)
    }
}
