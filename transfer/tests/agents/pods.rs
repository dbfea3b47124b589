//! Pods with one GPU each, on emulated devices: processes of other users, without capabilities, in
//! namespaces of their own, that have one directory in common.

use std::os::unix::fs::PermissionsExt;
use std::path::Path as FilePath;
use std::process::{Command, Stdio};
use std::time::Duration;

use gpu::{Block, Device, emulated};
use transfer::path::{Path, Policy};
use transfer::{
    Admission, Agent, AgentCard, AgentOptions, CopyService, Event, HostBuffer, Notice, Rights,
};

use crate::common::{ChildProcess, LENGTH, TIMEOUT, alone, start};
use crate::fixture::{fill, read, sum, sum_of, write};

const WHOLE: [Block; 1] = [Block { to: 0, from: 0, length: LENGTH }];
/// The users of the service and of two pods.
const USERS: [u32; 3] = [4711, 4712, 4713];

/// The program of a process as it runs in a pod: with its own namespaces and user, without
/// capabilities, which it cannot get back.
fn pod(user: u32) -> Vec<String> {
    let namespaces =
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--ipc", "--net"];
    let ids = [format!("--reuid={user}"), format!("--regid={user}")];
    let no_rights = ["--clear-groups", "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"];
    let mut words: Vec<_> = namespaces.map(str::to_owned).to_vec();
    words.push("setpriv".to_owned());
    words.extend(ids);
    words.extend(no_rights.map(str::to_owned));
    words.push("--".to_owned());
    words
}

fn everyone() -> Admission {
    Admission { users: USERS.to_vec(), groups: Vec::new() }
}

fn wait_for(path: &FilePath) {
    while !path.exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The pod of the service, which sees all devices.
pub fn service(directory: &FilePath) {
    let _service = CopyService::start(directory, everyone()).unwrap();
    write(&directory.join("serves"), b"");
    wait_for(&directory.join("end"));
}

/// This process sees one device only, and its driver maps no memory of another one.
fn only_device(number: u32) -> Device {
    emulated::hide_device(1 - number, true);
    let apart = emulated::FaultConfig { are_peers: false, ..Default::default() };
    emulated::configure_faults(number, apart);
    Device::open(gpu::DeviceName { implementation: gpu::Implementation::Emulated, number }).unwrap()
}

fn agent(label: &str, directory: &FilePath) -> Agent {
    let options = AgentOptions::new(label).directory(directory).admission(everyone());
    Agent::start(options).unwrap()
}

/// The pod that owns a region.
pub fn owner(directory: &FilePath) {
    let device = only_device(1);
    let mut agent = agent("decode", directory);
    let memory = device.allocate_shared(LENGTH, &[]).unwrap();
    fill(&memory, LENGTH, 50);
    let region = agent.register(&memory, Rights::ALL).unwrap();
    write(&directory.join("region"), &region.descriptor().encode().unwrap());
    write(&directory.join("card"), &agent.card().encode().unwrap());
    let first = loop {
        match agent.next_event(TIMEOUT).unwrap() {
            Event::Notice { notice, .. } => break notice.tag,
            // The service is no peer of the application.
            Event::Joined { label, .. } => assert_eq!(label, "prefill"),
            _ => {}
        }
    };
    // With the notice the data is there.
    assert_eq!(sum(&memory, LENGTH), sum_of(LENGTH, first));
    write(&directory.join("arrived"), b"");
    wait_for(&directory.join("end"));
}

/// The pod that puts and gets.
pub fn initiator(directory: &FilePath) {
    let device = only_device(0);
    let mut agent = agent("prefill", directory);
    let card = read(&directory.join("card"));
    let descriptor = read(&directory.join("region"));
    let peer = agent.connect(&card, TIMEOUT).unwrap();
    let memory = device.allocate_shared(LENGTH, &[]).unwrap();
    let host = HostBuffer::new(LENGTH).unwrap();
    let device_region = agent.register_local(&memory).unwrap();
    let host_region = agent.register_local(&host).unwrap();
    let policy = Policy::default();
    for region in [&device_region, &host_region] {
        let route = agent.join(peer, region, &descriptor, &policy, TIMEOUT).unwrap();
        assert_eq!(route.path(), Path::ServiceCopied, "{}", route.choice());
        let token = agent.get(&route, &WHOLE, None).unwrap();
        agent.wait(token, TIMEOUT).unwrap();
    }
    assert_eq!(sum(&memory, LENGTH), sum_of(LENGTH, 50));
    let mut bytes = vec![0; LENGTH as usize];
    host.read(0, &mut bytes).unwrap();
    assert_eq!(gpu::checksum(&bytes), sum_of(LENGTH, 50));
    fill(&memory, LENGTH, 77);
    let route = agent.join(peer, &device_region, &descriptor, &policy, TIMEOUT).unwrap();
    let token = agent.put(&route, &WHOLE, Some(Notice::new(77, b"").unwrap())).unwrap();
    agent.wait(token, TIMEOUT).unwrap();
    wait_for(&directory.join("arrived"));
    write(&directory.join("end"), b"");
}

#[test]
fn pods_with_one_gpu_each_copy_by_the_service() {
    let _alone = alone();
    let wrappers = USERS.map(pod);
    let wrapper = |at: usize| wrappers[at].iter().map(String::as_str).collect::<Vec<_>>();
    let first = wrapper(0);
    let works = Command::new(first[0]).args(&first[1..]).arg("true").stderr(Stdio::null()).status();
    if !works.is_ok_and(|status| status.success()) {
        testkit::skip!("namespaces and users cannot be created here");
    }
    let name = format!("fabricast-pods-{}", std::process::id());
    let directory = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&directory).unwrap();
    // As the host's directory that all pods mount.
    std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o1777)).unwrap();
    let mut service = start("pod of the service", &directory, &wrapper(0), None);
    read(&directory.join("serves"));
    let mut pods: Vec<ChildProcess> = [("pod of the owner", 1), ("pod of the initiator", 2)]
        .map(|(role, at)| start(role, &directory, &wrapper(at), None))
        .into();
    pods.iter_mut().for_each(ChildProcess::finish);
    service.finish();
    let _ = std::fs::remove_dir_all(&directory);
}

/// Containers may mount the directory at different paths: the name of the socket is enough.
#[test]
fn peer_in_a_directory_that_is_mounted_elsewhere_is_found() {
    let _alone = alone();
    let mut fixture = crate::fixture::AgentFixture::open();
    let peer = fixture.peer_process("shared", &[]);
    let card = AgentCard::decode(&peer.card).unwrap();
    let name = card.socket.as_deref().unwrap().file_name().unwrap();
    let elsewhere = FilePath::new("/run/another-mount").join(name);
    let card = AgentCard { socket: Some(elsewhere), ..card.clone() };
    let found = fixture.agent.connect(&card.encode().unwrap(), TIMEOUT).unwrap();
    assert_eq!(fixture.agent.locality(found), Some(&transfer::path::Locality::SameMachine));
    fixture.agent.disconnect(found, TIMEOUT).unwrap();
    fixture.end(peer);
}
