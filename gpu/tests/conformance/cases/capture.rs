//! Operations while a framework captures a graph.
#![allow(unsafe_code)]

use cudarc::driver::sys;
use gpu::Device;

use super::{Skip, skip};
use crate::fixture::Fixture;

/// Emulates a framework: it captures its own stream in global mode from this thread.
struct Capture {
    context: sys::CUcontext,
    stream: sys::CUstream,
}

fn check(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

impl Capture {
    fn begin(device: &Device) -> Self {
        let number = device.name().number as i32;
        let (mut context, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the calls of a framework; space for the handles.
        unsafe {
            check(sys::cuDevicePrimaryCtxRetain(&raw mut context, number));
            check(sys::cuCtxPushCurrent_v2(context));
            check(sys::cuStreamCreate(&raw mut stream, 1));
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
            check(sys::cuStreamBeginCapture_v2(stream, mode));
        }
        Self { context, stream }
    }

    /// The capture must be valid.
    fn end(self, device: &Device) {
        let mut graph = std::ptr::null_mut();
        let mut popped = std::ptr::null_mut();
        // SAFETY: reverts the calls above.
        unsafe {
            check(sys::cuStreamEndCapture(self.stream, &raw mut graph));
            assert!(!graph.is_null(), "the capture was invalidated");
            check(sys::cuGraphDestroy(graph));
            check(sys::cuStreamDestroy_v2(self.stream));
            check(sys::cuCtxPopCurrent_v2(&raw mut popped));
            assert_eq!(popped, self.context, "the context of the caller must be current");
            check(sys::cuDevicePrimaryCtxRelease_v2(device.name().number as i32));
        }
    }
}

fn work(device: &Device) {
    let length = 4 << 20;
    let [from, to] = [0, 1].map(|_| device.allocate(length).unwrap());
    let shared = device.allocate_shared(length, &[]).unwrap();
    let stream = device.stream().unwrap();
    stream.fill(&from.whole(), 7).unwrap();
    stream.copy(&to.whole(), &from.whole()).unwrap();
    stream.copy(&shared.whole(), &to.whole()).unwrap();
    let point = stream.point().unwrap();
    // Queries repeatedly, from before it is reached.
    point.wait(gpu::DEFAULT_TIMEOUT).unwrap();
    let sum = stream.checksum(&shared.whole(), gpu::DEFAULT_TIMEOUT).unwrap();
    assert_eq!(sum, gpu::checksum(&vec![7; length as usize]));
    // While a stream waits for a word.
    let word = device.allocate(4).unwrap();
    let waits = device.stream().unwrap();
    stream.fill(&word.whole(), 0).unwrap();
    stream.synchronize(gpu::DEFAULT_TIMEOUT).unwrap();
    waits.wait_for_word(&word.whole(), 1).unwrap();
    let waiting = waits.point().unwrap();
    assert!(!waiting.is_done().unwrap());
    stream.copy(&from.whole(), &to.whole()).unwrap();
    stream.synchronize(gpu::DEFAULT_TIMEOUT).unwrap();
    assert!(!waiting.is_done().unwrap());
    stream.write_word(&word.whole(), 1).unwrap();
    waiting.wait(gpu::DEFAULT_TIMEOUT).unwrap();
    stream.close(gpu::DEFAULT_TIMEOUT).unwrap();
}

pub fn operations_do_not_disturb_a_graph_capture(fixture: &Fixture) -> Result<(), Skip> {
    if fixture.is_emulated() {
        return skip("an emulated device has no graphs");
    }
    let capture = Capture::begin(&fixture.first);
    std::thread::scope(|scope| {
        let elsewhere = scope.spawn(|| work(&fixture.first));
        work(&fixture.first);
        elsewhere.join().unwrap();
    });
    capture.end(&fixture.first);
    Ok(())
}
