//! Fakes of providers whose hardware is not available, which behave as their manual pages say.
//!
//! `profile` holds what each provider promises; `network` carries it out, as badly as the
//! profile permits; `objects` has the tables of functions; `suite` runs on each.

mod network;
mod objects;
mod profile;
mod suite;
