//! The six functions of `rgaps.h`: a publisher and a subscriber that are told nothing but the
//! name of their topic. All else is told by the environment.

mod environment;

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use pubsub::{ErrorKind, Node, NodeOptions, Topic};

use self::environment::Environment;
use crate::boundary::{Range, Text, export};
use crate::device;
use crate::failure::Result;
use crate::handle::Handle;
use crate::layout::Timeout;
use crate::network;
use crate::publisher::OpenPublisher;
use crate::registry::{self, Registry};
use crate::subscriber::{OpenSample, OpenSubscriber};

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

/// The node that all of this process's share, as long as there are any; another one, if it was
/// closed because its service was lost.
fn node(shared: &Mutex<Weak<Node>>, mut options: NodeOptions) -> Result<Arc<Node>> {
    let start = Instant::now();
    let mut shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(node) = shared.upgrade()
        && node.check().is_ok()
    {
        return Ok(node);
    }
    network::check(&options)?;
    // Another thread may have looked for the others, in vain, and so may this one have waited.
    options.patience = options.patience.saturating_sub(start.elapsed());
    let node = Arc::new(Node::join(options)?);
    *shared = Arc::downgrade(&node);
    Ok(node)
}

/// A topic is as the environment says. Of what that does not say, whoever came first may have
/// said more.
fn topic(operation: &'static CStr, name: &str) -> Result<(Arc<Node>, Topic)> {
    let environment = Environment { operation, value_of: |name: &str| std::env::var_os(name) };
    let (settings, options) = (environment.topic_settings()?, environment.node_options()?);
    let node = node(&Registry::current().simple_node, options)?;
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

    /// Publishes a copy of what is at an address.
    fn publisher_push(
        publisher: Handle<SimplePublisher>,
        [message_size] device_pointer: Range<'_>,
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
        let subscriber = subscriber.find(OPERATION)?;
        let held = || subscriber.held.lock().unwrap_or_else(PoisonError::into_inner);
        drop(held().take());
        let pulled = subscriber.subscriber.pull(OPERATION, Timeout::Forever, None)?;
        let sample = OpenSample::new(pulled);
        // A message of no bytes is somewhere, too: NULL would say that there is none.
        let address = NonNull::new(sample.address()).unwrap_or(NonNull::dangling());
        *held() = Some(sample);
        Ok(address.as_ptr())
    }

    /// Reads no more.
    fn subscriber_destroy(
        subscriber: Option<Handle<SimpleSubscriber>>,
    ) -> (), c"subscriber_destroy" {
        if let Some(subscriber) = subscriber {
            let closed = subscriber.close(OPERATION)?;
            closed.subscriber.subscriber.end();
            drop(closed.held.lock().unwrap_or_else(PoisonError::into_inner).take());
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
            let options =
                NodeOptions { directory: directory.clone(), patience: FAR, ..Default::default() };
            Node::join(options).unwrap()
        };
        let outside = |patience| NodeOptions {
            directory: directory.clone(),
            service: ServiceMode::Outside,
            patience,
            ..NodeOptions::default()
        };
        let shared = Mutex::new(Weak::new());
        let service = serve();
        let first = node(&shared, outside(Duration::from_millis(500))).unwrap();
        let same = node(&shared, outside(FAR)).unwrap();
        assert!(Arc::ptr_eq(&first, &same));
        drop(service);
        let end = Instant::now() + FAR;
        while first.check().is_ok() {
            assert!(Instant::now() < end, "it does not notice");
            std::thread::sleep(Duration::from_millis(10));
        }
        let service = serve();
        let other = node(&shared, outside(FAR)).unwrap();
        assert!(!Arc::ptr_eq(&first, &other));
        other.check().unwrap();
        drop((first, same, other, service));
        std::fs::remove_dir_all(directory).unwrap();
    }
}
