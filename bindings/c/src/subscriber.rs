//! Subscribers and samples.

use std::ffi::{CString, c_void};
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::OnceLock;
use std::time::Instant;

use gpu::Stream;
use pubsub::{Closer, ErrorKind, Metadata, NodeId, Sample, Subscriber};

use crate::exclusive::Exclusive;
use crate::failure::{Failure, Operation, Result, c_text};
use crate::ffi::{Out, OutStruct, export};
use crate::handle::{Handle, kind};
use crate::layout::{RawEvent, RawSampleInfo};
use crate::registry::{self, export_close};
use crate::status::Status;
use crate::timeout::Timeout;
use crate::topic::OpenTopic;

/// A subscriber that one thread uses at a time, and any thread closes.
#[derive(Debug)]
pub(crate) struct OpenSubscriber {
    subscriber: Exclusive<Subscriber>,
    closer: Closer,
}

kind!(OpenSubscriber, 4, "subscriber", |open: &Self| {
    open.subscriber.end();
    open.closer.close();
});
export_close!(OpenSubscriber, fabricast_subscriber_close, c"close subscriber");

impl OpenSubscriber {
    pub(crate) fn new(subscriber: Subscriber) -> Self {
        Self { closer: subscriber.closer(), subscriber: Exclusive::new(subscriber) }
    }

    /// Pulls the next message. With a stream, the stream waits for a message that is not written
    /// yet.
    pub(crate) fn pull(
        &self,
        operation: Operation,
        timeout: Timeout,
        stream: Option<&Stream>,
    ) -> Result<Sample> {
        let end = timeout.end();
        self.subscriber.with(operation, timeout, |subscriber| {
            if timeout == Timeout::Now {
                let pulled = match stream {
                    Some(stream) => subscriber.try_pull_on(stream),
                    None => subscriber.try_pull(),
                };
                return pulled?.ok_or(NO_MESSAGE);
            }
            let remaining = end.saturating_duration_since(Instant::now());
            let pulled = match stream {
                Some(stream) => subscriber.pull_on(stream, remaining),
                None => subscriber.pull(remaining),
            };
            pulled.map_err(|error| match error.kind() {
                ErrorKind::DeadlineExceeded => {
                    // Of the whole call, which may have waited for another thread first.
                    let detail = format!("no message within {:?}", timeout.as_duration());
                    error.with_detail(detail).into()
                }
                _ => error.into(),
            })
        })
    }
}

/// Without allocation, for frequent polls.
const NO_MESSAGE: Failure = Failure::fixed(
    Status::WouldBlock,
    c"pull from topic",
    c"pull from topic failed: would block: no message",
);

/// A message that is held.
#[derive(Debug)]
pub(crate) struct OpenSample {
    pub(crate) sample: Sample,
    metadata: OnceLock<Metadata>,
    texts: OnceLock<Texts>,
}

kind!(OpenSample, 5, "sample");
export_close!(OpenSample, fabricast_sample_release, c"release sample");

/// Created when first requested; valid as long as the sample.
#[derive(Debug)]
struct Texts {
    memory: CString,
    origin: CString,
    path: CString,
}

impl OpenSample {
    pub(crate) fn new(sample: Sample) -> Self {
        Self { sample, metadata: OnceLock::new(), texts: OnceLock::new() }
    }

    /// A copy at a stable address.
    fn metadata(&self) -> &[u8] {
        self.metadata.get_or_init(|| self.sample.metadata())
    }

    pub(crate) fn address(&self) -> *mut c_void {
        ptr::with_exposed_provenance_mut(self.sample.address() as usize)
    }

    fn texts(&self) -> &Texts {
        self.texts.get_or_init(|| Texts {
            memory: c_text(self.sample.place().to_string()),
            path: c_text(self.sample.path().to_string()),
            origin: c_text(
                self.sample.origin().map(|node| NodeId(node).to_string()).unwrap_or_default(),
            ),
        })
    }

    fn info(&self) -> RawSampleInfo {
        let Texts { memory, origin, path } = self.texts();
        RawSampleInfo::of(&self.sample, self.address(), self.metadata(), [memory, origin, path])
    }
}

export! {
    /// Opens a subscriber, which receives all messages published from now on.
    fn fabricast_subscriber_open(
        topic: Handle<OpenTopic>,
        subscriber: Out<'_, *mut OpenSubscriber>,
    ) -> i32, c"open subscriber" {
        let topic = topic.find(OPERATION)?;
        subscriber.put(registry::open(OPERATION, OpenSubscriber::new(topic.topic.subscriber()?))?)
    }

    fn fabricast_subscriber_pull(
        subscriber: Handle<OpenSubscriber>,
        timeout: Timeout,
        sample: Out<'_, *mut OpenSample>,
    ) -> i32, c"pull from topic" {
        let pulled = subscriber.find(OPERATION)?.pull(OPERATION, timeout, None)?;
        sample.put(registry::open(OPERATION, OpenSample::new(pulled))?)
    }

    fn fabricast_subscriber_event(
        subscriber: Handle<OpenSubscriber>,
        event: OutStruct<'_, RawEvent>[size],
    ) -> i32, c"get event of subscriber" {
        subscriber.find(OPERATION)?.subscriber.with(OPERATION, Timeout::Now, |subscriber| {
            event.put(RawEvent::of(subscriber.poll_event()))
        })
    }

    /// Lets pulls end when the last publisher has gone, or not.
    fn fabricast_subscriber_end_without_publishers(
        subscriber: Handle<OpenSubscriber>,
        ends: i32,
    ) -> i32, c"set end of subscriber" {
        subscriber.find(OPERATION)?.subscriber.with(OPERATION, Timeout::Now, |subscriber| {
            subscriber.end_without_publishers(ends != 0);
            Ok(())
        })
    }

    /// A descriptor that is readable while there may be messages.
    fn fabricast_subscriber_descriptor(
        subscriber: Handle<OpenSubscriber>,
        descriptor: Out<'_, i32>,
    ) -> i32, c"get descriptor of subscriber" {
        subscriber.find(OPERATION)?.subscriber.with(OPERATION, Timeout::Now, |subscriber| {
            descriptor.put(subscriber.descriptor()?.as_raw_fd())
        })
    }

    fn fabricast_sample_memory(
        sample: Handle<OpenSample>,
        address: Out<'_, *const c_void>,
        length: Out<'_, usize>,
    ) -> i32, c"get memory of sample" {
        let sample = sample.find(OPERATION)?;
        address.put(sample.address())?;
        length.put(sample.sample.length() as usize)
    }

    fn fabricast_sample_read(
        sample: Handle<OpenSample>,
        offset: usize,
        into: &mut [u8] [length],
    ) -> i32, c"read sample" {
        sample.find(OPERATION)?.sample.read(offset as u64, into)?;
        Ok(())
    }

    /// Is the message still held?
    fn fabricast_sample_check(sample: Handle<OpenSample>) -> i32, c"check sample" {
        match sample.find(OPERATION)?.sample.is_valid() {
            true => Ok(()),
            false => {
                let detail = "its subscriber was evicted, and the message may be overwritten";
                Err(Failure::new(Status::Evicted, OPERATION, detail))
            }
        }
    }

    fn fabricast_sample_metadata(
        sample: Handle<OpenSample>,
        address: Out<'_, *const c_void>,
        length: Out<'_, usize>,
    ) -> i32, c"get metadata of sample" {
        let sample = sample.find(OPERATION)?;
        address.put(sample.metadata().as_ptr().cast())?;
        length.put(sample.metadata().len())
    }

    fn fabricast_sample_info_of(
        sample: Handle<OpenSample>,
        info: OutStruct<'_, RawSampleInfo>[size],
    ) -> i32, c"get information of sample" {
        info.put(sample.find(OPERATION)?.info())
    }
}
