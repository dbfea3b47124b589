//! Probes of device memory: the steps in [`plan`], the verdict on what an end sees after a notice in
//! [`arrival`]; these know no fabric and no device. [`scratch`] is the memory. The roles of a rail
//! carry the probe out.

mod arrival;
mod plan;
mod scratch;

pub(super) use arrival::{Arrival, Look};
pub(super) use plan::{MAX_PART_LENGTH, SCRATCH_LENGTH, Step, size_text, steps};
pub(super) use scratch::Scratch;
