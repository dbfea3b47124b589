//! A process of this command at its node.

use std::time::Duration;

use pubsub::{
    Budgets, ErrorKind, MemoryPlace, NetworkOptions, Node, NodeOptions, ServiceMode, Topic,
};

use super::exit::{Exit, Failure};
use super::settings::{Entry, Service, Settings};
use super::signals::{Deadline, SLICE, Signals};

/// How the library is to join, as the settings have it; `name` is the subcommand's.
pub(crate) fn options(settings: &Settings, name: &str) -> NodeOptions {
    let label = settings.label.value.clone();
    let of_size = |size: Option<super::settings::Size>| size.map(|size| size.0);
    NodeOptions {
        directory: settings.directory.value.clone(),
        label: label.unwrap_or_else(|| format!("fabricast {name}")),
        service: match settings.service.value {
            Service::Embedded => ServiceMode::Embedded,
            Service::Outside => ServiceMode::Outside,
        },
        patience: settings.patience.value,
        budgets: Budgets {
            host: of_size(settings.budget_host.value),
            device: of_size(settings.budget_device.value),
        },
        network: network(settings),
        ..NodeOptions::default()
    }
}

/// How the node is connected to others, if it is.
fn network(settings: &Settings) -> Option<NetworkOptions> {
    let is_connected = settings.listen.value.is_some()
        || settings.rendezvous.value.is_some()
        || !settings.peers.value.is_empty();
    is_connected.then(|| NetworkOptions {
        listen: settings.listen.value,
        peers: settings.peers.value.clone(),
        rendezvous: settings.rendezvous.value.clone(),
        insecure: settings.insecure.value,
        // If it is empty, the library takes the label.
        name: settings.node_name.value.clone().unwrap_or_default(),
        provider: settings.provider.value.clone(),
        source: settings.source.value,
        lost_after: settings.lost_after.value,
        ..NetworkOptions::default()
    })
}

/// Joins the node, unless it is asked to end meanwhile.
pub(crate) fn join(settings: &Settings, name: &str, signals: &Signals) -> Result<Node, Failure> {
    let options = options(settings, name);
    Ok(signals.meanwhile(move || Node::join(options))??)
}

/// That there is no such device is said as everywhere else.
fn check_device(place: MemoryPlace) -> Result<(), Failure> {
    let MemoryPlace::Device(name) = place else { return Ok(()) };
    let opened = gpu::Device::open(name).map(drop);
    opened.map_err(|error| Failure::new(Exit::NoProvider, error.to_string()))
}

/// Opens a topic to publish in. One that exists is taken as it is, unless the settings say what
/// it is to be like; one that is made has room for messages of this size, if they do not.
pub(crate) fn topic_to_publish(
    node: &Node,
    name: &str,
    settings: &Settings,
    size: Option<u64>,
) -> Result<Topic, Failure> {
    let is_open = !settings.says_topic();
    if is_open {
        match node.open(name) {
            Err(error) if error.kind() == ErrorKind::Unknown => {}
            opened => return Ok(opened?),
        }
    }
    let mut wanted = settings.topic();
    check_device(wanted.memory)?;
    if let (Some(size), false) = (size, settings.largest.is_given()) {
        wanted.largest = wanted.largest.max(size.checked_next_power_of_two().unwrap_or(size));
    }
    match node.topic(name, &wanted) {
        // Somebody made it just now.
        Err(error) if is_open && error.kind() == ErrorKind::SettingsDiffer => Ok(node.open(name)?),
        made => Ok(made?),
    }
}

/// Opens a topic to read: made here, if the settings say what it is to be like, or else as
/// soon as somebody has made it.
pub(crate) fn topic_to_read(
    node: &Node,
    name: &str,
    settings: &Settings,
    longest: Option<Duration>,
    signals: &Signals,
) -> Result<Option<Topic>, Failure> {
    if settings.says_topic() {
        check_device(settings.memory.value)?;
        return Ok(Some(node.topic(name, &settings.topic())?));
    }
    let deadline = Deadline::after(longest);
    let mut is_said = false;
    loop {
        match node.open(name) {
            Err(error) if error.kind() == ErrorKind::Unknown && !deadline.is_over() => {}
            Err(error) if error.kind() == ErrorKind::Unknown => {
                let why = format!("nobody has made the topic \"{}\"", name.escape_debug());
                return Err(Failure::new(Exit::Deadline, why));
            }
            opened => return Ok(Some(opened?)),
        }
        if signals.ask_to_end() {
            return Ok(None);
        }
        if !is_said {
            is_said = true;
            eprintln!("fabricast: waiting until somebody makes the topic");
        }
        signals.sleep(SLICE / 2);
    }
}
