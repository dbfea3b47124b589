//! The path `host-staged`: two processes of one machine copy through slots of pinned memory that
//! both have mapped.
//!
//! ```text
//!   initiator                    staging segment                     target
//!   local memory ── copy ──► slot 0: 4 MiB, request, answer ── copy ──► region
//!                            slot 1 …
//! ```
//!
//! A transfer is cut into chunks, of which each occupies a slot until both sides have copied it. So
//! both copy engines work at the same time. The initiator's side is driven by its caller, the
//! target's by a thread of the agent.
//!
//! | file | content |
//! |---|---|
//! | `slot_layout` | sizes of slots and chunks |
//! | `staging_segment` | the shared memory: requests, answers, slots |
//! | `staged_end`, `staged_pauses` | copies between slots and other memory; waits for them |
//! | `chunk_pipeline` | initiator: which chunk is where; without clocks, devices and memory |
//! | `staging_link`, `staged_copies` | initiator: the session, its copies |
//! | `chunk_request` | target: checks of a request |
//! | `region_uses` | target: regions that copies use |
//! | `staging_session`, `staging_thread`, `staging_target` | target: a session; its copies; the thread |

mod chunk_pipeline;
mod chunk_request;
#[cfg(test)]
mod hostile_tests;
mod region_uses;
mod slot_layout;
mod staged_copies;
mod staged_end;
mod staged_pauses;
mod staging_link;
mod staging_segment;
mod staging_session;
mod staging_target;
mod staging_thread;

pub(super) use staged_copies::{StagedCopies, StagedMover};
pub(super) use staging_link::{STAGING_DESCRIPTORS, StagingLink};
pub(super) use staging_session::{StagingOwner, StagingSession};
pub(super) use staging_target::StagingTarget;
