//! The settings of the command, from the file, the environment and the command line. The
//! declarations are those of the library.
//!
//! The command line overrides the environment, the environment the file, and the file the defaults.

pub(crate) mod config;
mod file;
mod options;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::path::Path;

use pubsub::{Setting, Settings};

use super::exit::{Exit, Failure, Result};
pub(crate) use options::{ALL, DIRECTORY_ONLY, NODE_SETTINGS, Options};

type OptionValue = (&'static Setting, String);

/// The variable with the path of the file.
pub(crate) const FILE_VARIABLE: &str = "FABRICAST_CONFIG";

fn merge(
    file: Option<(&Path, &str)>,
    value_of: impl Fn(&str) -> Option<OsString>,
    options: &[OptionValue],
) -> Result<Settings> {
    let mut settings = Settings::default();
    if let Some((path, text)) = file {
        file::read(&mut settings, path, text)?;
    }
    for setting in Setting::all() {
        let variable = &setting.variable;
        settings.set_by_variable(setting, variable, value_of(variable)).map_err(|error| {
            Failure::new(Exit::Usage, format!("environment {variable} is {}", error.detail()))
        })?;
    }
    for (setting, text) in options {
        let origin = format!("option --{}", setting.option);
        settings.set(setting, text, &origin).map_err(|why| {
            Failure::new(Exit::Usage, format!("{origin} is \"{}\": {why}", text.escape_debug()))
        })?;
    }
    Ok(settings)
}
