//! The functions of `rgaps.h`: a publisher and a subscriber with only the name of a topic. All
//! other settings are environment variables.

mod environment;

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use pubsub::{ErrorKind, Node, NodeOptions, Topic, UnknownVariable};

use crate::failure::{Failure, Operation, Result};
use crate::ffi::{CallerRange, Text, export};
use crate::handle::{Handle, kind};
use crate::network;
use crate::publisher::{OpenPublisher, wait_for_subscribers};
use crate::registry::{self, Registry};
use crate::status::Status;
use crate::subscriber::{OpenSample, OpenSubscriber};
use crate::timeout::Timeout;
use crate::variables;

/// Result of `publisher_init`.
#[derive(Debug)]
pub(crate) struct SimplePublisher {
    publisher: OpenPublisher,
    _node: Arc<Node>,
}

kind!(SimplePublisher, 6, "publisher of rgaps.h", |simple: &Self| simple.publisher.end());

/// Result of `subscriber_init`.
#[derive(Debug)]
pub(crate) struct SimpleSubscriber {
    /// The last message: the caller may read its memory until the next pull.
    held: Mutex<Option<OpenSample>>,
    subscriber: OpenSubscriber,
    _node: Arc<Node>,
}

kind!(SimpleSubscriber, 7, "subscriber of rgaps.h", |simple: &Self| {
    simple.subscriber.end();
    drop(simple.held().take());
});

impl SimpleSubscriber {
    fn held(&self) -> MutexGuard<'_, Option<OpenSample>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Releases the last message, and waits for the next one. Returns its address.
    fn pull(&self, operation: Operation, timeout: Timeout) -> Result<*mut c_void> {
        drop(self.held().take());
        let sample = OpenSample::new(self.subscriber.pull(operation, timeout, None)?);
        // An empty message has an address, too: NULL would mean no message.
        let address = NonNull::new(sample.address()).unwrap_or(NonNull::dangling());
        *self.held() = Some(sample);
        Ok(address.as_ptr())
    }
}

/// The node that all objects of this process share, while there are any; a new one, if the last was
/// closed because its service was lost.
fn node(
    operation: Operation,
    shared: &Mutex<Weak<Node>>,
    mut options: NodeOptions,
) -> Result<Arc<Node>> {
    let start = Instant::now();
    let mut shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(node) = shared.upgrade()
        && node.check().is_ok()
    {
        return Ok(node);
    }
    let variable_of = |field: &str| format!("FABRICAST_{}", field.to_uppercase());
    network::check(operation, variable_of, &options)?;
    // Another thread may have failed to join meanwhile, while this one waited.
    options.service_timeout = options.service_timeout.saturating_sub(start.elapsed());
    let node = Arc::new(Node::join(options)?);
    *shared = Arc::downgrade(&node);
    Ok(node)
}

/// Opens the topic with the settings of the environment. Settings that are not set there may differ
/// from an existing topic's.
fn topic(operation: Operation, name: &str) -> Result<(Arc<Node>, Topic)> {
    variables::apply(operation)?;
    UnknownVariable::refuse_misspelt()?;
    let settings = environment::read(operation, |name| std::env::var_os(name))?;
    let node = node(operation, &Registry::current().simple_node, settings.node_options())?;
    let topic = match node.topic(name, &settings.topic) {
        Err(error) if error.kind() == ErrorKind::SettingsDiffer => {
            let topic = node.open(name)?;
            if !environment::allows(&settings, &topic.settings()?) {
                return Err(error.into());
            }
            topic
        }
        done => done?,
    };
    Ok((node, topic))
}

export! {
    fn publisher_init(topic_name: Text<'_>) -> *mut SimplePublisher, c"publisher_init" {
        let (node, topic) = topic(OPERATION, topic_name.required(OPERATION, "topic_name")?)?;
        let publisher = OpenPublisher::new(&topic)?;
        registry::open(OPERATION, SimplePublisher { publisher, _node: node })
    }

    fn publisher_wait(
        publisher: Handle<SimplePublisher>,
        subscribers: usize,
        milliseconds: i32,
    ) -> i32, c"publisher_wait" {
        let timeout = Timeout::of_milliseconds(milliseconds);
        wait_for_subscribers(OPERATION, subscribers as u64, timeout, |count, longest| {
            Ok(publisher.find(OPERATION)?.publisher.wait_once(count, longest))
        })
    }

    /// Publishes a copy of the memory at an address.
    fn publisher_push(
        publisher: Handle<SimplePublisher>,
        [message_size] device_pointer: CallerRange<'_>,
    ) -> i32, c"publisher_push" {
        let publisher = &publisher.find(OPERATION)?.publisher;
        publisher.push_from(OPERATION, device_pointer, Timeout::Forever)
    }

    fn publisher_destroy(publisher: Option<Handle<SimplePublisher>>) -> (), c"publisher_destroy" {
        registry::close(OPERATION, publisher)
    }

    fn subscriber_init(topic_name: Text<'_>) -> *mut SimpleSubscriber, c"subscriber_init" {
        let (node, topic) = topic(OPERATION, topic_name.required(OPERATION, "topic_name")?)?;
        let subscriber = OpenSubscriber::new(topic.subscriber()?);
        let held = Mutex::new(None);
        registry::open(OPERATION, SimpleSubscriber { held, subscriber, _node: node })
    }

    /// Releases the last message, and waits for the next one.
    fn subscriber_pull(subscriber: Handle<SimpleSubscriber>) -> *mut c_void, c"subscriber_pull" {
        subscriber.find(OPERATION)?.pull(OPERATION, Timeout::Forever)
    }

    /// Like `subscriber_pull`, with a timeout.
    fn subscriber_pull_within(
        subscriber: Handle<SimpleSubscriber>,
        milliseconds: i32,
    ) -> *mut c_void, c"subscriber_pull_within" {
        subscriber.find(OPERATION)?.pull(OPERATION, Timeout::of_milliseconds(milliseconds))
    }

    fn subscriber_message_size(
        subscriber: Handle<SimpleSubscriber>,
    ) -> usize, c"subscriber_message_size" {
        let subscriber = subscriber.find(OPERATION)?;
        let held = subscriber.held();
        let none = || Failure::new(Status::WouldBlock, OPERATION, "no message is held");
        Ok(held.as_ref().ok_or_else(none)?.sample.length() as usize)
    }

    fn subscriber_destroy(
        subscriber: Option<Handle<SimpleSubscriber>>,
    ) -> (), c"subscriber_destroy" {
        registry::close(OPERATION, subscriber)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use pubsub::ServiceMode;

    use super::*;

    const FAR: Duration = Duration::from_secs(60);

    #[test]
    fn node_with_lost_service_is_not_reused() {
        let name = format!("fabricast-c-shared-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let serve = || {
            let options = NodeOptions {
                directory: directory.clone(),
                service_timeout: FAR,
                ..Default::default()
            };
            Node::join(options).unwrap()
        };
        let external = |service_timeout| NodeOptions {
            directory: directory.clone(),
            service: ServiceMode::External,
            service_timeout,
            ..NodeOptions::default()
        };
        let shared = Mutex::new(Weak::new());
        let service = serve();
        let first = node(c"test", &shared, external(Duration::from_millis(500))).unwrap();
        let same = node(c"test", &shared, external(FAR)).unwrap();
        assert!(Arc::ptr_eq(&first, &same));
        drop(service);
        let end = Instant::now() + FAR;
        while first.check().is_ok() {
            assert!(Instant::now() < end, "timed out waiting for the loss");
            std::thread::sleep(Duration::from_millis(10));
        }
        let service = serve();
        let other = node(c"test", &shared, external(FAR)).unwrap();
        assert!(!Arc::ptr_eq(&first, &other));
        other.check().unwrap();
        drop((first, same, other, service));
        std::fs::remove_dir_all(directory).unwrap();
    }
}
