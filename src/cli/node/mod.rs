//! `fabricast node`: serves a node in the foreground, until a signal ends it.

mod notify;

use std::path::Path;
use std::time::Duration;

use pubsub::{ErrorKind, NetworkOptions, Node, Row, ServiceMode, TopicSettings};
use serde_json::{Value, json};
use tracing_subscriber::filter::LevelFilter;
use transfer::{Admission, CopyService};

use self::notify::ServiceManager;
use super::exit::{Exit, Failure, Result};
use super::open_topic;
use super::output;
use super::paths::remedy_for;
use super::report_rows::{fields_of, matching, replication_error};
use super::service_wait::ServiceWait;
use super::settings::{NODE_SETTINGS, Options};
use super::signals::{Signals, interrupted};

const POLL_INTERVAL: Duration = Duration::from_secs(1);
const TAKEOVER_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Serves a node in the foreground, until SIGTERM or Ctrl-C.
///
/// Not needed where processes serve their node themselves; with it, the node exists without them.
/// If one of them serves the node already, it hands it over at once, and messages continue
/// meanwhile. Where another `fabricast node` serves it, this one ends and names it. A provider that
/// cannot replicate messages to other nodes ends it, too.
///
/// It also runs the copy service of its directory: agents that cannot map each other's memory, such as
/// those of pods with one GPU each, let it copy. It opens a GPU when it is first asked to.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Log level on standard error: off, error, warn, info, debug or trace [default:
    /// $FABRICAST_LOG, or info]
    #[arg(long, value_name = "LEVEL")]
    log: Option<LevelFilter>,
    /// One JSON line when the node is served, and another one after each change: the node, as in
    /// "fabricast topics --json", its directory, and why it does not reach other nodes
    #[arg(long)]
    json: bool,
    /// Run no copy service
    #[arg(long)]
    no_copy_service: bool,
    /// Let the copy service copy for agents of this user, too, by its number; several times for several
    #[arg(long, value_name = "UID", conflicts_with = "no_copy_service")]
    copy_for_user: Vec<u32>,
    /// Let the copy service copy for agents of this group, too, by its number; several times for several
    #[arg(long, value_name = "GID", conflicts_with = "no_copy_service")]
    copy_for_group: Vec<u32>,
    #[command(flatten)]
    settings: Options<NODE_SETTINGS>,
}

impl Arguments {
    pub(crate) fn log(&self) -> Option<LevelFilter> {
        self.log
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let signals = Signals::catch_with_hangup()?;
    let settings = arguments.settings.settings()?;
    let manager = ServiceManager::from_environment();
    let mut options = open_topic::options(&settings, "node");
    // The dedicated service always serves.
    options.service = ServiceMode::Dedicated;
    if let Some(network) = &options.network {
        check_insecure(network)?;
    }
    let default_topic_bytes = TopicSettings::default().reserves(1).bytes;
    if let Some(budget) = options.budgets.host.filter(|budget| *budget < default_topic_bytes) {
        tracing::warn!(
            budget,
            default_topic_bytes,
            "a topic with default settings reserves more than the budget"
        );
    }
    tracing::info!(directory = %settings.node.directory.display(), "joining the node");
    let service = ServiceWait::of(&settings.node.directory);
    let node = match open_topic::join(&settings, options, &service, &signals) {
        // Nothing was started that would have to be ended.
        Err(failure) if failure.exit() == interrupted().exit() => return Ok(()),
        joined => joined?,
    };
    let copy_service = start_copy_service(arguments, &settings.node.directory);
    let directory = arguments.json.then_some(&*settings.node.directory);
    let served = serve(&node, &signals, &manager, directory);
    drop(copy_service);
    manager.notify_stopping();
    tracing::info!("leaving the node; another member, if any, becomes its service");
    drop(node);
    served
}

/// Starts the copy service, unless it is switched off. Without it topics work all the same.
fn start_copy_service(arguments: &Arguments, directory: &Path) -> Option<CopyService> {
    if arguments.no_copy_service {
        return None;
    }
    let mut admission = Admission::own_user();
    admission.users.extend(&arguments.copy_for_user);
    admission.groups.extend(&arguments.copy_for_group);
    match CopyService::start(directory, admission) {
        Ok(service) => {
            tracing::info!(socket = %service.socket().display(), "copying for agents");
            Some(service)
        }
        Err(error) => {
            tracing::warn!(%error, "no copy service: agents use their other paths");
            None
        }
    }
}

/// Status of the node's service, for the log and for systemd.
fn status_of(rows: &[Row], serves: bool) -> Option<String> {
    let Row::Node { identity, service, process, listens, .. } = rows.first()? else { return None };
    if !serves {
        return Some(format!("process {process} serves node {identity}; taking over"));
    }
    // The log has the reason.
    let remedy = matching!(rows, Row::ReplicationError { kind, .. } => remedy_for(*kind)).next();
    let listens = listens.as_ref().map_or_else(
        || format!("not listening for other nodes{}", remedy.unwrap_or_default()),
        |address| format!("listening for other nodes at {address}"),
    );
    Some(format!("serving node {identity} (service {service}); {listens}"))
}

/// Fails if the node has a network, without --insecure.
fn check_insecure(network: &NetworkOptions) -> Result<()> {
    let Some(address) = network.first_address().filter(|_| !network.insecure) else {
        return Ok(());
    };
    let why = format!(
        "connect to nodes at {address} failed: peers are not authenticated and traffic is not encrypted: on \
         loopback each user of the machine can connect. Add --insecure to accept this"
    );
    Err(Failure::new(Exit::Usage, why))
}

fn to_json(rows: &[Row], directory: &Path) -> Result<Value> {
    Ok(json!({
        "node": fields_of!(rows, Node)?.pop(),
        "directory": directory.display().to_string(),
        "replication_error": replication_error(rows),
    }))
}

/// Serves until a signal ends it. With --json, each change of the node is printed.
fn serve(
    node: &Node,
    signals: &Signals,
    manager: &ServiceManager,
    json_directory: Option<&Path>,
) -> Result<()> {
    let mut hangups = 0;
    let (mut status, mut is_ready) = (None, false);
    let mut line = Value::Null;
    loop {
        let reported = node.clone();
        let report = move || reported.report();
        let rows = match Signals::run_interruptible(Some(signals), report, Duration::MAX, || {}) {
            Err(failure) if failure.exit() == interrupted().exit() => return Ok(()),
            rows => rows?,
        };
        match rows {
            Ok(rows) => {
                let serves = node.serves();
                if let Some(directory) = json_directory.filter(|_| serves) {
                    let now = to_json(&rows, directory)?;
                    if now != line {
                        // The output may be closed: the node is served all the same.
                        let _ = output::json(&now);
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
            // Retried: a service may just have ended.
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
    fn status_names_the_service_and_the_address_for_other_nodes() {
        let node = |listens: Option<&str>| Row::Node {
            identity: "ab".to_owned(),
            label: "x".to_owned(),
            service: 2,
            process: 7,
            listens: listens.map(str::to_owned),
        };
        let status = |listens, serves| status_of(&[node(listens)], serves).unwrap();
        let taking_over = "process 7 serves node ab; taking over";
        assert_eq!(status(Some("10.0.0.1:1"), false), taking_over);
        let serving = "serving node ab (service 2); listening for other nodes at 10.0.0.1:1";
        assert_eq!(status(Some("10.0.0.1:1"), true), serving);
        assert!(status(None, true).ends_with("not listening for other nodes"));
        let kind = ErrorKind::CannotListen;
        let rows = [node(None), Row::ReplicationError { kind, why: "address in use".to_owned() }];
        let expected = "not listening for other nodes. Choose another address: --listen";
        assert!(status_of(&rows, true).unwrap().ends_with(expected));
    }
}
