//! Asynchronous copies on one stream of a device, in order, each with a context that is returned at
//! its end.

use std::collections::VecDeque;
use std::time::Instant;

use gpu::{Device, Point, Stream};

use crate::error::{Context, Error, Result};
use crate::remaining;

const COPY: &str = "copy memory";

/// A stream and its copies in flight.
#[derive(Debug)]
pub(crate) struct StreamCopies<T> {
    stream: Stream,
    in_flight: VecDeque<InFlightCopy<T>>,
    /// When the first copy in flight was last seen in progress; None if it was not.
    in_progress: Option<Instant>,
}

#[derive(Debug)]
struct InFlightCopy<T> {
    context: T,
    /// None if the event could not be recorded: then the next recorded one completes it too.
    point: Option<Point>,
    since: Instant,
    /// Why not all of it was started. The started part is in flight until `point`.
    failure: Option<Error>,
}

impl<T> StreamCopies<T> {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        Ok(Self {
            stream: device.stream().during(COPY)?,
            in_flight: VecDeque::new(),
            in_progress: None,
        })
    }

    /// Starts a copy on the stream. A failed start may leave a part in flight, so the failure is
    /// reported when the stream has completed that part.
    pub(crate) fn begin(&mut self, context: T, copy: impl FnOnce(&Stream) -> gpu::Result<()>) {
        let failure = copy(&self.stream).err();
        let (point, failure) = match self.stream.point() {
            Ok(point) => (Some(point), failure),
            Err(error) => (None, failure.or(Some(error))),
        };
        let failure = failure.map(|error| Error::caused_by(COPY, error));
        self.in_flight.push_back(InFlightCopy { context, point, since: Instant::now(), failure });
    }

    /// The next completed copy: its context, when it was started, and its outcome. Its memory is
    /// released.
    #[inline]
    pub(crate) fn next_done(&mut self) -> Option<(T, Instant, Result<()>)> {
        self.in_flight.front()?;
        // Before the answer: afterwards the thread may be delayed.
        let asked = Instant::now();
        let outcome = match self.is_first_done() {
            Ok(false) => {
                self.in_progress = Some(asked);
                return None;
            }
            Ok(true) => Ok(()),
            Err(error) if gpu::proves_idle(&error) => Err(Error::caused_by(COPY, error)),
            Err(error) => {
                // Only the query failed: the copy may be in flight.
                tracing::debug!(%error, "the state of a copy cannot be queried now");
                return None;
            }
        };
        let InFlightCopy { context, since, failure, .. } = self.in_flight.pop_front()?;
        Some((context, since, outcome.and(failure.map_or(Ok(()), Err))))
    }

    /// Has the stream completed the first copy? One without a point is completed by the next point.
    #[inline]
    fn is_first_done(&mut self) -> gpu::Result<bool> {
        if let Some(point) = self.in_flight.iter().find_map(|in_flight| in_flight.point.as_ref()) {
            return self.stream.release_if_done(point);
        }
        let point = self.stream.point()?;
        let is_done = self.stream.release_if_done(&point);
        if let Some(last) = self.in_flight.back_mut() {
            last.point = Some(point);
        }
        is_done
    }

    /// When the copy that [`next_done`](Self::next_done) returned, or the first one in flight, was
    /// last seen in progress.
    pub(crate) fn take_in_progress(&mut self) -> Option<Instant> {
        self.in_progress.take()
    }

    /// The contexts of the copies in flight, the oldest first, and when they were started.
    pub(crate) fn in_flight(&self) -> impl Iterator<Item = (&T, Instant)> {
        self.in_flight.iter().map(|in_flight| (&in_flight.context, in_flight.since))
    }

    /// Where a copy in flight ends on the stream, at the latest.
    pub(crate) fn end_of(&self, is_meant: impl Fn(&T) -> bool) -> Option<&Point> {
        let at = self.in_flight.iter().position(|copy| is_meant(&copy.context))?;
        self.in_flight.range(at..).find_map(|copy| copy.point.as_ref())
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(crate) fn count(&self) -> usize {
        self.in_flight.len()
    }

    /// The contexts of the copies in flight, which are not tracked any more.
    pub(crate) fn abandon(&mut self) -> impl Iterator<Item = T> {
        self.in_flight.drain(..).map(|in_flight| in_flight.context)
    }

    /// Waits until the device has completed all copies. False if one may still be running: its
    /// memory must never be freed then.
    pub(crate) fn close(self, end: Instant) -> bool {
        let closed = self.stream.close(remaining(end));
        closed.map_or_else(|error| gpu::proves_idle(&error), |()| true)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::{Mutex, MutexGuard, PoisonError};
    use std::time::Duration;

    use gpu::emulated::{FaultConfig, configure_faults, refuse_points, refuse_records};

    use super::*;

    const DELAY: Duration = Duration::from_millis(100);

    static DEVICE_ONE: Mutex<()> = Mutex::new(());

    /// Serialises tests that change how the device `emulated:1` behaves: they may share a process.
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
            if let Some((context, _, outcome)) = copies.next_done() {
                return (context, outcome);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn half_started_copy_fails_when_its_half_is_done() {
        let _alone = alone();
        let (mut copies, memory) = slow();
        let start = Instant::now();
        let half = |stream: &Stream| {
            stream.fill(&memory.whole(), 1)?;
            stream.copy(&memory.whole(), &memory.slice(0, 8)?)
        };
        copies.begin(7, half);
        let (context, outcome) = wait(&mut copies);
        assert_eq!((context, outcome.unwrap_err().kind()), (7, crate::ErrorKind::Failed));
        assert!(start.elapsed() >= DELAY, "{:?}", start.elapsed());
        configure_faults(1, FaultConfig::default());
    }

    #[test]
    fn copy_with_failing_queries_is_not_done() {
        let _alone = alone();
        let (mut copies, memory) = slow();
        copies.begin(7, |stream| stream.fill(&memory.whole(), 1));
        refuse_points(1, true);
        assert!(copies.next_done().is_none());
        assert!(!copies.close(Instant::now() + DELAY / 10));
        refuse_points(1, false);
        configure_faults(1, FaultConfig::default());
    }

    /// Memory of the copy is not released before, although the driver refused to record its event.
    #[test]
    fn copy_without_an_event_completes_with_the_next_one() {
        let _alone = alone();
        for is_followed in [true, false] {
            let (mut copies, memory) = slow();
            let start = Instant::now();
            refuse_records(1, true);
            copies.begin(7, |stream| stream.fill(&memory.whole(), 1));
            assert!(start.elapsed() < DELAY, "begin() blocked: {:?}", start.elapsed());
            assert!(copies.next_done().is_none() && copies.count() == 1);
            refuse_records(1, false);
            if is_followed {
                copies.begin(8, |stream| stream.fill(&memory.whole(), 2));
            }
            let (context, outcome) = wait(&mut copies);
            assert_eq!((context, outcome.unwrap_err().kind()), (7, crate::ErrorKind::Failed));
            assert!(start.elapsed() >= DELAY, "{:?}", start.elapsed());
            if is_followed {
                let (context, outcome) = wait(&mut copies);
                assert_eq!((context, outcome.is_ok()), (8, true));
            }
            assert!(copies.close(Instant::now() + DELAY));
            configure_faults(1, FaultConfig::default());
        }
    }
}
