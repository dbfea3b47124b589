//! Nodes and reports on them; versions and counters of the library.

use std::ffi::{CString, c_char};

use pubsub::{Node, NodeOptions, Row};

use crate::failure::{self, Failure, Operation, Result, c_text};
use crate::ffi::{Out, OutStruct, Text, WithDefaults, export};
use crate::handle::{Handle, kind};
use crate::layout::RawNodeOptions;
use crate::network;
use crate::registry::{self, Registry, export_close};
use crate::status::Status;
use crate::variables;

/// A membership in a node.
#[derive(Debug)]
pub(crate) struct OpenNode {
    pub(crate) node: Node,
    identity: CString,
    directory: CString,
}

kind!(OpenNode, 0, "node", |open: &Self| open.node.close());
export_close!(OpenNode, fabricast_node_leave, c"leave node");

impl OpenNode {
    fn new(node: Node) -> Self {
        let identity = c_text(node.identity());
        let directory = c_text(node.directory().to_string_lossy());
        Self { node, identity, directory }
    }
}

fn lend_report(operation: Operation, rows: &[Row]) -> Result<*mut c_char> {
    let text = serde_json::to_string(rows)
        .map_err(|error| Failure::new(Status::Failed, operation, error))?;
    Ok(Registry::current().lend_text(c_text(text)))
}

export! {
    fn fabricast_node_options_init(
        options: OutStruct<'_, RawNodeOptions>[size],
    ) -> i32, c"initialize node options" {
        options.put_defaults()
    }

    fn fabricast_node_join(
        options: Option<RawNodeOptions>,
        node: Out<'_, *mut OpenNode>,
    ) -> i32, c"join node" {
        variables::apply(OPERATION)?;
        let options = options.unwrap_or_else(|| RawNodeOptions::defaults(size_of::<RawNodeOptions>()));
        let options = options.to_options(OPERATION)?;
        network::check(OPERATION, str::to_owned, &options)?;
        let joined = Node::join(options)?;
        node.put(registry::open(OPERATION, OpenNode::new(joined))?)
    }

    fn fabricast_node_identity(
        node: Handle<OpenNode>,
        identity: Out<'_, *const c_char>,
    ) -> i32, c"get identity of node" {
        identity.put(node.find(OPERATION)?.identity.as_ptr())
    }

    /// The directory of its socket.
    fn fabricast_node_directory(
        node: Handle<OpenNode>,
        directory: Out<'_, *const c_char>,
    ) -> i32, c"get directory of node" {
        directory.put(node.find(OPERATION)?.directory.as_ptr())
    }

    /// Reports on the node of a membership.
    fn fabricast_node_report(
        node: Handle<OpenNode>,
        json: Out<'_, *mut c_char>,
    ) -> i32, c"report on node" {
        let rows = node.find(OPERATION)?.node.report()?;
        json.put(lend_report(OPERATION, &rows)?)
    }

    /// Reports on the node of a directory, without joining it.
    fn fabricast_report(
        directory: Text<'_>,
        json: Out<'_, *mut c_char>,
    ) -> i32, c"report on node" {
        let directory = directory.get(OPERATION, "directory")?;
        let directory = directory.map_or_else(NodeOptions::default_directory, Into::into);
        json.put(lend_report(OPERATION, &pubsub::report(&directory)?)?)
    }

    fn fabricast_text_free(text: *mut c_char) -> i32, c"free text" {
        if text.is_null() {
            return Ok(());
        }
        Registry::current().free_text(OPERATION, text.addr())
    }

    fn fabricast_error_clear() -> (), c"clear error" {
        failure::clear_last_error();
        Ok(())
    }
}

#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fabricast_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fabricast_abi() -> u32 {
    const NUMBER: &str = env!("FABRICAST_ABI");
    NUMBER.parse().unwrap_or(u32::MAX)
}

#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fabricast_status_name(status: i32) -> *const c_char {
    Status::of_number(status).map_or(c"not a status", Status::label).as_ptr()
}

/// Number of open handles, and of texts that were not freed.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fabricast_open_handles() -> usize {
    Registry::current().count()
}
