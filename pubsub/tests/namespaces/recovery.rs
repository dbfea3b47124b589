//! Time until messages flow again after an outage: a link is down, in both directions or in one, a
//! node gets another address, or a service is stopped.
//!
//! Outages are shorter or longer than the timeout of a session. With `TEST_LONG` in the
//! environment there are long ones, too, and no measurement is repeated: this needs an idle machine.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use pubsub::{NetworkOptions, Node, NodeOptions, Publisher, TopicSettings};
use testkit::children::{self, Child};

use crate::network::{Network, address, create_hub, cut_link, ip, ip_of, restore_link, run_inside};
use crate::support::{TIMEOUT, TestDir, options, until};

const LOST_AFTER: Duration = Duration::from_secs(2);
/// Longest time from the end of an outage until messages flow again.
const RECOVERED: Duration = Duration::from_millis(500);
/// Longest time from a change of address until messages flow again.
const MOVED: Duration = Duration::from_secs(5);
/// A slow measurement is repeated, since the machine may be busy.
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

/// Publishes until `is_over`, also while no subscriber reads.
fn publish(publisher: &Publisher, is_over: &AtomicBool) {
    while !is_over.load(Relaxed) {
        let _ = publisher.push(&[7; 600], Duration::from_millis(50));
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// In a child: serves its node, and prints a line for each message.
pub fn read_forever(directory: &std::path::Path, number: u8) -> ! {
    let network = Some(network_of(number));
    let node = Node::join(NodeOptions { network, ..options(directory) }).unwrap();
    let mut subscriber = node.topic(TOPIC, &settings()).unwrap().subscriber().unwrap();
    loop {
        if subscriber.pull(TIMEOUT).is_ok() {
            children::say("received");
        }
    }
}

struct Outage<'a> {
    name: &'a str,
    begin: &'a dyn Fn(),
    end: &'a dyn Fn(),
    durations: &'a [Duration],
    /// Longest time until messages flow again.
    bound: Duration,
}

/// Waits for messages, makes the outage, and measures the time from its end to the next messages.
fn measure(outage: &Outage<'_>, received: &AtomicU64) {
    let is_long = std::env::var_os("TEST_LONG").is_some();
    let (longest, attempts) =
        if is_long { (Duration::MAX, 1) } else { (Duration::from_secs(5), ATTEMPTS) };
    for duration in outage.durations.iter().filter(|duration| **duration <= longest) {
        let mut fastest = Duration::MAX;
        for _ in 0..attempts {
            let before = received.load(Relaxed);
            until("messages", || received.load(Relaxed) > before + 50);
            (outage.begin)();
            std::thread::sleep(*duration);
            let before = received.load(Relaxed);
            let start = Instant::now();
            (outage.end)();
            until("messages after the outage", || received.load(Relaxed) > before + 5);
            let took = start.elapsed();
            println!("{}, for {duration:?}: messages again after {took:?}", outage.name);
            fastest = fastest.min(took);
            if fastest <= outage.bound {
                break;
            }
        }
        let (name, bound) = (outage.name, outage.bound);
        assert!(
            fastest <= bound,
            "{name} for {duration:?}: messages after {fastest:?}, limit {bound:?}"
        );
    }
}

/// Linux sends ARP requests for a lost neighbour once a second, which would dominate the measurement.
fn speed_up_arp() {
    std::fs::write("/proc/sys/net/ipv4/neigh/wire/retrans_time_ms", "100").unwrap();
}

/// Runs in the namespaces.
pub fn run() {
    create_hub();
    let networks = [1, 2].map(Network::new);
    networks.iter().for_each(|network| network.within(speed_up_arp));
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

fn seconds(seconds: &[f32]) -> Vec<Duration> {
    seconds.iter().map(|seconds| Duration::from_secs_f32(*seconds)).collect()
}

fn links(networks: &[Network; 2], test_dir: &TestDir) {
    let reader = networks[1].within(|| join(2, test_dir));
    let mut subscriber = reader.topic(TOPIC, &settings()).unwrap().subscriber().unwrap();
    let (received, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let (count, over) = (Arc::clone(&received), Arc::clone(&is_over));
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
            begin: &|| cut_link(2),
            end: &|| restore_link(2),
            durations: &seconds(&[0.3, 1.7, 4.0, 30.0]),
            bound: RECOVERED,
        },
        &received,
    );
    // The first node sends to a MAC address that no machine has, and gets no error.
    let misroute = format!("neigh replace {} lladdr 02:00:00:00:00:99 dev wire", ip_of(2));
    let reset = format!("neigh del {} dev wire", ip_of(2));
    measure(
        &Outage {
            name: "a link is down one way",
            begin: &|| networks[0].within(|| ip(&misroute)),
            end: &|| networks[0].within(|| ip(&reset)),
            durations: &seconds(&[1.7, 4.0, 12.0]),
            bound: RECOVERED,
        },
        &received,
    );
    let other = ip_of(12);
    measure(
        &Outage {
            name: "a node has another address",
            begin: &|| (),
            end: &|| {
                networks[1].within(|| {
                    let has_other = std::net::UdpSocket::bind((other, 0)).is_ok();
                    let [old, new] = if has_other { [other, ip_of(2)] } else { [ip_of(2), other] };
                    ip(&format!("address del {old}/24 dev wire"));
                    ip(&format!("address add {new}/24 dev wire"));
                });
            },
            durations: &[Duration::ZERO],
            bound: MOVED,
        },
        &received,
    );
    is_over.store(true, Relaxed);
    reading.join().unwrap();
}

fn stopped_service(network: &Network) {
    let test_dir = TestDir::new();
    let args = [test_dir.path().to_str().unwrap(), "serves-and-reads", "2"];
    let mut command = children::respawn(args);
    let command = command.stdout(std::process::Stdio::piped());
    let mut child = network.within(|| Child::start(command));
    let received = Arc::new(AtomicU64::new(0));
    let lines = child.output();
    let count = Arc::clone(&received);
    let reading = std::thread::spawn(move || {
        use std::io::{BufRead, BufReader};
        for _ in BufReader::new(lines).lines().map_while(Result::ok) {
            count.fetch_add(1, Relaxed);
        }
    });
    measure(
        &Outage {
            name: "a service is stopped",
            begin: &|| child.stop(TIMEOUT),
            end: &|| child.resume(),
            durations: &seconds(&[1.7, 4.0, 12.0, 20.0]),
            bound: RECOVERED,
        },
        &received,
    );
    child.kill();
    reading.join().unwrap();
}

#[test]
fn messages_resume_within_half_a_second_of_an_outage() {
    run_inside("recovery");
}
