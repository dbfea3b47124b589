//! What the arrays of a topic have in common.

use crate::data_type::DataType;
use crate::failure::{Failure, Result};
use crate::layout::Layout;

/// Shape in the type name of a topic whose arrays have any.
const ANY_SHAPE: &str = "...";

/// The type of all arrays of a topic, and their shape, unless that varies.
#[derive(Debug, Clone)]
pub(crate) struct MessageType {
    data_type: DataType,
    layout: Option<Layout>,
}

impl MessageType {
    /// Arrays of this type, of any shape without a layout.
    pub(crate) fn new(data_type: DataType, layout: Option<Layout>) -> Self {
        Self { data_type, layout }
    }

    pub(crate) fn data_type(&self) -> DataType {
        self.data_type
    }

    /// The shape of all arrays; None if it varies.
    pub(crate) fn layout(&self) -> Option<&Layout> {
        self.layout.as_ref()
    }

    /// The name of the topic's type: `float32[3,480,640]`, or `float32[...]` for arrays of any shape.
    pub(crate) fn name(&self) -> String {
        match &self.layout {
            Some(layout) => layout.type_name(self.data_type),
            None => format!("{}[{ANY_SHAPE}]", self.data_type),
        }
    }

    /// By the name of a topic's type; None for that of another language.
    pub(crate) fn of_name(name: &str) -> Option<Self> {
        let (data_type, shape) = name.strip_suffix(']')?.rsplit_once('[')?;
        let data_type = DataType::parse(data_type)?;
        let layout = match shape {
            ANY_SHAPE => None,
            _ => {
                let extents = shape.split(',').filter(|_| !shape.is_empty());
                let shape: std::result::Result<_, _> = extents.map(str::parse).collect();
                Some(Layout::contiguous(shape.ok()?)?)
            }
        };
        Some(Self { data_type, layout })
    }

    /// Type and layout of a message of this length without a header.
    pub(crate) fn of_message(&self, length: u64) -> Option<(DataType, Layout)> {
        let layout = self.layout.clone()?;
        (self.data_type.bytes(layout.elements()) == Some(length))
            .then_some((self.data_type, layout))
    }

    /// Fails for an array that is no message of the topic.
    pub(crate) fn check(
        &self,
        operation: &'static str,
        data_type: DataType,
        layout: &Layout,
    ) -> Result<()> {
        let has_shape = |own: &Layout| own.shape() == layout.shape();
        if self.data_type == data_type && self.layout.as_ref().is_none_or(has_shape) {
            return Ok(());
        }
        let cause = format!(
            "an array of {}, but the messages of the topic are {}",
            layout.type_name(data_type),
            self.name()
        );
        Err(Failure::invalid(operation, cause))
    }
}
