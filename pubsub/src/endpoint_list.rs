//! Publishers and subscribers of this process, which end with the topic or node that they hang on.

use std::sync::{Arc, Mutex, OnceLock, Weak};

use threads::lock;

use crate::error::{Error, ErrorKind, Result};

/// An object that ends when the one that it hangs on is closed.
pub(crate) trait Endpoint: Send + Sync {
    /// Ends it at once. Waits of other threads in it end, too, and name the reason.
    fn close(&self, reason: &Arc<str>);

    /// This process is no longer a member of the node: nothing that it publishes would arrive.
    fn on_lost_membership(&self, _reason: &Arc<str>) {}
}

/// Mark of a closed object, with the reason: "the topic was closed".
#[derive(Debug, Default)]
pub(crate) struct ClosedMark(OnceLock<Arc<str>>);

impl ClosedMark {
    /// Marks the object as closed. False if it was marked before.
    pub(crate) fn set(&self, reason: &Arc<str>) -> bool {
        self.0.set(Arc::clone(reason)).is_ok()
    }

    #[inline]
    pub(crate) fn is_set(&self) -> bool {
        self.0.get().is_some()
    }

    /// Fails once the object is closed.
    #[inline]
    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        match self.0.get() {
            None => Ok(()),
            Some(reason) => Err(Error::new(operation, ErrorKind::Closed, &**reason)),
        }
    }
}

/// The objects that hang on another one.
#[derive(Debug, Default)]
pub(crate) struct Endpoints {
    closed: ClosedMark,
    all: Mutex<Vec<Weak<dyn Endpoint>>>,
}

impl Endpoints {
    /// Adds an object. Fails if it hangs on one that was closed.
    pub(crate) fn add(&self, operation: &'static str, endpoint: Weak<dyn Endpoint>) -> Result<()> {
        let mut all = lock(&self.all);
        self.closed.check(operation)?;
        all.retain(|known| known.strong_count() > 0);
        all.push(endpoint);
        Ok(())
    }

    /// Closes all of them, and refuses further ones.
    pub(crate) fn close(&self, reason: &Arc<str>) {
        let all = {
            let mut all = lock(&self.all);
            self.closed.set(reason);
            std::mem::take(&mut *all)
        };
        all.iter().filter_map(Weak::upgrade).for_each(|endpoint| endpoint.close(reason));
    }

    /// Tells all of them that this process is no longer a member of the node.
    pub(crate) fn on_lost_membership(&self, reason: &Arc<str>) {
        let all = lock(&self.all).clone();
        let living = all.iter().filter_map(Weak::upgrade);
        living.for_each(|endpoint| endpoint.on_lost_membership(reason));
    }

    /// Fails once [`close`](Self::close) was called.
    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        self.closed.check(operation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Endpoint for ClosedMark {
        fn close(&self, reason: &Arc<str>) {
            self.set(reason);
        }
    }

    #[test]
    fn close_reaches_all_living_endpoints_and_refuses_later_ones() {
        let (endpoints, reason) = (Endpoints::default(), Arc::from("the topic was closed"));
        let (kept, dropped) = (Arc::new(ClosedMark::default()), Arc::new(ClosedMark::default()));
        let add = |endpoint: &Arc<ClosedMark>| {
            let weak = Arc::downgrade(endpoint);
            endpoints.add("test", weak)
        };
        add(&kept).unwrap();
        add(&dropped).unwrap();
        drop(dropped);
        endpoints.close(&reason);
        let error = kept.check("pull").unwrap_err();
        assert_eq!((error.kind(), error.detail()), (ErrorKind::Closed, "the topic was closed"));
        assert_eq!(add(&kept).unwrap_err().kind(), ErrorKind::Closed);
        // The first reason stays.
        assert!(!kept.set(&Arc::from("the node was closed")));
        assert_eq!(kept.check("pull").unwrap_err().detail(), "the topic was closed");
    }
}
