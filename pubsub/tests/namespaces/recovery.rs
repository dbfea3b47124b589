//! How soon messages go again: after a link was down, both ways or one way, after a node has another
//! address, and after a service did not run for a while.
//!
//! Everyday runs have one of each kind, shorter than a node is waited for and longer. With
//! `FABRICAST_TEST_LONG` in the environment there are long ones, too, and each of them counts: that is
//! for a machine that does nothing else.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use pubsub::{NetworkOptions, Node, NodeOptions, Publisher, TopicSettings};
use testkit::children::{self, Child};

use crate::network::{Network, address, cut, ip, ip_of, make_hub, mend, run_inside};
use crate::support::{TIMEOUT, TestDir, options, until};

/// How long a node is waited for that is not heard.
const LOST_AFTER: Duration = Duration::from_secs(2);
/// Until messages go again when they can.
const RECOVERED: Duration = Duration::from_millis(500);
/// The same after a node has another address.
const MOVED: Duration = Duration::from_secs(5);
/// A machine that is busy is no reason to fail: what took too long is done again, so often, in
/// everyday runs.
const ATTEMPTS: u32 = 3;
const TOPIC: &str = "numbers";

fn settings() -> TopicSettings {
    TopicSettings { depth: 16, largest: 4096, ..TopicSettings::default() }
}

fn network_of(number: u8) -> NetworkOptions {
    NetworkOptions {
        listen: Some(format!("0.0.0.0:{}", address(number).port()).parse().unwrap()),
        rendezvous: Some(address(1).to_string()),
        insecure: true,
        name: format!("node {number}"),
        lost_after: LOST_AFTER,
        ..NetworkOptions::default()
    }
}

fn join(number: u8, test_dir: &TestDir) -> Node {
    let network = Some(network_of(number));
    Node::join(NodeOptions { network, ..options(test_dir.path()) }).unwrap()
}

/// Publishes all the time, whether anybody takes it or not.
fn publish(publisher: &Publisher, is_over: &AtomicBool) {
    while !is_over.load(Relaxed) {
        let _ = publisher.push(&[7; 600], Duration::from_millis(50));
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// In a child: reads all that comes, and serves its node.
pub fn read_for_ever(place: &std::path::Path, number: u8) -> ! {
    let network = Some(network_of(number));
    let node = Node::join(NodeOptions { network, ..options(place) }).unwrap();
    let mut subscriber = node.topic(TOPIC, &settings()).unwrap().subscriber().unwrap();
    loop {
        if subscriber.pull(TIMEOUT).is_ok() {
            children::say("came");
        }
    }
}

/// Something is in the way for a while, and then it is not.
struct Outage<'a> {
    name: &'a str,
    begins: &'a dyn Fn(),
    ends: &'a dyn Fn(),
    /// How long it lasts, each of these.
    lasts: &'a [Duration],
    bound: Duration,
}

/// Waits until messages come, has it happen, and measures how soon they come again.
fn measure(event: &Outage<'_>, came: &AtomicU64) {
    let is_long = std::env::var_os("FABRICAST_TEST_LONG").is_some();
    let (longest, attempts) =
        if is_long { (Duration::MAX, 1) } else { (Duration::from_secs(5), ATTEMPTS) };
    for lasts in event.lasts.iter().filter(|lasts| **lasts <= longest) {
        let mut fastest = Duration::MAX;
        for _ in 0..attempts {
            let before = came.load(Relaxed);
            until("messages", || came.load(Relaxed) > before + 50);
            (event.begins)();
            std::thread::sleep(*lasts);
            let before = came.load(Relaxed);
            let began = Instant::now();
            (event.ends)();
            until("messages again", || came.load(Relaxed) > before + 5);
            let took = began.elapsed();
            println!("{}, for {lasts:?}: messages again after {took:?}", event.name);
            fastest = fastest.min(took);
            if fastest <= event.bound {
                break;
            }
        }
        let (name, bound) = (event.name, event.bound);
        assert!(fastest <= bound, "{name} for {lasts:?}: {fastest:?}, not {bound:?}");
    }
}

/// The system asks for the addresses of neighbours that it lost once a second; that is not measured.
fn ask_neighbours_often() {
    std::fs::write("/proc/sys/net/ipv4/neigh/wire/retrans_time_ms", "100").unwrap();
}

/// What happens in the namespaces.
pub fn inside() {
    make_hub();
    let networks = [1, 2].map(Network::new);
    networks.iter().for_each(|network| network.within(ask_neighbours_often));
    let test_dirs = [TestDir::new(), TestDir::new()];
    let writer = networks[0].within(|| join(1, &test_dirs[0]));
    let publisher = writer.topic(TOPIC, &settings()).unwrap().publisher().unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let over = Arc::clone(&is_over);
    let publishing = std::thread::spawn(move || publish(&publisher, &over));
    links(&networks, &test_dirs[1]);
    stopped_service(&networks[1]);
    is_over.store(true, Relaxed);
    publishing.join().unwrap();
}

fn seconds(all: &[f32]) -> Vec<Duration> {
    all.iter().map(|seconds| Duration::from_secs_f32(*seconds)).collect()
}

fn links(networks: &[Network; 2], test_dir: &TestDir) {
    let reader = networks[1].within(|| join(2, test_dir));
    let mut subscriber = reader.topic(TOPIC, &settings()).unwrap().subscriber().unwrap();
    let (came, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let (count, over) = (Arc::clone(&came), Arc::clone(&is_over));
    let reading = std::thread::spawn(move || {
        while !over.load(Relaxed) {
            if subscriber.pull(Duration::from_millis(100)).is_ok() {
                count.fetch_add(1, Relaxed);
            }
        }
    });
    measure(
        &Outage {
            name: "a link is down",
            begins: &|| cut(2),
            ends: &|| mend(2),
            lasts: &seconds(&[0.3, 1.7, 4.0, 30.0]),
            bound: RECOVERED,
        },
        &came,
    );
    // What the first sends goes to a machine that is not there. Nobody is told.
    let elsewhere = format!("neigh replace {} lladdr 02:00:00:00:00:99 dev wire", ip_of(2));
    let forgotten = format!("neigh del {} dev wire", ip_of(2));
    measure(
        &Outage {
            name: "a link is down one way",
            begins: &|| networks[0].within(|| ip(&elsewhere)),
            ends: &|| networks[0].within(|| ip(&forgotten)),
            lasts: &seconds(&[1.7, 4.0, 12.0]),
            bound: RECOVERED,
        },
        &came,
    );
    let other = ip_of(12);
    measure(
        &Outage {
            name: "a node has another address",
            begins: &|| (),
            ends: &|| {
                networks[1].within(|| {
                    let has_other = std::net::UdpSocket::bind((other, 0)).is_ok();
                    let [old, new] = if has_other { [other, ip_of(2)] } else { [ip_of(2), other] };
                    ip(&format!("address del {old}/24 dev wire"));
                    ip(&format!("address add {new}/24 dev wire"));
                });
            },
            lasts: &[Duration::ZERO],
            bound: MOVED,
        },
        &came,
    );
    is_over.store(true, Relaxed);
    reading.join().unwrap();
}

fn stopped_service(network: &Network) {
    let test_dir = TestDir::new();
    let words = [test_dir.path().to_str().unwrap(), "reads-in-its-service", "2"];
    let mut command = children::respawn(words);
    let command = command.stdout(std::process::Stdio::piped());
    let mut child = network.within(|| Child::start(command));
    let came = Arc::new(AtomicU64::new(0));
    let lines = child.output();
    let count = Arc::clone(&came);
    let reading = std::thread::spawn(move || {
        use std::io::{BufRead, BufReader};
        for _ in BufReader::new(lines).lines().map_while(Result::ok) {
            count.fetch_add(1, Relaxed);
        }
    });
    measure(
        &Outage {
            name: "a service does not run",
            begins: &|| child.stop(TIMEOUT),
            ends: &|| child.resume(),
            lasts: &seconds(&[1.7, 4.0, 12.0, 20.0]),
            bound: RECOVERED,
        },
        &came,
    );
    child.kill();
    reading.join().unwrap();
}

#[test]
fn messages_go_again_within_half_a_second_of_what_was_in_their_way() {
    run_inside("recovery");
}
