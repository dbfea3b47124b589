//! Settings as command line options: an option for each setting that a command uses.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use pubsub::{Form, Setting, Settings, UnknownVariable};

use super::{FILE_VARIABLE, OptionValue, merge};
use crate::cli::exit::{Exit, Failure, Result};
use crate::cli::text;

const HEADING: &str = "Settings (also in a file, or in the environment)";
const ENVIRONMENT: &str = "\
Environment:
  Each setting can be set as FABRICAST_NAME, too: \"fabricast config\" lists them with their names";
const FILE: &str = "config";

/// The settings of a command: all, those of a process at a node, or the directory alone.
pub(crate) const ALL: u8 = 0;
pub(crate) const NODE_SETTINGS: u8 = 1;
pub(crate) const DIRECTORY_ONLY: u8 = 2;

/// The settings options of a command line.
#[derive(Debug)]
pub(crate) struct Options<const SCOPE: u8> {
    file: Option<PathBuf>,
    values: Vec<OptionValue>,
}

impl Options<DIRECTORY_ONLY> {
    /// For a command without options for settings: those of the environment, and of the file that
    /// it names.
    pub(crate) fn none() -> Self {
        Self { file: None, values: Vec::new() }
    }
}

impl<const SCOPE: u8> Options<SCOPE> {
    /// The settings, merged with the environment and the file.
    pub(crate) fn settings(&self) -> Result<Settings> {
        let named = std::env::var_os(FILE_VARIABLE).filter(|name| !name.is_empty());
        let path = self.file.clone().or_else(|| named.map(PathBuf::from));
        let read = path.as_deref().map(read).transpose();
        let content = read.map_err(|error| {
            let path = path.as_deref().unwrap_or("".as_ref()).display();
            Failure::new(Exit::Usage, format!("read settings of {path} failed: {error}"))
        })?;
        for unknown in UnknownVariable::all_of_this_process() {
            text::print_error(&format!("fabricast: warning: {unknown}"));
        }
        let file = path.as_deref().zip(content.as_deref());
        merge(file, |variable| std::env::var_os(variable), &self.values)
    }
}

/// The text of a file. Fails if it is far too long for settings.
fn read(path: &Path) -> std::io::Result<String> {
    const LONGEST: u64 = 1 << 20;
    let text = std::io::read_to_string(File::open(path)?.take(LONGEST + 1))?;
    if text.len() as u64 > LONGEST {
        return Err(std::io::Error::other("it is longer than 1 MiB"));
    }
    Ok(text)
}

fn settings_in_scope<const SCOPE: u8>() -> impl Iterator<Item = &'static Setting> {
    Setting::all().iter().filter(|setting| match SCOPE {
        DIRECTORY_ONLY => setting.name == "directory",
        NODE_SETTINGS => !setting.is_of_topics(),
        _ => true,
    })
}

/// The type of a setting's value in help and documentation: `SECONDS`.
pub(super) fn value_name(form: Form) -> &'static str {
    match form {
        Form::Text(name) => name,
        Form::Flag => "true|false",
        Form::Number => "NUMBER",
        Form::Size => "SIZE",
        Form::Seconds => "SECONDS",
        Form::List => "LIST",
    }
}

impl<const SCOPE: u8> Args for Options<SCOPE> {
    fn augment_args(command: Command) -> Command {
        let file = Arg::new(FILE)
            .long(FILE)
            .value_name("FILE")
            .value_parser(clap::value_parser!(PathBuf))
            .help("Read settings from this file [default: $FABRICAST_CONFIG, or none]");
        let options = settings_in_scope::<SCOPE>().map(|setting| {
            let about = setting.about.trim_end_matches('.');
            let option = Arg::new(setting.name)
                .long(setting.option.as_str())
                .value_name(value_name(setting.form))
                .help(format!("{about} [default: {}]", setting.default.replace('`', "")));
            match setting.form == Form::Flag {
                // Without a value it means "true".
                true => option.num_args(0..=1).require_equals(true).default_missing_value("true"),
                false => option,
            }
        });
        let command = command.after_help(ENVIRONMENT);
        command.args([file].into_iter().chain(options).map(|option| option.help_heading(HEADING)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<const SCOPE: u8> FromArgMatches for Options<SCOPE> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let values = settings_in_scope::<SCOPE>().filter_map(|setting| {
            Some((setting, matches.get_one::<String>(setting.name)?.clone()))
        });
        let file = matches.get_one::<PathBuf>(FILE).cloned();
        Ok(Self { file, values: values.collect() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
