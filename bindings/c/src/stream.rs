//! Streams of devices, and messages in stream order.

use std::ffi::c_char;
use std::sync::Arc;

use gpu::Stream;
use pubsub::{Loan, Readiness};

use crate::caller_memory;
use crate::exclusive::Exclusive;
use crate::ffi::{CallerRange, Out, OutStruct, Text, export};
use crate::handle::{Handle, kind};
use crate::layout::RawSent;
use crate::publisher::{OpenPublisher, publish};
use crate::registry::{self, export_close};
use crate::subscriber::{OpenSample, OpenSubscriber};
use crate::timeout::Timeout;
use crate::topic::OpenTopic;

kind!(Stream, 8, "stream");
export_close!(Stream, fabricast_stream_close, c"close stream");

export! {
    /// Adopts a stream of the topic's device.
    fn fabricast_stream_open(
        topic: Handle<OpenTopic>,
        handle: *mut c_char,
        stream: Out<'_, *mut Stream>,
    ) -> i32, c"open stream" {
        let memory = topic.find(OPERATION)?.topic.place()?;
        let adopted = caller_memory::adopt(memory, OPERATION, handle.addr() as u64)?;
        stream.put(registry::open(OPERATION, adopted)?)
    }

    /// Adopts a stream of a device.
    fn fabricast_stream_adopt(
        device: Text<'_>,
        handle: *mut c_char,
        stream: Out<'_, *mut Stream>,
    ) -> i32, c"adopt stream" {
        let device = device.required(OPERATION, "device")?.parse()?;
        let adopted = caller_memory::adopt(device, OPERATION, handle.addr() as u64)?;
        stream.put(registry::open(OPERATION, adopted)?)
    }

    /// Publishes device memory in the order of a stream.
    fn fabricast_publisher_push_on(
        publisher: Handle<OpenPublisher>,
        pointer: CallerRange<'_>[length],
        stream: Handle<Stream>,
        timeout: Timeout,
    ) -> i32, c"push on stream" {
        let (publisher, stream) = (publisher.find(OPERATION)?, stream.find(OPERATION)?);
        publisher.push_on(OPERATION, &stream, pointer, timeout)
    }

    /// Publishes a loan that a stream writes. Without space, or after the timeout, the loan is
    /// unchanged.
    fn fabricast_loan_publish_on(
        loan: Handle<Exclusive<Loan>>,
        stream: Handle<Stream>,
        timeout: Timeout,
        sent: Option<OutStruct<'_, RawSent>>[size],
    ) -> i32, c"publish on stream" {
        let stream = stream.find(OPERATION)?;
        publish(OPERATION, loan, timeout, sent, |lent, left| {
            lent.publish_on_within(&stream, left)
        })
    }

    /// The next message, which the stream waits for.
    fn fabricast_subscriber_pull_on(
        subscriber: Handle<OpenSubscriber>,
        stream: Handle<Stream>,
        timeout: Timeout,
        sample: Out<'_, *mut OpenSample>,
    ) -> i32, c"pull on stream" {
        let (subscriber, stream) = (subscriber.find(OPERATION)?, stream.find(OPERATION)?);
        let pulled = subscriber.pull(OPERATION, timeout, Some(&stream))?;
        sample.put(registry::open(OPERATION, OpenSample::new(pulled))?)
    }

    fn fabricast_sample_readiness(
        sample: Handle<OpenSample>,
        readiness: Out<'_, u64>,
    ) -> i32, c"get readiness of sample" {
        readiness.put(match sample.find(OPERATION)?.sample.readiness()? {
            Readiness::Ready => 1,
            Readiness::Poisoned => 2,
            _ => 0,
        })
    }

    /// Releases a sample in the order of a stream.
    fn fabricast_sample_release_on(
        sample: Handle<OpenSample>,
        stream: Handle<Stream>,
    ) -> i32, c"release sample on stream" {
        let stream = stream.find(OPERATION)?;
        let mut closed = sample.close(OPERATION)?;
        // Another thread may still read it, and must not be the one that releases it.
        let open = loop {
            match Arc::try_unwrap(closed) {
                Ok(open) => break open,
                Err(shared) => closed = shared,
            }
            std::thread::sleep(std::time::Duration::from_micros(50));
        };
        Ok(open.sample.release_on(&stream)?)
    }
}
