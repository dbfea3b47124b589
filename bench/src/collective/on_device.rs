//! The buffers of a rank on its device, and the operations there.

use std::path::Path;
use std::time::{Duration, Instant};

use collective::{
    CollectiveCall, CommDomain, CommDomainKey, DeviceDomain, DomainOptions, OpKey, Operation,
    Parameters,
};
use command::exit::{Exit, Failure};
use gpu::{Device, Memory, Stream};

use super::buffers::Buffers;
use super::nccl::Nccl;

/// CUDA's handle of the stream of each thread: copy engines serve no operations of the default stream.
const STREAM_OF_THREAD: u64 = 2;
/// The longest wait for operations of the device.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A rank's device.
#[derive(Debug)]
pub(crate) struct OnDevice {
    /// Buffers of NCCL, if its operations have windows. Dropped before it.
    windows: Option<(Memory, Memory)>,
    /// Dropped before the domain.
    nccl: Option<Nccl>,
    domain: DeviceDomain,
    stream: Stream,
    default_stream: Option<Stream>,
    memory: Option<(Memory, Memory)>,
    /// How long the host took to start an operation, in the last measurement.
    host_time: f64,
}

impl OnDevice {
    /// Opens the device of a rank: the named one, or that of an implementation with the number of the rank.
    pub(crate) fn open(device: &str, rank: u32) -> Result<Device, Failure> {
        let name =
            if device.contains(':') { device.to_owned() } else { format!("{device}:{rank}") };
        let failed = |error: gpu::Error| Failure::new(Exit::NoProvider, error.to_string());
        Device::open(name.parse().map_err(Failure::of)?).map_err(failed)
    }

    /// Joins the domain of the devices, and that of NCCL if it is the rival.
    pub(crate) fn start(
        device: &str,
        host: &mut CommDomain,
        options: &DomainOptions,
        rival: Option<(Option<&Path>, bool)>,
    ) -> Result<Self, Failure> {
        let (rank, ranks) = (host.rank(), host.size());
        let device = Self::open(device, rank)?;
        let key = CommDomainKey::of_first_ranks(ranks);
        let domain = DeviceDomain::join(&key, rank, &device, options).map_err(Failure::of)?;
        let stream = device.stream().map_err(Failure::of)?;
        let (mut nccl, mut default_stream) = (None, None);
        if let Some((path, has_windows)) = rival {
            let join = || {
                let share = |id: &mut [u8]| host.broadcast(0, id, TIMEOUT).map_err(Failure::of);
                Nccl::start(path, rank, ranks, has_windows.then_some(STREAM_OF_THREAD), share)
            };
            nccl = Some(device.with_context(join).map_err(Failure::of)??);
            default_stream = Some(device.default_stream().map_err(Failure::of)?);
        }
        let (memory, windows) = (None, None);
        Ok(Self { nccl, domain, stream, default_stream, memory, windows, host_time: 0.0 })
    }

    /// Operations that accessed the buffers of other ranks.
    pub(crate) fn direct_operations(&self) -> u64 {
        self.domain.outcomes().direct
    }

    /// Copies the buffers to the device.
    pub(crate) fn set_up(&mut self, buffers: &Buffers) -> Result<(), Failure> {
        self.memory = None;
        let allocate = |bytes: &[u8]| {
            let memory = self.domain.device().allocate(bytes.len().max(16) as u64)?;
            self.stream.upload(&memory.slice(0, bytes.len() as u64)?, bytes, TIMEOUT)?;
            Ok(memory)
        };
        let (input, output) = buffers.bytes();
        let both = (|| -> gpu::Result<_> { Ok((allocate(input)?, allocate(output)?)) })();
        self.memory = Some(both.map_err(Failure::of)?);
        self.set_up_windows(input, output)
    }

    #[allow(unsafe_code)]
    fn set_up_windows(&mut self, input: &[u8], output: &[u8]) -> Result<(), Failure> {
        let Some(nccl) = self.nccl.as_mut().filter(|nccl| nccl.has_windows()) else {
            return Ok(());
        };
        self.windows = None;
        let lengths = [input.len().max(16), output.len().max(16)];
        let device = self.domain.device();
        let addresses = device.with_context(|| nccl.allocate(lengths)).map_err(Failure::of)??;
        let upload = |address, bytes: &[u8]| {
            // SAFETY: NCCL's memory, which is freed after `windows` is set again or dropped.
            let memory = unsafe { device.adopt(address, bytes.len().max(16) as u64, ()) }?;
            self.stream.upload(&memory.slice(0, bytes.len() as u64)?, bytes, TIMEOUT)?;
            Ok(memory)
        };
        let both = (|| -> gpu::Result<_> {
            Ok((upload(addresses[0], input)?, upload(addresses[1], output)?))
        })();
        self.windows = Some(both.map_err(Failure::of)?);
        Ok(())
    }

    /// The parameters of an operation.
    pub(crate) fn parameters(&self, key: OpKey) -> Parameters {
        self.domain.parameters(key)
    }

    /// Copies the result to the buffers.
    pub(crate) fn read(&self, buffers: &mut Buffers) -> Result<(), Failure> {
        let Some((_, output)) = &self.memory else { return Ok(()) };
        let bytes = buffers.output_bytes();
        let from = output.slice(0, bytes.len() as u64).map_err(Failure::of)?;
        self.stream.download(&from, bytes, TIMEOUT).map_err(Failure::of)
    }

    fn addresses(&self) -> (u64, u64) {
        self.memory.as_ref().map_or((0, 0), |(input, output)| (input.address(), output.address()))
    }

    /// How long the host took to start an operation, in seconds.
    pub(crate) fn host_time(&self) -> f64 {
        self.host_time
    }

    /// Carries out operations. Returns how long that took.
    #[allow(unsafe_code)]
    pub(crate) fn run(
        &mut self,
        call: &CollectiveCall<'_>,
        turns: u64,
    ) -> Result<Duration, Failure> {
        let (input, output) = self.addresses();
        let pointer = |at: u64| std::ptr::with_exposed_provenance_mut::<u8>(at as usize);
        let input = if call.operation == Operation::Broadcast { output } else { input };
        let call = CollectiveCall { input: pointer(input), output: pointer(output), ..*call };
        let began = Instant::now();
        for _ in 0..turns {
            // SAFETY: the memory has the elements of the operation, and is kept until the end.
            unsafe { self.domain.start(&call, &self.stream, TIMEOUT) }.map_err(Failure::of)?;
        }
        self.host_time = began.elapsed().as_secs_f64() / turns as f64;
        self.stream.synchronize(TIMEOUT).map_err(Failure::of)?;
        self.domain.check("benchmark").map_err(Failure::of)?;
        Ok(began.elapsed())
    }

    /// Carries out operations by the rival.
    pub(crate) fn run_rival(
        &self,
        operation: Operation,
        count: usize,
        turns: u64,
    ) -> Result<Option<Duration>, Failure> {
        let (Some(nccl), Some(stream)) = (&self.nccl, &self.default_stream) else {
            return Ok(None);
        };
        let windows =
            self.windows.as_ref().map(|(input, output)| (input.address(), output.address()));
        let (from, to) = windows.unwrap_or_else(|| self.addresses());
        let run = || -> Result<Duration, Failure> {
            let began = Instant::now();
            nccl.run(operation, from, to, count, turns)?;
            // Also behind the stream of this thread.
            let end = stream.point().map_err(Failure::of)?;
            end.wait(TIMEOUT).map_err(Failure::of)?;
            Ok(began.elapsed())
        };
        let took = self.domain.device().with_context(run).map_err(Failure::of)??;
        if let (Some((_, from)), Some((_, to))) = (&self.windows, &self.memory) {
            self.stream.copy(&to.whole(), &from.whole()).map_err(Failure::of)?;
            self.stream.synchronize(TIMEOUT).map_err(Failure::of)?;
        }
        Ok(Some(took))
    }
}
