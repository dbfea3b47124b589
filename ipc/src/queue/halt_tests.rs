//! A subscription that is halted: what it had stays, and nothing is added.

use super::*;
use crate::participant::{Caller, Immortal};
use crate::words::LocalWords;

type Short = Queue<LocalWords, 1>;

#[test]
fn who_is_halted_keeps_what_it_had_and_gets_no_more() {
    for when_full in [WhenFull::Refuse, WhenFull::DropOldest, WhenFull::DropNewest] {
        let setup = QueueSetup { depth: 4, when_full };
        let words = LocalWords::zeroed(Short::words_needed(setup));
        let queue = Short::format(words, setup).unwrap();
        let me = Caller::new(Participant::new(0, 1).unwrap(), &Immortal);
        let role = Participant::role(0).unwrap();
        let mut halted = queue.subscribe_as(&me, role).unwrap();
        let other = queue.subscribe(&me).unwrap();
        for value in 0..3 {
            queue.publish(&me, [value], |_| {}).unwrap();
        }
        assert_eq!(queue.take(&mut halted).unwrap().entry, [0]);
        let unreleased = |from| {
            let mut found = Vec::new();
            queue.each_unreleased_by(halted.seat(), from, |entry| found.push(entry[0]));
            found
        };
        // One who has nothing to do with it is left alone.
        queue.halt(&me, Participant::role(1).unwrap()).unwrap();
        assert_eq!((queue.subscribers(), unreleased(0)), (2, vec![0, 1, 2]));
        // Once more is harmless.
        (0..2).for_each(|_| queue.halt(&me, role).unwrap());
        assert_eq!(queue.publish(&me, [3], |_| {}).unwrap().readers, 1);
        assert_eq!((unreleased(0), unreleased(1)), (vec![0, 1, 2], vec![1, 2]));
        // It may still let go of what it had; nobody goes on for it, and its place is not free.
        assert_eq!(queue.take(&mut halted).unwrap().entry, [1]);
        queue.release(&halted, 0);
        assert!(queue.resume(&me, role, |_| {}).unwrap().is_none());
        let next = queue.subscribe(&me).unwrap();
        assert_ne!(next.place(), halted.place());
        // The last who lets go of something disposes of it.
        let mut disposed = Vec::new();
        queue.unsubscribe(&me, &other, |entry| disposed.push(entry[0])).unwrap();
        queue.expel(&me, role, |entry| disposed.push(entry[0])).unwrap();
        disposed.sort_unstable();
        disposed.dedup();
        assert_eq!(disposed, [0, 1, 2, 3]);
        assert_eq!(queue.subscribe_as(&me, role).unwrap().place(), halted.place());
    }
}
