//! Typed topics: topics of values of one type.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::plain::Plain;
use crate::text::counted;
use crate::{Node, Publisher, Sample, Sent, Subscriber, Topic, TopicSettings, TypeName};

const OPEN: &str = "open typed topic";
const PULL: &str = "pull value from topic";
/// Alignment of a message in bytes.
const MAX_ALIGNMENT: usize = 256;

/// A topic of values of one type: each message is one value.
///
/// ```
/// use std::time::Duration;
/// use pubsub::{Node, NodeOptions};
/// pubsub::plain! {
///     /// Where a robot is.
///     #[derive(Debug, PartialEq)]
///     pub struct Pose { pub x: f64, pub y: f64 }
/// }
/// # let directory = testkit::temp_dir::TempDir::new("fabricast-doc-typed");
/// # let node = Node::join(NodeOptions { directory: directory.join("node"), ..NodeOptions::default() })?;
/// let timeout = Duration::from_secs(5);
/// let topic = node.topic_of::<Pose>("pose")?;
/// let mut subscriber = topic.subscriber()?;
/// let publisher = topic.publisher()?;
/// publisher.publish(&Pose { x: 1.0, y: 2.0 }, timeout)?;
/// assert_eq!(subscriber.pull(timeout)?, Pose { x: 1.0, y: 2.0 });
///
/// // A type of another name or size is refused.
/// let refused = node.topic_of::<[f64; 2]>("pose").unwrap_err();
/// assert!(refused.to_string().contains("Pose"), "{refused}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TypedTopic<T> {
    topic: Topic,
    values: PhantomData<fn(T) -> T>,
}

/// Publishes values of one type.
#[derive(Debug)]
pub struct TypedPublisher<T> {
    publisher: Publisher,
    values: PhantomData<fn(T) -> T>,
}

/// Receives values of one type.
#[derive(Debug)]
pub struct TypedSubscriber<T> {
    subscriber: Subscriber,
    values: PhantomData<fn(T) -> T>,
}

impl Node {
    /// Opens a topic of values of this type, with default settings otherwise, and creates it if it
    /// does not exist.
    ///
    /// # Errors
    /// As [`topic_of_with`](Self::topic_of_with).
    pub fn topic_of<T: Plain>(&self, name: &str) -> Result<TypedTopic<T>> {
        self.topic_of_with(name, &TopicSettings::default())
    }

    /// Opens a topic of values of this type, and creates it if it does not exist. Its
    /// [largest](TopicSettings::largest) message is one value, and its [type
    /// name](TopicSettings::type_name) is that of [`Plain::type_name`]; these two settings are
    /// ignored. A topic that was created without a type accepts values of any type.
    ///
    /// # Errors
    /// [`SettingsDiffer`](ErrorKind::SettingsDiffer) if the topic exists with values of another
    /// type name or size, or with other settings: the detail has both and the creating process;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for a type without bytes, or with an
    /// alignment of more than 256 bytes; and as [`topic`](Self::topic).
    pub fn topic_of_with<T: Plain>(
        &self,
        name: &str,
        settings: &TopicSettings,
    ) -> Result<TypedTopic<T>> {
        let (largest, type_name) = (size_for_topic::<T>(name)?, Some(name_of::<T>(name)?));
        let requested = TopicSettings { largest, type_name, ..*settings };
        let topic = self.topic(name, &requested).map_err(|error| {
            self.explain_size_mismatch(name, &requested, &error).unwrap_or(error)
        })?;
        Ok(TypedTopic { topic, values: PhantomData })
    }

    /// Explains the error by the size of the type, if the topic has the same type name and differs
    /// in the size only.
    fn explain_size_mismatch(
        &self,
        name: &str,
        requested: &TopicSettings,
        error: &Error,
    ) -> Option<Error> {
        let type_name =
            requested.type_name.filter(|_| error.kind() == ErrorKind::SettingsDiffer)?;
        let found = self.open(name).ok()?.settings().ok()?;
        let requested_held = TopicSettings { max_held: requested.held(), ..*requested };
        let is_all_that_differs =
            TopicSettings { largest: requested.largest, ..found } == requested_held;
        (is_all_that_differs && found.largest != requested.largest)
            .then(|| size_mismatch(name, type_name, (requested.largest, found.largest)))
    }
}

/// The error of a type that has another size where the topic was created.
fn size_mismatch(topic: &str, name: TypeName, (local, remote): (u64, u64)) -> Error {
    let detail = format!(
        "a {name} has {} here, but {remote} where the topic was created. Compile both from one \
         definition",
        counted(local, "byte")
    );
    Error::new(OPEN, ErrorKind::SettingsDiffer, detail).on(topic)
}

impl Topic {
    /// The topic as one of values of this type, with any other settings: for processes that did not
    /// create it.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pubsub::{ErrorKind, Node, NodeOptions, TopicSettings};
    /// # let directory = testkit::temp_dir::TempDir::new("fabricast-doc-as-typed");
    /// # let node = Node::join(NodeOptions { directory: directory.join("node"), ..NodeOptions::default() })?;
    /// let deep = TopicSettings { depth: 64, ..TopicSettings::default() };
    /// let made = node.topic_of_with::<[f32; 3]>("force", &deep)?;
    /// let topic = node.wait_for_topic("force", Duration::from_secs(5))?.typed::<[f32; 3]>()?;
    /// assert_eq!(topic.untyped().settings()?.depth, 64);
    /// let refused = topic.untyped().typed::<f64>().unwrap_err();
    /// assert_eq!(refused.kind(), ErrorKind::SettingsDiffer);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`SettingsDiffer`](ErrorKind::SettingsDiffer) if its values have another type name, or its
    /// largest message is not one value long; [`InvalidArgument`](ErrorKind::InvalidArgument) for a
    /// type that no topic can have.
    pub fn typed<T: Plain>(&self) -> Result<TypedTopic<T>> {
        let (size, name) = (size_for_topic::<T>(self.name())?, name_of::<T>(self.name())?);
        let TopicSettings { largest, type_name, .. } = self.settings()?;
        if let Some(found) = type_name.filter(|found| *found != name) {
            let detail = format!("it has values of type {found}, not {name}");
            return Err(Error::new(OPEN, ErrorKind::SettingsDiffer, detail).on(self.name()));
        }
        if largest != size && type_name.is_some() {
            return Err(size_mismatch(self.name(), name, (size, largest)));
        }
        if largest != size {
            let detail =
                format!("its messages have up to {largest} bytes, but a {name} has {size}");
            return Err(Error::new(OPEN, ErrorKind::SettingsDiffer, detail).on(self.name()));
        }
        Ok(TypedTopic { topic: self.clone(), values: PhantomData })
    }
}

fn name_of<T: Plain>(topic: &str) -> Result<TypeName> {
    T::type_name().parse().map_err(|error: Error| {
        let detail = format!("{}. Plain::type_name can give another name", error.detail());
        Error::new(OPEN, ErrorKind::InvalidArgument, detail).on(topic)
    })
}

/// The size of a value in bytes, if a topic can have such values.
fn size_for_topic<T: Plain>(name: &str) -> Result<u64> {
    let (size, alignment) = (size_of::<T>(), align_of::<T>());
    if size > 0 && alignment <= MAX_ALIGNMENT {
        return Ok(size as u64);
    }
    let detail = format!(
        "{} has {size} bytes and an alignment of {alignment}: from 1 byte on and up to \
         {MAX_ALIGNMENT} is possible",
        std::any::type_name::<T>()
    );
    Err(Error::new(OPEN, ErrorKind::InvalidArgument, detail).on(name))
}

impl<T: Plain> TypedTopic<T> {
    /// Creates a publisher.
    ///
    /// # Errors
    /// As [`Topic::publisher`].
    pub fn publisher(&self) -> Result<TypedPublisher<T>> {
        Ok(TypedPublisher { publisher: self.topic.publisher()?, values: PhantomData })
    }

    /// Creates a subscriber, which receives all values published from now on.
    ///
    /// # Errors
    /// As [`Topic::subscriber`].
    pub fn subscriber(&self) -> Result<TypedSubscriber<T>> {
        Ok(TypedSubscriber { subscriber: self.topic.subscriber()?, values: PhantomData })
    }

    /// The topic without its type.
    #[must_use]
    pub fn untyped(&self) -> &Topic {
        &self.topic
    }
}

impl<T: Plain> TypedPublisher<T> {
    /// Publishes a value with one copy, to where all subscribers read it.
    ///
    /// # Errors
    /// As [`Publisher::push`].
    pub fn publish(&self, value: &T, timeout: Duration) -> Result<Sent> {
        self.publisher.push(bytes_of(value), timeout)
    }

    /// Publishes a value, if there is room now; otherwise None.
    ///
    /// # Errors
    /// As [`Publisher::try_push`].
    pub fn try_publish(&self, value: &T) -> Result<Option<Sent>> {
        self.publisher.try_push(bytes_of(value))
    }

    /// Waits for subscribers, as [`Publisher::wait_for_subscribers`].
    ///
    /// # Errors
    /// As [`Publisher::wait_for_subscribers`].
    pub fn wait_for_subscribers(&self, count: u32, timeout: Duration) -> Result<u32> {
        self.publisher.wait_for_subscribers(count, timeout)
    }

    /// The publisher without its type: to flush, or for counters.
    #[must_use]
    pub fn untyped(&self) -> &Publisher {
        &self.publisher
    }
}

impl<T: Plain> TypedSubscriber<T> {
    /// Waits for the next value, and copies it.
    ///
    /// # Errors
    /// As [`Subscriber::pull`]; [`Malformed`](ErrorKind::Malformed) for a message of another size,
    /// which was published without a type.
    pub fn pull(&mut self, timeout: Duration) -> Result<T> {
        let sample = self.subscriber.pull(timeout)?;
        self.value_of(&sample)
    }

    /// The next value, if there is one.
    ///
    /// # Errors
    /// As [`pull`](Self::pull), except for the deadline.
    pub fn try_pull(&mut self) -> Result<Option<T>> {
        let sample = self.subscriber.try_pull()?;
        sample.map(|sample| self.value_of(&sample)).transpose()
    }

    /// The subscriber without its type: for events, and for samples, whose value
    /// [`value_of`](Self::value_of) returns.
    pub fn untyped(&mut self) -> &mut Subscriber {
        &mut self.subscriber
    }

    /// Copies the value of a message.
    ///
    /// # Errors
    /// [`Malformed`](ErrorKind::Malformed) if it has another size; as [`Sample::read`].
    pub fn value_of(&self, sample: &Sample) -> Result<T> {
        if sample.length() != size_of::<T>() as u64 {
            let (length, size) = (sample.length(), size_of::<T>());
            let (length, name) = (counted(length, "byte"), T::type_name());
            let detail = format!(
                "a message of {length} from publisher {}, but a {name} has {size}. Publish values \
                 of that type only",
                sample.publisher()
            );
            return Err(Error::new(PULL, ErrorKind::Malformed, detail).on(self.subscriber.topic()));
        }
        let mut value = MaybeUninit::<T>::zeroed();
        // SAFETY: the slice has the size of the value, was zeroed just now, and is the only access.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(value.as_mut_ptr().cast::<u8>(), size_of::<T>())
        };
        sample.read(0, bytes)?;
        // SAFETY: any bytes are a value of a plain type.
        Ok(unsafe { value.assume_init() })
    }
}

fn bytes_of<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: a plain value has no padding, so that all of its bytes are initialized.
    unsafe { std::slice::from_raw_parts((&raw const *value).cast::<u8>(), size_of::<T>()) }
}
