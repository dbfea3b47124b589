//! Messages in the memory of devices.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use gpu::{Device, DeviceName, emulated};

use super::*;
use crate::MemoryLocation;

/// An emulated device that other tests of this process must not use.
const SLOW: u32 = 1;
/// Locked by tests that configure faults.
pub(super) static MISBEHAVING: Mutex<()> = Mutex::new(());

#[test]
fn block_is_not_reused_while_a_device_writes_to_it() {
    let _alone = MISBEHAVING.lock().unwrap_or_else(PoisonError::into_inner);
    let name = DeviceName::emulated(SLOW);
    let node = TestNode::new(&TopicSettings { memory: MemoryLocation::Device(name), ..settings() });
    node.service.grow(node.local.id(), 1 << 20);
    let publisher = node.publisher();
    let from = Device::open(name).unwrap().allocate(4096).unwrap();
    let delay = Duration::from_secs(4);
    emulated::configure_faults(SLOW, emulated::FaultConfig { delay, ..Default::default() });
    let mut loan = publisher.loan(4096, TEST_TIMEOUT).unwrap();
    let error = loan.copy(&from.whole(), SHORT_TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    emulated::configure_faults(SLOW, emulated::FaultConfig::default());
    // It is neither published nor freed while the device writes to it.
    assert_eq!(loan.publish(TEST_TIMEOUT).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    node.local.free_completed(&node.caller());
    assert_eq!(node.blocks_allocated(), 1);
    let end = Instant::now() + TEST_TIMEOUT;
    while node.blocks_allocated() > 0 {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(10));
        node.local.free_completed(&node.caller());
    }
    publisher.push_slice(&from.whole(), TEST_TIMEOUT).unwrap();
}

#[test]
fn device_to_host_copies_share_one_stream() {
    let node = TestNode::new(&settings());
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    for (number, byte) in [(0, 7), (0, 8), (1, 9)] {
        let device = Device::open(DeviceName::emulated(number)).unwrap();
        let from = device.allocate(3 << 20).unwrap();
        let part = from.slice(0, u64::from(byte) * 1000).unwrap();
        let stream = device.stream().unwrap();
        stream.fill(&part, byte).unwrap();
        stream.synchronize(TEST_TIMEOUT).unwrap();
        publisher.push_slice(&part, TEST_TIMEOUT).unwrap();
        let sample = subscriber.pull(TEST_TIMEOUT).unwrap();
        assert_eq!(sample.to_vec().unwrap(), vec![byte; usize::from(byte) * 1000]);
    }
}
