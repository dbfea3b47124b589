//! Limits of the memory of a node's messages.

use crate::error::{Error, ErrorKind, Result};
use crate::settings::{Reserve, SharedLocation};

/// Limits of the messages of all topics of a node, by memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Budgets {
    /// For host memory; by default a quarter of it.
    pub host: Option<u64>,
    /// For memory of each device; by default half of it.
    pub device: Option<u64>,
}

impl Budgets {
    /// The smallest valid budget, in bytes: the [reservation](crate::TopicSettings::reserves) of
    /// the smallest topic.
    pub const MIN: u64 = Reserve::MIN;

    /// Rejects budgets that are too small for any topic.
    ///
    /// # Errors
    /// Of the kind [`InvalidArgument`](crate::ErrorKind::InvalidArgument), with the figures.
    ///
    /// ```
    /// use pubsub::{Budgets, ErrorKind};
    /// assert!(Budgets { host: Some(Budgets::MIN), device: None }.check().is_ok());
    /// let error = Budgets { host: Some(0), device: None }.check().unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    /// ```
    pub fn check(&self) -> Result<()> {
        for (place, budget) in [("the host's", self.host), ("a device's", self.device)] {
            if let Some(bytes) = budget.filter(|bytes| *bytes < Self::MIN) {
                let detail = format!(
                    "a budget of {bytes} bytes of {place} memory, but the smallest topic reserves {}",
                    Self::MIN
                );
                return Err(Error::new("set memory budgets", ErrorKind::InvalidArgument, detail));
            }
        }
        Ok(())
    }

    /// The budget of host memory, by default a quarter of it.
    ///
    /// ```
    /// use pubsub::Budgets;
    /// assert_eq!(Budgets { host: Some(1 << 30), device: None }.of_host()?, 1 << 30);
    /// assert!(Budgets::default().of_host()? > 0);
    /// # Ok::<(), pubsub::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Failed`](crate::ErrorKind::Failed) if the system does not report its memory.
    pub fn of_host(&self) -> Result<u64> {
        match self.host {
            Some(bytes) => Ok(bytes),
            None => Ok(host_memory()? / 4),
        }
    }

    /// The budget of a memory location; None if it is half the memory of a device that this process
    /// does not see.
    pub(crate) fn of(&self, place: SharedLocation) -> Result<Option<u64>> {
        match (place, self.device) {
            (SharedLocation::Host, _) => self.of_host().map(Some),
            (SharedLocation::Device(_), Some(bytes)) => Ok(Some(bytes)),
            (SharedLocation::Device(_), None) if place.is_visible() => {
                let device = place.device("compute memory of topic")?;
                Ok(Some(Self::of_device(device.properties().total_memory)))
            }
            (SharedLocation::Device(_), None) => Ok(None),
        }
    }

    /// The default for a device with this many bytes of memory.
    pub(crate) fn of_device(total_memory: u64) -> u64 {
        total_memory / 2
    }
}

fn host_memory() -> Result<u64> {
    let operation = "read size of host memory";
    let text =
        std::fs::read_to_string("/proc/meminfo").map_err(|error| Error::of(operation, error))?;
    ipc::memory::kibibytes(&text, "MemTotal:")
        .ok_or_else(|| Error::new(operation, ErrorKind::Failed, "/proc/meminfo has no MemTotal"))
}
