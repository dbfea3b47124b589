//! The module `fabricast._native`: what the package `fabricast` for Python is made of.
//!
//! Modules, each importing only those before it: `devices`, `structured`, `data_type`, `layout`, `failure`, `arguments`,
//! `message_type`, `waits`, `exclusive`, `closable`, `array`, `streams`, `caller_stream`, `release`, `kept`, `memory`, `torch_allocator`,
//! `shared`, `agent`, `publisher`, `topic_publisher`, `subscriber`, `topic`, `node`, `param_store`, `elements`, `exchange`, `domain`, `group`, `information`, `log`.

mod agent;
mod arguments;
mod array;
mod caller_stream;
mod closable;
mod data_type;
mod devices;
mod domain;
mod elements;
mod exchange;
mod exclusive;
mod failure;
mod group;
mod information;
mod kept;
mod layout;
mod log;
mod memory;
mod message_type;
mod node;
mod param_store;
mod publisher;
mod release;
mod shared;
mod streams;
mod structured;
mod subscriber;
mod topic;
mod topic_publisher;
mod torch_allocator;
mod waits;

/// Classes of the library. The package documents them.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use super::agent::{
        PyAgent, PyAgentEvent, PyOperation, PyPrepared, PyRegion, PyRoute, PyStrided, card_info,
    };
    #[pymodule_export]
    use super::array::Array;
    #[pymodule_export]
    use super::domain::PyDomain;
    #[pymodule_export]
    use super::group::PyGroup;
    #[pymodule_export]
    use super::information::{_info, _paths};
    #[pymodule_export]
    use super::log::{_next_record, _start_log};
    #[pymodule_export]
    use super::memory::{_is_mapped, allocate};
    #[pymodule_export]
    use super::node::PyNode;
    #[pymodule_export]
    use super::param_store::{PyParamEntry, PyParamStore, PyParameters};
    #[pymodule_export]
    use super::publisher::{PyLoan, PyPublisher, PySent};
    #[pymodule_export]
    use super::shared::{
        _copy, _describe, _directory, _open, _share, _share_structure, _token_of_name,
        _wait_for_receivers, PyShared,
    };
    #[pymodule_export]
    use super::subscriber::{PySample, PySubscriber, PyUntilEnd};
    #[pymodule_export]
    use super::topic::PyTopic;
    #[pymodule_export]
    use super::topic_publisher::PyTopicPublisher;
    #[pymodule_export]
    use super::torch_allocator::{_pool_statistics, _trim_pool};

    /// The version of the library.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name is that of Python")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
