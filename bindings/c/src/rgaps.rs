//! The functions of `rgaps.h`: a publisher and a subscriber that are told nothing but the
//! name of their topic. All else is told by the environment.

mod environment;

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use pubsub::{ErrorKind, Node, NodeOptions, Topic};

use self::environment::{Environment, variable_of};
use crate::device;
use crate::failure::{Failure, Result};
use crate::ffi::{CallerRange, Text, export};
use crate::handle::Handle;
use crate::layout::Timeout;
use crate::network;
use crate::publisher::{OpenPublisher, SubscriberWait, wait_for_subscribers};
use crate::registry::{self, Registry};
use crate::status::Status;
use crate::subscriber::{OpenSample, OpenSubscriber};
use crate::variables;

/// What `publisher_init` gives.
#[derive(Debug)]
pub(crate) struct SimplePublisher {
    publisher: OpenPublisher,
    _node: Arc<Node>,
}

/// What `subscriber_init` gives.
#[derive(Debug)]
pub(crate) struct SimpleSubscriber {
    /// Of the last message: its memory is the caller's until he wants the next one.
    held: Mutex<Option<OpenSample>>,
    subscriber: OpenSubscriber,
    _node: Arc<Node>,
}

impl SimpleSubscriber {
    fn held(&self) -> MutexGuard<'_, Option<OpenSample>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the last message back, and waits for the next one: where it is.
    fn pull(&self, operation: &'static CStr, timeout: Timeout) -> Result<*mut c_void> {
        drop(self.held().take());
        let sample = OpenSample::new(self.subscriber.pull(operation, timeout, None)?);
        // A message of no bytes is somewhere, too: NULL would say that there is none.
        let address = NonNull::new(sample.address()).unwrap_or(NonNull::dangling());
        *self.held() = Some(sample);
        Ok(address.as_ptr())
    }
}

/// The node that all of this process's share, as long as there are any; another one, if it was
/// closed because its service was lost.
fn node(
    operation: &'static CStr,
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
    network::check(operation, variable_of, &options)?;
    // Another thread may have looked for the others, in vain, and so may this one have waited.
    options.service_timeout = options.service_timeout.saturating_sub(start.elapsed());
    let node = Arc::new(Node::join(options)?);
    *shared = Arc::downgrade(&node);
    Ok(node)
}

/// A topic is as the environment says. Of what that does not say, whoever came first may have
/// said more.
fn topic(operation: &'static CStr, name: &str) -> Result<(Arc<Node>, Topic)> {
    variables::warn_misspelt();
    let environment = Environment { operation, value_of: |name: &str| std::env::var_os(name) };
    let (settings, options) = (environment.topic_settings()?, environment.node_options()?);
    let node = node(operation, &Registry::current().simple_node, options)?;
    let topic = match node.topic(name, &settings) {
        Err(error) if error.kind() == ErrorKind::SettingsDiffer => {
            let topic = node.open(name)?;
            if !environment.allows(&settings, &topic.settings()?) {
                return Err(error.into());
            }
            topic
        }
        done => done?,
    };
    Ok((node, topic))
}

export! {
    /// Publishes on a topic from now on.
    fn publisher_init(topic_name: Text<'_>) -> *mut SimplePublisher, c"publisher_init" {
        let (node, topic) = topic(OPERATION, topic_name.required(OPERATION, "topic_name")?)?;
        let publisher = OpenPublisher::new(&topic)?;
        registry::open(OPERATION, SimplePublisher { publisher, _node: node })
    }

    /// Waits until so many read the topic.
    fn publisher_wait(
        publisher: Handle<SimplePublisher>,
        subscribers: usize,
        milliseconds: i32,
    ) -> i32, c"publisher_wait" {
        let timeout = Timeout::of_milliseconds(milliseconds);
        wait_for_subscribers(OPERATION, subscribers as u64, timeout, |count, longest| {
            Ok(SubscriberWait::once(&publisher.find(OPERATION)?.publisher.publisher, count, longest))
        })
    }

    /// Publishes a copy of what is at an address.
    fn publisher_push(
        publisher: Handle<SimplePublisher>,
        [message_size] device_pointer: CallerRange<'_>,
    ) -> i32, c"publisher_push" {
        let publisher = publisher.find(OPERATION)?;
        let found = device::find(publisher.publisher.memory, OPERATION, device_pointer)?;
        publisher.publisher.push_from(&found, Timeout::Forever)
    }

    /// Publishes no more.
    fn publisher_destroy(publisher: Option<Handle<SimplePublisher>>) -> (), c"publisher_destroy" {
        registry::close(OPERATION, publisher)
    }

    /// Reads what is published on a topic from now on.
    fn subscriber_init(topic_name: Text<'_>) -> *mut SimpleSubscriber, c"subscriber_init" {
        let (node, topic) = topic(OPERATION, topic_name.required(OPERATION, "topic_name")?)?;
        let subscriber = OpenSubscriber::new(&topic)?;
        let held = Mutex::new(None);
        registry::open(OPERATION, SimpleSubscriber { held, subscriber, _node: node })
    }

    /// Gives the last message back, and waits for the next one.
    fn subscriber_pull(subscriber: Handle<SimpleSubscriber>) -> *mut c_void, c"subscriber_pull" {
        subscriber.find(OPERATION)?.pull(OPERATION, Timeout::Forever)
    }

    /// The same, for so long at most.
    fn subscriber_pull_within(
        subscriber: Handle<SimpleSubscriber>,
        milliseconds: i32,
    ) -> *mut c_void, c"subscriber_pull_within" {
        subscriber.find(OPERATION)?.pull(OPERATION, Timeout::of_milliseconds(milliseconds))
    }

    /// How long the last message is.
    fn subscriber_message_size(
        subscriber: Handle<SimpleSubscriber>,
    ) -> usize, c"subscriber_message_size" {
        let subscriber = subscriber.find(OPERATION)?;
        let held = subscriber.held();
        let none = || Failure::new(Status::WouldBlock, OPERATION, "no message is held");
        Ok(held.as_ref().ok_or_else(none)?.sample.length() as usize)
    }

    /// Reads no more.
    fn subscriber_destroy(
        subscriber: Option<Handle<SimpleSubscriber>>,
    ) -> (), c"subscriber_destroy" {
        if let Some(subscriber) = subscriber {
            let closed = subscriber.close(OPERATION)?;
            closed.subscriber.subscriber.end();
            drop(closed.held().take());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use pubsub::ServiceMode;

    use super::*;

    const FAR: Duration = Duration::from_secs(60);

    #[test]
    fn a_node_whose_service_was_lost_is_not_handed_out_again() {
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
            assert!(Instant::now() < end, "it does not notice");
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
