//! A slow subscriber, and its eviction.

use ipc::Participant;

use super::{Scenario, fork};
use crate::Fixture;

/// Kill points of an eviction that is left incomplete: those of its lock, and then the rest.
const HALF_EVICTED: u64 = 26;
/// Likewise of the end of a subscription.
const HALF_ENDED: u64 = 20;

impl Fixture {
    /// A subscriber that has taken the first of two entries, and releases it slowly.
    pub(crate) fn hold_one_entry(&self) {
        let queue = self.queue();
        let mut slow = queue.subscribe(&self.caller(self.survivor)).unwrap();
        for _ in 0..2 {
            let block = self.allocate(self.survivor, 100, 1);
            self.publish(self.survivor, block).unwrap();
        }
        assert_eq!(queue.take(&mut slow).unwrap().position, 0);
        *self.slow.borrow_mut() = Some(slow);
    }

    /// A subscriber of this role takes the first entry, and then so many follow that it is out
    /// of reach.
    pub(crate) fn hold_until_out_of_reach(&self, role: Participant) {
        let queue = self.queue();
        let mut before = queue.subscribe_as(&self.caller(self.survivor), role).unwrap();
        for _ in 0..80 {
            let block = self.allocate(self.survivor, 64, 1);
            self.publish(self.survivor, block).unwrap();
            if before.position() == 0 {
                queue.take(&mut before).unwrap();
            }
        }
    }

    pub(crate) fn evict_slow_subscriber(&self, me: Participant) {
        let subscription_id = self.slow.borrow().as_ref().unwrap().subscription_id();
        self.queue()
            .evict(&self.caller(me), subscription_id, |entry| self.dispose(me, entry))
            .unwrap();
    }

    /// A subscriber holds as many entries as there are slots in the ring.
    pub(crate) fn hold_all(&self, me: Participant) {
        let (queue, caller) = (self.queue(), self.caller(me));
        let mut holds = queue.subscribe(&caller).unwrap();
        for _ in 0..2 {
            let block = self.allocate(me, 64, 1);
            self.publish(me, block).unwrap();
            queue.take(&mut holds).unwrap();
        }
    }

    /// The victim holds entries, and later ones get their slots of the ring.
    pub(crate) fn hold_while_others_read(&self, me: Participant) {
        let (queue, caller) = (self.queue(), self.caller(me));
        let mut holds = queue.subscribe(&caller).unwrap();
        let mut reads = queue.subscribe(&caller).unwrap();
        for number in 0..5 {
            let block = self.allocate(me, 64, 1);
            self.publish(me, block).unwrap();
            let taken = queue.take(&mut reads).unwrap();
            self.release(me, &reads, taken.position);
            let taken = queue.take(&mut holds).unwrap();
            if number >= 2 {
                self.release(me, &holds, taken.position);
            }
        }
        self.release(me, &holds, 0);
        let block = self.allocate(me, 64, 1);
        self.publish(me, block).unwrap();
    }

    /// Either evicted, or not at all and then able to continue.
    pub(crate) fn check_slow_subscriber(&self, what: &str) {
        let Some(mut slow) = self.slow.take() else { return };
        let (queue, subscription_id) = (self.queue(), slow.subscription_id());
        if queue.is_subscribed(&slow) {
            assert!(queue.subscription_ids().any(|other| other == subscription_id), "{what}");
            assert_eq!(queue.backlog_of(subscription_id), (1, 1), "{what}");
            assert_eq!(queue.take(&mut slow).unwrap().position, 1, "{what}");
            self.release(self.survivor, &slow, 1);
            self.release(self.survivor, &slow, 0);
        } else {
            // It keeps the entry that it holds.
            assert_eq!(
                (queue.backlog_of(subscription_id), queue.take(&mut slow)),
                ((0, 1), None),
                "{what}"
            );
            self.release(self.survivor, &slow, 0);
            assert!(
                queue.subscription_ids().all(|other| other.index() != subscription_id.index()),
                "{what}"
            );
        }
        let caller = self.caller(self.survivor);
        // Its slot is not reused as long as it has not ended.
        let other = queue.subscribe(&caller).unwrap();
        assert_ne!(other.index(), slow.index(), "{what}");
        let nothing = |entry| panic!("{what}: {entry:?} was still held");
        queue.end_subscription(&caller, slow.subscription_id(), nothing).unwrap();
        let next = queue.subscribe(&caller).unwrap();
        assert_eq!(next.index(), slow.index(), "{what}");
    }
}

/// A process leaves the end of its subscription incomplete, and the victim is the next lock owner.
pub(crate) fn half_ended() -> impl Iterator<Item = (String, Scenario)> {
    (0..HALF_ENDED).map(|point| {
        let scenario = move |fixture: &Fixture| -> Box<dyn FnOnce(&Fixture)> {
            let dead = Participant::new(200, 1).unwrap();
            fixture.hold_all(dead);
            let child = fork(&fixture.crash, point, || {
                let (queue, caller) = (fixture.queue(), fixture.caller(dead));
                let id = queue.subscriptions_of(dead).next().unwrap();
                queue.end_subscription(&caller, id, |entry| fixture.dispose(dead, entry)).unwrap();
            });
            assert!(child.was_killed(), "the end has fewer than {point} points");
            Box::new(move |fixture| fixture.clean_up_after(fixture.victim, dead))
        };
        (format!("finish an end left incomplete at point {point}"), Box::new(scenario) as Scenario)
    })
}

/// A process leaves an eviction incomplete, and the victim is the next lock owner.
pub(crate) fn half_evicted() -> impl Iterator<Item = (String, Scenario)> {
    (0..HALF_EVICTED).map(|point| {
        let scenario = move |fixture: &Fixture| -> Box<dyn FnOnce(&Fixture)> {
            let dead = Participant::new(200, 1).unwrap();
            fixture.hold_one_entry();
            let child = fork(&fixture.crash, point, || fixture.evict_slow_subscriber(dead));
            let was_killed = child.was_killed();
            assert!(was_killed, "the eviction has fewer than {point} points");
            Box::new(move |fixture| {
                let (queue, caller) = (fixture.queue(), fixture.caller(fixture.victim));
                let subscriber = queue.subscribe(&caller).unwrap();
                queue
                    .end_subscription(&caller, subscriber.subscription_id(), |entry| {
                        fixture.dispose(fixture.victim, entry);
                    })
                    .unwrap();
            })
        };
        (
            format!("finish an eviction left incomplete at point {point}"),
            Box::new(scenario) as Scenario,
        )
    })
}
