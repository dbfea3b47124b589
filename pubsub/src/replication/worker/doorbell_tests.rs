use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use fabric::{CompletionQueue, Domain, EndpointKind, Query};

use super::*;

#[test]
fn data_published_before_an_announcement_is_found() {
    const LAST: u64 = 50_000;
    let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first().unwrap();
    let queue = CompletionQueue::open(&Domain::open(&offer).unwrap()).unwrap();
    let doorbell = Arc::new(WorkerDoorbell::new(queue.waker()));
    let announcer = Announcer::new(&doorbell, TopicKey(7));
    let published = AtomicU64::new(0);
    let end = Instant::now() + Duration::from_secs(60);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 1..=LAST {
                published.store(number, Ordering::Release);
                announcer.announce_waiter();
                // Some announcements then meet a list that was just taken.
                if number.is_multiple_of(64) {
                    std::thread::yield_now();
                }
            }
        });
        // Only an announcement triggers a read: a lost one of the last number hangs here.
        let (mut announced, mut found) = (Vec::new(), 0);
        while found < LAST {
            doorbell.take(&mut announced);
            for one in announced.drain(..) {
                assert_eq!(one.key, TopicKey(7));
                one.clear_listed();
                found = published.load(Ordering::Acquire);
            }
            assert!(Instant::now() < end, "{found} of {LAST} were found");
            std::thread::yield_now();
        }
    });
}
