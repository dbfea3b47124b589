//! A halted subscription: it keeps its entries, and gets no more.

use super::*;
use crate::participant::{AlwaysAlive, Caller};
use crate::words::LocalWords;

type Short = Queue<LocalWords, 1>;

#[test]
fn halted_subscription_keeps_its_entries_and_gets_no_more() {
    for overflow_policy in
        [OverflowPolicy::Reject, OverflowPolicy::DropOldest, OverflowPolicy::DropNewest]
    {
        let setup = QueueSetup { depth: 4, max_held: 4, overflow_policy };
        let words = LocalWords::zeroed(Short::required_words(setup));
        let queue = Short::format(words, setup).unwrap();
        let me = Caller::new(Participant::new(0, 1).unwrap(), &AlwaysAlive);
        let role = Participant::role(0).unwrap();
        let mut halted = queue.subscribe_as(&me, role).unwrap();
        let other = queue.subscribe(&me).unwrap();
        for value in 0..3 {
            queue.publish(&me, [value], |_| {}).unwrap();
        }
        assert_eq!(queue.take(&mut halted).unwrap().entry, [0]);
        let unreleased = |from| {
            let mut found = Vec::new();
            queue.for_each_unreleased(halted.subscription_id(), from, |_, entry| {
                found.push(entry[0])
            });
            found
        };
        // A subscription of another participant is unaffected.
        queue.halt(&me, Participant::role(1).unwrap()).unwrap();
        assert_eq!((queue.subscribers(), unreleased(0)), (2, vec![0, 1, 2]));
        // A second call does no harm.
        (0..2).for_each(|_| queue.halt(&me, role).unwrap());
        assert_eq!(queue.publish(&me, [3], |_| {}).unwrap().readers, 1);
        assert_eq!((unreleased(0), unreleased(1)), (vec![0, 1, 2], vec![1, 2]));
        // It may still release its entries; it cannot be resumed, and its slot is not free.
        assert_eq!(queue.take(&mut halted).unwrap().entry, [1]);
        queue.release(&halted, 0);
        assert!(queue.resume(&me, role, |_| {}).unwrap().is_none());
        let next = queue.subscribe(&me).unwrap();
        assert_ne!(next.index(), halted.index());
        // The last subscription that releases an entry disposes of it.
        let mut disposed = Vec::new();
        queue
            .end_subscription(&me, other.subscription_id(), |entry| disposed.push(entry[0]))
            .unwrap();
        queue.remove_participant(&me, role, |entry| disposed.push(entry[0])).unwrap();
        disposed.sort_unstable();
        disposed.dedup();
        assert_eq!(disposed, [0, 1, 2, 3]);
        assert_eq!(queue.subscribe_as(&me, role).unwrap().index(), halted.index());
    }
}
