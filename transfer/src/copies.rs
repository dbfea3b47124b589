//! Copies that a device makes on one stream, in order, each with what is to be known when it is done.

use std::collections::VecDeque;
use std::time::Instant;

use gpu::{Device, Point, Stream};

use crate::error::{Error, Result};

/// A stream of copies.
#[derive(Debug)]
pub(crate) struct Copies<T> {
    stream: Stream,
    begun: VecDeque<Begun<T>>,
}

#[derive(Debug)]
struct Begun<T> {
    what: T,
    point: Point,
    since: Instant,
}

impl<T> Copies<T> {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let stream = device.stream().map_err(of_device)?;
        Ok(Self { stream, begun: VecDeque::new() })
    }

    /// Begins what `copy` asks of the stream.
    pub(crate) fn begin(
        &mut self,
        what: T,
        copy: impl FnOnce(&Stream) -> gpu::Result<()>,
    ) -> std::result::Result<(), (T, Error)> {
        if let Err(error) = copy(&self.stream) {
            return Err((what, of_device(error)));
        }
        match self.stream.point() {
            Ok(point) => {
                self.begun.push_back(Begun { what, point, since: Instant::now() });
                Ok(())
            }
            Err(error) => {
                // It was begun all the same, and its memory may be used again after this.
                let _ = self.stream.synchronize(gpu::PATIENCE);
                Err((what, of_device(error)))
            }
        }
    }

    /// The next one that is done, since when it was under way, and how it ended.
    #[inline]
    pub(crate) fn next_done(&mut self) -> Option<(T, Instant, Result<()>)> {
        let outcome = match self.begun.front()?.point.is_done() {
            Ok(false) => return None,
            Ok(true) => Ok(()),
            Err(error) => Err(of_device(error)),
        };
        self.begun.pop_front().map(|Begun { what, since, .. }| (what, since, outcome))
    }

    /// How many are under way.
    pub(crate) fn count(&self) -> usize {
        self.begun.len()
    }

    /// Those under way, when nothing more can be expected of them.
    pub(crate) fn give_up(&mut self) -> impl Iterator<Item = T> {
        self.begun.drain(..).map(|begun| begun.what)
    }
}

fn of_device(error: gpu::Error) -> Error {
    Error::of_device("copy", error)
}
