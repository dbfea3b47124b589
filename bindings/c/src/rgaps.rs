//! The six functions of `rgaps.h`: a publisher and a subscriber that are told nothing but the
//! name of their topic. All else is told by the environment.

mod environment;

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use pubsub::{ErrorKind, Node, Topic};

use self::environment::Environment;
use crate::boundary::{Range, Text, export};
use crate::device;
use crate::failure::Result;
use crate::handle::Handle;
use crate::layout::Timeout;
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

/// The node that all of this process's share, as long as there are any.
fn node(operation: &'static CStr, environment: &Environment) -> Result<Arc<Node>> {
    let mut shared = Registry::current().simple_node.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(node) = shared.upgrade() {
        return Ok(node);
    }
    let node = Arc::new(Node::join(environment.node_options(operation)?)?);
    *shared = Arc::downgrade(&node);
    Ok(node)
}

/// A topic is as the environment says. If that says nothing but where its memory is, whoever
/// came first may have said more.
fn topic(operation: &'static CStr, name: &str) -> Result<(Arc<Node>, Topic)> {
    let environment = Environment::of_this_process();
    let settings = environment.topic_settings(operation)?;
    let node = node(operation, &environment)?;
    let topic = match node.topic(name, &settings) {
        Err(error)
            if error.kind() == ErrorKind::SettingsDiffer && !environment.says_what_topics_are() =>
        {
            let topic = node.open(name)?;
            let found = topic.settings()?;
            if (found.memory, found.reliability) != (settings.memory, settings.reliability) {
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
        if let Some(publisher) = publisher {
            publisher.close(OPERATION)?;
        }
        Ok(())
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
        let pulled = subscriber.subscriber.pull(OPERATION, Timeout::Forever)?;
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
