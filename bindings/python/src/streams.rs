//! CUDA streams of other libraries that use memory of a message.
#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::sync::Mutex;

use gpu::{DeviceName, Point, Stream};
use threads::lock;

use crate::devices::open_device;
use crate::failure::Result;

/// The streams that use the memory, by their handles.
#[derive(Debug, Default)]
pub(crate) struct UsingStreams(Mutex<BTreeSet<u64>>);

impl UsingStreams {
    /// Work on this stream uses it from now on.
    pub(crate) fn add(&self, handle: u64) {
        lock(&self.0).insert(handle);
    }

    /// Is the work on all of them done? Then nothing has to be ordered behind it: even an event costs
    /// a switch between the processes that use a device.
    pub(crate) fn are_done(&self, device: DeviceName) -> Result<bool> {
        let handles = lock(&self.0);
        for handle in handles.iter() {
            if !adopt(device, *handle)?.is_done()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// One stream that waits for the work on all of them; None if there are none.
    pub(crate) fn joined(&self, device: DeviceName) -> Result<Option<Stream>> {
        let handles = lock(&self.0).clone();
        let mut joined: Option<(Stream, u64)> = None;
        for handle in handles {
            let stream = adopt(device, handle)?;
            match &joined {
                // SAFETY: as in `adopt`.
                Some((_, first)) => unsafe {
                    open_device(device)?.delay_stream(*first, &stream.point()?)?;
                },
                None => joined = Some((stream, handle)),
            }
        }
        Ok(joined.map(|(stream, _)| stream))
    }
}

/// When the work on these streams is done, and a stream that is to be dropped after it: its drop would
/// wait. None if the work is done.
pub(crate) fn last_use(device: DeviceName, streams: &UsingStreams) -> Option<(Point, Stream)> {
    if streams.are_done(device).unwrap_or(true) {
        return None;
    }
    let stream = streams.joined(device).ok()??;
    let point = stream.point().ok()?;
    Some((point, stream))
}

/// Adopts a stream that a caller passed.
pub(crate) fn adopt(device: DeviceName, handle: u64) -> Result<Stream> {
    // SAFETY: a consumer of DLPack, or the caller of a transfer, passed its stream: it is of this
    // device, and lives as long as the framework that made it.
    Ok(unsafe { open_device(device)?.adopt_stream(handle) }?)
}
