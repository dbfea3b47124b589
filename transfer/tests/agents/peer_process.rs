//! The other process of a test.

use std::path::Path;
use std::time::{Duration, Instant};

use gpu::{Allocator, Block, Device, emulated};
use testkit::children::ForkedChild;
use transfer::path::Policy;
use transfer::{Agent, AgentOptions, Buffer, Event, HostBuffer, Region, Rights};

use crate::common::{LENGTH, TIMEOUT};
use crate::fixture::{
    DROP_AGENT, END, FILL, PUT_SLOWLY, REPLY, SLEEP, SUM, WITHDRAW, fill_buffer, notice,
    other_device, read, sum_of_buffer, with_cables, with_rails, write,
};
use crate::{cables, copy_service, devices, direct, limits, orders, pods, requests, staged};

/// Allocates memory according to a role.
fn memory(role: &str, device: &Device) -> Buffer {
    match role {
        "shared" | "shared-read-only" => device.allocate_shared(LENGTH, &[]).unwrap().into(),
        "plain" => device.allocate(LENGTH).unwrap().into(),
        "host" | "host-read-only" | "parent" => HostBuffer::new(LENGTH).unwrap().into(),
        // As PyTorch's expandable segments, with an offset in the first piece.
        "pieces" => foreign(device, Allocator::Mapped { exportable: true }, 1, 512),
        // At the end of one piece and the start of the next, which are much longer.
        "long-pieces" => {
            let offset = 8 * device.properties().granularity + 512;
            foreign(device, Allocator::Mapped { exportable: true }, 10, offset)
        }
        "not-exportable" => foreign(device, Allocator::Mapped { exportable: false }, 1, 0),
        "pool" => foreign(device, Allocator::Pool, 1, 0),
        "private-host" => HostBuffer::from_vec(vec![0; LENGTH as usize]).unwrap().into(),
        other => panic!("no role {other}"),
    }
}

/// Adopts memory in pieces of a number of granules, `offset` bytes before the last three granules.
fn foreign(device: &Device, allocator: Allocator, granules: u64, offset: u64) -> Buffer {
    let granule = device.properties().granularity;
    let number = device.name().number;
    let pieces = vec![granules * granule; 150];
    let owner = emulated::ForeignMemory::new(number, &pieces, allocator).unwrap();
    let address = owner.address() + pieces.iter().sum::<u64>() - 3 * granule - offset;
    // SAFETY: inside of the owner's memory, which is moved along.
    #[allow(unsafe_code)]
    let memory = unsafe { device.adopt(address, LENGTH, owner) };
    memory.unwrap().into()
}

/// The memory of this process, and its region.
struct TestMemory {
    buffer: Buffer,
    region: Option<Region>,
}

impl TestMemory {
    fn fill(&self, first: u64) {
        fill_buffer(&self.buffer, first);
    }

    fn sum(&self) -> u64 {
        sum_of_buffer(&self.buffer)
    }
}

testkit::child_entry!(enter);

fn enter(words: &[&str]) {
    let [role, directory] = *words else { panic!("{words:?}") };
    if let Some(role) = role.strip_prefix("inside ") {
        return cables::inside(role);
    }
    if let Some(what) = role.strip_prefix("limited ") {
        return limits::run(what, Path::new(directory));
    }
    if let Some(role) = role.strip_prefix("stager ") {
        return staged::stager(role, Path::new(directory));
    }
    let directory = Path::new(directory);
    match role {
        "initiator" => return orders::initiator(directory),
        "owner" => return devices::owner(directory),
        "copy service" => return copy_service::serve(directory),
        "owner of a region" => return copy_service::own(directory),
        "client of the copy service" => return copy_service::load(directory),
        "pod of the service" => return pods::service(directory),
        "pod of the owner" => return pods::owner(directory),
        "pod of the initiator" => return pods::initiator(directory),
        "setting of environment" => return direct::setting_of_environment(),
        _ => {}
    }
    let options = AgentOptions::new(role).directory(directory);
    // Also when the fixture is lost: it may reconnect.
    let mut survives_losses = false;
    // "remote by tcp 2: host", or "shared by …" with shared memory.
    let (options, role) =
        match role.split_once(": ").and_then(|(how, r)| Some((how.split_once(" by ")?, r))) {
            Some(((how, fabric), role)) => {
                let (provider, rails) = fabric.rsplit_once(' ').unwrap();
                let options = if how == "remote" { options.force_remote() } else { options };
                // "remote by cables 10.0.0.1,10.0.1.1"
                let options = if provider == "cables" {
                    survives_losses = true;
                    read(&directory.join("laid"));
                    let from: Vec<_> = rails.split(',').collect();
                    with_cables(options, cables::LOST_AFTER, &from)
                } else {
                    with_rails(options, provider, rails.parse().unwrap())
                };
                (options, role)
            }
            None => (options, role),
        };
    let mut agent = Agent::start(options).unwrap();
    let buffer = memory(role, &other_device());
    let rights = if role.ends_with("read-only") { Rights::READ } else { Rights::ALL };
    let region = agent.register(buffer.clone(), rights).unwrap();
    // A child such as a worker of a data loader inherits what the agent has open.
    let _child = role.starts_with("parent").then(|| {
        agent.connect(&read(&directory.join("card")), TIMEOUT).unwrap();
        ForkedChild::new(|| std::thread::sleep(Duration::from_secs(4)))
    });
    let mut own = TestMemory { buffer, region: None };
    own.fill(0);
    write(&directory.join("peer-region"), &region.descriptor().encode().unwrap());
    own.region = Some(region);
    write(&directory.join("peer-card"), &agent.card().encode().unwrap());
    let fixture = agent.connect(&read(&directory.join("card")), TIMEOUT).unwrap();
    // Counts sessions of the fixture, which may connect a second time and be refused.
    let mut sessions = 0;
    loop {
        let (tag, number) = match agent.next_event(3 * TIMEOUT).unwrap() {
            Event::Joined { .. } => {
                sessions += 1;
                continue;
            }
            Event::Left { .. } => {
                sessions -= 1;
                if sessions == 0 && !survives_losses {
                    return;
                }
                continue;
            }
            Event::Notice { notice, .. } => {
                let (sum, rest) = notice.data().split_first_chunk().unwrap();
                if notice.tag == requests::LONG {
                    let are_right = |byte: &(usize, &u8)| byte.0 as u8 == *byte.1 || *byte.1 == 9;
                    assert!((8..).zip(rest).all(|byte| are_right(&byte)));
                } else {
                    assert!(rest.is_empty());
                }
                (notice.tag, u64::from_le_bytes(*sum))
            }
            _ => continue,
        };
        let reply = match tag {
            FILL => {
                own.fill(number);
                0
            }
            SUM => own.sum(),
            WITHDRAW => {
                if let Some(region) = own.region.take() {
                    agent.withdraw(&region, TIMEOUT).unwrap();
                }
                0
            }
            SLEEP => {
                std::thread::sleep(3 * TIMEOUT);
                return;
            }
            END => return,
            DROP_AGENT => {
                drop(agent);
                for (name, after) in [("at-the-end", None), ("later", Some("look"))] {
                    after.map(|after| read(&directory.join(after)));
                    write(&directory.join(name), &own.sum().to_le_bytes());
                }
                read(&directory.join("leave"));
                return;
            }
            PUT_SLOWLY => {
                let region = own.region.as_ref().unwrap();
                let descriptor = read(&directory.join("fixture-region"));
                let policy = Policy::default();
                let route = agent.join(fixture, region, &descriptor, &policy, TIMEOUT).unwrap();
                let delay = Duration::from_millis(number);
                for number in 0..emulated::COUNT {
                    emulated::configure_faults(
                        number,
                        emulated::FaultConfig { delay, ..Default::default() },
                    );
                }
                let block = [Block { to: 0, from: 0, length: LENGTH }];
                let token = agent.put(&route, &block, None).unwrap();
                agent.forget(token);
                0
            }
            // After a transfer: the expected checksum.
            _ => u64::from(own.sum() == number),
        };
        let end = Instant::now() + TIMEOUT;
        let token = loop {
            match agent.notify(fixture, notice(REPLY, reply)) {
                Ok(token) => break token,
                // The fixture has not reconnected yet.
                Err(error) => assert!(survives_losses && Instant::now() < end, "{error}"),
            }
            agent.progress();
            std::thread::sleep(Duration::from_millis(5));
        };
        agent.wait(token, TIMEOUT).unwrap();
    }
}
