//! Objects that are dropped when the work of a device that uses them is done, by a thread.

use std::any::Any;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpu::{Point, Stream};
use ipc::PerProcess;

/// Points and the objects that are dropped when they are reached; None without a thread.
static WAITING: PerProcess<Mutex<Option<Vec<Waiting>>>> = PerProcess::new();

type Waiting = (Point, Box<dyn Any + Send>);

/// Pause between queries.
const PAUSE: Duration = Duration::from_millis(1);

fn waiting() -> MutexGuard<'static, Option<Vec<Waiting>>> {
    WAITING.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// Drops an object when the work before a point is done. The caller, which may hold the lock of the
/// interpreter, does not wait.
pub(crate) fn drop_after(point: Point, object: impl Send + 'static) {
    let mut waiting = waiting();
    let has_thread =
        waiting.is_some() || threads::spawn("fabricast-release", drop_released).is_ok();
    if has_thread {
        waiting.get_or_insert_default().push((point, Box::new(object)));
    } else {
        // It stays: the work may still use it.
        std::mem::forget(object);
    }
}

/// Ends the use of an adopted stream: its drop would wait for what was begun on it.
pub(crate) fn leave(stream: Stream) {
    if let Ok(point) = stream.point() {
        drop_after(point, stream);
    }
}

/// Until none is left.
fn drop_released() {
    loop {
        std::thread::sleep(PAUSE);
        let mut waiting = waiting();
        let Some(list) = &mut *waiting else { return };
        // After some errors the device does not use it any more; after others it is asked again.
        let is_over = |waiting: &mut Waiting| {
            waiting.0.is_done().unwrap_or_else(|error| gpu::proves_idle(&error))
        };
        let over: Vec<_> = list.extract_if(.., is_over).collect();
        if list.is_empty() {
            *waiting = None;
            // The objects are dropped without the lock.
            drop(waiting);
            return drop(over);
        }
        drop(waiting);
        drop(over);
    }
}
