//! `fabricast config`: every setting with its value and origin.

use pubsub::{Budgets, Form, Setting, Settings};
use serde_json::{Value, json};

use super::{ALL, Options};
use crate::cli::exit::Result;
use crate::cli::{output, size, text};

/// Lists every setting with its environment variable, its value, and the origin of the value: built
/// in (default), in a file, in the environment, or by an option.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// One JSON line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: Options<ALL>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let settings = arguments.settings.settings()?;
    match arguments.json {
        true => output::json(&to_json(&settings)),
        false => output::print_report(&to_text(&settings)),
    }
}

fn json_of(setting: &Setting, settings: &Settings) -> Value {
    match (setting.form, setting.value(settings)) {
        (Form::List, text) => json!(text.iter().flat_map(|all| all.split(',')).collect::<Vec<_>>()),
        (_, None) => Value::Null,
        (Form::Text(_), Some(text)) => text.into(),
        (Form::Flag, Some(text)) => json!(text.parse::<bool>().ok()),
        (Form::Number, Some(text)) => json!(text.parse::<u64>().ok()),
        (Form::Size, Some(text)) => json!(size::parse(&text).ok()),
        (Form::Seconds, Some(text)) => json!(text.parse::<f64>().ok()),
    }
}

/// The effective value of a setting that is not set, where another setting or the machine
/// determines it.
fn effective_value(settings: &Settings, setting: &Setting) -> Option<Value> {
    let label = &settings.node.label;
    match (setting.name, setting.value(settings)) {
        ("budget_host", None) => Budgets::default().of_host().ok().map(Value::from),
        ("node_name", None) if !label.is_empty() => Some(label.clone().into()),
        _ => None,
    }
}

fn origin<'a>(settings: &'a Settings, setting: &Setting) -> &'a str {
    settings.origin(setting.name).unwrap_or("default")
}

fn to_text(settings: &Settings) -> String {
    let row = |setting: &Setting| {
        let origin = origin(settings, setting);
        let value = match setting.value(settings) {
            // The effective value is more informative than "none".
            None if origin == "default" => setting.default.replace('`', ""),
            _ => setting.text(settings),
        };
        let value = match effective_value(settings, setting) {
            Some(Value::Number(bytes)) => {
                format!("{value}: {}", size::amount(bytes.as_f64().unwrap_or_default()))
            }
            Some(Value::String(text)) => format!("{value}: \"{}\"", text.escape_debug()),
            _ => value,
        };
        vec![setting.name.to_owned(), setting.variable.clone(), value, origin.to_owned()]
    };
    text::table(&Setting::all().iter().map(row).collect::<Vec<_>>())
}

fn to_json(settings: &Settings) -> Value {
    let all = Setting::all().iter().map(|setting| {
        let mut about = json!({
            "value": json_of(setting, settings),
            "origin": origin(settings, setting),
            "variable": setting.variable,
        });
        if let Some(value) = effective_value(settings, setting) {
            about["effective_value"] = value;
        }
        (setting.name.to_owned(), about)
    });
    Value::Object(all.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::settings::options::value_name;

    #[test]
    fn every_setting_has_a_line_and_a_value() {
        let settings = Settings::default();
        let lines = to_text(&settings);
        let all = to_json(&settings);
        assert_eq!(lines.lines().count(), Setting::all().len());
        for setting in Setting::all() {
            let name = setting.name;
            assert!(lines.lines().any(|line| line.starts_with(&format!("{name} "))), "{lines}");
            assert_eq!(all[name]["origin"], "default", "{all}");
            let line = lines.lines().find(|line| line.starts_with(&format!("{name} ")));
            let variable = line.and_then(|line| line.split_whitespace().nth(1));
            assert_eq!(variable, Some(&*setting.variable), "{lines}");
            assert_eq!(all[name]["variable"], setting.variable, "{all}");
        }
        assert_eq!(all["topic.depth"]["value"], 16);
    }

    #[test]
    fn text_none_is_not_null_in_json() {
        let mut settings = Settings::default();
        settings.node.directory = "none".into();
        let all = to_json(&settings);
        assert_eq!(all["directory"]["value"], "none");
        assert!(all["label"]["value"].is_null(), "{all}");
        assert!(all["peers"]["value"].as_array().is_some_and(Vec::is_empty), "{all}");
    }

    #[test]
    fn effective_value_of_an_unset_setting_is_shown() {
        let mut settings = Settings::default();
        settings.node.label = "left".to_owned();
        let all = to_json(&settings);
        assert!(all["budget_host"]["effective_value"].as_u64() > Some(0), "{all}");
        assert!(all["budget_host"]["value"].is_null(), "{all}");
        assert_eq!(all["node_name"]["effective_value"], "left");
        let lines = to_text(&settings);
        assert!(
            lines.contains("a quarter of the host's memory: ")
                && lines.contains("the label: \"left\""),
            "{lines}"
        );
        settings.node.budgets.host = Some(1 << 30);
        assert!(to_json(&settings)["budget_host"]["effective_value"].is_null());
    }

    /// The table in docs/reference/settings.md.
    fn for_documentation() -> String {
        let rows = Setting::all().iter().map(|setting| {
            let Setting { name, default, about, variable, option, form, .. } = setting;
            let kind = match form {
                Form::Flag => String::new(),
                form => format!(" {}", value_name(*form).replace('|', " or ")),
            };
            format!("| `{name}` | `--{option}`{kind} | `{variable}` | {about} | {default} |\n")
        });
        let head = "| file key | option | environment | meaning | default |\n\
                    |---|---|---|---|---|\n";
        head.to_owned() + &rows.collect::<String>()
    }

    #[test]
    fn documentation_lists_the_settings() {
        testkit::reference::check("settings.md", "settings", &for_documentation());
    }
}
