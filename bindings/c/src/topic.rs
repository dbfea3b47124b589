//! Topics.

use std::ffi::{CString, c_char};

use pubsub::Topic;

use crate::failure::c_text;
use crate::ffi::{Out, OutArray, OutStruct, Text, export};
use crate::handle::{Handle, kind};
use crate::layout::{RawTopicPublisher, RawTopicSettings};
use crate::node::OpenNode;
use crate::registry::{self, export_close};

#[derive(Debug)]
pub(crate) struct OpenTopic {
    pub(crate) topic: Topic,
    name: CString,
    memory: CString,
    type_name: Option<CString>,
}

kind!(OpenTopic, 1, "topic", |open: &Self| open.topic.close());
export_close!(OpenTopic, fabricast_topic_close, c"close topic");

impl OpenTopic {
    fn new(topic: Topic) -> pubsub::Result<Self> {
        let name = c_text(topic.name());
        let settings = topic.settings()?;
        let memory = c_text(settings.memory.to_string());
        let type_name = settings.type_name.map(|name| c_text(name.to_string()));
        Ok(Self { topic, name, memory, type_name })
    }
}

export! {
    fn fabricast_topic_settings_init(
        settings: OutStruct<'_, RawTopicSettings<'_>>[size],
    ) -> i32, c"initialize topic settings" {
        settings.put_defaults()
    }

    /// Opens a topic, and creates it if settings are passed.
    fn fabricast_topic_open(
        node: Handle<OpenNode>,
        name: Text<'_>,
        settings: Option<RawTopicSettings<'_>>,
        topic: Out<'_, *mut OpenTopic>,
    ) -> i32, c"open topic" {
        let node = node.find(OPERATION)?;
        let name = name.required(OPERATION, "name")?;
        let opened = match settings {
            Some(settings) => node.node.topic(name, &settings.to_options(OPERATION)?)?,
            None => node.node.open(name)?,
        };
        topic.put(registry::open(OPERATION, OpenTopic::new(opened)?)?)
    }

    fn fabricast_topic_name(
        topic: Handle<OpenTopic>,
        name: Out<'_, *const c_char>,
    ) -> i32, c"get name of topic" {
        name.put(topic.find(OPERATION)?.name.as_ptr())
    }

    /// Lists its publishers, as many as there is room for.
    fn fabricast_topic_publishers(
        topic: Handle<OpenTopic>,
        publishers: OutArray<'_, RawTopicPublisher>,
        capacity: usize,
        count: Out<'_, usize>,
    ) -> i32, c"list publishers of topic" {
        let found = topic.find(OPERATION)?.topic.publishers();
        let raw: Vec<_> = found.iter().take(capacity).map(RawTopicPublisher::of).collect();
        publishers.put(OPERATION, "publishers", capacity, &raw)?;
        count.put(found.len())
    }

    fn fabricast_topic_settings_of(
        topic: Handle<OpenTopic>,
        settings: OutStruct<'_, RawTopicSettings<'_>>[size],
    ) -> i32, c"get settings of topic" {
        let topic = topic.find(OPERATION)?;
        let size = settings.size();
        let type_name = topic.type_name.as_deref().map(Text::of);
        let texts = (Text::of(&topic.memory), type_name.unwrap_or_default());
        let found = RawTopicSettings::of(size, &topic.topic.settings()?, texts);
        settings.put(found)
    }
}
