//! The file: TOML, and strict. What is not known is an error.

use std::io::Read;
use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::declare::{Declaration, Group, Origin};
use super::nearest::nearest;
use super::{Settings, TABLE};
use crate::cli::exit::{Exit, Failure};

/// Longer than any file of settings.
const LONGEST: u64 = 1 << 20;

/// The text of a file of settings.
pub(super) fn text(path: &Path) -> Result<String, Failure> {
    let wrong = |why: &dyn std::fmt::Display| {
        Failure::new(Exit::Usage, format!("the settings of {}: {why}", path.display()))
    };
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(|error| wrong(&error))?;
    file.take(LONGEST + 1).read_to_string(&mut text).map_err(|error| wrong(&error))?;
    if text.len() as u64 > LONGEST {
        return Err(wrong(&format_args!("more than {LONGEST} bytes")));
    }
    Ok(text)
}

/// Where in a file something is wrong.
struct Place<'a> {
    path: &'a Path,
    text: &'a str,
}

impl Place<'_> {
    fn wrong(&self, at: usize, why: impl std::fmt::Display) -> Failure {
        let before = self.text.get(..at).unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        Failure::new(Exit::Usage, format!("{}, line {line}: {why}", self.path.display()))
    }
}

/// Takes over what the file says.
pub(super) fn read(settings: &mut Settings, path: &Path, text: &str) -> Result<(), Failure> {
    let place = Place { path, text };
    let table = DeTable::parse(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        place.wrong(at, error.message())
    })?;
    for (key, value) in table.get_ref() {
        let group = groups().find(|group| group.table() == Some(key.get_ref()));
        match (group, value.get_ref()) {
            (Some(group), DeValue::Table(inner)) => {
                for (key, value) in inner {
                    set(settings, &place, group, key, value)?;
                }
            }
            (Some(_), _) => {
                let why = format!("\"{0}\" is a table, [{0}]", key.get_ref());
                return Err(place.wrong(key.span().start, why));
            }
            (None, _) => set(settings, &place, Group::Node, key, value)?,
        }
    }
    Ok(())
}

fn groups() -> impl Iterator<Item = Group> {
    [Group::Node, Group::Topic].into_iter()
}

fn set(
    settings: &mut Settings,
    place: &Place<'_>,
    group: Group,
    key: &Spanned<toml::de::DeString<'_>>,
    value: &Spanned<DeValue<'_>>,
) -> Result<(), Failure> {
    let name = &**key.get_ref();
    let is_it = |declaration: &Declaration| declaration.group == group && declaration.name == name;
    let Some(which) = TABLE.iter().position(is_it) else {
        return Err(place.wrong(key.span().start, unknown(group, name)));
    };
    let origin = Origin::File(place.path.to_owned());
    settings.entries_mut()[which].read_toml(value.get_ref(), origin).map_err(|why| {
        let name = TABLE[which].full_name();
        let said = shown(text_of(place.text, value.span()));
        place.wrong(value.span().start, format!("{name}{said}: {why}"))
    })
}

fn text_of(text: &str, span: std::ops::Range<usize>) -> &str {
    text.get(span).unwrap_or_default()
}

/// A value as it stands in the file, if it is short enough to be said again.
fn shown(value: &str) -> String {
    const LONGEST: usize = 60;
    match value.len() {
        1..=LONGEST if !value.chars().any(char::is_control) => format!(" = {value}"),
        _ => String::new(),
    }
}

/// What is said of a name that is none, or belongs elsewhere.
fn unknown(group: Group, name: &str) -> String {
    let place = |group: Group| match group.table() {
        Some(table) => format!("under [{table}]"),
        None => "above all [tables]".to_owned(),
    };
    if let Some(other) = TABLE.iter().find(|other| other.name == name) {
        return format!("\"{name}\" stands {}", place(other.group));
    }
    let tables = groups().filter_map(Group::table).filter(|_| group == Group::Node);
    let names = || TABLE.iter().filter(|other| other.group == group).map(|other| other.name);
    let elsewhere = TABLE.iter().filter(|other| other.group != group).map(|other| other.name);
    let proposal = if let Some(near) = nearest(name, names().chain(tables)) {
        format!("the nearest is \"{near}\"")
    } else if let Some(near) = nearest(name, elsewhere) {
        let other = TABLE.iter().find(|other| other.name == near);
        format!("the nearest is \"{near}\", {}", place(other.map_or(group, |other| other.group)))
    } else {
        format!("there are {}", names().collect::<Vec<_>>().join(", "))
    };
    format!("there is no setting \"{}\"; {proposal}", name.escape_debug())
}
