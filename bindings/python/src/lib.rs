//! The module `fabricast._native`: what the package `fabricast` for Python is made of.
//!
//! Modules, each importing only those before it: `data_type`, `layout`, `failure`, `waits`,
//! `array`, `streams`, `publisher`, `subscriber`, `topic`, `node`.

mod array;
mod data_type;
mod failure;
mod layout;
mod node;
mod publisher;
mod streams;
mod subscriber;
mod topic;
mod waits;

/// Classes of the library. The package documents them.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use super::array::Array;
    #[pymodule_export]
    use super::node::PyNode;
    #[pymodule_export]
    use super::publisher::{PyLoan, PyPublisher, PySent};
    #[pymodule_export]
    use super::subscriber::{PySample, PySubscriber};
    #[pymodule_export]
    use super::topic::PyTopic;

    /// The version of the library.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name is that of Python")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
