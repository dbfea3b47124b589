//! Operations of CUDA devices, by a device domain.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::time::Duration;

use collective::{CommDomainKey, DeviceDomain, DomainOptions};
use gpu::{Device, Event, Stream};

use crate::engine::{AbortHandle, Engine, Mark};
use crate::error::{Error, Result};
use crate::request::{Request, StreamHandle};

/// Events that are kept for reuse.
const MAX_SPARE: usize = 256;
/// Streams of the program that are kept. Programs have few.
const MAX_STREAMS: usize = 64;

#[derive(Debug)]
pub(crate) struct DeviceEngine {
    /// Dropped first: they wait for what was started on them.
    streams: HashMap<StreamHandle, Stream>,
    spare: Vec<Event>,
    domain: DeviceDomain,
}

impl DeviceEngine {
    pub(crate) fn join(
        key: &CommDomainKey,
        rank: u32,
        options: &DomainOptions,
        device: &Device,
    ) -> Result<Self> {
        let domain = DeviceDomain::join(key, rank, device, options)?;
        Ok(Self { streams: HashMap::new(), spare: Vec::new(), domain })
    }

    /// The stream of a handle. An error for one that is captured, or is that of each thread.
    fn stream(&mut self, handle: StreamHandle) -> Result<&Stream> {
        if !self.streams.contains_key(&handle) {
            if self.streams.len() >= MAX_STREAMS {
                // All marks of theirs are reached soon: each operation ends with one.
                self.streams.clear();
            }
            // SAFETY: the program passed it with this operation. It may destroy it later: then its last point,
            // which each operation has, is all that is used.
            let stream = unsafe { self.domain.device().adopt_stream(handle as u64) }?;
            self.streams.insert(handle, stream);
        }
        self.streams.get(&handle).ok_or_else(|| Error::Unavailable("no stream".to_owned()))
    }

    fn event(&mut self) -> Result<Event> {
        match self.spare.pop() {
            Some(event) => Ok(event),
            None => Ok(self.domain.device().event_with_time()?),
        }
    }
}

impl Engine for DeviceEngine {
    fn is_left(&mut self, stream: StreamHandle) -> bool {
        match self.stream(stream) {
            Ok(stream) => stream.is_capturing().unwrap_or(false),
            Err(Error::Device(error)) => error.kind() == gpu::ErrorKind::NotSupported,
            Err(_) => false,
        }
    }

    unsafe fn run(&mut self, request: &Request, stream: StreamHandle) -> Result<()> {
        self.stream(stream)?;
        let Self { streams, domain, .. } = self;
        if let Some(stream) = streams.get(&stream) {
            // SAFETY: the caller's promise.
            unsafe { domain.start(&request.call(), stream, Duration::MAX) }?;
        }
        Ok(())
    }

    fn mark(&mut self, stream: StreamHandle) -> Result<Mark> {
        let event = self.event()?;
        self.stream(stream)?.record(&event)?;
        Ok(Mark::Event(event))
    }

    fn order(&mut self, stream: StreamHandle, after: &Mark) -> Result<()> {
        if let Mark::Event(event) = after {
            self.stream(stream)?.wait_for(event)?;
        }
        Ok(())
    }

    fn forget(&mut self, mark: Mark) {
        if let (Mark::Event(event), true) = (mark, self.spare.len() < MAX_SPARE) {
            self.spare.push(event);
        }
    }

    fn check(&self) -> Result<()> {
        Ok(self.domain.check("check communicator")?)
    }

    fn check_started(&self) -> Result<()> {
        // A rank that has aborted after its part of them does not keep the others from theirs.
        if self.domain.has_given_up() { self.check() } else { Ok(()) }
    }

    fn abort_handle(&self) -> AbortHandle {
        AbortHandle::Device(self.domain.abort_handle())
    }

    fn drain(&mut self, timeout: Duration) -> Result<()> {
        match self.domain.last() {
            Some(last) => Ok(last.wait(timeout)?),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use collective::{DataType, Operation, ReduceOp};
    use testkit::temp_dir::TempDir;

    use super::*;
    use crate::request::ElementType;

    const COUNT: usize = 10_000;

    /// Joins two ranks, which are threads with an emulated device.
    fn run(name: &str, each: impl Fn(u32, DeviceEngine) + Sync) {
        let directory = TempDir::new(name);
        let options = DomainOptions::new().directory(&directory);
        let key = CommDomainKey::of_first_ranks(2);
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let (options, key, each) = (&options, &key, &each);
                scope.spawn(move || {
                    let device = Device::open(gpu::DeviceName::emulated(rank)).unwrap();
                    each(rank, DeviceEngine::join(key, rank, options, &device).unwrap());
                });
            }
        });
    }

    fn sum(memory: &gpu::Memory) -> Request {
        let address = memory.address() as usize;
        let element = ElementType::Reducible(DataType::U8);
        let operation = Operation::AllReduce;
        Request::reducing(operation, element, ReduceOp::Sum, COUNT, address, address).unwrap()
    }

    #[test]
    fn operations_of_a_device_are_carried_out_and_measured() {
        run("engine-measured", |rank, mut engine| {
            let device = engine.domain.device().clone();
            let memory = device.allocate(COUNT as u64).unwrap();
            let stream = device.stream().unwrap();
            stream.fill(&memory.whole(), rank as u8 + 1).unwrap();
            stream.synchronize(gpu::DEFAULT_TIMEOUT).unwrap();
            // The device emulates its default stream only.
            assert!(!engine.is_left(0) && engine.is_left(5));
            for times in 0..3 {
                let begin = engine.mark(0).unwrap();
                // SAFETY: memory that is kept until the end.
                unsafe { engine.run(&sum(&memory), 0) }.unwrap();
                let end = engine.mark(0).unwrap();
                engine.order(0, &end).unwrap();
                engine.drain(gpu::DEFAULT_TIMEOUT).unwrap();
                engine.check_started().unwrap();
                let Mark::Event(event) = &end else { panic!("{end:?}") };
                event.wait(gpu::DEFAULT_TIMEOUT).unwrap();
                assert!(engine.elapsed(&begin, &end).unwrap().is_some());
                engine.forget(begin);
                engine.forget(end);
                assert_eq!(engine.spare.len(), 2, "after {times} others");
            }
            let mut found = vec![0; COUNT];
            stream.download(&memory.whole(), &mut found, gpu::DEFAULT_TIMEOUT).unwrap();
            assert!(found.iter().all(|byte| *byte == 12));
        });
    }

    #[test]
    fn abort_is_a_failure_of_started_operations() {
        run("engine-aborted", |rank, mut engine| {
            if rank == 1 {
                // It has started none, so nothing of it has failed.
                while engine.check().is_ok() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                engine.check_started().unwrap();
                return;
            }
            let memory = engine.domain.device().allocate(COUNT as u64).unwrap();
            // SAFETY: memory that is kept until the end.
            unsafe { engine.run(&sum(&memory), 0) }.unwrap();
            engine.check_started().unwrap();
            engine.abort_handle().abort();
            engine.drain(gpu::DEFAULT_TIMEOUT).unwrap();
            assert!(engine.check_started().is_err());
        });
    }
}
