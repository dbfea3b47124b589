//! Copies that a device makes on one stream, in order, each with what is to be known when it is done.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use gpu::{Device, Point, Stream};

use crate::error::{Error, Result};

/// A request that could not be begun.
#[derive(Debug)]
pub(crate) struct NotBegun<T> {
    pub(crate) what: T,
    pub(crate) error: Error,
    /// The device may be at a part of it nevertheless, and it cannot be told when it is done.
    pub(crate) may_be_under_way: bool,
}

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
    /// Why not all of it was begun. The part that was is under way until `point`.
    failure: Option<Error>,
}

impl<T> Copies<T> {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let stream = device.stream().map_err(of_device)?;
        Ok(Self { stream, begun: VecDeque::new() })
    }

    /// Begins what `copy` asks of the stream. Where `copy` fails, a part of it may have been begun:
    /// the failure is told when that is done.
    pub(crate) fn begin(
        &mut self,
        what: T,
        copy: impl FnOnce(&Stream) -> gpu::Result<()>,
    ) -> std::result::Result<(), NotBegun<T>> {
        let failure = copy(&self.stream).err();
        match self.stream.point() {
            Ok(point) => {
                let failure = failure.map(of_device);
                self.begun.push_back(Begun { what, point, since: Instant::now(), failure });
                Ok(())
            }
            Err(error) => {
                let outcome = self.stream.synchronize(gpu::PATIENCE);
                let may_be_under_way = outcome.is_err_and(|error| !is_over(&error));
                let error = of_device(failure.unwrap_or(error));
                Err(NotBegun { what, error, may_be_under_way })
            }
        }
    }

    /// The next one that is done, since when it was under way, and how it ended.
    #[inline]
    pub(crate) fn next_done(&mut self) -> Option<(T, Instant, Result<()>)> {
        let outcome = match self.begun.front()?.point.is_done() {
            Ok(false) => return None,
            Ok(true) => Ok(()),
            Err(error) if is_over(&error) => Err(of_device(error)),
            Err(error) => {
                // Only the question failed: the copy may be under way.
                tracing::debug!(%error, "a copy cannot be asked after now");
                return None;
            }
        };
        let Begun { what, since, failure, .. } = self.begun.pop_front()?;
        Some((what, since, outcome.and(failure.map_or(Ok(()), Err))))
    }

    /// How many are under way.
    pub(crate) fn count(&self) -> usize {
        self.begun.len()
    }

    /// Those under way, which are not asked after any more.
    pub(crate) fn give_up(&mut self) -> impl Iterator<Item = T> {
        self.begun.drain(..).map(|begun| begun.what)
    }

    /// Waits until the device has done all copies. False if it may still be at one: what it touches
    /// is never freed then.
    pub(crate) fn close(self, longest: Duration) -> bool {
        self.stream.close(longest).is_ok()
    }
}

/// Is nothing under way any more after this error?
fn is_over(error: &gpu::Error) -> bool {
    matches!(error.kind(), gpu::ErrorKind::DeviceFailed | gpu::ErrorKind::Forked)
}

fn of_device(error: gpu::Error) -> Error {
    Error::of_device("copy", error)
}

#[cfg(test)]
mod tests {
    use gpu::stand_in::{Behaviour, behave, refuse_points};

    use super::*;

    const DELAY: Duration = Duration::from_millis(100);

    /// A stream of a device that no other test slows down.
    fn slow() -> (Copies<u32>, gpu::Memory) {
        let device = Device::open("stand-in:1".parse().unwrap()).unwrap();
        behave(1, Behaviour { delay: DELAY, ..Behaviour::default() });
        (Copies::new(&device).unwrap(), device.allocate(4096).unwrap())
    }

    fn wait(copies: &mut Copies<u32>) -> (u32, Result<()>) {
        loop {
            if let Some((what, _, outcome)) = copies.next_done() {
                return (what, outcome);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn what_was_half_begun_is_told_of_when_that_half_is_done() {
        let (mut copies, memory) = slow();
        let start = Instant::now();
        let half = |stream: &Stream| {
            stream.fill(&memory.whole(), 1)?;
            stream.copy(&memory.whole(), &memory.slice(0, 8)?)
        };
        copies.begin(7, half).unwrap();
        let (what, outcome) = wait(&mut copies);
        assert_eq!((what, outcome.unwrap_err().kind()), (7, crate::ErrorKind::Failed));
        assert!(start.elapsed() >= DELAY, "{:?}", start.elapsed());
        behave(1, Behaviour::default());
    }

    #[test]
    fn a_copy_that_cannot_be_asked_after_is_not_taken_for_done() {
        let (mut copies, memory) = slow();
        copies.begin(7, |stream| stream.fill(&memory.whole(), 1)).unwrap();
        refuse_points(1, true);
        assert!(copies.next_done().is_none());
        assert!(!copies.close(DELAY / 10));
        refuse_points(1, false);
        behave(1, Behaviour::default());
    }
}
