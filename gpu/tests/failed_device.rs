//! A device that fails. A separate program, so that no other test uses the device at the same
//! time.

use std::time::{Duration, Instant};

use gpu::{Device, ErrorKind, leaked_streams};

const TIMEOUT: Duration = Duration::from_secs(10);

#[test]
fn closing_a_stream_of_a_failed_device_fails_at_once() {
    let device = Device::open("emulated:1".parse().unwrap()).unwrap();
    let memory = device.allocate(4096).unwrap();
    let stream = device.stream().unwrap();
    gpu::emulated::fail_after(1, 0);
    stream.fill(&memory.whole(), 1).unwrap();
    let (start, leaked) = (Instant::now(), leaked_streams());
    assert_eq!(stream.close(TIMEOUT).unwrap_err().kind(), ErrorKind::DeviceFailed);
    assert!(start.elapsed() < TIMEOUT / 2 && leaked_streams() == leaked);
}
