//! The cases of the conformance suite.

mod atomics;
mod connections;
mod immediates;
mod keys;
mod lifecycle;
mod messages;
mod processes;
mod registration;
mod ring;
mod ring_close;
mod ring_lanes;
mod rma;
mod violations;
mod waiting;

use crate::cells::Cell;
use crate::pair::CaseResult;

pub struct Case {
    pub name: &'static str,
    pub run: fn(&Cell) -> CaseResult,
    /// The case ends with objects that fail to close, because it harms the provider on purpose.
    pub may_leak_objects: bool,
}

#[macro_export]
macro_rules! cases {
    ($($name:ident),* $(,)?) => {
        &[$($crate::cases::Case { name: stringify!($name), run: $name, may_leak_objects: false }),*]
    };
}

const FILES: &[&[Case]] = &[
    lifecycle::CASES,
    messages::CASES,
    rma::CASES,
    immediates::CASES,
    atomics::CASES,
    registration::CASES,
    keys::CASES,
    ring::CASES,
    ring_close::CASES,
    ring_lanes::CASES,
    violations::CASES,
    waiting::CASES,
    connections::CASES,
    processes::CASES,
];

pub fn all() -> Vec<&'static Case> {
    FILES.iter().flat_map(|file| file.iter()).collect()
}

/// Sizes from a byte to 64 MiB, with neighbours of page and protocol limits.
pub const SIZES: &[usize] = &[
    1,
    2,
    7,
    8,
    63,
    64,
    65,
    255,
    1024,
    4095,
    4096,
    4097,
    16 << 10,
    (16 << 10) + 1,
    64 << 10,
    (64 << 10) - 1,
    1 << 20,
    (1 << 20) + 3,
    8 << 20,
    64 << 20,
];

/// The sizes that the provider moves in one operation, and that an emulated machine moves in
/// reasonable time.
pub fn sizes(largest_message: usize) -> Vec<usize> {
    let bound = std::env::var("FABRICAST_MATRIX_LARGEST")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(usize::MAX);
    SIZES.iter().copied().filter(|size| *size <= largest_message.min(bound)).collect()
}
