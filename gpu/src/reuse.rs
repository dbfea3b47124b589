//! What is used again when nobody uses it any more.

use std::sync::Arc;

/// Things that are handed out as references, and again when the last of them is gone:
/// so nobody has to give anything back, whoever drops it, and whenever.
#[derive(Debug)]
pub(crate) struct ReusePool<T: ?Sized> {
    all: Vec<Arc<T>>,
    /// Where to look first: what is done in order is free in order.
    next: usize,
}

impl<T: ?Sized> Default for ReusePool<T> {
    fn default() -> Self {
        Self { all: Vec::new(), next: 0 }
    }
}

impl<T: ?Sized> ReusePool<T> {
    /// One that nobody else has, and that is ready to be used again.
    pub(crate) fn take(&mut self, is_ready: impl Fn(&T) -> bool) -> Option<Arc<T>> {
        let count = self.all.len();
        let mut places = (self.next..count).chain(0..self.next.min(count));
        let found = places.find(|place| {
            // Looked at first, since it is cheaper than to make sure of it.
            let is_alone = Arc::strong_count(&self.all[*place]) == 1;
            is_alone && Arc::get_mut(&mut self.all[*place]).is_some_and(|one| is_ready(one))
        })?;
        self.next = found + 1;
        Some(Arc::clone(&self.all[found]))
    }

    /// Keeps one that was made since none was free. It is the caller's for now.
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
    fn what_is_let_go_of_is_used_again_and_nothing_else() {
        let mut reuse = ReusePool::default();
        assert!(reuse.take(|_| true).is_none(), "there is none yet");
        let made: Vec<_> = (0..3).map(Arc::new).collect();
        made.iter().for_each(|one| reuse.keep(one));
        assert!(reuse.take(|_| true).is_none(), "somebody has each of them");
        let [first, second, third] = <[_; 3]>::try_from(made).unwrap();
        drop(second);
        let again = reuse.take(|_| true).unwrap();
        assert_eq!(*again, 1);
        assert!(reuse.take(|_| true).is_none(), "it is in use again");
        drop((first, third, again));
        // One behind the other, and what is not ready is passed over.
        assert_eq!(*reuse.take(|_| true).unwrap(), 2);
        assert_eq!(*reuse.take(|number| *number != 0).unwrap(), 1);
        assert!(reuse.take(|_| false).is_none());
        assert_eq!(reuse.len(), 3);
    }
}
