//! Collective operations whose parameters all ranks agree on.
//!
//! Modules, each importing only those before it: `error`, `element`, `operation`,
//! `domain_key`, `call`, `parameters`, `statistics`, `controller`, `saved_parameters`, `status_file`,
//! `rendezvous`, `members`, `param_table`, `domain_options`, `param_store`, `choice_log`, `peer_memory`, `place`, `host_steps`,
//! `host_operations`, `collective_call`, `block_lengths`, `machine_domain`, `topology`,
//! `replicated_parameters`, `liveness`, `remote_ranks`, `introduction`, `remote_steps`, `remote_operations`,
//! `machines`, `peer_watch`, `call_board`, `buffer_agreement`, `second_path`, `device_paths`, `device_domain`,
//! `domain`.

mod block_lengths;
mod buffer_agreement;
mod call;
mod call_board;
mod choice_log;
#[cfg(test)]
mod choice_log_tests;
mod collective_call;
mod controller;
#[cfg(test)]
mod controller_tests;
mod device_domain;
#[cfg(test)]
mod device_domain_tests;
mod device_paths;
mod domain;
mod domain_key;
mod domain_options;
#[cfg(test)]
mod domain_process_tests;
#[cfg(test)]
mod domain_tests;
mod element;
mod error;
mod host_operations;
mod host_steps;
mod introduction;
mod liveness;
mod machine_domain;
mod machines;
#[cfg(test)]
mod machines_tests;
mod members;
mod operation;
mod param_store;
#[cfg(test)]
mod param_store_tests;
mod param_table;
mod parameters;
mod peer_memory;
mod peer_watch;
mod place;
mod remote_operations;
mod remote_ranks;
mod remote_steps;
mod rendezvous;
#[cfg(test)]
mod rendezvous_tests;
mod replicated_parameters;
#[cfg(test)]
mod replicated_parameters_tests;
mod saved_parameters;
mod second_path;
mod statistics;
mod status_file;
mod topology;

pub use buffer_agreement::DirectOutcomes;
pub use call::Call;
pub use choice_log::{Choice, ChoiceLog};
pub use collective_call::{Blocks, CollectiveCall};
pub use controller::{Change, Choices, Controller};
pub use device_domain::{DeviceAbort, DeviceDomain};
pub use domain::CommDomain;
pub use domain_key::CommDomainKey;
pub use domain_options::DomainOptions;
pub use element::{Bf16, Element, F16};
pub use error::{Error, ErrorKind, Result};
pub use operation::{OpKey, Operation, SizeClass};
pub use param_store::{Entry, ShmParamStore};
pub use param_table::{AggregationPoint, LearningOptions};
pub use parameters::{Algorithm, Parameters};
pub use reduction::{DataType, ReduceOp};
pub use saved_parameters::{LoadError, SavedParameters};
pub use statistics::{Aggregation, ExecStat};
pub use status_file::{
    CleanedDomains, DomainKind, DomainStatus, FoundDomains, OperationStatus, ParameterChange,
    UsedParameters,
};
