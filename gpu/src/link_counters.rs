//! The number of bytes that each link carried: NVIDIA's counters, read through its management
//! library (NVML), which is looked up at run time.
//!
//! Counters are the only proof of a path: a transfer that should use NVLink but moves nothing
//! there took another path.
#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_int, c_longlong, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;

use crate::cuda::functions;
use crate::device::Device;
use crate::device_name::{DeviceName, Implementation};
use crate::error::{Error, ErrorKind, Result};

/// Bytes that a device's links carried since some time in the past; None where the device does
/// not count. Only differences are meaningful.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LinkBytes {
    /// Sent by NVLink, payload only.
    pub nvlink_sent: Option<u64>,
    /// Received by NVLink, payload only.
    pub nvlink_received: Option<u64>,
    /// Sent by PCIe.
    pub pcie_sent: Option<u64>,
    /// Received by PCIe.
    pub pcie_received: Option<u64>,
}

impl LinkBytes {
    /// The bytes since `earlier`.
    ///
    /// ```
    /// use gpu::LinkBytes;
    /// let earlier = LinkBytes { nvlink_sent: Some(10), ..LinkBytes::default() };
    /// let later = LinkBytes { nvlink_sent: Some(30), ..LinkBytes::default() };
    /// assert_eq!(later.since(&earlier).nvlink_sent, Some(20));
    /// assert_eq!(later.since(&earlier).pcie_sent, None);
    /// ```
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let since = |now: Option<u64>, then: Option<u64>| Some(now?.wrapping_sub(then?));
        Self {
            nvlink_sent: since(self.nvlink_sent, earlier.nvlink_sent),
            nvlink_received: since(self.nvlink_received, earlier.nvlink_received),
            pcie_sent: since(self.pcie_sent, earlier.pcie_sent),
            pcie_received: since(self.pcie_received, earlier.pcie_received),
        }
    }
}

/// A device's counters.
#[derive(Debug)]
pub struct LinkCounters {
    name: DeviceName,
    library: &'static Nvml,
    /// The library's handle, which any thread may use; as a number, so that this can be sent to one.
    handle: usize,
}

type Code = u32;
const NOT_SUPPORTED: Code = 3;

/// A value, or the reason why there is none, as the library fills it in.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Field {
    number: c_uint,
    scope: c_uint,
    timestamp: c_longlong,
    latency: c_longlong,
    value_type: c_uint,
    code: Code,
    value: u64,
}

functions! {
    #[derive(Debug)]
    Nvml
    init = "nvmlInit_v2": fn();
    handle_by_uuid = "nvmlDeviceGetHandleByUUID": fn(*const c_char, *mut *mut c_void);
    field_values = "nvmlDeviceGetFieldValues": fn(*mut c_void, c_int, *mut Field);
}

const OPERATION: &str = "read link counters";

fn nvml() -> Result<&'static Nvml> {
    static FOUND: OnceLock<Result<Nvml>> = OnceLock::new();
    let find = || {
        let missing = |detail| Error::new(OPERATION, ErrorKind::Unavailable, detail);
        // SAFETY: NVIDIA's library, by its file name; its initialisers are NVIDIA's.
        let library = unsafe { Library::new("libnvidia-ml.so.1") };
        let library = library.map_err(|_| missing("libnvidia-ml.so.1 was not found".to_owned()))?;
        // SAFETY: its symbols have these types; it is never unloaded.
        let found = unsafe { Nvml::find(Box::leak(Box::new(library))) }
            .map_err(|symbol| missing(format!("libnvidia-ml has no {symbol}: too old a driver")))?;
        // SAFETY: no arguments.
        check(unsafe { (found.init)() })?;
        Ok(found)
    };
    FOUND.get_or_init(find).as_ref().map_err(Clone::clone)
}

fn check(code: Code) -> Result<()> {
    let kind = match code {
        0 => return Ok(()),
        NOT_SUPPORTED => ErrorKind::NotSupported,
        _ => ErrorKind::Other,
    };
    let detail = format!("the management library returned {code}");
    Err(Error::new(OPERATION, kind, detail).with_code(i64::from(code)))
}

/// All links of a device together: not every driver adds them up.
const ALL_LINKS: c_uint = c_uint::MAX;
/// More links than any device has.
const MAX_LINKS: c_uint = 36;
/// In units of 1024 bytes.
const NVLINK_DATA_SENT: c_uint = 138;
const NVLINK_DATA_RECEIVED: c_uint = 139;
const PCIE_BYTES_SENT: c_uint = 197;
const PCIE_BYTES_RECEIVED: c_uint = 198;

impl LinkCounters {
    /// The counters of a device.
    ///
    /// # Errors
    /// [`NotSupported`](ErrorKind::NotSupported) for an emulated device;
    /// [`Unavailable`](ErrorKind::Unavailable) without the management library.
    pub fn of(device: &Device) -> Result<Self> {
        let name = device.name();
        if name.implementation != Implementation::Cuda {
            let detail = "an emulated device has no links";
            return Err(Error::new(OPERATION, ErrorKind::NotSupported, detail).on(name));
        }
        let library = nvml()?;
        let uuid = format!("GPU-{}", device.properties().uuid);
        let uuid = CString::new(uuid).map_err(|_| {
            Error::new(OPERATION, ErrorKind::InvalidArgument, "a zero in the UUID").on(name)
        })?;
        let mut handle: *mut c_void = ptr::null_mut();
        // SAFETY: a zero-terminated text, and space for a handle.
        check(unsafe { (library.handle_by_uuid)(uuid.as_ptr(), &raw mut handle) })
            .map_err(|error| error.on(name))?;
        Ok(Self { name, library, handle: handle.expose_provenance() })
    }

    /// The current values.
    ///
    /// # Errors
    /// If the library refuses; values that a device does not count are None.
    pub fn read(&self) -> Result<LinkBytes> {
        let [sent, received] = self.nvlink(ALL_LINKS)?;
        let (mut nvlink_sent, mut nvlink_received) = (sent, received);
        for link in (0..MAX_LINKS).take_while(|_| sent.is_none()) {
            let [sent, received] = self.nvlink(link)?;
            let add = |sum: Option<u64>, one: Option<u64>| match (sum, one) {
                (Some(sum), Some(one)) => Some(sum.wrapping_add(one)),
                (sum, one) => sum.or(one),
            };
            nvlink_sent = add(nvlink_sent, sent);
            nvlink_received = add(nvlink_received, received);
        }
        let [pcie_sent, pcie_received] =
            self.fields([(PCIE_BYTES_SENT, 0), (PCIE_BYTES_RECEIVED, 0)])?;
        Ok(LinkBytes { nvlink_sent, nvlink_received, pcie_sent, pcie_received })
    }

    /// Sent and received by a link, in bytes.
    fn nvlink(&self, link: c_uint) -> Result<[Option<u64>; 2]> {
        let kibibytes = self.fields([(NVLINK_DATA_SENT, link), (NVLINK_DATA_RECEIVED, link)])?;
        Ok(kibibytes.map(|number| number.map(|number| number.wrapping_mul(1024))))
    }

    /// Two values, each named by number and scope.
    fn fields(&self, asked: [(c_uint, c_uint); 2]) -> Result<[Option<u64>; 2]> {
        // Zeros are no value: the library leaves unknown fields unchanged.
        let mut fields = asked.map(|(number, scope)| Field { number, scope, ..Field::default() });
        // SAFETY: as many fields as the count says.
        let code = unsafe {
            let count = fields.len() as c_int;
            let handle = ptr::with_exposed_provenance_mut(self.handle);
            (self.library.field_values)(handle, count, fields.as_mut_ptr())
        };
        check(code).map_err(|error| error.on(self.name))?;
        Ok(fields.map(Field::as_integer))
    }
}

impl Field {
    /// The value, if present and a whole number.
    fn as_integer(self) -> Option<u64> {
        const UNSIGNED: c_uint = 1;
        const UNSIGNED_LONG: c_uint = 2;
        const UNSIGNED_LONG_LONG: c_uint = 3;
        match (self.code, self.value_type) {
            (0, UNSIGNED) => Some(self.value & u64::from(u32::MAX)),
            (0, UNSIGNED_LONG | UNSIGNED_LONG_LONG) => Some(self.value),
            _ => None,
        }
    }
}
