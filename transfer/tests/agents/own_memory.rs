//! Memory of callers: vectors, and memory of other libraries.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu::{Block, Device};
use transfer::path::{Operation, Path, Policy};
use transfer::{Agent, AgentOptions, HostBuffer, Rights};

use crate::common::{TIMEOUT, alone};
use crate::fixture::{AgentFixture, blocks_of, with_rails};
use crate::rails::tcp;

const LENGTH: usize = 1 << 20;

fn agent(label: &str, is_remote: bool) -> Agent {
    let options = AgentOptions::new(label);
    let remote_options = |options: AgentOptions| with_rails(options.force_remote(), tcp(), 1);
    Agent::start(if is_remote { remote_options(options) } else { options }).unwrap()
}

/// Put and get, by a fabric and within the process; then the caller gets the vector back.
#[test]
fn vectors_are_transferred_and_returned() {
    let _alone = alone();
    for (is_remote, path) in [(true, Path::FabricDirect), (false, Path::SameProcess)] {
        let (mut here, there) = (agent("here", is_remote), agent("there", is_remote));
        let bytes: Vec<u8> = (0..LENGTH).map(|at| (at * 7) as u8).collect();
        let address = bytes.as_ptr().addr();
        let (buffer, remote_buffer) = (
            HostBuffer::from_vec(bytes.clone()).unwrap(),
            HostBuffer::from_vec(vec![0; LENGTH]).unwrap(),
        );
        assert_ne!(buffer.address() as usize, address, "the address of the clone");
        let local = here.register(&buffer, Rights::ALL).unwrap();
        let remote = there.register(&remote_buffer, Rights::ALL).unwrap();
        let peer = here.connect(&there.card().encode().unwrap(), TIMEOUT).unwrap();
        let descriptor = remote.descriptor().encode().unwrap();
        let route = here.join(peer, &local, &descriptor, &Policy::default(), TIMEOUT).unwrap();
        assert_eq!(route.path(), path, "{}", route.choice());
        let put = here.put_all(&route, None).unwrap();
        here.wait(put, TIMEOUT).unwrap();
        let mut received = vec![0; LENGTH];
        remote_buffer.read(0, &mut received).unwrap();
        assert!(received == bytes, "wrong bytes arrived");
        buffer.write(0, &vec![0; LENGTH]).unwrap();
        let get = here.get_all(&route, None).unwrap();
        here.wait(get, TIMEOUT).unwrap();

        let buffer = buffer.into_vec().unwrap_err(); // its region has a handle
        drop(route);
        here.close(TIMEOUT).unwrap();
        there.close(TIMEOUT).unwrap();
        drop((local, remote));
        assert!(buffer.into_vec().unwrap() == bytes);
        assert!(remote_buffer.into_vec().unwrap() == bytes);
    }
}

/// Also if a rail caches its registration: that ends when no one else uses the memory.
#[test]
#[allow(unsafe_code)]
fn owner_of_memory_is_dropped_with_its_last_use() {
    let _alone = alone();
    for is_remote in [true, false] {
        let options = AgentOptions::new("here").always_register_local();
        let options =
            if is_remote { with_rails(options.force_remote(), tcp(), 1) } else { options };
        let (mut here, there) = (Agent::start(options).unwrap(), agent("there", is_remote));
        let mut memory = vec![5_u8; LENGTH];
        let (start, owner) = (memory.as_mut_ptr(), Arc::new(()));
        let weak = Arc::downgrade(&owner);
        // SAFETY: the vector is used by nothing else before the owner is dropped.
        let buffer = unsafe { HostBuffer::adopt(start, LENGTH, owner) }.unwrap();
        let local = here.register_local(&buffer).unwrap();
        let remote = there.register(HostBuffer::new(LENGTH as u64).unwrap(), Rights::ALL).unwrap();
        let peer = here.connect(&there.card().encode().unwrap(), TIMEOUT).unwrap();
        let descriptor = remote.descriptor().encode().unwrap();
        let route = here.join(peer, &local, &descriptor, &Policy::default(), TIMEOUT).unwrap();
        let put = here.put_all(&route, None).unwrap();
        here.wait(put, TIMEOUT).unwrap();
        drop((buffer, local));
        std::thread::sleep(Duration::from_millis(300));
        assert!(weak.upgrade().is_some(), "the route uses it");
        drop(route);
        let end = Instant::now() + TIMEOUT;
        while weak.upgrade().is_some() {
            assert!(Instant::now() < end, "nothing uses it");
            here.progress();
            std::thread::sleep(Duration::from_millis(1));
        }
        memory.fill(0);
    }
}

/// A caller that frees memory after a withdrawal and the drop of its handles needs no later call.
#[test]
#[allow(unsafe_code)]
fn withdrawn_memory_is_released_without_another_call() {
    let _alone = alone();
    let mut fixture = AgentFixture::open_with_rails(tcp(), 1);
    let role = format!("shared by {} 1: shared", tcp());
    let peer = fixture.peer_process(&role, &[]);
    let mut memory = vec![5_u8; LENGTH];
    for policy in ["=cuda-ipc", "=host-staged", "=fabric-staged"] {
        for is_one_block in [true, false] {
            let owner = Arc::new(());
            let weak = Arc::downgrade(&owner);
            // SAFETY: the vector is used by nothing else before the owner is dropped.
            let buffer = unsafe { HostBuffer::adopt(memory.as_mut_ptr(), LENGTH, owner) }.unwrap();
            let agent = &mut fixture.agent;
            let local = agent.register(&buffer, Rights::ALL).unwrap();
            let policy: Policy = policy.parse().unwrap();
            let joined = agent.join(peer.peer, &local, &peer.descriptor, &policy, TIMEOUT);
            let route = joined.unwrap();
            let path = route.path();
            let length = LENGTH as u64;
            let blocks = match is_one_block {
                true => vec![Block { to: 0, from: 0, length }],
                false => blocks_of(16 << 10).into_iter().filter(|it| it.to < length).collect(),
            };
            for operation in [Operation::Put, Operation::Get] {
                let token = match operation {
                    Operation::Put => agent.put(&route, &blocks, None),
                    Operation::Get => agent.get(&route, &blocks, None),
                }
                .unwrap();
                loop {
                    match agent.test(token) {
                        Some(outcome) => break assert!(outcome.is_ok()),
                        None => std::thread::yield_now(),
                    }
                }
            }
            drop(route);
            agent.withdraw(&local, TIMEOUT).unwrap();
            drop((local, buffer));
            // The thread of an emulated device may just end the copy.
            let end = Instant::now() + Duration::from_secs(2);
            while weak.strong_count() > 0 {
                assert!(Instant::now() < end, "{path}, one block: {is_one_block}");
                std::thread::sleep(Duration::from_millis(1));
            }
            memory.fill(0);
        }
    }
    fixture.end(peer);
}

#[test]
#[allow(unsafe_code)]
fn memory_by_a_pointer_stays_with_the_caller() {
    let _alone = alone();
    let (mut here, there) = (agent("here", true), agent("there", true));
    let mut memory = vec![5_u8; LENGTH];
    let start = memory.as_mut_ptr();
    // SAFETY: the vector outlives both agents, and is used by nothing else before they are closed.
    let buffer = unsafe { HostBuffer::from_pointer(start, LENGTH) }.unwrap();
    let remote = there.register(&buffer, Rights::ALL).unwrap();
    let local = here.register(HostBuffer::new(LENGTH as u64).unwrap(), Rights::ALL).unwrap();
    let peer = here.connect(&there.card().encode().unwrap(), TIMEOUT).unwrap();
    let descriptor = remote.descriptor().encode().unwrap();
    let route = here.join(peer, &local, &descriptor, &Policy::default(), TIMEOUT).unwrap();
    let put = here.put_all(&route, None).unwrap();
    here.wait(put, TIMEOUT).unwrap();
    drop(route);
    here.close(TIMEOUT).unwrap();
    there.close(TIMEOUT).unwrap();
    drop((local, remote));
    let buffer = buffer.into_vec().unwrap_err();
    assert_eq!(buffer.length(), LENGTH as u64);
    drop(buffer);
    assert!(memory == vec![0; LENGTH]);
}

/// A device of this process copies from and to it.
#[test]
fn device_reaches_own_memory() {
    let _alone = alone();
    let (mut here, there) = (agent("here", false), agent("there", false));
    let device = Device::open("emulated:0".parse().unwrap()).unwrap();
    let memory = device.allocate_shared(LENGTH as u64, &[]).unwrap();
    let buffer = HostBuffer::from_vec(vec![9; LENGTH]).unwrap();
    let local = here.register(&buffer, Rights::ALL).unwrap();
    let remote = there.register(&memory, Rights::ALL).unwrap();
    let peer = here.connect(&there.card().encode().unwrap(), TIMEOUT).unwrap();
    let descriptor = remote.descriptor().encode().unwrap();
    let route = here.join(peer, &local, &descriptor, &Policy::default(), TIMEOUT).unwrap();
    let put = here.put_all(&route, None).unwrap();
    here.wait(put, TIMEOUT).unwrap();
    let mut received = vec![0; LENGTH];
    let range = memory.slice(0, LENGTH as u64).unwrap();
    device.stream().unwrap().download(&range, &mut received, TIMEOUT).unwrap();
    assert!(received == vec![9; LENGTH]);
}

#[test]
fn empty_vector_is_refused() {
    assert!(HostBuffer::from_vec(Vec::new()).is_err());
}
