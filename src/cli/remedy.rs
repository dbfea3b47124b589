//! Remedies of errors in the words of the command line.

use pubsub::{ErrorKind, Settings};

use super::exit::{Exit, Failure, Result};
use super::text;

pub(crate) fn check_not_a_file(settings: &Settings) -> Result<()> {
    let why = "it is a file, not a directory. Choose another one: --directory";
    let is_file = settings.node.directory.metadata().is_ok_and(|found| !found.is_dir());
    if is_file { Err(directory_error(settings, why)) } else { Ok(()) }
}

/// An error of the configured node directory.
pub(crate) fn directory_error(settings: &Settings, why: &str) -> Failure {
    let origin = settings.origin("directory").unwrap_or("the default directory");
    let path = text::escape_control(&settings.node.directory.display().to_string());
    Failure::new(Exit::Usage, format!("{origin} is \"{path}\": {why}"))
}

/// An error of the library, with the remedy as an option of this command.
pub(crate) fn with_remedy(error: pubsub::Error) -> Failure {
    let remedy = match error.kind() {
        ErrorKind::OverBudget => {
            "Reserve less (--largest, --depth, --max-held, --loans), or serve the node with a larger budget (--budget-host, \
             --budget-device)"
        }
        ErrorKind::TooLong => {
            "Publish shorter messages, or create a topic with a larger --largest: it is fixed while the topic is in use"
        }
        ErrorKind::Denied => "Choose a directory of this user: --directory",
        ErrorKind::AlreadyServed => {
            "Stop that process first, or give this node its own directory: --directory"
        }
        _ if is_read_only(&error) => {
            let why =
                format!("{error}. Choose a directory that this user can write in: --directory");
            return Failure::new(Exit::Denied, why);
        }
        _ => return error.into(),
    };
    let failure = Failure::from(error);
    Failure::new(failure.exit(), format!("{failure}. {remedy}"))
}

fn is_read_only(error: &(dyn std::error::Error + 'static)) -> bool {
    let cause = error.downcast_ref::<std::io::Error>();
    cause.is_some_and(|cause| cause.kind() == std::io::ErrorKind::ReadOnlyFilesystem)
        || error.source().is_some_and(is_read_only)
}
