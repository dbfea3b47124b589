//! `fabricast node`: serves a node in the foreground, until it is asked to end.

mod notify;
mod watch;

use std::time::Duration;

use pubsub::{Node, ServiceMode, TopicSettings};
use tracing_subscriber::filter::LevelFilter;

use self::notify::Manager;
use self::watch::Watch;
use super::exit::{Exit, Failure};
use super::membership;
use super::settings::{OF_NODE, Options};
use super::signals::{Signals, interrupted};

/// Between two looks at who is there.
const LOOK: Duration = Duration::from_secs(1);
/// While it takes over.
const SOON: Duration = Duration::from_millis(50);

/// Serves a node in the foreground, until SIGTERM or Ctrl-C.
///
/// Not needed where processes serve their node themselves; with it, the node stays when they
/// come and go. If one of them serves the node already, it hands it over to this one at once, and
/// messages go on meanwhile. Where another `fabricast node` does, this one ends and names it. A
/// provider that cannot carry messages to other nodes ends it, too.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// What to log to standard error: off, error, warn, info, debug or trace [default: $FABRICAST_LOG, or info]
    #[arg(long, value_name = "LEVEL")]
    log: Option<LevelFilter>,
    #[command(flatten)]
    settings: Options<OF_NODE>,
}

impl Arguments {
    pub(crate) fn log(&self) -> Option<LevelFilter> {
        self.log
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let signals = Signals::catch_hangups_too()?;
    let settings = arguments.settings.settings()?;
    let manager = Manager::of_this_process();
    // Programs that serve in passing go on without other nodes; who serves for nothing else does not.
    let mut options = membership::options(&settings, "node");
    // Whatever the settings say: that is what it is for.
    options.service = ServiceMode::Standing;
    if let Some(network) = &options.network {
        network.check(&options.label)?;
        network.check_provider()?;
    }
    let usual = TopicSettings::default().reserves(1).bytes;
    if let Some(budget) = options.budgets.host.filter(|budget| *budget < usual) {
        tracing::warn!(
            budget,
            usual,
            "a topic with all that is usual reserves more than the budget"
        );
    }
    tracing::info!(directory = %settings.directory.value.display(), "joining the node");
    let node = match signals.meanwhile(move || Node::join(options)) {
        // Nothing was begun that would have to be ended.
        Err(failure) if failure.exit() == interrupted().exit() => return Ok(()),
        joined => joined?.map_err(refused)?,
    };
    let served = serve(&node, Watch::default(), &signals, &manager);
    manager.is_ending();
    tracing::info!("leaving the node; if there are others, one of them serves it now");
    drop(node);
    served
}

/// Why it does not join, and what to do about it.
fn refused(error: pubsub::Error) -> Failure {
    let why = error.to_string();
    match error.kind() {
        pubsub::ErrorKind::AlreadyServed => {
            Failure::new(Exit::Taken, format!("{why}; end that one first"))
        }
        _ => error.into(),
    }
}

fn serve(
    node: &Node,
    mut watch: Watch,
    signals: &Signals,
    manager: &Manager,
) -> Result<(), Failure> {
    let mut hangups = 0;
    let mut is_ready = false;
    loop {
        let asked = node.clone();
        let rows = match signals.meanwhile(move || asked.report()) {
            Err(failure) if failure.exit() == interrupted().exit() => return Ok(()),
            rows => rows?,
        };
        match rows {
            Ok(rows) => {
                if let Some(status) = watch.look(&rows, node.serves()) {
                    match is_ready || !watch.is_settled() {
                        true => manager.status(&status),
                        false => manager.is_ready(&status),
                    }
                    is_ready |= watch.is_settled();
                }
            }
            Err(error) if error.kind() == pubsub::ErrorKind::Closed => return Err(error.into()),
            // It is looked for again: a service may just have ended.
            Err(error) => tracing::warn!(%error, "the node does not answer"),
        }
        signals.sleep(if watch.is_settled() { LOOK } else { SOON });
        if signals.ask_to_end() {
            return Ok(());
        }
        if signals.hangups() > hangups {
            hangups = signals.hangups();
            tracing::info!("SIGHUP is ignored: settings are read when the process starts");
        }
    }
}
