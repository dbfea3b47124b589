//! Preloaded into unmodified programs (`LD_PRELOAD=libfabricast_hook.so`): what they allocate with
//! CUDA's runtime lies in memory that other processes can map.
//!
//! Replaced are functions of the runtime that allocate and share memory, and one system call. What
//! this library does not handle, or cannot, is done by the original function: a program runs as
//! without it. Only programs that are linked to the shared runtime (`libcudart.so`) are affected.
//!
//! Modules, each importing only those before it: `settings`, `original`, `recursion`, `blocks`,
//! `descriptors`, `functions`.

mod blocks;
mod descriptors;
mod functions;
mod original;
mod recursion;
mod settings;
