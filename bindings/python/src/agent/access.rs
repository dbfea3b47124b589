//! Agents and those of groups, which one thread at a time uses.

use std::sync::Arc;

use launch::Group;
use pyo3::prelude::*;
use transfer::Agent;

use crate::exclusive::Exclusive;
use crate::failure::Result;

/// An agent of its own, or that of a group.
#[derive(Debug)]
pub(super) enum Access {
    Own(Box<Exclusive<Agent>>),
    OfGroup(Arc<Exclusive<Group>>),
}

impl Access {
    pub(super) fn detached<R>(
        &self,
        operation: &'static str,
        call: impl FnOnce(&mut Agent) -> Result<R>,
    ) -> Result<R> {
        match self {
            Self::Own(agent) => agent.detached(operation, call),
            Self::OfGroup(group) => group.detached(operation, |group| call(group.agent())),
        }
    }

    pub(super) fn step<R>(
        &self,
        operation: &'static str,
        call: impl FnOnce(&mut Agent) -> Result<R>,
    ) -> Result<R> {
        match self {
            Self::Own(agent) => agent.step(operation, call),
            Self::OfGroup(group) => group.step(operation, |group| call(group.agent())),
        }
    }

    pub(super) fn with<R: Send>(
        &self,
        py: Python<'_>,
        operation: &'static str,
        call: impl FnOnce(&mut Agent) -> Result<R> + Send,
    ) -> Result<R> {
        py.detach(|| self.detached(operation, call))
    }
}
