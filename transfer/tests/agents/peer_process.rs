//! What the other process of a test does.

use std::path::Path;
use std::time::{Duration, Instant};

use gpu::{Allocator, Block, Device, emulated};
use transfer::path::Policy;
use transfer::{Agent, AgentOptions, Buffer, Event, HostBuffer, Region, Rights};

use crate::common::{LENGTH, TIMEOUT};
use crate::fixture::{
    ANSWER, DROP_AGENT, END, FILL, PUT_SLOWLY, SLEEP, SUM, WITHDRAW, fill_buffer, notice,
    other_device, read, sum_of_buffer, with_cables, with_rails, write,
};
use crate::{cables, devices, orders};

/// Memory of its own, by role.
fn memory(role: &str, device: &Device) -> Buffer {
    match role {
        "shared" | "shared-read-only" => device.allocate_shared(LENGTH, &[]).unwrap().into(),
        "plain" => device.allocate(LENGTH).unwrap().into(),
        "host" | "host-read-only" => HostBuffer::new(LENGTH).unwrap().into(),
        // As PyTorch's expandable segments are, and not from the start of a piece.
        "pieces" => foreign(device, Allocator::Mapped { exportable: true }, 1, 512),
        // In the end of one and the beginning of another, which have far more.
        "long-pieces" => {
            let offset = 8 * device.properties().granularity + 512;
            foreign(device, Allocator::Mapped { exportable: true }, 10, offset)
        }
        "not-exportable" => foreign(device, Allocator::Mapped { exportable: false }, 1, 0),
        "pool" => foreign(device, Allocator::Pool, 1, 0),
        other => panic!("no role {other}"),
    }
}

/// In pieces of so many granules, `offset` bytes before the last three granules.
fn foreign(device: &Device, allocator: Allocator, granules: u64, offset: u64) -> Buffer {
    let granule = device.properties().granularity;
    let number = device.name().number;
    let pieces = vec![granules * granule; 150];
    let owner = emulated::ForeignMemory::new(number, &pieces, allocator).unwrap();
    let address = owner.address() + pieces.iter().sum::<u64>() - 3 * granule - offset;
    // SAFETY: inside of what the owner has, which goes along.
    #[allow(unsafe_code)]
    let memory = unsafe { device.adopt(address, LENGTH, owner) };
    memory.unwrap().into()
}

/// What it has, and what can be said of it.
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
    let directory = Path::new(directory);
    match role {
        "initiator" => return orders::initiator(directory),
        "owner" => return devices::owner(directory),
        _ => {}
    }
    let options = AgentOptions::new(role).directory(directory);
    // Also when the house is lost: it may come back.
    let mut stays = false;
    // "far by tcp 2: host", or "beside by" where memory is shared, too.
    let (options, role) =
        match role.split_once(": ").and_then(|(how, r)| Some((how.split_once(" by ")?, r))) {
            Some(((how, fabric), role)) => {
                let (provider, rails) = fabric.rsplit_once(' ').unwrap();
                let options = if how == "far" { options.force_remote() } else { options };
                // "far by cables 10.0.0.1,10.0.1.1"
                let options = if provider == "cables" {
                    stays = true;
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
    let mut has = TestMemory { buffer, region: None };
    has.fill(0);
    write(&directory.join("their-region"), &region.descriptor().encode().unwrap());
    has.region = Some(region);
    write(&directory.join("their-card"), &agent.card().encode().unwrap());
    let fixture = agent.connect(&read(&directory.join("card")), TIMEOUT).unwrap();
    // Of the house, too, which may come a second time and be turned away.
    let mut visits = 0;
    loop {
        let (tag, number) = match agent.next_event(3 * TIMEOUT).unwrap() {
            Event::Joined { .. } => {
                visits += 1;
                continue;
            }
            Event::Left { .. } => {
                visits -= 1;
                if visits == 0 && !stays {
                    return;
                }
                continue;
            }
            Event::Notice { notice, .. } => {
                (notice.tag, u64::from_le_bytes(notice.data().try_into().unwrap()))
            }
            _ => continue,
        };
        let answer = match tag {
            FILL => {
                has.fill(number);
                0
            }
            SUM => has.sum(),
            WITHDRAW => {
                if let Some(region) = has.region.take() {
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
                    write(&directory.join(name), &has.sum().to_le_bytes());
                }
                read(&directory.join("leave"));
                return;
            }
            PUT_SLOWLY => {
                let region = has.region.as_ref().unwrap();
                let descriptor = read(&directory.join("house-region"));
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
            // Behind a transfer: what it should have brought.
            _ => u64::from(has.sum() == number),
        };
        let end = Instant::now() + TIMEOUT;
        let token = loop {
            match agent.notify(fixture, notice(ANSWER, answer)) {
                Ok(token) => break token,
                // It is not there again yet.
                Err(error) => assert!(stays && Instant::now() < end, "{error}"),
            }
            agent.progress();
            std::thread::sleep(Duration::from_millis(5));
        };
        agent.wait(token, TIMEOUT).unwrap();
    }
}
