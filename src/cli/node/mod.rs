//! `fabricast node`: serves a node in the foreground, until it is asked to end.

mod notify;

use std::path::Path;
use std::time::Duration;

use pubsub::{ErrorKind, NetworkOptions, Node, Row, ServiceMode, TopicSettings};
use serde_json::{Value, json};
use tracing_subscriber::filter::LevelFilter;

use self::notify::ServiceManager;
use super::exit::{Exit, Failure};
use super::node_client;
use super::paths::remedy_for;
use super::service_wait::ServiceWait;
use super::settings::{NODE_SETTINGS, Options};
use super::signals::{Signals, interrupted};
use super::text;
use super::topics::by_kind;

/// Between two looks at who is there.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// While it takes over.
const TAKEOVER_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Serves a node in the foreground, until SIGTERM or Ctrl-C.
///
/// Not needed where processes serve their node themselves; with it, the node stays when they
/// come and go. If one of them serves the node already, it hands it over to this one at once, and
/// messages go on meanwhile. Where another `fabricast node` does, this one ends and names it. A
/// provider that cannot carry messages to other nodes ends it, too.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Log level on standard error: off, error, warn, info, debug or trace [default: $FABRICAST_LOG, or info]
    #[arg(long, value_name = "LEVEL")]
    log: Option<LevelFilter>,
    /// One JSON line when the node is served, and another one when what it tells has changed: the node, as
    /// "fabricast topics --json" tells it, its directory, and why it does not reach other nodes
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: Options<NODE_SETTINGS>,
}

impl Arguments {
    pub(crate) fn log(&self) -> Option<LevelFilter> {
        self.log
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let signals = Signals::catch_with_hangup()?;
    let settings = arguments.settings.settings()?;
    let manager = ServiceManager::from_environment();
    // Programs that serve in passing go on without other nodes; who serves for nothing else does not.
    let mut options = node_client::options(&settings, "node");
    // Whatever the settings say: that is what it is for.
    options.service = ServiceMode::Dedicated;
    if let Some(network) = &options.network {
        check_insecure(network)?;
        network.check(&options.label)?;
        network.check_provider()?;
    }
    let default_topic_bytes = TopicSettings::default().reserves(1).bytes;
    if let Some(budget) = options.budgets.host.filter(|budget| *budget < default_topic_bytes) {
        tracing::warn!(
            budget,
            default_topic_bytes,
            "a topic with default settings reserves more than the budget"
        );
    }
    tracing::info!(directory = %settings.directory.value.display(), "joining the node");
    let service = ServiceWait::of(&settings.directory.value);
    let node = match node_client::join(&settings, options, &service, &signals) {
        // Nothing was begun that would have to be ended.
        Err(failure) if failure.exit() == interrupted().exit() => return Ok(()),
        joined => joined?,
    };
    let directory = arguments.json.then_some(&*settings.directory.value);
    let served = serve(&node, &signals, &manager, directory);
    manager.notify_stopping();
    tracing::info!("leaving the node; another member, if any, becomes its service");
    drop(node);
    served
}

/// How it stands with the service of the node, in words for the log and for systemd.
fn status_of(rows: &[Row], serves: bool) -> Option<String> {
    let Row::Node { identity, service, process, listens, .. } = rows.first()? else { return None };
    if !serves {
        return Some(format!("process {process} serves node {identity}; taking over"));
    }
    // The log says why.
    let remedy = rows.iter().find_map(|row| match row {
        Row::ReplicationError { kind, .. } => Some(remedy_for(*kind)),
        _ => None,
    });
    let listens = listens.as_ref().map_or_else(
        || format!("not listening for other nodes{}", remedy.unwrap_or_default()),
        |address| format!("listening for other nodes at {address}"),
    );
    Some(format!("serving node {identity} (service {service}); {listens}"))
}

/// Refuses other nodes, unless that was agreed to.
fn check_insecure(network: &NetworkOptions) -> Result<(), Failure> {
    let Some(address) = network.first_address().filter(|_| !network.insecure) else {
        return Ok(());
    };
    let why = format!(
        "connect to nodes at {address} failed: peers are not authenticated and traffic is not encrypted: on \
         loopback each user of the machine can connect. Add --insecure to agree to that"
    );
    Err(Failure::new(Exit::Usage, why))
}

/// The node that is served here, for programs.
fn to_json(rows: &[Row], directory: &Path) -> Result<Value, Failure> {
    let mut all = by_kind(rows)?;
    let mut last = |kind: &str| all.remove(kind).unwrap_or_default().pop();
    Ok(json!({
        "node": last("Node"),
        "directory": directory.display().to_string(),
        "replication_error": last("ReplicationError").map(|row| row["why"].clone()),
    }))
}

/// Until this process is asked to end. Programs are told of the node if it is said where it is.
fn serve(
    node: &Node,
    signals: &Signals,
    manager: &ServiceManager,
    json_directory: Option<&Path>,
) -> Result<(), Failure> {
    let mut hangups = 0;
    let (mut status, mut is_ready) = (None, false);
    let mut line = Value::Null;
    loop {
        let asked = node.clone();
        let rows = match signals.run_interruptible(move || asked.report()) {
            Err(failure) if failure.exit() == interrupted().exit() => return Ok(()),
            rows => rows?,
        };
        match rows {
            Ok(rows) => {
                let serves = node.serves();
                if let Some(directory) = json_directory.filter(|_| serves) {
                    let now = to_json(&rows, directory)?;
                    if now != line {
                        // Its reader may be gone: the node is served all the same.
                        let _ = text::json(&now);
                        line = now;
                    }
                }
                let now = status_of(&rows, serves);
                if let Some(now) = now.filter(|now| status.as_ref() != Some(now)) {
                    tracing::info!("{now}");
                    match is_ready || !serves {
                        true => manager.status(&now),
                        false => manager.notify_ready(&now),
                    }
                    is_ready |= serves;
                    status = Some(now);
                }
            }
            Err(error) if error.kind() == ErrorKind::Closed => return Err(error.into()),
            // It is looked for again: a service may just have ended.
            Err(error) => tracing::warn!(%error, "the node's service does not answer"),
        }
        signals.sleep(if is_ready { POLL_INTERVAL } else { TAKEOVER_POLL_INTERVAL });
        if signals.termination_requested() {
            return Ok(());
        }
        if signals.hangups() > hangups {
            hangups = signals.hangups();
            tracing::info!("SIGHUP is ignored: settings are read when the process starts");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_says_who_serves_and_where_other_nodes_reach_it() {
        let node = |listens: Option<&str>| Row::Node {
            identity: "ab".to_owned(),
            label: "x".to_owned(),
            service: 2,
            process: 7,
            listens: listens.map(str::to_owned),
        };
        let status = |listens, serves| status_of(&[node(listens)], serves).unwrap();
        let taking_over = "process 7 serves node ab; taking it over";
        assert_eq!(status(Some("10.0.0.1:1"), false), taking_over);
        let said = "serves node ab as its service number 2; other nodes reach it at 10.0.0.1:1";
        assert_eq!(status(Some("10.0.0.1:1"), true), said);
        assert!(status(None, true).ends_with("it does not listen for other nodes"));
        let kind = ErrorKind::CannotListen;
        let rows = [node(None), Row::ReplicationError { kind, why: "it is taken".to_owned() }];
        let said = "it does not listen for other nodes. --listen says where";
        assert!(status_of(&rows, true).unwrap().ends_with(said));
    }
}
