//! The settings file: TOML; unknown names are errors.

use std::fmt::Display;
use std::ops::Range;
use std::path::Path;

use pubsub::{Form, Setting, Settings};
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

use crate::cli::exit::{Exit, Failure, Result};

/// The table of settings of topics.
const TOPIC: &str = "topic";

/// A settings file and the settings read from it.
struct File<'a> {
    path: &'a Path,
    text: &'a str,
    settings: &'a mut Settings,
}

pub(super) fn read(settings: &mut Settings, path: &Path, text: &str) -> Result<()> {
    let mut file = File { path, text, settings };
    let table = DeTable::parse(text)
        .map_err(|error| file.wrong(error.span().unwrap_or_default(), error.message()))?;
    for (key, value) in table.get_ref() {
        match (key.get_ref().as_ref() == TOPIC, value.get_ref()) {
            (true, DeValue::Table(topic)) => {
                for (key, value) in topic {
                    file.set(true, key, value)?;
                }
            }
            (true, _) => {
                return Err(file.wrong(key.span(), format!("\"{TOPIC}\" is a table, [{TOPIC}]")));
            }
            (false, _) => file.set(false, key, value)?,
        }
    }
    Ok(())
}

impl File<'_> {
    fn wrong(&self, at: Range<usize>, why: impl Display) -> Failure {
        let line = self.text.get(..at.start).unwrap_or_default().matches('\n').count() + 1;
        Failure::new(Exit::Usage, format!("{}, line {line}: {why}", self.path.display()))
    }

    fn set(
        &mut self,
        is_of_topics: bool,
        key: &Spanned<DeString<'_>>,
        value: &Spanned<DeValue<'_>>,
    ) -> Result<()> {
        let name = key.get_ref().as_ref();
        let mut all = Setting::all().iter();
        let Some(setting) = all.find(|one| one.is_of_topics() == is_of_topics && one.key() == name)
        else {
            return Err(self.wrong(key.span(), unknown(is_of_topics, name)));
        };
        let origin = format!("file {}", self.path.display());
        let text = text_of(setting.form, value.get_ref());
        let read = text.and_then(|text| self.settings.set(setting, &text, &origin));
        read.map_err(|why| {
            // A short value is shown as written.
            let text = self.text.get(value.span()).unwrap_or_default();
            let is_short = (1..=60).contains(&text.len()) && !text.contains(char::is_control);
            let shown = if is_short { format!(" = {text}") } else { String::new() };
            self.wrong(value.span(), format!("{}{shown}: {why}", setting.name))
        })
    }
}

/// The text of a value in a file that has this form.
fn text_of(form: Form, value: &DeValue<'_>) -> Result<String, String> {
    let expected = match (form, value) {
        (Form::Flag, DeValue::Boolean(value)) => return Ok(value.to_string()),
        (Form::Number | Form::Size | Form::Seconds, DeValue::Integer(number)) => {
            let digits = number.as_str().replace('_', "");
            let number = u64::from_str_radix(&digits, number.radix());
            let why = |_| format!("{digits}: a number from 0 to 2^64 - 1 is expected");
            return number.map(|number| number.to_string()).map_err(why);
        }
        (Form::Seconds, DeValue::Float(number)) => return Ok(number.as_str().replace('_', "")),
        (Form::Text(_) | Form::Size, DeValue::String(text)) => return Ok(text.to_string()),
        (Form::Number | Form::Seconds, DeValue::String(text)) if text == "none" => {
            return Ok(text.to_string());
        }
        (Form::List, DeValue::Array(all)) => {
            let element = |value: &Spanned<DeValue<'_>>| match value.get_ref() {
                DeValue::String(text) if text.is_empty() => {
                    Err("an element of the list is empty".to_owned())
                }
                DeValue::String(text) => Ok(text.to_string()),
                other => Err(format!("a string is expected, not {}", type_name_of(other))),
            };
            let all: Vec<_> = all.iter().map(element).collect::<Result<_, _>>()?;
            return Ok(all.join(","));
        }
        (Form::Text(kind), _) => kind,
        (Form::Flag, _) => "true or false",
        (Form::Number, _) => "a whole number",
        (Form::Size, _) => "a size like 4096 or \"64M\"",
        (Form::Seconds, _) => "a number of seconds",
        (Form::List, _) => "a list of strings",
    };
    Err(format!("{expected} is expected, not {}", type_name_of(value)))
}

fn type_name_of(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "a whole number",
        DeValue::Float(_) => "a number with a fraction",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

/// The message about a name that is unknown, or belongs elsewhere.
fn unknown(is_of_topics: bool, name: &str) -> String {
    let place = |is_of_topics| match is_of_topics {
        true => format!("under [{TOPIC}]"),
        false => "above all [tables]".to_owned(),
    };
    let all = || Setting::all().iter().map(|one| (one.key(), one.is_of_topics()));
    if let Some((_, belongs)) = all().find(|(key, _)| *key == name) {
        return format!("\"{name}\" belongs {}", place(belongs));
    }
    let written = name.to_lowercase().replace('-', "_");
    let distances = all().chain([(TOPIC, false)]).map(|(key, belongs)| {
        (strsim::osa_distance(&written, key), belongs != is_of_topics, key, belongs)
    });
    let nearest = distances.min_by_key(|(distance, is_elsewhere, ..)| (*distance, *is_elsewhere));
    let proposal = match nearest.filter(|(distance, _, key, _)| *distance <= key.len() / 3) {
        Some((_, false, near, _)) => format!("the nearest is \"{near}\""),
        Some((_, true, near, belongs)) => format!("the nearest is \"{near}\", {}", place(belongs)),
        None => {
            let here = all().filter(|(_, belongs)| *belongs == is_of_topics).map(|(key, _)| key);
            format!("there are {}", here.collect::<Vec<_>>().join(", "))
        }
    };
    format!("unknown setting \"{}\"; {proposal}", name.escape_debug())
}
