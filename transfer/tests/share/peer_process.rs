//! The other process of a test.

use std::path::Path;

use gpu::emulated;
use ipc::Channel;
use transfer::{
    Admission, Agent, AgentOptions, ErrorKind, HostBuffer, Rights, ShareClient, ShareService,
    SharedBuffer,
};

use crate::common::{LENGTH, TIMEOUT, device, next_device, numbers};
use crate::fixture::{check, fill, send, tensor};

testkit::child_entry!(enter);

/// A child that sleeps, with all that a fork leaves it.
#[allow(unsafe_code)]
fn fork_a_child() {
    // SAFETY: the child only sleeps, and ends.
    if unsafe { libc::fork() } == 0 {
        // SAFETY: as above.
        unsafe {
            libc::sleep(8);
            libc::_exit(0);
        }
    }
}

/// Memory of a device that this process does not see: it is used, but named as its owner names it.
fn use_memory_of_a_hidden_device(path: &Path) {
    let client = ShareClient::connect(path, TIMEOUT).unwrap();
    let owner_device = client.handle("numbers", TIMEOUT).unwrap().metadata.device;
    let opened = client.open("numbers", None, TIMEOUT).unwrap();
    let memory = opened.memory().unwrap();
    assert!(memory.is_of_hidden_device());
    assert_eq!(memory.device_uuid().unwrap(), owner_device);
    check(memory, 1);
    let error = SharedBuffer::new(memory, &tensor()).unwrap_err();
    assert!(error.to_string().contains("Share it where it was allocated"), "{error}");
    let directory = path.parent().unwrap();
    let agent = Agent::start(AgentOptions::new("opener").directory(directory)).unwrap();
    let region = agent.register(memory, Rights::ALL).unwrap();
    assert_eq!(region.descriptor().device, owner_device);
    let local_only = agent.register_local(memory).unwrap();
    assert_eq!(local_only.descriptor().device, owner_device);
    fill(memory, 7);
}

/// Hides the emulated devices from this process, except the named one.
fn hide_all_but(visible: Option<u32>) {
    (0..emulated::COUNT).for_each(|other| emulated::hide_device(other, visible != Some(other)));
}

fn enter(words: &[&str]) {
    let [role, path] = *words else { panic!("{words:?}") };
    let path = Path::new(path);
    match role {
        "reads-and-writes" => {
            let client = ShareClient::connect(path, TIMEOUT).unwrap();
            let opened = client.open("numbers", None, TIMEOUT).unwrap();
            assert_eq!(*opened.tensor(), tensor());
            assert_eq!(opened.address(), opened.memory().unwrap().address() + 4096);
            assert_eq!(opened.slice().unwrap().length(), 400_000);
            check(opened.memory().unwrap(), 1);
            // A peer device reads it too, if there is one.
            if let Some(peer) = next_device(&device()) {
                let seen = client.open("numbers", Some(&peer), TIMEOUT).unwrap();
                assert_eq!(seen.memory().unwrap().device(), opened.memory().unwrap().device());
                check(seen.memory().unwrap(), 1);
            }
            fill(opened.memory().unwrap(), 7);
        }
        "sees-another-device" => {
            hide_all_but(Some(1));
            use_memory_of_a_hidden_device(path);
        }
        "sees-no-device" => {
            hide_all_but(None);
            let client = ShareClient::connect(path, TIMEOUT).unwrap();
            let error = client.open("numbers", None, TIMEOUT).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NoSuchDevice);
            let text = error.to_string();
            assert!(text.contains("this process sees no device 6661"), "{text}");
            assert!(text.contains("let CUDA_VISIBLE_DEVICES name one"), "{text}");
        }
        // Sends its own memory, and is killed while it waits.
        "sends" => {
            let channel = Channel::connect(path, TIMEOUT).unwrap();
            let memory = device().allocate_shared(LENGTH, &[]).unwrap();
            fill(&memory, 3);
            let shared = SharedBuffer::new(&memory, &tensor()).unwrap();
            send(&shared, &channel).unwrap();
            std::thread::sleep(TIMEOUT);
        }
        "sends-plain" => {
            let channel = Channel::connect(path, TIMEOUT).unwrap();
            let memory = device().allocate(LENGTH).unwrap();
            fill(&memory, 3);
            let shared = SharedBuffer::new(&memory, &tensor()).unwrap();
            send(&shared, &channel).unwrap();
            let _ = channel.receive(TIMEOUT);
        }
        "is-not-served" => {
            let client = ShareClient::connect(path, TIMEOUT).unwrap();
            let error = client.handle("numbers", TIMEOUT).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
            // More connections than the limit; all are refused without delay.
            let channels: Vec<_> =
                (1..99).map(|_| Channel::connect(path, TIMEOUT).unwrap()).collect();
            let channel = Channel::connect(path, TIMEOUT).unwrap();
            let request = b"\x03\x00\x07numbers\x00";
            let _ = channel.send(request, &[], TIMEOUT);
            let reply = channel.receive(TIMEOUT).unwrap();
            assert_eq!(reply.bytes, [3, 5]);
            assert!(reply.descriptors.is_empty());
            drop(channels);
        }
        "reads-as-number-one" => {
            assert_eq!(std::process::id(), 1, "not the first of its namespace");
            let client = ShareClient::connect(path, TIMEOUT).unwrap();
            check(client.open("numbers", None, TIMEOUT).unwrap().memory().unwrap(), 3);
        }
        "serves" | "serves-as-number-one" | "serves-plain-as-number-one" => {
            assert!(role == "serves" || std::process::id() == 1, "not the first of its namespace");
            let memory = match role.contains("plain") {
                true => device().allocate(LENGTH),
                false => device().allocate_shared(LENGTH, &[]),
            };
            let memory = memory.unwrap();
            fill(&memory, 3);
            let admission = Admission { users: vec![0], groups: Vec::new() };
            let service = ShareService::start(path, admission).unwrap();
            service.publish("numbers", SharedBuffer::new(&memory, &tensor()).unwrap()).unwrap();
            std::thread::sleep(TIMEOUT);
        }
        // Shares memory by tokens in files: for everyone, and for one receiver.
        "shares" | "shares-with-child" => {
            let directory = path.parent().unwrap();
            let shared = || {
                let buffer = HostBuffer::new(LENGTH).unwrap();
                buffer.write(0, &numbers(LENGTH, 3)).unwrap();
                SharedBuffer::new(buffer, &tensor()).unwrap()
            };
            let share = transfer::share(directory, shared()).unwrap();
            let once = transfer::share(directory, shared()).unwrap().for_one_receiver().unwrap();
            if role == "shares-with-child" {
                fork_a_child();
            }
            std::fs::write(directory.join("once"), once).unwrap();
            std::fs::write(path.with_extension("part"), share.token()).unwrap();
            std::fs::rename(path.with_extension("part"), path).unwrap();
            std::thread::sleep(TIMEOUT);
        }
        other => panic!("no role {other}"),
    }
}
