//! The settings file: TOML; unknown names are errors.

use std::fmt::Display;
use std::ops::Range;
use std::path::Path;

use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

use super::declare::Group;
use super::value::text_for_form;
use super::{Settings, TABLE};
use crate::cli::exit::{Exit, Failure, Result};

/// A settings file and the settings read from it.
struct File<'a> {
    path: &'a Path,
    text: &'a str,
    settings: &'a mut Settings,
}

/// Reads the settings of a file.
pub(super) fn read(settings: &mut Settings, path: &Path, text: &str) -> Result<()> {
    let mut file = File { path, text, settings };
    let table = DeTable::parse(text)
        .map_err(|error| file.wrong(error.span().unwrap_or_default(), error.message()))?;
    for (key, value) in table.get_ref() {
        match (key.get_ref().as_ref() == TOPIC, value.get_ref()) {
            (true, DeValue::Table(topic)) => {
                for (key, value) in topic {
                    file.set(Group::Topic, key, value)?;
                }
            }
            (true, _) => {
                return Err(file.wrong(key.span(), format!("\"{TOPIC}\" is a table, [{TOPIC}]")));
            }
            (false, _) => file.set(Group::Node, key, value)?,
        }
    }
    Ok(())
}

/// The table of settings of [`Group::Topic`].
const TOPIC: &str = "topic";

impl File<'_> {
    fn wrong(&self, at: Range<usize>, why: impl Display) -> Failure {
        let line = self.text.get(..at.start).unwrap_or_default().matches('\n').count() + 1;
        Failure::new(Exit::Usage, format!("{}, line {line}: {why}", self.path.display()))
    }

    fn set(
        &mut self,
        group: Group,
        key: &Spanned<DeString<'_>>,
        value: &Spanned<DeValue<'_>>,
    ) -> Result<()> {
        let name = key.get_ref().as_ref();
        let Some(which) = TABLE.iter().position(|one| one.group == group && one.name == name)
        else {
            return Err(self.wrong(key.span(), unknown(group, name)));
        };
        let origin = format!("file {}", self.path.display());
        let text = text_for_form(TABLE[which].form, TABLE[which].kind, value.get_ref());
        let read = text.and_then(|text| (TABLE[which].read)(self.settings, &text, &origin));
        read.map_err(|why| {
            // A short value is shown as written.
            let text = self.text.get(value.span()).unwrap_or_default();
            let is_short = (1..=60).contains(&text.len()) && !text.contains(char::is_control);
            let shown = if is_short { format!(" = {text}") } else { String::new() };
            self.wrong(value.span(), format!("{}{shown}: {why}", TABLE[which].full_name()))
        })
    }
}

/// The message about a name that is unknown, or belongs to the other group.
fn unknown(group: Group, name: &str) -> String {
    let place = |group: Group| match group {
        Group::Topic => format!("under [{TOPIC}]"),
        Group::Node => "above all [tables]".to_owned(),
    };
    if let Some(other) = TABLE.iter().find(|other| other.name == name) {
        return format!("\"{name}\" belongs {}", place(other.group));
    }
    let written = name.to_lowercase().replace('-', "_");
    let names = TABLE.iter().map(|other| (other.name, other.group)).chain([(TOPIC, Group::Node)]);
    let distances = names.map(|(name, of)| {
        let distance = strsim::osa_distance(&written, name);
        (distance, of != group, name, of)
    });
    let nearest = distances.min_by_key(|(distance, is_elsewhere, ..)| (*distance, *is_elsewhere));
    let proposal = match nearest.filter(|(distance, _, name, _)| *distance <= name.len() / 3) {
        Some((_, false, near, _)) => format!("the nearest is \"{near}\""),
        Some((_, true, near, of)) => format!("the nearest is \"{near}\", {}", place(of)),
        None => {
            let names = TABLE.iter().filter(|other| other.group == group).map(|other| other.name);
            format!("there are {}", names.collect::<Vec<_>>().join(", "))
        }
    };
    format!("unknown setting \"{}\"; {proposal}", name.escape_debug())
}
