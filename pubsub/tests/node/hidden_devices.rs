//! Topics on a device that some of their processes do not see, as `CUDA_VISIBLE_DEVICES` of
//! torchrun, vLLM and Slurm sets it.
//!
//! Each process sees device 0 or 1 only, or none: of the emulated devices or, if
//! `TEST_DEVICE` names one of CUDA, of the GPUs of the machine.
//!
//! In a pod, the device files of the other devices are missing as well: their memory is not mapped.

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

use gpu::{Device, DeviceName, Stream, emulated};
use pubsub::{
    DeliveryPath, ErrorKind, MemoryLocation, Node, NodeOptions, Publisher, Sample, Subscriber,
    Topic,
};
use pubsub::{Reliability, TopicSettings};
use testkit::children::{next_line, say, wait_for_end_of_input};
use transfer::{Admission, CopyService};

use crate::support::{ChildProcess, Gate, TIMEOUT, TestDir, options};

/// So long that a pool soon needs more pieces.
const LENGTH: u64 = 3 << 19;
const COUNT: u64 = 8;
const DEPTH: u32 = 8;

fn uses_cuda() -> bool {
    std::env::var("TEST_DEVICE").is_ok_and(|name| name.starts_with("cuda"))
}

fn has_two_devices() -> bool {
    !uses_cuda() || Device::count(gpu::Implementation::Cuda).is_ok_and(|count| count >= 2)
}

/// Starts a process that sees one device (`0` or `1`), or none (`none`), or all (`all`), or is in a
/// pod with one (`pod-0` or `pod-1`).
fn start(test_dir: &TestDir, device: &str, role: &str) -> ChildProcess {
    let visible = if device == "none" { "" } else { device };
    let environment = [("CUDA_VISIBLE_DEVICES", visible)];
    let environment = if uses_cuda() { &environment[..] } else { &[] };
    ChildProcess::start_in(environment, &format!("sees {device} {role}"), test_dir.path())
}

/// Hides the other devices from this process. Returns the name of its own.
fn see_only(device: &str) -> Option<DeviceName> {
    if device == "all" {
        return None;
    }
    let number = device.trim_start_matches("pod-").parse().ok();
    if uses_cuda() {
        return number.map(|_: u32| DeviceName::cuda(0));
    }
    if let Some(number) = number.filter(|_| device.starts_with("pod-")) {
        let apart = emulated::FaultConfig { are_peers: false, ..Default::default() };
        emulated::configure_faults(number, apart);
    }
    // Topics of host memory use this one, which a real process always sees.
    std::mem::forget(Device::open(DeviceName::emulated(0)).unwrap());
    (0..emulated::COUNT).for_each(|other| emulated::hide_device(other, number != Some(other)));
    number.map(DeviceName::emulated)
}

fn settings(memory: MemoryLocation) -> TopicSettings {
    let reliability = Reliability::Reliable;
    TopicSettings { memory, reliability, depth: DEPTH, largest: LENGTH, ..TopicSettings::default() }
}

/// Creates the topic on the device of this process, or waits until another process has.
fn open(node: &Node, how: &str, own: DeviceName) -> Topic {
    if how == "creates" {
        return node.topic("large", &settings(MemoryLocation::Device(own))).unwrap();
    }
    let end = Instant::now() + TIMEOUT;
    loop {
        match node.open("large") {
            Ok(topic) => return topic,
            Err(error) if error.kind() == ErrorKind::NotFound && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

fn message(number: u64) -> Vec<u8> {
    let mut bytes = vec![number as u8 + 1; LENGTH as usize];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// Publishes from the host.
fn publish(publisher: &Publisher) {
    for number in 0..COUNT {
        publisher.push(&message(number), TIMEOUT).unwrap();
    }
}

/// Publishes on a stream that waits: subscribers get the messages before they are written.
fn publish_on(publisher: &Publisher, device: &Device) {
    let (stream, uploads) = (device.stream().unwrap(), device.stream().unwrap());
    for number in 0..COUNT {
        let gate = Gate::new(device);
        gate.block(&stream);
        // The publisher may wait for the stream.
        let opener = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(5));
            gate.open();
        });
        let source = device.allocate(LENGTH).unwrap().whole();
        uploads.upload(&source, &message(number), TIMEOUT).unwrap();
        publisher.push_on(&stream, &source, TIMEOUT).unwrap();
        opener.join().unwrap();
    }
    stream.synchronize(TIMEOUT).unwrap();
}

fn read(subscriber: &mut Subscriber, path: DeliveryPath) {
    for number in 0..COUNT {
        let sample = subscriber.pull(TIMEOUT).unwrap();
        assert_eq!(sample.path(), path);
        assert!(sample.to_vec().unwrap() == message(number), "message {number} differs");
    }
}

/// Copies messages to memory of this process on a stream, and holds most of them: the pool grows.
fn read_on(subscriber: &mut Subscriber, device: &Device) {
    let stream: Stream = device.stream().unwrap();
    let mut held: VecDeque<Sample> = VecDeque::new();
    for number in 0..COUNT {
        let sample = subscriber.pull_on(&stream, TIMEOUT).unwrap();
        let own = device.allocate(LENGTH).unwrap().whole();
        stream.copy(&own, sample.slice()).unwrap();
        let mut bytes = vec![0; LENGTH as usize];
        stream.download(&own, &mut bytes, TIMEOUT).unwrap();
        assert!(bytes == message(number), "message {number} differs");
        held.push_back(sample);
        if held.len() as u32 == DEPTH - 2 {
            held.pop_front().unwrap().release_on(&stream).unwrap();
        }
    }
}

/// A child process that sees this device only.
pub(crate) fn enter(directory: &Path, device_name: &str, words: &[&str]) {
    let own = see_only(device_name);
    let join = || Node::join(NodeOptions { label: words.join(" "), ..options(directory) }).unwrap();
    match (words, own) {
        (["serves"], _) => {
            let node = join();
            say("ready");
            wait_for_end_of_input();
            drop(node);
        }
        // The same services as those of "fabricast node".
        (["serves-and-copies"], _) => {
            let node = join();
            let copies = CopyService::start(directory, Admission::own_user()).unwrap();
            say("ready");
            wait_for_end_of_input();
            drop((copies, node));
        }
        // Twice: from the host, and on a stream once the test says so.
        (["publishes", how], Some(own)) => {
            let (node, device) = (join(), Device::open(own).unwrap());
            say("ready");
            let topic = open(&node, how, own);
            let is_hidden =
                matches!(topic.settings().unwrap().memory, MemoryLocation::DeviceUuid(_));
            assert_eq!(is_hidden, *how == "opens");
            assert_eq!(topic.place().unwrap(), MemoryLocation::Device(own));
            let publisher = topic.publisher().unwrap();
            publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
            publish(&publisher);
            publisher.flush(TIMEOUT).unwrap();
            say("published");
            next_line();
            publish_on(&publisher, &device);
            publisher.flush(TIMEOUT).unwrap();
        }
        (["reads", how], Some(own)) => {
            let (node, device) = (join(), Device::open(own).unwrap());
            say("ready");
            let mut subscriber = open(&node, how, own).subscriber().unwrap();
            let is_copied = device_name.starts_with("pod-") && *how == "opens";
            let path = match is_copied {
                true => DeliveryPath::ServiceCopied,
                false => DeliveryPath::SharedMemory,
            };
            read(&mut subscriber, path);
            read_on(&mut subscriber, &device);
        }
        // The topic stays after the process that made it, but its pool cannot grow.
        (["outlives-the-creator"], Some(own)) => {
            let node = join();
            let topic = open(&node, "opens", own);
            // Named as this process sees it, it can be opened again.
            let same = node.topic("large", &topic.settings().unwrap()).unwrap();
            let own_device = settings(MemoryLocation::Device(own));
            let error = node.topic("large", &own_device).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::SettingsDiffer, "{error}");
            say("opened");
            next_line();
            let publisher = same.publisher().unwrap();
            let subscriber = topic.subscriber().unwrap();
            let error = loop {
                let pushed = publisher.push(&message(0), Duration::from_millis(300));
                if let Err(error) = pushed {
                    break error;
                }
            };
            assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
            assert!(error.to_string().contains("does not see the device"), "{error}");
            drop(subscriber);
        }
        (["needs-the-copy-service"], Some(_)) => {
            let error = join().open("large").unwrap_err().to_string();
            assert!(error.contains("Run \"fabricast node\" with access to all devices"), "{error}");
        }
        (["may-not-publish"], Some(_)) => {
            let error = join().open("large").unwrap().publisher().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NoDevice);
            assert!(error.to_string().contains("for subscribers only"), "{error}");
        }
        (["needs-a-device"], None) => {
            let node = join();
            let error = node.open("large").unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NoDevice);
            let text = error.to_string();
            assert!(text.contains("this process sees no device"), "{text}");
            assert!(text.contains("CUDA_VISIBLE_DEVICES"), "{text}");
        }
        _ => panic!("no role {words:?} of a process that sees {device_name}"),
    }
}

#[track_caller]
fn ready(child: &mut ChildProcess) {
    assert_eq!(child.line().as_deref(), Some("ready"));
}

/// The processes with the publisher and the subscriber, of which the first sees device 0, the other
/// device 1. The first one to join serves the node, unless it is served.
fn start_both(test_dir: &TestDir, creates: &str, first: &str) -> [ChildProcess; 2] {
    start_on(test_dir, creates, first, ["0", "1"])
}

fn start_on(
    test_dir: &TestDir,
    creates: &str,
    first: &str,
    [publishers, readers]: [&'static str; 2],
) -> [ChildProcess; 2] {
    let role = |name: &str| format!("{name} {}", if name == creates { "creates" } else { "opens" });
    let child = |(name, device)| {
        let mut child = start(test_dir, device, &role(name));
        ready(&mut child);
        child
    };
    let [publishes, reads] = [("publishes", publishers), ("reads", readers)];
    if first == "publishes" {
        [publishes, reads].map(child)
    } else {
        let [reads, publishes] = [reads, publishes].map(child);
        [publishes, reads]
    }
}

#[track_caller]
fn finish([mut publishes, mut reads]: [ChildProcess; 2]) {
    assert_eq!(publishes.line().as_deref(), Some("published"));
    publishes.say("go on");
    publishes.finish();
    reads.finish();
}

#[test]
fn each_process_sees_its_own_device_only() {
    if !has_two_devices() {
        testkit::skip!("only one GPU is available");
    }
    for creates in ["publishes", "reads"] {
        for first in ["publishes", "reads"] {
            let test_dir = TestDir::new();
            finish(start_both(&test_dir, creates, first));
        }
    }
}

/// The next service sees one of the devices, and not that of the topic in one of the rounds.
#[test]
fn service_sees_no_device_and_is_killed() {
    if !has_two_devices() {
        testkit::skip!("only one GPU is available");
    }
    for creates in ["publishes", "reads"] {
        let test_dir = TestDir::new();
        let mut service = start(&test_dir, "none", "serves");
        ready(&mut service);
        let [mut publishes, reads] = start_both(&test_dir, creates, "publishes");
        assert_eq!(publishes.line().as_deref(), Some("published"));
        service.kill();
        publishes.say("go on");
        publishes.finish();
        { reads }.finish();
    }
}

#[test]
fn pool_without_a_process_that_sees_its_device_does_not_grow() {
    if !has_two_devices() {
        testkit::skip!("only one GPU is available");
    }
    let test_dir = TestDir::new();
    let mut service = start(&test_dir, "none", "serves");
    ready(&mut service);
    let mut creator = start(&test_dir, "0", "publishes creates");
    ready(&mut creator);
    let mut other = start(&test_dir, "1", "outlives-the-creator");
    assert_eq!(other.line().as_deref(), Some("opened"));
    creator.kill();
    start(&test_dir, "none", "needs-a-device").finish();
    other.say("go on");
    other.finish();
}

/// The topic is on the device of its publisher; the copy service copies for the subscriber.
#[test]
fn pods_with_one_device_each_share_topics_by_the_copy_service() {
    if uses_cuda() {
        testkit::skip!("device files are not hidden here");
    }
    for first in ["publishes", "reads"] {
        let test_dir = TestDir::new();
        let mut service = start(&test_dir, "all", "serves-and-copies");
        ready(&mut service);
        finish(start_on(&test_dir, "publishes", first, ["pod-0", "pod-1"]));
        service.end();
    }
}

/// A copy of a publisher that dies would be written into a block of another one.
#[test]
fn publisher_that_cannot_map_the_topic_is_refused() {
    if uses_cuda() {
        testkit::skip!("device files are not hidden here");
    }
    let test_dir = TestDir::new();
    let mut service = start(&test_dir, "all", "serves-and-copies");
    ready(&mut service);
    let mut creator = start(&test_dir, "pod-0", "publishes creates");
    ready(&mut creator);
    let mut reader = start(&test_dir, "pod-1", "reads opens");
    ready(&mut reader);
    assert_eq!(creator.line().as_deref(), Some("published"));
    start(&test_dir, "pod-1", "may-not-publish").finish();
    creator.say("go on");
    creator.finish();
    reader.finish();
    service.end();
}

#[test]
fn topic_continues_with_the_next_copy_service() {
    if uses_cuda() {
        testkit::skip!("device files are not hidden here");
    }
    let test_dir = TestDir::new();
    let mut service = start(&test_dir, "all", "serves-and-copies");
    ready(&mut service);
    let both = start_on(&test_dir, "publishes", "publishes", ["pod-0", "pod-1"]);
    let [mut publishes, mut reads] = both;
    assert_eq!(publishes.line().as_deref(), Some("published"));
    service.kill();
    let mut next = start(&test_dir, "all", "serves-and-copies");
    ready(&mut next);
    publishes.say("go on");
    publishes.finish();
    reads.finish();
    next.end();
}

#[test]
fn pod_without_a_copy_service_is_told_what_to_run() {
    if uses_cuda() {
        testkit::skip!("device files are not hidden here");
    }
    let test_dir = TestDir::new();
    let mut service = start(&test_dir, "all", "serves");
    ready(&mut service);
    let mut creator = start(&test_dir, "pod-0", "publishes creates");
    ready(&mut creator);
    let mut reader = start(&test_dir, "0", "reads opens");
    ready(&mut reader);
    assert_eq!(creator.line().as_deref(), Some("published"));
    start(&test_dir, "pod-1", "needs-the-copy-service").finish();
    creator.kill();
    reader.kill();
    service.end();
}
