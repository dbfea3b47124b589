//! Copies that a device makes on one stream, in order, each with what is to be known when it is done.

use std::collections::VecDeque;
use std::time::Instant;

use gpu::{Device, Point, Stream};

use crate::error::{Error, Result};

/// A stream of copies.
#[derive(Debug)]
pub(crate) struct StreamCopies<T> {
    stream: Stream,
    begun: VecDeque<InFlightCopy<T>>,
}

#[derive(Debug)]
struct InFlightCopy<T> {
    what: T,
    /// None if none could be marked: then it is done with the next one that could.
    point: Option<Point>,
    since: Instant,
    /// Why not all of it was begun. The part that was is under way until `point`.
    failure: Option<Error>,
}

impl<T> StreamCopies<T> {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let stream = device.stream().map_err(of_device)?;
        Ok(Self { stream, begun: VecDeque::new() })
    }

    /// Begins what `copy` asks of the stream. Where that fails a part of it may be under way all the
    /// same, so the failure is told when the stream has done it.
    pub(crate) fn begin(&mut self, what: T, copy: impl FnOnce(&Stream) -> gpu::Result<()>) {
        let failure = copy(&self.stream).err();
        let (point, failure) = match self.stream.point() {
            Ok(point) => (Some(point), failure),
            Err(error) => (None, failure.or(Some(error))),
        };
        let failure = failure.map(of_device);
        self.begun.push_back(InFlightCopy { what, point, since: Instant::now(), failure });
    }

    /// The next one that is done, since when it was under way, and how it ended.
    #[inline]
    pub(crate) fn next_done(&mut self) -> Option<(T, Instant, Result<()>)> {
        self.begun.front()?;
        let outcome = match self.is_first_done() {
            Ok(false) => return None,
            Ok(true) => Ok(()),
            Err(error) if gpu::is_over(&error) => Err(of_device(error)),
            Err(error) => {
                // Only the question failed: the copy may be under way.
                tracing::debug!(%error, "the state of a copy cannot be queried now");
                return None;
            }
        };
        let InFlightCopy { what, since, failure, .. } = self.begun.pop_front()?;
        Some((what, since, outcome.and(failure.map_or(Ok(()), Err))))
    }

    /// Has the stream passed the first one? Where it has no point, by the next point there is.
    #[inline]
    fn is_first_done(&mut self) -> gpu::Result<bool> {
        if let Some(point) = self.begun.iter().find_map(|begun| begun.point.as_ref()) {
            return point.is_done();
        }
        let point = self.stream.point()?;
        let is_done = point.is_done();
        if let Some(last) = self.begun.back_mut() {
            last.point = Some(point);
        }
        is_done
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
    pub(crate) fn close(self, end: Instant) -> bool {
        let closed = self.stream.close(end.saturating_duration_since(Instant::now()));
        closed.map_or_else(|error| gpu::is_over(&error), |()| true)
    }
}

fn of_device(error: gpu::Error) -> Error {
    Error::of_device("copy", error)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::{Mutex, MutexGuard, PoisonError};
    use std::time::Duration;

    use gpu::emulated::{FaultConfig, configure_faults, refuse_points, refuse_records};

    use super::*;

    const DELAY: Duration = Duration::from_millis(100);

    static DEVICE_ONE: Mutex<()> = Mutex::new(());

    /// For a test that changes how the device `emulated:1` behaves: tests may share a process.
    pub(crate) fn alone() -> MutexGuard<'static, ()> {
        DEVICE_ONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn slow() -> (StreamCopies<u32>, gpu::Memory) {
        let device = Device::open("emulated:1".parse().unwrap()).unwrap();
        configure_faults(1, FaultConfig { delay: DELAY, ..FaultConfig::default() });
        (StreamCopies::new(&device).unwrap(), device.allocate(4096).unwrap())
    }

    fn wait(copies: &mut StreamCopies<u32>) -> (u32, Result<()>) {
        loop {
            if let Some((what, _, outcome)) = copies.next_done() {
                return (what, outcome);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn what_was_half_begun_is_told_of_when_that_half_is_done() {
        let _alone = alone();
        let (mut copies, memory) = slow();
        let start = Instant::now();
        let half = |stream: &Stream| {
            stream.fill(&memory.whole(), 1)?;
            stream.copy(&memory.whole(), &memory.slice(0, 8)?)
        };
        copies.begin(7, half);
        let (what, outcome) = wait(&mut copies);
        assert_eq!((what, outcome.unwrap_err().kind()), (7, crate::ErrorKind::Failed));
        assert!(start.elapsed() >= DELAY, "{:?}", start.elapsed());
        configure_faults(1, FaultConfig::default());
    }

    #[test]
    fn a_copy_that_cannot_be_asked_after_is_not_taken_for_done() {
        let _alone = alone();
        let (mut copies, memory) = slow();
        copies.begin(7, |stream| stream.fill(&memory.whole(), 1));
        refuse_points(1, true);
        assert!(copies.next_done().is_none());
        assert!(!copies.close(Instant::now() + DELAY / 10));
        refuse_points(1, false);
        configure_faults(1, FaultConfig::default());
    }

    /// What it touches is not free before, although the driver refused to mark its end.
    #[test]
    fn copy_whose_end_was_not_marked_is_done_with_the_next_one() {
        let _alone = alone();
        for is_followed in [true, false] {
            let (mut copies, memory) = slow();
            let start = Instant::now();
            refuse_records(1, true);
            copies.begin(7, |stream| stream.fill(&memory.whole(), 1));
            assert!(start.elapsed() < DELAY, "nothing waits for it here: {:?}", start.elapsed());
            assert!(copies.next_done().is_none() && copies.count() == 1);
            refuse_records(1, false);
            if is_followed {
                copies.begin(8, |stream| stream.fill(&memory.whole(), 2));
            }
            let (what, outcome) = wait(&mut copies);
            assert_eq!((what, outcome.unwrap_err().kind()), (7, crate::ErrorKind::Failed));
            assert!(start.elapsed() >= DELAY, "{:?}", start.elapsed());
            if is_followed {
                let (what, outcome) = wait(&mut copies);
                assert_eq!((what, outcome.is_ok()), (8, true));
            }
            assert!(copies.close(Instant::now() + DELAY));
            configure_faults(1, FaultConfig::default());
        }
    }
}
