//! Device memory that a fabric accesses itself, and the probes before it: with a provider inside of
//! this process that can lie about device memory, and with shm.

use std::process::Stdio;
use std::time::{Duration, Instant};

use fabric::emulated::Fault;
use fabric::{Domain, MemoryKind, Offer, registrations};
use gpu::{Device, DeviceName, Implementation, emulated};
use testkit::children::{self, Child};
use transfer::path::{DeviceFabric, Exportability, Operation, Path, Policy};
use transfer::{
    Agent, AgentOptions, Buffer, ErrorKind, Event, HostBuffer, MemoryAttributes, PeerId, Region,
    Rights, Route,
};

use crate::common::{LENGTH, TIMEOUT, alone, device, next_device};
use crate::fixture::{
    AgentFixture, FILL, blocks_of, fill_buffer, metric, notice, shm_with_devices, sum_of,
    sum_of_buffer,
};
use crate::rails::{COMPARE, WHOLE};

/// Kinds of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Host,
    /// Memory of `cudaMalloc`.
    Plain(u32),
    Mapped(u32),
}

use Kind::{Host, Mapped, Plain};

impl Kind {
    fn allocate(self) -> Buffer {
        let device = |number| Device::open(format!("emulated:{number}").parse().unwrap()).unwrap();
        match self {
            Host => HostBuffer::new(LENGTH).unwrap().into(),
            Plain(number) => device(number).allocate(LENGTH).unwrap().into(),
            Mapped(number) => device(number).allocate_shared(LENGTH, &[]).unwrap().into(),
        }
    }
}

/// An agent with one region.
struct Side {
    agent: Agent,
    region: Region,
}

fn start(label: &str, fabrics: &[Offer], setting: DeviceFabric) -> Agent {
    let options = AgentOptions::new(label).force_remote().device_fabric(setting);
    Agent::start(fabrics.iter().fold(options, AgentOptions::fabric)).unwrap()
}

impl Side {
    fn new(agent: Agent, kind: Kind) -> Self {
        let region = agent.register(kind.allocate(), Rights::ALL).unwrap();
        Self { agent, region }
    }

    fn replace(&mut self, kind: Kind) {
        self.region = self.agent.register(kind.allocate(), Rights::ALL).unwrap();
    }

    fn fill(&self, first: u64) {
        fill_buffer(self.region.buffer(), first);
    }

    fn sum(&self) -> u64 {
        sum_of_buffer(self.region.buffer())
    }

    /// Waits until a notice has arrived.
    fn await_notice(&mut self) {
        while !matches!(self.agent.next_event(TIMEOUT).unwrap(), Event::Notice { .. }) {}
    }

    /// Is the next event, if there is one within this time, a notice?
    fn has_notice(&mut self, timeout: Duration) -> bool {
        matches!(self.agent.next_event(timeout), Ok(Event::Notice { .. }))
    }
}

/// An initiator and its target.
struct Pair {
    here: Side,
    there: Side,
    peer: PeerId,
}

impl Pair {
    fn new(fault: Fault, kinds: (Kind, Kind)) -> Self {
        Self::with((fault, 1), (DeviceFabric::Probe, DeviceFabric::Probe), kinds)
    }

    /// With this number of rails, and the settings of both sides.
    fn with(
        (fault, rails): (Fault, usize),
        settings: (DeviceFabric, DeviceFabric),
        kinds: (Kind, Kind),
    ) -> Self {
        let offers = vec![fabric::emulated::offer(fault).unwrap(); rails];
        let mut here = Side::new(start("here", &offers, settings.0), kinds.0);
        let there = Side::new(start("there", &offers, settings.1), kinds.1);
        let peer = here.agent.connect(&there.agent.card().encode().unwrap(), TIMEOUT).unwrap();
        Self { here, there, peer }
    }

    fn join_with(&mut self, policy: &str) -> transfer::Result<Route> {
        let policy: Policy = policy.parse().unwrap();
        let descriptor = self.there.region.descriptor().encode().unwrap();
        self.here.agent.join(self.peer, &self.here.region, &descriptor, &policy, TIMEOUT)
    }

    fn join(&mut self) -> Route {
        self.join_with("").unwrap()
    }

    /// Puts with notices and gets: whole regions, and many blocks.
    fn exchange(&mut self, route: &Route) {
        for (round, blocks) in
            [(1, WHOLE.to_vec()), (2, blocks_of(10_001)), (3, blocks_of(1 << 20))]
        {
            self.here.fill(round);
            let on_arrival = Some(notice(1, 0));
            let token = self.here.agent.put(route, &blocks, on_arrival).unwrap();
            // With several rails the initiator sends the notice, when it makes progress.
            while !self.there.has_notice(Duration::from_millis(1)) {
                self.here.agent.progress();
            }
            assert_eq!(self.there.sum(), sum_of(LENGTH, round), "the target has wrong bytes");
            let done = self.here.agent.wait(token, TIMEOUT).unwrap();
            assert_eq!(done.path, Some(route.path()));
            self.there.fill(50 + round);
            let token = self.here.agent.get(route, &blocks, None).unwrap();
            self.here.agent.wait(token, TIMEOUT).unwrap();
            assert_eq!(self.here.sum(), sum_of(LENGTH, 50 + round), "wrong bytes were read");
        }
    }

    /// The reason why the path is not direct.
    fn reason(&self) -> String {
        let (local, remote) = ((&self.here.region).into(), self.there.region.descriptor().into());
        let policy = Policy::default();
        let choice = self.here.agent.explain(self.peer, Operation::Put, &local, &remote, &policy);
        reason(&choice.unwrap())
    }
}

fn reason(choice: &transfer::path::Choice) -> String {
    let direct = choice.candidates.iter().find(|it| it.path == Path::FabricDirect).unwrap();
    direct.verdict.to_string()
}

/// Joins, and the path must be staged for this reason, with right bytes.
fn must_be_staged(pair: &mut Pair, name: &str, starts: &str, ends: &str) {
    let route = pair.join();
    assert_eq!(route.path(), Path::FabricStaged, "{}", route.choice());
    assert_eq!(route.fallback(), Some(name), "{}", route.choice());
    let text = reason(route.choice());
    assert!(text.starts_with(starts) && text.ends_with(ends), "{text}");
    pair.exchange(&route);
    drop(route);
    // The same verdict before the next join, and without another probe.
    assert!(pair.reason().starts_with(starts), "{}", pair.reason());
    let before = registrations();
    let again = pair.join();
    assert_eq!(again.path(), Path::FabricStaged);
    assert_eq!(registrations(), before, "it was probed again");
    let refused = pair.join_with("=fabric-direct").unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NoPath);
    let text = refused.to_string();
    assert!(text.contains(&starts["refused: ".len()..]) && text.contains(ends), "{text}");
}

const DEVICE_PAIRS: [(Kind, Kind); 7] = [
    (Host, Plain(0)),
    (Plain(0), Host),
    (Plain(0), Plain(1)),
    (Mapped(1), Mapped(0)),
    (Host, Mapped(1)),
    (Mapped(0), Host),
    (Plain(1), Mapped(1)),
];

// --------------------------------------------------------------------- an honest provider

#[test]
fn honest_provider_reaches_device_memory_itself() {
    let _alone = alone();
    let mut pair = Pair::new(Fault::None, (Host, Host));
    for (local, remote) in DEVICE_PAIRS {
        pair.here.replace(local);
        pair.there.replace(remote);
        let before = pair.reason();
        assert_eq!(before, "refused: emulated was not probed with this memory yet; a join does it");
        let flushes = emulated::flushes(0) + emulated::flushes(1);
        let route = pair.join();
        assert_eq!(route.path(), Path::FabricDirect, "{local:?} {remote:?}: {}", route.choice());
        assert_eq!(route.fallback(), None);
        pair.exchange(&route);
        assert_eq!(pair.reason(), "taken");
        assert!(emulated::flushes(0) + emulated::flushes(1) > flushes + 3);
    }
}

#[test]
fn device_memory_is_split_among_rails() {
    let _alone = alone();
    let probe = (DeviceFabric::Probe, DeviceFabric::Probe);
    let mut pair = Pair::with((Fault::None, 3), probe, (Plain(0), Plain(1)));
    let route = pair.join();
    assert_eq!(route.path(), Path::FabricDirect, "{}", route.choice());
    pair.exchange(&route);
}

#[test]
fn passed_probe_counts_for_all_regions_of_its_kinds() {
    let _alone = alone();
    let mut pair = Pair::new(Fault::None, (Plain(0), Plain(1)));
    assert_eq!(pair.join().path(), Path::FabricDirect);
    pair.here.replace(Plain(0));
    pair.there.replace(Plain(1));
    assert_eq!(pair.reason(), "taken");
    let before = registrations();
    let route = pair.join();
    assert_eq!(route.path(), Path::FabricDirect);
    assert_eq!(registrations(), before, "it was probed again");
    pair.exchange(&route);
    // Another allocation, or device, is another question.
    for kind in [Mapped(1), Plain(0)] {
        pair.there.replace(kind);
        assert!(pair.reason().contains("not probed"), "{kind:?}: {}", pair.reason());
    }
}

#[test]
fn local_only_regions_of_a_device_are_accessed_directly() {
    let _alone = alone();
    let mut pair = Pair::new(Fault::None, (Host, Host));
    for kind in [Plain(0), Mapped(1)] {
        pair.here.region = pair.here.agent.register_local(kind.allocate()).unwrap();
        let route = pair.join();
        assert_eq!(route.path(), Path::FabricDirect, "{}", route.choice());
        pair.exchange(&route);
    }
}

/// The keys of device memory are only granted, never published.
#[test]
fn descriptors_have_no_keys_of_device_memory() {
    let _alone = alone();
    let pair = Pair::new(Fault::None, (Plain(0), Host));
    let keys = |side: &Side| side.region.descriptor().keys.len();
    assert_eq!((keys(&pair.here), keys(&pair.there)), (0, 1));
}

#[test]
fn withdrawn_device_memory_is_stale() {
    let _alone = alone();
    let mut pair = Pair::new(Fault::None, (Host, Plain(0)));
    let route = pair.join();
    let Pair { here, there, .. } = &mut pair;
    std::thread::scope(|scope| {
        let withdrawn = scope.spawn(|| there.agent.withdraw(&there.region, TIMEOUT));
        let end = Instant::now() + TIMEOUT;
        let refused = loop {
            match here.agent.put(&route, &WHOLE, None) {
                Ok(token) => drop(here.agent.wait(token, TIMEOUT)),
                Err(error) => break error,
            }
            assert!(Instant::now() < end, "the region is not withdrawn");
        };
        assert_eq!(refused.kind(), ErrorKind::Stale);
        withdrawn.join().unwrap().unwrap();
    });
    let refused = pair.join_with("").unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Stale, "{refused}");
}

/// More initiators at once than probes run at a time.
#[test]
fn probes_of_many_initiators_wait_for_each_other() {
    let _alone = alone();
    let offer = fabric::emulated::offer(Fault::None).unwrap();
    let there = start("there", std::slice::from_ref(&offer), DeviceFabric::Probe);
    let region = there.register(Plain(1).allocate(), Rights::ALL).unwrap();
    let (card, descriptor) =
        (there.card().encode().unwrap(), region.descriptor().encode().unwrap());
    std::thread::scope(|scope| {
        for number in 0..6 {
            let (card, descriptor, offer) = (&card, &descriptor, &offer);
            scope.spawn(move || {
                let kind = [Host, Plain(0), Mapped(0)][number % 3];
                let fabrics = std::slice::from_ref(offer);
                let mut side = Side::new(start("one of many", fabrics, DeviceFabric::Probe), kind);
                let peer = side.agent.connect(card, TIMEOUT).unwrap();
                let (region, policy) = (&side.region, Policy::default());
                let route = side.agent.join(peer, region, descriptor, &policy, TIMEOUT).unwrap();
                assert_eq!(route.path(), Path::FabricDirect, "{kind:?}: {}", route.choice());
                side.agent.disconnect(peer, TIMEOUT).unwrap();
            });
        }
    });
}

// --------------------------------------------------------------------- providers that lie

const DELAY: Duration = Duration::from_millis(3);

#[test]
fn notices_before_their_bytes_fail_the_probe() {
    let _alone = alone();
    let count = || metric("path_fallback_total{reason=\"probe-failed\"}");
    for (local, remote) in DEVICE_PAIRS {
        let before = count();
        let mut pair = Pair::new(Fault::EarlyCompletions(DELAY), (local, remote));
        // The first operations pass if the target looks too late for them.
        let starts = "refused: emulated failed the probe: ";
        must_be_staged(&mut pair, "probe-failed", starts, " after its notice");
        assert_eq!(count() - before, 6);
    }
}

#[test]
fn cut_bytes_fail_the_probe() {
    let _alone = alone();
    for (local, remote) in DEVICE_PAIRS {
        let mut pair = Pair::new(Fault::CutsTransfers(65_536), (local, remote));
        let starts = "refused: emulated failed the probe: ";
        let ends = " ms after its notice: the first 64 KiB are right";
        must_be_staged(&mut pair, "probe-failed", starts, ends);
        // The first operation beyond the cut, or the next if the target looks too late for that.
        let known = ["65537 bytes was incomplete 1", "1 MiB was incomplete 1"];
        let reason = pair.reason();
        assert!(known.iter().any(|text| reason.contains(text)), "{reason}");
    }
}

#[test]
fn operations_that_never_complete_fail_the_probe() {
    let _alone = alone();
    let mut pair = Pair::new(Fault::NeverCompletes, (Host, Plain(0)));
    let starts = "refused: emulated failed the probe: writing 8 bytes";
    let ends = " did not complete in time";
    must_be_staged(&mut pair, "probe-failed", starts, ends);
}

/// With little time for the join the verdict is not final.
#[test]
fn short_timeouts_leave_time_for_staging() {
    let _alone = alone();
    let mut pair = Pair::new(Fault::NeverCompletes, (Host, Plain(0)));
    let descriptor = pair.there.region.descriptor().encode().unwrap();
    let (policy, timeout) = (Policy::default(), Duration::from_secs(1));
    let Pair { here: Side { agent, region }, peer, .. } = &mut pair;
    let route = agent.join(*peer, region, &descriptor, &policy, timeout).unwrap();
    assert_eq!(route.path(), Path::FabricStaged, "{}", route.choice());
    assert_eq!(
        reason(route.choice()),
        "refused: emulated failed the probe: writing 8 bytes did not complete in time"
    );
    assert!(pair.reason().contains("was not probed"), "{}", pair.reason());
    pair.exchange(&route);
}

#[test]
fn refused_registrations_are_reported_by_side() {
    let _alone = alone();
    let ends = "GPUDirect RDMA (nvidia-peermem or dma-buf) may be missing";
    for (kinds, side) in [((Plain(0), Host), "local"), ((Host, Plain(0)), "remote")] {
        let mut pair = Pair::new(Fault::RefusesRegistration, kinds);
        let route = pair.join();
        assert_eq!(route.path(), Path::FabricStaged, "{}", route.choice());
        assert_eq!(route.fallback(), Some("registration-refused"), "{}", route.choice());
        let text = reason(route.choice());
        assert!(
            text.starts_with(&format!("refused: the {side} memory is not registered: ")),
            "{text}"
        );
        assert!(text.contains(ends), "{text}");
        pair.exchange(&route);
        assert_eq!(pair.reason(), text);
    }
}

#[test]
fn refused_peer_to_peer_is_reported() {
    let _alone = alone();
    for kinds in [(Plain(0), Host), (Host, Mapped(0)), (Plain(0), Plain(1))] {
        let mut pair = Pair::new(Fault::RefusesPeerToPeer, kinds);
        let route = pair.join();
        assert_eq!(route.path(), Path::FabricStaged, "{}", route.choice());
        assert_eq!(route.fallback(), Some("registration-refused"));
        let text = reason(route.choice());
        assert!(text.contains("memory is not registered: "), "{text}");
        assert!(text.contains("fi_setopt"), "{text}");
        pair.exchange(&route);
    }
}

// --------------------------------------------------------------------- settings

#[test]
fn the_stricter_setting_of_both_sides_wins() {
    use DeviceFabric::{Off, On, Probe};
    let _alone = alone();
    let lies = Fault::EarlyCompletions(DELAY);
    let device = (Plain(0), Plain(1));
    let off_here = "refused: the setting device_fabric is off";
    let off_there =
        "refused: the remote memory is not registered: device_fabric is off at the peer";
    let failed = "refused: emulated failed the probe: ";
    let passes = "taken";
    for (settings, kinds, expected) in [
        ((Off, Probe), device, off_here),
        ((Off, On), (Host, Plain(1)), off_here),
        ((Probe, Off), device, off_there),
        ((On, Off), (Host, Plain(1)), off_there),
        ((Probe, On), device, failed),
        ((On, Probe), device, failed),
        ((On, Probe), (Host, Plain(1)), failed),
        // Bytes of devices that come too late are wrong in the target's host memory, too.
        ((On, Probe), (Plain(0), Host), failed),
        ((Probe, On), (Plain(0), Host), failed),
        ((On, Off), (Plain(0), Host), off_there),
        ((Off, On), (Plain(0), Host), off_here),
        ((On, On), (Plain(0), Host), passes),
        ((On, On), device, passes),
    ] {
        let mut pair = Pair::with((lies, 1), settings, kinds);
        let route = pair.join();
        let text = reason(route.choice());
        assert!(text.starts_with(expected), "{settings:?} {kinds:?}: {text}");
        let path = if expected == passes { Path::FabricDirect } else { Path::FabricStaged };
        assert_eq!(route.path(), path);
        // Not where the provider was trusted wrongly.
        if path == Path::FabricStaged {
            pair.exchange(&route);
        }
        let is_fallback = expected != passes && expected != off_here;
        assert_eq!(route.fallback().is_some(), is_fallback, "{:?}", route.fallback());
    }
}

#[test]
fn forced_transfers_of_an_honest_provider_need_no_probe() {
    let _alone = alone();
    let settings = (DeviceFabric::On, DeviceFabric::On);
    let mut pair = Pair::with((Fault::None, 1), settings, (Plain(0), Mapped(1)));
    let before = registrations();
    let route = pair.join();
    assert_eq!(route.path(), Path::FabricDirect, "{}", route.choice());
    assert_eq!(registrations(), before);
    pair.exchange(&route);
}

/// In a process of its own: reads the setting from its environment.
pub fn setting_of_environment() {
    let offers = [fabric::emulated::offer(Fault::None).unwrap()];
    let start = |label| Agent::start(AgentOptions::new(label).force_remote().fabric(&offers[0]));
    let mut here = match start("here") {
        Ok(here) => here,
        Err(error) => return children::say(&format!("{:?}: {error}", error.kind())),
    };
    let there = start("there").unwrap();
    let peer = here.connect(&there.card().encode().unwrap(), TIMEOUT).unwrap();
    let device = Device::open("emulated:0".parse().unwrap()).unwrap().properties().uuid;
    let memory = MemoryAttributes::on_device(device, Exportability::ByDescriptors);
    let policy = Policy::default();
    let choice = here.explain(peer, Operation::Put, &memory, &memory, &policy).unwrap();
    children::say(&reason(&choice));
}

#[test]
fn setting_is_read_from_the_environment() {
    let not_probed = "refused: emulated was not probed with this memory yet; a join does it";
    for (value, expected) in [
        ("off", "refused: the setting device_fabric is off"),
        ("probe", not_probed),
        ("", not_probed),
        (
            "maybe",
            "Malformed: parse setting failed: malformed: FABRICAST_DEVICE_FABRIC is \"maybe\". \
             Choose off, probe or on",
        ),
    ] {
        let mut command = children::respawn(["setting of environment", "-"]);
        command.env(DeviceFabric::VARIABLE, value).stdout(Stdio::piped());
        let mut child = Child::start(&mut command);
        assert_eq!(child.line(TIMEOUT).as_deref(), Some(expected), "{value:?}");
        child.finish(TIMEOUT);
    }
}

// --------------------------------------------------------------------- flushes

#[test]
fn writes_are_flushed_before_their_notice_and_before_the_end_of_a_get() {
    let _alone = alone();
    let mut pair = Pair::new(Fault::None, (Plain(0), Plain(1)));
    let route = pair.join();
    let counts = || (emulated::flushes(0), emulated::flushes(1));
    let (here, there) = counts();
    let token = pair.here.agent.put(&route, &WHOLE, Some(notice(1, 0))).unwrap();
    pair.here.agent.wait(token, TIMEOUT).unwrap();
    pair.there.await_notice();
    assert_eq!(counts(), (here, there + 1));
    let token = pair.here.agent.get(&route, &WHOLE, None).unwrap();
    pair.here.agent.wait(token, TIMEOUT).unwrap();
    assert_eq!(counts(), (here + 1, there + 1));
}

/// Refuses flushes until dropped.
struct Refusing(u32);

impl Refusing {
    fn new(number: u32) -> Self {
        emulated::refuse_flushes(number, true);
        Self(number)
    }
}

impl Drop for Refusing {
    fn drop(&mut self) {
        emulated::refuse_flushes(self.0, false);
    }
}

#[test]
fn bytes_that_cannot_be_flushed_are_never_announced() {
    let _alone = alone();
    for (kinds, device) in [((Host, Plain(1)), 1), ((Plain(0), Host), 0)] {
        // Before the join: the probe fails.
        let mut pair = Pair::new(Fault::None, kinds);
        let refusing = Refusing::new(device);
        let route = pair.join();
        assert_eq!(route.fallback(), Some("probe-failed"), "{}", route.choice());
        assert!(reason(route.choice()).contains("flush remote writes"), "{}", route.choice());
        pair.exchange(&route);
        drop(refusing);
        // After it.
        let mut pair = Pair::new(Fault::None, kinds);
        let route = pair.join();
        assert_eq!(route.path(), Path::FabricDirect);
        let refusing = Refusing::new(device);
        if device == 0 {
            let token = pair.here.agent.get(&route, &WHOLE, None).unwrap();
            let failed = pair.here.agent.wait(token, TIMEOUT).unwrap_err();
            assert!(failed.to_string().contains("flush remote writes"), "{failed}");
            continue;
        }
        let token = pair.here.agent.put(&route, &WHOLE, Some(notice(1, 0))).unwrap();
        loop {
            match pair.there.agent.next_event(TIMEOUT).unwrap() {
                Event::Notice { .. } => panic!("the notice of bytes that were not flushed arrived"),
                Event::RailLost { reason, .. } => {
                    assert!(reason.contains("cannot be flushed: flush remote writes"), "{reason}");
                    break;
                }
                _ => {}
            }
        }
        // The notice is not delivered later either.
        let _ = pair.here.agent.wait(token, TIMEOUT);
        drop(refusing);
    }
}

// --------------------------------------------------------------------- shm

/// Can shm register memory of the tested device? With CUDA this needs a libfabric that was built
/// with it.
fn shm_registers_devices() -> bool {
    let DeviceName { implementation, number } = device().name();
    if implementation == Implementation::Emulated {
        return false;
    }
    let domain = Domain::open(&shm_with_devices().unwrap()).unwrap();
    let registered = domain.probe_memory(MemoryKind::Cuda(number.cast_signed()));
    if let Err(error) = &registered {
        println!("shm does not register memory of {}: {error}", device().name());
    }
    registered.is_ok() && device().properties().gpu_direct.rdma
}

/// shm copies between GPUs in the target, and reports writes before they are done. So the probe
/// fails, and device memory is staged with right bytes. Without registration the reason is another.
#[test]
fn shm_stages_device_memory_with_its_reason() {
    let _alone = alone();
    let is_registered = shm_registers_devices();
    let has_two = next_device(&device()).is_some();
    let mut fixture = AgentFixture::open_remote("shm-with-devices", 1);
    for role in ["plain", "shared", "host"] {
        let peer_process =
            fixture.peer_process(&format!("remote by shm-with-devices 1: {role}"), &[]);
        for local in ["plain", "shared", "host"] {
            let buffer: Buffer = match local {
                "plain" => device().allocate(LENGTH).unwrap().into(),
                "shared" => device().allocate_shared(LENGTH, &[]).unwrap().into(),
                _ => HostBuffer::new(LENGTH).unwrap().into(),
            };
            let region = fixture.agent.register(buffer.clone(), Rights::ALL).unwrap();
            let (peer, policy) = (peer_process.peer, Policy::default());
            let descriptor = &peer_process.descriptor;
            let route = fixture.agent.join(peer, &region, descriptor, &policy, TIMEOUT).unwrap();
            let is_of_host = (local, role) == ("host", "host");
            let path = if is_of_host { Path::FabricDirect } else { Path::FabricStaged };
            assert_eq!(route.path(), path, "{local} to {role}: {}", route.choice());
            if !is_of_host {
                let text = reason(route.choice());
                println!("paths from {local} to {role}:\n{}", route.choice());
                let is_plain = [local, role].iter().all(|one| *one != "shared");
                let expected: &[&str] = match is_registered {
                    // shm has no handles of mapped memory.
                    true if is_plain => &["probe-failed"],
                    true => &["probe-failed", "registration-refused"],
                    false => &["registration-refused"],
                };
                assert!(expected.contains(&route.fallback().unwrap()), "{text}");
                if is_registered && has_two && (local, role) == ("plain", "plain") {
                    assert!(text.contains(" after its notice"), "not found by the probe: {text}");
                }
            }
            for round in 1..4 {
                fill_buffer(&buffer, round);
                let on_arrival = Some(notice(COMPARE, sum_of(LENGTH, round)));
                let token = fixture.agent.put(&route, &blocks_of(1 << 20), on_arrival).unwrap();
                fixture.agent.wait(token, TIMEOUT).unwrap();
                assert_eq!(fixture.reply(), 1, "the other side has wrong bytes");
            }
            fixture.request(&peer_process, FILL, 77);
            let token = fixture.agent.get(&route, &WHOLE, None).unwrap();
            fixture.agent.wait(token, TIMEOUT).unwrap();
            assert_eq!(sum_of_buffer(&buffer), sum_of(LENGTH, 77));
            fixture.agent.withdraw(&region, TIMEOUT).unwrap();
        }
        fixture.end(peer_process);
    }
}
