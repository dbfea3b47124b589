//! Reports, as JSON.

use std::ffi::{CStr, c_char};

use pubsub::{NodeOptions, Row};

use crate::failure::{Failure, Result, c_text};
use crate::ffi::{Address, Out, Text, export};
use crate::handle::Handle;
use crate::node::OpenNode;
use crate::registry::Registry;
use crate::status::Status;

fn lend_report(operation: &'static CStr, rows: &[Row]) -> Result<*mut c_char> {
    let text = serde_json::to_string(rows)
        .map_err(|error| Failure::new(Status::Failed, operation, error))?;
    Ok(Registry::current().lend_text(c_text(text)))
}

export! {
    /// Reports on the node of a membership.
    fn fabricast_node_report(
        node: Handle<OpenNode>,
        json: Out<'_, *mut c_char>,
    ) -> i32, c"report on a node" {
        let rows = node.find(OPERATION)?.node.report()?;
        json.put(lend_report(OPERATION, &rows)?)
    }

    /// Reports on the node of a directory, without joining it.
    fn fabricast_report(
        directory: Text<'_>,
        json: Out<'_, *mut c_char>,
    ) -> i32, c"report on a node" {
        let directory = directory.get(OPERATION, "directory")?;
        let directory = directory.map_or_else(NodeOptions::default_directory, Into::into);
        json.put(lend_report(OPERATION, &pubsub::report(&directory)?)?)
    }

    /// Frees a text of this library.
    fn fabricast_text_free(text: Address) -> i32, c"free a text" {
        if text.0 == 0 {
            return Ok(());
        }
        Registry::current().free_text(OPERATION, text.0)
    }
}
