//! Objects that are reused when they are no longer used.

use std::sync::Arc;

/// Objects that are handed out as references, and handed out again when the last reference is
/// dropped. So no user has to return them.
#[derive(Debug)]
pub(crate) struct ReusePool<T: ?Sized> {
    all: Vec<Arc<T>>,
    /// The index to check first: objects are usually freed in the order in which they were
    /// taken.
    next: usize,
}

impl<T: ?Sized> Default for ReusePool<T> {
    fn default() -> Self {
        Self { all: Vec::new(), next: 0 }
    }
}

impl<T: ?Sized> ReusePool<T> {
    /// An object without users that is ready to be reused.
    pub(crate) fn take(&mut self, is_ready: impl Fn(&T) -> bool) -> Option<Arc<T>> {
        let count = self.all.len();
        let mut indices = (self.next..count).chain(0..self.next.min(count));
        let found = indices.find(|index| {
            // Checked first, because it is cheaper than the exclusive check.
            let is_alone = Arc::strong_count(&self.all[*index]) == 1;
            is_alone && Arc::get_mut(&mut self.all[*index]).is_some_and(|one| is_ready(one))
        })?;
        self.next = found + 1;
        Some(Arc::clone(&self.all[found]))
    }

    /// Adds a new object, which the caller uses first.
    pub(crate) fn keep(&mut self, made: &Arc<T>) {
        self.all.push(Arc::clone(made));
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_released_objects_are_reused() {
        let mut reuse = ReusePool::default();
        assert!(reuse.take(|_| true).is_none(), "no object exists yet");
        let made: Vec<_> = (0..3).map(Arc::new).collect();
        made.iter().for_each(|one| reuse.keep(one));
        assert!(reuse.take(|_| true).is_none(), "all objects are in use");
        let [first, second, third] = <[_; 3]>::try_from(made).unwrap();
        drop(second);
        let again = reuse.take(|_| true).unwrap();
        assert_eq!(*again, 1);
        assert!(reuse.take(|_| true).is_none(), "the object is in use again");
        drop((first, third, again));
        // Several in a row; an object that is not ready is skipped.
        assert_eq!(*reuse.take(|_| true).unwrap(), 2);
        assert_eq!(*reuse.take(|number| *number != 0).unwrap(), 1);
        assert!(reuse.take(|_| false).is_none());
        assert_eq!(reuse.len(), 3);
    }
}
