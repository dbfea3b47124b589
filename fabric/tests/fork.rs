//! A forked child drops inherited objects. The parent's connections, names and memory must be
//! unaffected.
#![allow(missing_docs)]

use std::time::{Duration, Instant};

use fabric::ring::{self, Port, PortEvent, RingOptions};
use fabric::{
    Access, AddressVector, CompletionQueue, Domain, Endpoint, EndpointKind, Error, ErrorKind,
    Event, EventQueue, HostMemory, Listener, MemoryRegion, Peer, PostOptions, Query, failed_closes,
};
use testkit::children::ForkedChild;

const TIMEOUT: Duration = Duration::from_secs(20);

/// Drops an object in a forked child, and returns it in the parent.
fn drop_in_child<T>(inherited: T) -> T {
    in_child(inherited, drop)
}

/// Calls a function with an object in a forked child, and returns the object in the parent.
fn in_child<T>(inherited: T, act: impl FnOnce(T)) -> T {
    let mut inherited = Some(inherited);
    let child = ForkedChild::new(|| {
        act(inherited.take().unwrap());
        assert_eq!(failed_closes(), 0);
    });
    let pidfd = child.pidfd();
    let mut ready =
        [nix::poll::PollFd::new(std::os::fd::AsFd::as_fd(&pidfd), nix::poll::PollFlags::POLLIN)];
    let timeout = nix::poll::PollTimeout::from(20_000_u16);
    assert_eq!(nix::poll::poll(&mut ready, timeout).unwrap(), 1, "the child hangs");
    assert!(!child.was_killed());
    inherited.take().unwrap()
}

struct Side {
    endpoint: Endpoint,
    queue: CompletionQueue,
    /// A region of 64 bytes.
    region: MemoryRegion,
}

impl Side {
    /// Sends a message to another side, and checks the received bytes.
    fn sends(&mut self, to: Peer, other: &mut Side, byte: u8) {
        self.region.write(0, &[byte; 8]).unwrap();
        other.region.write(0, &[0; 64]).unwrap();
        let Side { endpoint, queue, region } = other;
        endpoint.receive(queue, &region.all(), 1).unwrap();
        let slice = self.region.slice(0..8).unwrap();
        let end = Instant::now() + TIMEOUT;
        let mut is_sent = false;
        loop {
            if !is_sent {
                let at_once = PostOptions::token(2).timeout(Duration::ZERO);
                match self.endpoint.send(&mut self.queue, to, &slice, at_once) {
                    Ok(_) => is_sent = true,
                    Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
                }
            }
            // Both sides make progress.
            let _ = self.queue.poll();
            if let Some(got) = other.queue.poll() {
                let got = got.unwrap();
                assert_eq!(got.token, 1, "{got:?}");
                break;
            }
            assert!(Instant::now() < end, "no message arrived");
            std::thread::sleep(Duration::from_micros(100));
        }
        let mut bytes = [0; 8];
        other.region.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [byte; 8]);
    }
}

#[test]
fn connected_endpoints_survive_a_child_that_drops_them() {
    let offer = Query::new(EndpointKind::Msg).provider("tcp").source("127.0.0.1").first().unwrap();
    let domain = Domain::open(&offer).unwrap();
    let mut requests = EventQueue::open(domain.fabric()).unwrap();
    let listener = Listener::open(domain.fabric(), &offer, &requests).unwrap();
    let to = listener.address().unwrap();
    let mut client_events = EventQueue::open(domain.fabric()).unwrap();
    let mut queue = CompletionQueue::open(&domain).unwrap();
    let builder = Endpoint::builder(&domain).queue(&mut queue).events(&client_events);
    let mut endpoint = builder.towards(&to).open().unwrap();
    let register = || domain.register(HostMemory::zeroed(64).unwrap(), Access::ALL).unwrap();
    endpoint.start_connecting(&to, &[]).unwrap();
    let mut client = Side { endpoint, queue, region: register() };
    let end = Instant::now() + TIMEOUT;
    let request = loop {
        client_events.poll().unwrap();
        if let Some(Event::ConnectionRequest(request)) = requests.poll().unwrap() {
            break request;
        }
        assert!(Instant::now() < end, "no request arrived");
        std::thread::sleep(Duration::from_millis(1));
    };
    let mut server_events = EventQueue::open(domain.fabric()).unwrap();
    let mut queue = CompletionQueue::open(&domain).unwrap();
    let builder = Endpoint::builder(&domain).offer(&request.offer);
    let mut endpoint = builder.queue(&mut queue).events(&server_events).open().unwrap();
    endpoint.start_accepting(&[]).unwrap();
    let mut server = Side { endpoint, queue, region: register() };
    let mut up = 0;
    while up < 2 {
        for events in [&mut client_events, &mut server_events] {
            up += u32::from(matches!(events.poll().unwrap(), Some(Event::Connected { .. })));
        }
        assert!(Instant::now() < end, "not connected");
        std::thread::sleep(Duration::from_millis(1));
    }
    client.sends(Peer::CONNECTED, &mut server, 1);
    let all = (client, server, listener, requests, client_events, server_events, domain);
    let (mut client, mut server, listener, ..) = drop_in_child(all);
    client.sends(Peer::CONNECTED, &mut server, 2);
    server.sends(Peer::CONNECTED, &mut client, 3);
    assert_eq!(listener.address().unwrap(), to);
    // Sends nothing before it is closed.
    let child = ForkedChild::new(move || {
        client.endpoint.close().unwrap();
        server.endpoint.close().unwrap();
    });
    assert!(!child.was_killed());
}

/// Two sides of a connectionless provider, and each other's names.
fn connectionless(provider: &str) -> (Domain, [(Side, AddressVector); 2]) {
    let query = Query::new(EndpointKind::Rdm).provider(provider);
    let query = if provider == "shm" { query } else { query.source("127.0.0.1") };
    let domain = Domain::open(&query.first().unwrap()).unwrap();
    let sides = [0, 1].map(|_| {
        let addresses = AddressVector::open(&domain).unwrap();
        let mut queue = CompletionQueue::open(&domain).unwrap();
        let builder = Endpoint::builder(&domain).addresses(&addresses);
        let endpoint = builder.queue(&mut queue).open().unwrap();
        let region = domain.register(HostMemory::zeroed(64).unwrap(), Access::ALL).unwrap();
        (Side { endpoint, queue, region }, addresses)
    });
    (domain, sides)
}

#[test]
fn endpoints_keep_their_names_after_a_child_drops_them() {
    for provider in ["shm", "tcp;ofi_rxm"] {
        let (domain, sides) = connectionless(provider);
        let (domain, sides) = drop_in_child((domain, sides));
        // The names are looked up only now.
        let [(mut one, of_one), (mut two, of_two)] = sides;
        let to_two = of_one.insert(&two.endpoint.address().unwrap()).unwrap();
        let to_one = of_two.insert(&one.endpoint.address().unwrap()).unwrap();
        one.sends(to_two, &mut two, 5);
        two.sends(to_one, &mut one, 6);
        let both = (domain, one, of_one, two, of_two);
        let (_domain, mut one, _of_one, mut two, _of_two) = drop_in_child(both);
        one.sends(to_two, &mut two, 7);
        two.sends(to_one, &mut one, 8);
    }
}

fn progress(writer: &mut Port, reader: &mut Port) {
    for port in [writer, reader] {
        let (PortEvent::Idle | PortEvent::Ring) = port.progress().unwrap() else {
            panic!("a completion of no ring")
        };
    }
}

#[test]
fn rings_continue_after_a_child_drops_them() {
    let (domain, [(one, of_one), (two, of_two)]) = connectionless("tcp;ofi_rxm");
    let to_two = of_one.insert(&two.endpoint.address().unwrap()).unwrap();
    let to_one = of_two.insert(&one.endpoint.address().unwrap()).unwrap();
    let mut writer = Port::new(one.endpoint, one.queue);
    let mut reader = Port::new(two.endpoint, two.queue);
    let options = RingOptions::new(reader.endpoint(), 64 << 10).unwrap();
    let reading = reader.offer(&options).unwrap();
    let ring_offer = reader.ring_offer(reading).unwrap();
    let (writing, answer) = writer.accept(to_two, &ring_offer, 1000).unwrap();
    reader.connect(reading, to_one, &answer).unwrap();
    let source = domain.register(HostMemory::from_vec(vec![9; 512]).unwrap(), Access::WRITE);
    let source = source.unwrap();
    let mut all = (writer, reader, source, domain, of_one, of_two);
    let mut views = Vec::new();
    for number in 0..300 {
        if number == 100 {
            // With views of received messages.
            (all, views) = drop_in_child((all, views));
        }
        let (writer, reader, source, ..) = &mut all;
        let mut message = writer.begin(writing, 0, 512).unwrap();
        let end = Instant::now() + TIMEOUT;
        while !message.is_written() {
            writer.push(writing, &mut message, &source.all()).unwrap();
            progress(writer, reader);
            reader.return_all_credit(true);
            assert!(Instant::now() < end, "message {number} is not written");
        }
        loop {
            assert!(Instant::now() < end, "message {number} did not arrive");
            let Some(view) = reader.take(reading).unwrap() else {
                progress(writer, reader);
                continue;
            };
            assert_eq!(view.header().message, number);
            let is_whole = view.is_last();
            views.push(view);
            if is_whole {
                break;
            }
        }
        if views.len() > 20 {
            views.clear();
        }
    }
}

#[test]
fn connected_rings_refuse_a_child_and_work_in_its_parent() {
    let mut listener = ring::listen("127.0.0.1:0").unwrap();
    let address = listener.address();
    let connect = move || std::thread::spawn(move || ring::connect(address, TIMEOUT));
    let mut pair = || {
        let connecting = connect();
        let reader = listener.accept(TIMEOUT).unwrap();
        (reader, connecting.join().unwrap().unwrap())
    };
    let rings = [pair(), pair()];
    // In the meantime the threads of the rings have taken the ports, with their locks.
    let idle = Duration::from_millis(100);
    std::thread::sleep(idle);
    let refused = |error: Error| assert_eq!(error.kind(), ErrorKind::NotSupported, "{error}");
    let inherited = in_child((rings, listener), |(rings, listener)| {
        let [(mut reader, mut writer), dropped] = rings;
        refused(reader.receive(TIMEOUT).unwrap_err());
        refused(reader.receive_chunk(TIMEOUT).unwrap_err());
        refused(writer.send(b"of the child", TIMEOUT).unwrap_err());
        refused(writer.flush(TIMEOUT).unwrap_err());
        refused(reader.close(TIMEOUT).unwrap_err());
        refused(writer.close(TIMEOUT).unwrap_err());
        drop((dropped, listener));
    });
    let (rings, _listener) = inherited;
    for (mut reader, mut writer) in rings {
        writer.send(b"of the parent", TIMEOUT).unwrap();
        assert_eq!(reader.receive(TIMEOUT).unwrap(), b"of the parent");
        writer.close(TIMEOUT).unwrap();
        assert_eq!(reader.receive(TIMEOUT).unwrap_err().kind(), ErrorKind::Closed);
    }
}
