//! A child process of the supervisor, and its memory and state according to the system.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child as Process, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::control_channel::{ControlChannel, Instruction, Received, Report};
use crate::failure::Failure;

/// How long a child may take to end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(20);
/// Time between two samples of memory.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);
/// Allowed difference of memory between two parts of a child's life: rings have different sizes,
/// and some of earlier epochs stay until the endpoint is closed.
const MEMORY_SLACK_KIB: u64 = 48 << 10;

/// A child. Dropping it kills it.
#[derive(Debug)]
pub struct Child {
    role: &'static str,
    process: Process,
    control_channel: ControlChannel<Report>,
    started: Instant,
    /// Time, and resident kibibytes.
    samples: Vec<(Instant, u64)>,
    /// Connections that it had.
    pub epochs: u64,
}

impl Child {
    pub fn start(role: &'static str, provider: &str, seed: u64) -> Result<Self, Failure> {
        let system = |error| Failure::System("starting a process", error);
        let (here, there) = UnixStream::pair().map_err(system)?;
        let process = Command::new("/proc/self/exe")
            .args([role, provider, &seed.to_string()])
            // Debian's libfabric 1.17 writes a trace of each crash to the working directory.
            .current_dir(std::env::temp_dir())
            .stdin(Stdio::from(OwnedFd::from(there)))
            .spawn()
            .map_err(system)?;
        let (control_channel, started) = (ControlChannel::new(here)?, Instant::now());
        Ok(Self { role, process, control_channel, started, samples: Vec::new(), epochs: 0 })
    }

    pub fn control_channel(&self) -> &ControlChannel<Report> {
        &self.control_channel
    }

    pub fn send_instruction(&mut self, instruction: &Instruction) -> Result<(), Failure> {
        // If the child has exited, the next `report` finds out.
        self.control_channel.send(instruction).map(drop)
    }

    /// The next report. A child that has exited is an error here: killed ones are not asked.
    pub fn report(&mut self) -> Result<Option<Report>, Failure> {
        match self.control_channel.receive(Duration::ZERO)? {
            Received::Frame(report) => Ok(Some(report)),
            Received::Nothing => Ok(None),
            Received::Closed => {
                let role = self.role;
                let status = self.exit_status()?;
                Err(Failure::Defect(format!("the {role} exited unexpectedly: {status:?}")))
            }
        }
    }

    pub fn kill(&mut self) -> Result<(), Failure> {
        self.process.kill().map_err(|error| Failure::System("killing a process", error))
    }

    /// All reports that it sent before it was killed.
    pub fn drain_reports(&mut self) -> Result<Vec<Report>, Failure> {
        self.process.wait().map_err(|error| Failure::System("waiting for a process", error))?;
        remove_shm_files(self.process.id());
        let mut reports = Vec::new();
        loop {
            match self.control_channel.receive(Duration::ZERO)? {
                Received::Frame(report) => reports.push(report),
                Received::Nothing => {}
                Received::Closed => return Ok(reports),
            }
        }
    }

    /// Asks it to end, and waits.
    pub fn end(&mut self) -> Result<(), Failure> {
        self.send_instruction(&Instruction::End)?;
        match self.exit_status()? {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(Failure::Defect(format!("the {} failed: {status}", self.role))),
            None => Err(Failure::Stalled(format!("the {} did not exit", self.role))),
        }
    }

    fn exit_status(&mut self) -> Result<Option<ExitStatus>, Failure> {
        let end = Instant::now() + CLOSE_TIMEOUT;
        loop {
            let status = self.process.try_wait();
            let status = status.map_err(|e| Failure::System("waiting for a process", e))?;
            if status.is_some() || Instant::now() >= end {
                return Ok(status);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Samples its memory if that is due.
    pub fn sample(&mut self) {
        let is_due = self.samples.last().is_none_or(|(at, _)| at.elapsed() >= SAMPLE_INTERVAL);
        // Memory before the first ring is not representative.
        if is_due && self.epochs > 0 {
            let resident = status_value(self.process.id(), "VmRSS:");
            self.samples.extend(resident.map(|kib| (Instant::now(), kib)));
        }
    }

    /// The child's memory over time.
    pub fn memory(&self) -> Memory {
        let age = self.started.elapsed();
        let peak_between = |from: u32, until: u32| {
            let part = self.started + age * from / 4..self.started + age * until / 4;
            let samples = self.samples.iter().filter(|(at, _)| part.contains(at));
            samples.map(|(_, kib)| *kib).max().unwrap_or(0)
        };
        Memory {
            seconds: age.as_secs(),
            epochs: self.epochs,
            first_kib: self.samples.first().map_or(0, |(_, kib)| *kib),
            second_quarter_peak_kib: peak_between(1, 2),
            last_quarter_peak_kib: peak_between(3, 4),
            last_kib: self.samples.last().map_or(0, |(_, kib)| *kib),
        }
    }

    /// State according to the system, for a process that is stuck.
    pub fn process_state(&self) -> String {
        let number = self.process.id();
        let read = |name: &str| {
            let text = std::fs::read_to_string(format!("/proc/{number}/{name}"));
            text.map_or_else(|error| error.to_string(), |text| text.trim().to_owned())
        };
        let stat = read("stat");
        format!("{} {number}: stat {stat}, wchan {}", self.role, read("wchan"))
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        remove_shm_files(self.process.id());
    }
}

/// Removes the files of a killed process that shm leaves in /dev/shm.
fn remove_shm_files(number: u32) {
    let prefixes = [format!("{number}-"), format!("{number}:")];
    for entry in std::fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if prefixes.iter().any(|prefix| name.starts_with(prefix)) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// A number of kibibytes from a process's status.
fn status_value(process: u32, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// Resident memory of a process, in kibibytes. Peaks are compared, since rings have different
/// sizes.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Memory {
    pub seconds: u64,
    pub epochs: u64,
    first_kib: u64,
    second_quarter_peak_kib: u64,
    last_quarter_peak_kib: u64,
    last_kib: u64,
}

impl Memory {
    /// Did it stop growing after a warm-up?
    pub fn is_flat(&self) -> bool {
        self.last_quarter_peak_kib
            <= self.second_quarter_peak_kib.max(self.first_kib) + MEMORY_SLACK_KIB
    }
}
