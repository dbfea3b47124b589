//! `{:?}` shows nothing that gives access to memory.

use transfer::path::Policy;
use transfer::{Agent, AgentOptions, HostBuffer, RegionDescriptor, Rights};

use crate::common::{TIMEOUT, alone};
use crate::fixture::with_rails;
use crate::rails::tcp;

/// All forms in which a derived `Debug` would print a ticket or key.
fn secrets(descriptor: &RegionDescriptor) -> Vec<String> {
    let ticket = descriptor.ticket;
    let mut secrets = vec![ticket.to_string(), format!("{ticket:x}"), format!("{ticket:X}")];
    for key in &descriptor.keys {
        let list = format!("{:?}", key.bytes);
        let long = format!("{:#?}", key.bytes);
        secrets.extend([list, long.lines().map(str::trim).collect::<Vec<_>>().join(" ")]);
        if let fabric::RemoteKey::Plain(number) =
            fabric::RemoteRegion::decode(&key.bytes).unwrap().key()
        {
            secrets.push(format!("key: {number}"));
        }
    }
    secrets
}

#[test]
fn debug_output_shows_no_ticket_and_no_key() {
    let _alone = alone();
    let start = |label| {
        let options = AgentOptions::new(label).force_remote();
        Agent::start(with_rails(options, tcp(), 1)).unwrap()
    };
    let (mut one, two) = (start("one"), start("two"));
    let register =
        |agent: &Agent| agent.register(HostBuffer::new(4096).unwrap(), Rights::ALL).unwrap();
    let (local, remote_region) = (register(&one), register(&two));
    let card = two.card();
    let peer = one.connect(&card.encode().unwrap(), TIMEOUT).unwrap();
    let descriptor = remote_region.descriptor().encode().unwrap();
    let route = one.join(peer, &local, &descriptor, &Policy::default(), TIMEOUT).unwrap();

    let descriptors = [local.descriptor(), remote_region.descriptor()];
    assert!(!descriptors[1].keys.is_empty(), "the region has no keys");
    let keys = &descriptors[1].keys;
    let remote = fabric::RemoteRegion::decode(&keys[0].bytes).unwrap();
    let texts = [
        format!("{one:?} {two:?} {local:?} {remote_region:?} {route:?} {peer:?} {card:?}"),
        format!("{one:#?} {two:#?} {local:#?} {remote_region:#?} {route:#?} {peer:#?} {card:#?}"),
        format!("{descriptors:?} {keys:?} {remote:?}"),
        format!("{descriptors:#?} {keys:#?} {remote:#?}"),
    ];
    for text in texts {
        let flat = text.lines().map(str::trim).collect::<Vec<_>>().join(" ");
        for secret in descriptors.into_iter().flat_map(secrets) {
            assert!(!flat.contains(&secret), "{secret} in {flat}");
        }
    }
    // Useful information is shown.
    let shown = format!("{one:?} {route:?}");
    for expected in ["\"one\"", "\"two\"", route.path().name(), "4096"] {
        assert!(shown.contains(expected), "{expected} is missing in {shown}");
    }
}
