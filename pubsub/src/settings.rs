//! Settings of a topic: fixed when it is created, and the same for all its users.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use gpu::{Device, DeviceName, Uuid};
use ipc::{OverflowPolicy, QueueSetup};
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::ids::{id_from_words, id_to_words};
use crate::text::counted;
use crate::type_name::TypeName;

/// Maximum length of a topic's name in bytes.
pub const MAX_TOPIC_NAME: usize = 200;
/// Maximum length of a message's metadata in bytes.
pub const MAX_METADATA: usize = 256;
/// Default number of samples that a subscriber may hold: as many as unread messages, but at least
/// two, since a reader that takes the next sample before it drops the last one holds two. If
/// subscribers together hold the maximum, topics that drop messages drop: there it is higher.
const fn default_held(depth: u32, reliability: Reliability) -> u32 {
    let least = if matches!(reliability, Reliability::Reliable) { 2 } else { 16 };
    if depth < least { least } else { depth }
}

/// Host memory is also memory of an emulated device.
const HOST_DEVICE: DeviceName = DeviceName::emulated(0);

/// The memory of a topic's messages.
///
/// ```
/// use pubsub::MemoryLocation;
/// assert_eq!("host".parse::<MemoryLocation>()?, MemoryLocation::Host);
/// assert_eq!("cuda:1".parse::<MemoryLocation>()?.to_string(), "cuda:1");
/// let uuid = "GPU-66616272-6963-6173-742d-686f73742d30";
/// assert_eq!(uuid.parse::<MemoryLocation>()?.to_string(), uuid);
/// # Ok::<(), pubsub::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MemoryLocation {
    /// Host memory.
    Host,
    /// Memory of a device, by its name in this process.
    Device(DeviceName),
    /// Memory of a device, by its UUID: the same in all processes, also in those that do not see the
    /// device (`CUDA_VISIBLE_DEVICES`).
    DeviceUuid(Uuid),
}

impl MemoryLocation {
    /// The name of the device in this process; None for the host.
    ///
    /// ```
    /// use pubsub::MemoryLocation;
    /// let device: gpu::DeviceName = "emulated:1".parse()?;
    /// assert_eq!(MemoryLocation::DeviceUuid(device.uuid()?).device()?, Some(device));
    /// assert_eq!(MemoryLocation::Host.device()?, None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`NoDevice`](ErrorKind::NoDevice) if this process sees no device with the UUID.
    pub fn device(self) -> Result<Option<DeviceName>> {
        match self {
            Self::Host => Ok(None),
            Self::Device(name) => Ok(Some(name)),
            Self::DeviceUuid(uuid) => match DeviceName::find(uuid) {
                Ok(name) => Ok(Some(name)),
                Err(cause) => Err(device_error("find device of memory", cause)),
            },
        }
    }

    /// The device, opened, if this process sees it; None for the host, and for a UUID that it does
    /// not see.
    pub(crate) fn open(self) -> Result<Option<Device>> {
        let name = match self {
            Self::Host => None,
            Self::Device(name) => Some(name),
            Self::DeviceUuid(uuid) => DeviceName::find(uuid).ok(),
        };
        let opened = name.map(Device::open).transpose();
        opened.map_err(|cause| device_error("open device of topic", cause))
    }
}

impl fmt::Display for MemoryLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Device(name) => name.fmt(f),
            Self::DeviceUuid(uuid) => write!(f, "GPU-{uuid}"),
        }
    }
}

impl FromStr for MemoryLocation {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == "host" {
            return Ok(Self::Host);
        }
        if text.starts_with("GPU-")
            && let Ok(uuid) = text.parse()
        {
            return Ok(Self::DeviceUuid(uuid));
        }
        text.parse().map(Self::Device).map_err(|_| {
            let detail = format!("\"{text}\" is not like host, cuda:0, emulated:0 or GPU-<UUID>");
            Error::new("parse memory location", ErrorKind::InvalidArgument, detail)
        })
    }
}

/// Memory location as all processes of a machine know it: each process numbers devices itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum SharedLocation {
    Host,
    Device([u8; 16]),
}

impl SharedLocation {
    pub(crate) fn words(self) -> [u64; 3] {
        match self {
            Self::Host => [1, 0, 0],
            Self::Device(uuid) => {
                let [low, high] = id_to_words(&uuid);
                [2, low, high]
            }
        }
    }

    pub(crate) fn from_words([place, low, high]: [u64; 3]) -> Option<Self> {
        match place {
            1 => Some(Self::Host),
            2 => Some(Self::Device(id_from_words([low, high]))),
            _ => None,
        }
    }

    pub(crate) fn of(place: MemoryLocation) -> Result<Self> {
        if let MemoryLocation::DeviceUuid(Uuid(bytes)) = place {
            return Ok(Self::Device(bytes));
        }
        Ok(place.open()?.map_or(Self::Host, |device| Self::Device(device.properties().uuid.0)))
    }

    /// The name of its device in this process; None for the host, and if this process does not see
    /// the device.
    pub(crate) fn device_name(self) -> Option<DeviceName> {
        match self {
            Self::Host => None,
            Self::Device(uuid) => DeviceName::find(Uuid(uuid)).ok(),
        }
    }

    /// Can this process allocate such memory?
    pub(crate) fn is_visible(self) -> bool {
        self == Self::Host || self.device_name().is_some()
    }

    /// The device that allocates the memory; fails if this process does not see it.
    pub(crate) fn device(self, operation: &'static str) -> Result<Device> {
        match self {
            Self::Host => Device::open(HOST_DEVICE),
            Self::Device(uuid) => Device::find(Uuid(uuid)),
        }
        .map_err(|cause| device_error(operation, cause))
    }

    /// The device that maps the memory: its own or, if this process does not see that, another one.
    pub(crate) fn mapping_device(self, operation: &'static str) -> Result<Device> {
        match self {
            Self::Host => Device::open(HOST_DEVICE),
            Self::Device(uuid) => Device::for_memory_of(Uuid(uuid)),
        }
        .map_err(|cause| device_error(operation, cause))
    }
}

impl fmt::Display for SharedLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Device(bytes) => Uuid(*bytes).fmt(f),
        }
    }
}

/// Adds a likely cause: a driver does not report that it could not open a file.
fn device_error(operation: &'static str, cause: gpu::Error) -> Error {
    /// A driver opens about this many files.
    const OF_A_DRIVER: u64 = 256;
    let limit = ipc::DescriptorLimit::of_this_process();
    let error = Error::because(operation, ErrorKind::NoDevice, cause);
    if limit.left() >= OF_A_DRIVER {
        return error;
    }
    error.with_detail(format!("the driver may be out of file descriptors: {limit}"))
}

/// Handling of a message when there is no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Reliability {
    /// The publisher waits. No message is lost. A subscriber that does not release messages is
    /// evicted after [`release_deadline`](TopicSettings::release_deadline).
    Reliable,
    /// The oldest message is dropped. Subscribers that had not read it get a count of missed
    /// messages; others miss nothing.
    DropOldest,
    /// The new message is dropped if no subscriber has room for it. If some have, slow subscribers
    /// miss their oldest message, as with [`DropOldest`](Self::DropOldest), and do not block
    /// others.
    DropNewest,
}

impl Reliability {
    pub(crate) const ALL: [Self; 3] = [Self::Reliable, Self::DropOldest, Self::DropNewest];
}

impl fmt::Display for Reliability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reliable => "reliable",
            Self::DropOldest => "drop-oldest",
            Self::DropNewest => "drop-newest",
        })
    }
}

impl FromStr for Reliability {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|one| one.to_string() == text).ok_or_else(|| {
            let detail = format!("\"{text}\" is not reliable, drop-oldest or drop-newest");
            Error::new("parse reliability", ErrorKind::InvalidArgument, detail)
        })
    }
}

/// Settings of a topic. All users pass the same, or leave them to its creator (`Node::open`).
///
/// ```
/// use pubsub::{Reliability, TopicSettings};
/// let settings = TopicSettings { largest: 64 << 20, ..TopicSettings::default() };
/// assert_eq!(settings.reliability, Reliability::Reliable);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TopicSettings {
    /// The memory of its messages.
    pub memory: MemoryLocation,
    /// Handling of a message when there is no room.
    pub reliability: Reliability,
    /// Maximum number of unread messages of a subscriber.
    pub depth: u32,
    /// Maximum number of samples that a subscriber may hold; they do not count as unread. All
    /// subscribers together may hold as many messages beside the unread ones, and
    /// [evicted](ErrorKind::Evicted) ones as many again. 0: as many as [`depth`](Self::depth), at
    /// least 2, and at least 16 if the topic drops messages.
    pub max_held: u32,
    /// Maximum message length in bytes.
    pub largest: u64,
    /// Maximum number of [loans](crate::Loan) of a publisher at once. Memory for them is reserved
    /// when a publisher is created, so publishers do not wait for each other's loans.
    pub loans: u32,
    /// How long a subscriber may block publishers before it is [evicted](ErrorKind::Evicted): by
    /// unread messages of a reliable topic, or since subscribers hold the maximum of messages.
    /// [`NEVER`](Self::NEVER): publishers wait instead.
    pub release_deadline: Duration,
    /// The type of its values, if its messages are values of one type. A user with another type
    /// name is refused; one without a type name is not.
    pub type_name: Option<TypeName>,
}

/// Memory that a topic reserves of each of its two pools: one for messages published on its node,
/// and one for messages of other nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Reserve {
    /// Maximum number of messages at a time, loans included.
    #[serde(rename = "messages")]
    pub blocks: u64,
    /// Their maximum size: this number of longest messages, each rounded up to 256 bytes.
    pub bytes: u64,
}

impl Reserve {
    /// Alignment of a message in bytes.
    const UNIT: u64 = 256;
    /// Reservation of the smallest topic in bytes: one queued message and one loan.
    pub(crate) const MIN: u64 = 2 * Self::UNIT;

    /// For unread messages, held ones of subscribers and of evicted ones, and loans.
    fn of(settings: &SharedSettings, publishers: u64) -> Self {
        let queued = settings.queue_setup().slots();
        let loans = publishers.max(1).saturating_mul(u64::from(settings.loans));
        let blocks = queued.saturating_add(loans);
        Self { blocks, bytes: Self::bytes_of(blocks, settings.largest) }
    }

    /// Maximum size of this many messages.
    pub(crate) fn bytes_of(messages: u64, largest: u64) -> u64 {
        let each = largest.checked_next_multiple_of(Self::UNIT).unwrap_or(u64::MAX);
        messages.saturating_mul(each)
    }

    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            blocks: self.blocks.saturating_add(other.blocks),
            bytes: self.bytes.saturating_add(other.bytes),
        }
    }
}

impl TopicSettings {
    /// The reservation of such a topic with this number of publishers on a node. It has room for
    /// `depth` unread messages, `max_held` that subscribers hold and as many that evicted ones hold,
    /// and `loans` of each publisher, of at least one.
    ///
    /// ```
    /// use pubsub::TopicSettings;
    /// let mut settings = TopicSettings::default();
    /// assert_eq!((settings.reserves(1).blocks, settings.reserves(1).bytes), (52, 52 << 20));
    /// assert_eq!((settings.reserves(0).blocks, settings.reserves(3).blocks), (52, 60));
    /// settings.max_held = 2;
    /// assert_eq!(settings.reserves(1).blocks, 24);
    /// ```
    #[must_use]
    pub fn reserves(&self, publishers: u64) -> Reserve {
        Reserve::of(&SharedSettings::at(self, SharedLocation::Host), publishers)
    }

    /// Maximum number of samples that a subscriber may hold: [`max_held`](Self::max_held), or its
    /// default.
    ///
    /// ```
    /// use pubsub::TopicSettings;
    /// let settings = TopicSettings { depth: 1, ..TopicSettings::default() };
    /// assert_eq!(settings.held(), 2);
    /// assert_eq!(TopicSettings { max_held: 9, ..settings }.held(), 9);
    /// ```
    #[must_use]
    pub fn held(&self) -> u32 {
        match self.max_held {
            0 => default_held(self.depth, self.reliability),
            max_held => max_held,
        }
    }

    /// A [release deadline](Self::release_deadline) that never passes.
    pub const NEVER: Duration = Duration::MAX;
    /// Maximum depth of a topic, and of samples that a subscriber holds.
    pub const MAX_DEPTH: u32 = 1 << 16;
    /// Maximum message length of any topic, in bytes.
    pub const LARGEST: u64 = 1 << 40;
    /// Maximum number of loans of a publisher.
    pub const MAX_LOANS: u32 = 1 << 16;
}

impl Default for TopicSettings {
    fn default() -> Self {
        Self {
            memory: MemoryLocation::Host,
            reliability: Reliability::Reliable,
            depth: 16,
            max_held: 0,
            largest: 1 << 20,
            loans: 4,
            release_deadline: Duration::from_secs(5),
            type_name: None,
        }
    }
}

/// Settings as stored in shared memory and sent to the service. The numbers of loans
/// and of held samples are not sent to other nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct SharedSettings {
    pub(crate) place: SharedLocation,
    pub(crate) reliability: Reliability,
    pub(crate) depth: u32,
    pub(crate) max_held: u32,
    pub(crate) largest: u64,
    pub(crate) loans: u32,
    pub(crate) release_microseconds: u64,
    pub(crate) type_name: Option<TypeName>,
}

impl SharedSettings {
    pub(crate) fn of(settings: &TopicSettings) -> Result<Self> {
        Ok(Self::at(settings, SharedLocation::of(settings.memory)?))
    }

    fn at(settings: &TopicSettings, place: SharedLocation) -> Self {
        Self {
            place,
            reliability: settings.reliability,
            depth: settings.depth,
            max_held: settings.held(),
            largest: settings.largest,
            loans: settings.loans,
            release_microseconds: settings.release_deadline.as_micros().min(u128::from(u64::MAX))
                as u64,
            type_name: settings.type_name,
        }
    }

    /// With the default number of held samples: other nodes do not send theirs.
    pub(crate) fn with_default_held(self) -> Self {
        Self { max_held: default_held(self.depth, self.reliability), ..self }
    }

    /// Memory reserved for this many publishers, like [`TopicSettings::reserves`].
    pub(crate) fn reserves(&self, publishers: u64) -> Reserve {
        Reserve::of(self, publishers)
    }

    /// The parameters of its queues.
    pub(crate) fn queue_setup(&self) -> QueueSetup {
        let overflow_policy = match self.reliability {
            Reliability::Reliable => OverflowPolicy::Reject,
            Reliability::DropOldest => OverflowPolicy::DropOldest,
            Reliability::DropNewest => OverflowPolicy::DropNewest,
        };
        QueueSetup { depth: self.depth, max_held: self.max_held, overflow_policy }
    }

    pub(crate) fn release_deadline(&self) -> Duration {
        match self.release_microseconds {
            u64::MAX => TopicSettings::NEVER,
            microseconds => Duration::from_micros(microseconds),
        }
    }

    /// Names of differing settings, as in options and files. Memory location, loans and held samples
    /// may differ between nodes.
    pub(crate) fn differs(&self, other: &Self) -> impl Iterator<Item = &'static str> {
        let all = [
            ("reliability", self.reliability != other.reliability),
            ("depth", self.depth != other.depth),
            ("largest", self.largest != other.largest),
            ("release_deadline", self.release_microseconds != other.release_microseconds),
            ("type", self.type_name.zip(other.type_name).is_some_and(|(own, other)| own != other)),
        ];
        all.into_iter().filter_map(|(name, differs)| differs.then_some(name))
    }

    /// Names of settings that differ within a node, with those that may differ between nodes.
    pub(crate) fn differences_within_node(
        &self,
        other: &Self,
    ) -> impl Iterator<Item = &'static str> {
        let has_equal_default = (self.depth, self.reliability) == (other.depth, other.reliability);
        let all = [
            ("memory", self.place != other.place),
            ("loans", self.loans != other.loans),
            // Otherwise it may follow from these.
            ("max_held", has_equal_default && self.max_held != other.max_held),
        ];
        let all = all.into_iter().filter_map(|(name, differs)| differs.then_some(name));
        all.chain(self.differs(other))
    }

    /// Settings that nodes compare; memory location, loans and held samples may differ.
    pub(crate) fn replicated_settings(&self) -> impl fmt::Display {
        self.described("")
    }

    /// With this text of the settings that may differ between nodes.
    fn described(&self, within_node: &str) -> String {
        let (depth, largest) =
            (counted(self.depth.into(), "message"), counted(self.largest, "byte"));
        let reliability = self.reliability;
        let within = match self.release_deadline() {
            TopicSettings::NEVER => "released at any time".to_owned(),
            within => format!("released within {within:?}"),
        };
        let values = self.type_name.map(|name| format!(", values of type {name}"));
        let values = values.unwrap_or_default();
        format!("{reliability}, {depth} of up to {largest}{within_node}, {within}{values}")
    }

    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        let refuse = |detail| Err(Error::new(operation, ErrorKind::InvalidArgument, detail));
        if self.depth == 0 || self.depth > TopicSettings::MAX_DEPTH {
            let most = TopicSettings::MAX_DEPTH;
            return refuse(format!("a depth of {}: 1 to {most} is possible", self.depth));
        }
        if self.max_held == 0 || self.max_held > TopicSettings::MAX_DEPTH {
            let most = TopicSettings::MAX_DEPTH;
            return refuse(format!("{} held samples: 1 to {most} is possible", self.max_held));
        }
        if self.largest == 0 || self.largest > TopicSettings::LARGEST {
            let (largest, most) = (self.largest, TopicSettings::LARGEST);
            return refuse(format!("messages of {largest} bytes: 1 to {most} is possible"));
        }
        if self.loans == 0 || self.loans > TopicSettings::MAX_LOANS {
            let most = TopicSettings::MAX_LOANS;
            return refuse(format!("{} loans of a publisher: 1 to {most} is possible", self.loans));
        }
        if self.release_microseconds < 1000 {
            let deadline = self.release_deadline();
            return refuse(format!("a release deadline of {deadline:?}: at least 1 ms"));
        }
        Ok(())
    }

    /// Settings with the names of this process: a device that it does not see has its UUID.
    pub(crate) fn to_local(self) -> TopicSettings {
        let memory = match (self.place, self.place.device_name()) {
            (SharedLocation::Host, _) => MemoryLocation::Host,
            (SharedLocation::Device(_), Some(name)) => MemoryLocation::Device(name),
            (SharedLocation::Device(uuid), None) => MemoryLocation::DeviceUuid(Uuid(uuid)),
        };
        TopicSettings {
            memory,
            reliability: self.reliability,
            depth: self.depth,
            max_held: self.max_held,
            largest: self.largest,
            loans: self.loans,
            release_deadline: self.release_deadline(),
            type_name: self.type_name,
        }
    }
}

impl fmt::Display for SharedSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let loans = counted(self.loans.into(), "loan");
        let held = counted(self.max_held.into(), "held sample");
        f.write_str(&self.described(&format!(" on {}, {held}, {loans}", self.place)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl SharedSettings {
        /// For tests that only depend on the depth.
        pub(crate) const fn of_depth(depth: u32) -> Self {
            Self {
                place: SharedLocation::Host,
                reliability: Reliability::Reliable,
                depth,
                max_held: default_held(depth, Reliability::Reliable),
                largest: 4096,
                loans: 4,
                release_microseconds: 1_000_000,
                type_name: None,
            }
        }
    }

    #[test]
    fn settings_are_shown_in_singular_and_plural() {
        let settings = SharedSettings { largest: 1, ..SharedSettings::of_depth(1) };
        let shown = settings.replicated_settings().to_string();
        assert_eq!(shown, "reliable, 1 message of up to 1 byte, released within 1s");
        let shown = SharedSettings::of_depth(2).replicated_settings().to_string();
        assert!(shown.contains("2 messages of up to 4096 bytes"), "{shown}");
    }
}
