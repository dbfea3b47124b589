//! Memory handed from process to process.
//!
//! Stands on `gpu` (devices) and `ipc` (processes of one machine). What is here so far:
//! one buffer, shared without a copy. A [`Shared`] buffer gives [handles](Handle), which
//! carry what the bytes mean along with the descriptors that reach them; an [`Opener`]
//! maps them, each memory once. A [`ShareService`] gives them out by name.

mod error;
mod handle;
mod pinned;
mod service;
mod share;
mod tensor;

pub use error::{Error, ErrorKind, Result};
pub use handle::{Facts, Handle, Route};
pub use pinned::pin;
pub use service::{Admission, Client, LONGEST_NAME, Served, ShareService};
pub use share::{Opened, Opener, Shared};
pub use tensor::{ElementType, MOST_DIMENSIONS, Tensor};
