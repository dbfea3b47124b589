//! Devices behind NVIDIA's driver.

mod device;
mod kernels;
mod library;
mod locate;
mod memory;
mod stream;

pub(crate) use device::{Device, count, uuid};
pub(crate) use locate::{PointerLocation, locate};
pub(crate) use memory::Physical;
pub(crate) use stream::Event;
