//! Providers whose hardware is not here, as fakes that behave as their manual pages say.
//!
//! What each promises is in `profile`; `network` carries it out, as badly as it permits; `objects`
//! are the tables of functions; `suite` is run on each.

mod network;
mod objects;
mod profile;
mod suite;
