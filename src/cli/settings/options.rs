//! Settings on the command line: an option for each that a command has use for.

use std::fmt;
use std::marker::PhantomData;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use super::declare::{Declaration, Group};
use super::{FILE_VARIABLE, Said, Settings, TABLE, file};
use crate::cli::exit::Failure;

const HEADING: &str = "Settings (also by file and environment; docs/operating.md)";
const FILE: &str = "config";

/// Which settings a command takes.
pub(crate) trait Scope: fmt::Debug {
    fn takes(declaration: &Declaration) -> bool;
}

/// Where the node is, and nothing else.
#[derive(Debug, Clone)]
pub(crate) struct OfDirectory;

/// Those of a process that is at a node.
#[derive(Debug, Clone)]
pub(crate) struct OfNode;

/// All.
#[derive(Debug, Clone)]
pub(crate) struct All;

impl Scope for OfDirectory {
    fn takes(declaration: &Declaration) -> bool {
        declaration.name == "directory"
    }
}

impl Scope for OfNode {
    fn takes(declaration: &Declaration) -> bool {
        declaration.group == Group::Node
    }
}

impl Scope for All {
    fn takes(_: &Declaration) -> bool {
        true
    }
}

/// What the command line says of the settings.
#[derive(Debug, Clone)]
pub(crate) struct Options<S> {
    file: Option<PathBuf>,
    said: Vec<Said>,
    scope: PhantomData<S>,
}

impl<S> Options<S> {
    /// The settings, with what the file and the environment say.
    pub(crate) fn settings(&self) -> Result<Settings, Failure> {
        let named = || std::env::var_os(FILE_VARIABLE).filter(|name| !name.is_empty());
        let path = self.file.clone().or_else(|| named().map(PathBuf::from));
        let text = path.as_deref().map(file::text).transpose()?;
        let file = path.as_deref().zip(text.as_deref());
        Settings::gather(file, |variable| std::env::var_os(variable), &self.said)
    }
}

fn of_scope<S: Scope>() -> impl Iterator<Item = (usize, &'static Declaration)> {
    TABLE.iter().enumerate().filter(|(_, declaration)| S::takes(declaration))
}

impl<S: Scope> Args for Options<S> {
    fn augment_args(command: Command) -> Command {
        let file = Arg::new(FILE)
            .long(FILE)
            .value_name("FILE")
            .value_parser(clap::value_parser!(PathBuf))
            .help("Read settings from this file [default: $FABRICAST_CONFIG, or none]")
            .help_heading(HEADING);
        of_scope::<S>().fold(command.arg(file), |command, (_, declaration)| {
            let about = declaration.about.trim_end_matches('.');
            let mut option = Arg::new(declaration.name)
                .long(declaration.option.as_str())
                .value_name(declaration.kind)
                .help(format!("{about} [default: {}]", declaration.default.replace('`', "")))
                .help_heading(HEADING)
                .action(ArgAction::Set)
                .allow_hyphen_values(false);
            if let Some(alone) = declaration.alone {
                option = option.num_args(0..=1).require_equals(true).default_missing_value(alone);
            }
            command.arg(option)
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<S: Scope> FromArgMatches for Options<S> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut said = Vec::new();
        for (which, declaration) in of_scope::<S>() {
            let value = matches.try_get_one::<String>(declaration.name);
            let value = value.map_err(|error| clap::Error::raw(ErrorKind::InvalidValue, error))?;
            said.extend(value.map(|text| (which, text.clone())));
        }
        Ok(Self { file: matches.get_one::<PathBuf>(FILE).cloned(), said, scope: PhantomData })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
