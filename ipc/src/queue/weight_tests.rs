//! Entries that count as several when they are dropped.

use super::*;
use crate::participant::{Caller, Immortal};
use crate::words::LocalWords;

#[test]
fn one_that_is_dropped_counts_for_those_that_it_would_have_told_of() {
    let setup = QueueSetup { depth: 2, when_full: WhenFull::DropOldest };
    let words = LocalWords::zeroed(Queue::<LocalWords, 1>::words_needed(setup));
    let queue = Queue::format(words, setup).unwrap().weighing(|[value]| value);
    let me = Caller::new(Participant::new(0, 1).unwrap(), &Immortal);
    let mut reader = queue.subscribe(&me).unwrap();
    for value in [1, 5, 1, 7, 1] {
        queue.publish(&me, [value], |_| {}).unwrap();
    }
    let first = queue.take(&mut reader).unwrap();
    assert_eq!((first.entry, first.missed), ([7], 7));
    assert_eq!(queue.take(&mut reader).unwrap().missed, 0);
    assert_eq!((reader.missed(), queue.dropped()), (7, 3));
}
