//! One who is slow, and is evicted.

use ipc::Participant;

use super::{Scenario, fork};
use crate::World;

/// Points of an eviction that is left half done: those of its lock, and then the rest.
const HALF_EVICTED: u64 = 20;

impl World {
    /// One that has taken the first of two entries, and is slow to release it.
    pub(crate) fn be_slow(&self) {
        let queue = self.queue();
        let mut slow = queue.subscribe(&self.caller(self.survivor)).unwrap();
        for _ in 0..2 {
            let block = self.allocate(self.survivor, 100, 1);
            self.publish(self.survivor, block).unwrap();
        }
        assert_eq!(queue.take(&mut slow).unwrap().position, 0);
        *self.slow.borrow_mut() = Some(slow);
    }

    /// One in this name takes the first entry, and then so many come that it is out of reach.
    pub(crate) fn hold_what_gets_out_of_reach(&self, who: Participant) {
        let queue = self.queue();
        let mut before = queue.subscribe_as(&self.caller(self.survivor), who).unwrap();
        for _ in 0..80 {
            let block = self.allocate(self.survivor, 64, 1);
            self.publish(self.survivor, block).unwrap();
            if before.position() == 0 {
                queue.take(&mut before).unwrap();
            }
        }
    }

    pub(crate) fn evict_the_slow(&self, me: Participant) {
        let seat = self.slow.borrow().as_ref().unwrap().seat();
        self.queue().evict(&self.caller(me), seat, |entry| self.dispose(me, entry)).unwrap();
    }

    /// Evicted, or not at all, and then it goes on.
    pub(crate) fn check_the_slow(&self, what: &str) {
        let Some(mut slow) = self.slow.take() else { return };
        let (queue, seat) = (self.queue(), slow.seat());
        if queue.is_subscribed(&slow) {
            assert!(queue.seats().any(|other| other == seat), "{what}");
            assert_eq!(queue.backlog_of(seat), (1, 1), "{what}");
            assert_eq!(queue.take(&mut slow).unwrap().position, 1, "{what}");
            self.release(self.survivor, &slow, 1);
            self.release(self.survivor, &slow, 0);
        } else {
            assert_eq!((queue.backlog_of(seat), queue.take(&mut slow)), ((0, 0), None), "{what}");
            assert!(queue.seats().all(|other| other.place() != seat.place()), "{what}");
        }
        let caller = self.caller(self.survivor);
        // Its place is nobody else's as long as it has not ended.
        let other = queue.subscribe(&caller).unwrap();
        assert_ne!(other.place(), slow.place(), "{what}");
        let nothing = |entry| panic!("{what}: {entry:?} was still its own");
        queue.unsubscribe(&caller, &slow, nothing).unwrap();
        let next = queue.subscribe(&caller).unwrap();
        assert_eq!(next.place(), slow.place(), "{what}");
    }
}

/// What another left half done is an eviction, and the victim comes to the lock next.
pub(crate) fn half_evicted() -> impl Iterator<Item = (String, Scenario)> {
    (0..HALF_EVICTED).map(|point| {
        let scenario = move |world: &World| -> Box<dyn FnOnce(&World)> {
            let dead = Participant::new(200, 1).unwrap();
            world.be_slow();
            let child = fork(&world.crash, point, || world.evict_the_slow(dead));
            let was_killed = child.was_killed();
            assert!(was_killed, "there are no {point} points to be left half evicted at");
            Box::new(move |world| {
                let (queue, caller) = (world.queue(), world.caller(world.victim));
                let subscriber = queue.subscribe(&caller).unwrap();
                queue
                    .unsubscribe(&caller, &subscriber, |entry| {
                        world.dispose(world.victim, entry);
                    })
                    .unwrap();
            })
        };
        (
            format!("finish what was evicted by half at point {point}"),
            Box::new(scenario) as Scenario,
        )
    })
}
