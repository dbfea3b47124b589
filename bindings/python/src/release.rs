//! Objects that are dropped when the work of a device that uses them is done, by a thread.

use std::any::Any;
use std::time::Duration;

use gpu::{Point, Stream};
use ipc::PerProcess;
use threads::{DeferredDrop, DeferredValue};

static IN_USE: PerProcess<DeferredDrop<InUse>> = PerProcess::new();

/// An object that the work before a point uses.
struct InUse {
    point: Point,
    _object: Box<dyn Any + Send>,
}

impl DeferredValue for InUse {
    const THREAD_NAME: &'static str = "fabricast-release";
    const CHECK_INTERVAL: Duration = Duration::from_millis(1);

    fn is_unused(&mut self) -> bool {
        // After some errors the device does not use it any more; after others it is asked again.
        self.point.is_done().unwrap_or_else(|error| gpu::proves_idle(&error))
    }
}

/// Drops an object when the work before a point is done. The caller, which may hold the lock of the
/// interpreter, does not wait.
pub(crate) fn drop_after(point: Point, object: impl Send + 'static) {
    // Without a thread it stays until the next one: the work may still use it.
    let _ = IN_USE.get().push(InUse { point, _object: Box::new(object) });
}

/// Ends the use of an adopted stream: its drop would wait for what was begun on it.
pub(crate) fn leave(stream: Stream) {
    if let Ok(point) = stream.point() {
        drop_after(point, stream);
    }
}
