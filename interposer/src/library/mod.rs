//! The functions of the libraries: their names, types and originals.

mod hccl;
mod loader;
mod nccl;
