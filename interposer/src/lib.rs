//! Preloaded into unmodified NCCL programs (`LD_PRELOAD=libfabricast_nccl.so`): each collective operation is
//! carried out by NCCL or by this project's crate `collective`, whichever was measured to be faster.
//!
//! All of NCCL's functions keep their meaning. What this library does not handle is done by the original
//! function. The same for HCCL, whose operations are counted, agreed on and measured, but always its own.
//!
//! Modules, each importing only those before it: `error`, `settings`, `request`, `engine`, `host_engine`,
//! `device_engine`, `timer_engine`, `report`, `communicator`, `group`, `interposer`, `library`.

mod communicator;
mod device_engine;
mod engine;
mod error;
mod group;
mod host_engine;
mod interposer;
mod library;
mod report;
mod request;
mod settings;
mod timer_engine;
