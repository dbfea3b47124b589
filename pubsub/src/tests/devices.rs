//! Messages in the memory of devices.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use gpu::{Device, DeviceName, stand_in};

use super::*;
use crate::MemoryPlace;

/// Of which others in this process have to be patient.
const SLOW: u32 = 1;
/// Held by who tells it to be slow, or to fail.
pub(super) static MISBEHAVING: Mutex<()> = Mutex::new(());

#[test]
fn what_a_device_still_writes_to_is_nobody_elses() {
    let _alone = MISBEHAVING.lock().unwrap_or_else(PoisonError::into_inner);
    let name = DeviceName::stand_in(SLOW);
    let home = Home::new(&TopicSettings { memory: MemoryPlace::Device(name), ..settings() });
    home.clerk.grow(home.here.id(), 1 << 20);
    let publisher = home.publisher();
    let from = Device::open(name).unwrap().allocate(4096).unwrap();
    let delay = Duration::from_secs(4);
    stand_in::behave(SLOW, stand_in::Behaviour { delay, ..Default::default() });
    let mut loan = publisher.loan(4096, FAR).unwrap();
    let error = loan.copy(&from.whole(), SOON).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    stand_in::behave(SLOW, stand_in::Behaviour::default());
    // Neither is it published, nor given back, as long as it is written to.
    assert_eq!(loan.publish(FAR).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    home.here.free_what_is_done(&home.caller());
    assert_eq!(home.blocks_taken(), 1);
    let end = Instant::now() + FAR;
    while home.blocks_taken() > 0 {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(10));
        home.here.free_what_is_done(&home.caller());
    }
    publisher.push_slice(&from.whole(), FAR).unwrap();
}

#[test]
fn from_a_device_to_the_host_one_stream_is_enough() {
    let home = Home::new(&settings());
    let (mut subscriber, publisher) = (home.subscriber(), home.publisher());
    for (number, byte) in [(0, 7), (0, 8), (1, 9)] {
        let device = Device::open(DeviceName::stand_in(number)).unwrap();
        let from = device.allocate(3 << 20).unwrap();
        let part = from.slice(0, u64::from(byte) * 1000).unwrap();
        let stream = device.stream().unwrap();
        stream.fill(&part, byte).unwrap();
        stream.synchronize(FAR).unwrap();
        publisher.push_slice(&part, FAR).unwrap();
        let sample = subscriber.pull(FAR).unwrap();
        assert_eq!(sample.to_vec().unwrap(), vec![byte; usize::from(byte) * 1000]);
    }
}
