//! Owned libfabric objects: closed once, when the last owner drops them.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use libfabric_sys as sys;
use threads::ForkGeneration;

use crate::{Error, Result};

static FAILED_CLOSES: AtomicU64 = AtomicU64::new(0);

/// The number of libfabric objects that this process failed to close. Anything but 0 is a leak;
/// each failure was also logged with its reason.
#[must_use]
pub fn failed_closes() -> u64 {
    FAILED_CLOSES.load(Ordering::Relaxed)
}

/// The libfabric types that begin with a `struct fid`.
///
/// # Safety
/// The implementing type's first member must be `struct fid`.
pub(crate) unsafe trait Object {
    /// The name of the type in messages.
    const NAME: &'static str;
}

macro_rules! objects {
    ($($type:ident => $name:literal),* $(,)?) => {
        $(
            // SAFETY: libfabric's ABI: every fid_* structure starts with a `struct fid`.
            unsafe impl Object for sys::$type {
                const NAME: &'static str = $name;
            }
        )*
    };
}

objects! {
    fid_fabric => "fabric",
    fid_domain => "domain",
    fid_ep => "endpoint",
    fid_pep => "passive endpoint",
    fid_av => "address vector",
    fid_cq => "completion queue",
    fid_eq => "event queue",
    fid_cntr => "counter",
    fid_mr => "memory region",
}

/// An open libfabric object. An owner also holds, by `Arc`, everything that the object was made
/// from; so drop order is the right close order.
pub(crate) struct Handle<T: Object> {
    object: NonNull<T>,
    created_in: ForkGeneration,
}

// SAFETY: domains are opened with FI_THREAD_SAFE unless the caller promised, in an unsafe call,
// to use all objects of a domain from one thread at a time.
unsafe impl<T: Object> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T: Object> Sync for Handle<T> {}

impl<T: Object> Handle<T> {
    /// Opens an object of this provider. Threads that the provider starts block all signals.
    ///
    /// # Safety
    /// A call that returns 0 or more has stored null, or a live object that no other owner closes.
    pub(crate) unsafe fn open(
        operation: &'static str,
        provider: &str,
        call: impl FnOnce(&mut *mut T) -> i32,
    ) -> Result<Self> {
        let mut object = std::ptr::null_mut();
        let code = {
            let _blocked = threads::BlockedSignals::new();
            call(&mut object)
        };
        Error::check(operation, code)
            .map_err(|error| error.with_provider(provider).explain_opening())?;
        // SAFETY: by contract.
        unsafe { Self::adopt(operation, object) }
    }

    /// Takes ownership of the object that an open call stored.
    ///
    /// # Safety
    /// `object` must be null or a live object that no other owner closes.
    pub(crate) unsafe fn adopt(operation: &'static str, object: *mut T) -> Result<Self> {
        let Some(object) = NonNull::new(object) else {
            let detail = "the provider reported success and returned no object";
            return Err(Error::new(crate::ErrorKind::Other, operation, detail));
        };
        Ok(Self { object, created_in: ForkGeneration::current() })
    }

    /// Is this a forked child, so that the object belongs to the parent? Then the child must
    /// not close it.
    #[inline]
    pub(crate) fn is_inherited(&self) -> bool {
        !self.created_in.is_current()
    }

    pub(crate) fn as_ptr(&self) -> *mut T {
        self.object.as_ptr()
    }

    pub(crate) fn as_fid(&self) -> *mut sys::fid {
        self.object.as_ptr().cast()
    }

    /// Closes now and returns the result; dropping could only log it.
    pub(crate) fn close(self) -> Result<()> {
        std::mem::ManuallyDrop::new(self).close_once()
    }

    /// Must be called once, at the end of the handle. In a forked child the object stays open,
    /// because the parent uses it.
    fn close_once(&mut self) -> Result<()> {
        if self.is_inherited() {
            return Ok(());
        }
        // SAFETY: this handle owns the object; it is closed only here.
        let code = unsafe { sys::fi_close(self.as_fid()) };
        if code < 0 {
            FAILED_CLOSES.fetch_add(1, Ordering::Relaxed);
        }
        Error::check("fi_close", code).map(drop).map_err(|e| e.with_detail(T::NAME))
    }
}

impl<T: Object> Drop for Handle<T> {
    fn drop(&mut self) {
        if let Err(error) = self.close_once() {
            tracing::error!(object = T::NAME, %error, "closing a libfabric object failed");
        }
    }
}

impl<T: Object> std::fmt::Debug for Handle<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:p}", T::NAME, self.object)
    }
}
