//! Fabricast for C, C++ and Fortran: what `include/fabricast.h` and `include/rgaps.h` declare.
//!
//! Arguments are checked in [`ffi`], the only module that accesses memory of the caller, except
//! [`caller_memory`]. Handles are looked up in tables ([`handle`], [`registry`]), so that a closed
//! one is an error and never a wild pointer. The rest is safe code over `pubsub`, `transfer` and
//! `collective`.
//!
//! Modules, each importing only those before it: `status`, `failure`, `timeout`, `handle`,
//! `ffi`, `registry`, `exclusive`, `caller_memory`, `network`, `layout`, `log`, `variables`,
//! `node`, `topic`, `publisher`, `subscriber`, `stream`, `release`, `memory`, `share`, `agent`,
//! `param_store`, `domain`, `rgaps`.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("handles have 64 bits: for machines with 64-bit pointers only");

mod agent;
mod caller_memory;
mod domain;
mod exclusive;
mod failure;
#[cfg(test)]
mod fake_driver_tests;
mod ffi;
mod handle;
mod layout;
mod log;
mod memory;
mod network;
mod node;
mod param_store;
mod publisher;
mod registry;
mod release;
mod rgaps;
mod share;
mod status;
mod stream;
mod subscriber;
mod timeout;
mod topic;
mod variables;

#[cfg(test)]
mod tests {
    use super::handle::Kind;
    use super::{
        agent, domain, exclusive, memory, node, publisher, rgaps, share, subscriber, topic,
    };

    #[test]
    fn kinds_of_handles_have_different_numbers() {
        let mut numbers = [
            node::OpenNode::NUMBER,
            topic::OpenTopic::NUMBER,
            publisher::OpenPublisher::NUMBER,
            exclusive::Exclusive::<pubsub::Loan>::NUMBER,
            subscriber::OpenSubscriber::NUMBER,
            subscriber::OpenSample::NUMBER,
            rgaps::SimplePublisher::NUMBER,
            rgaps::SimpleSubscriber::NUMBER,
            gpu::Stream::NUMBER,
            memory::OpenMemory::NUMBER,
            share::OpenShare::NUMBER,
            share::OpenedMemory::NUMBER,
            agent::OpenAgent::NUMBER,
            transfer::Region::NUMBER,
            agent::OpenRoute::NUMBER,
            transfer::PreparedTransfer::NUMBER,
            domain::OpenDomain::NUMBER,
            exclusive::Exclusive::<collective::ShmParamStore>::NUMBER,
        ];
        numbers.sort_unstable();
        assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]), "{numbers:?}");
    }
}
