//! `fabricast config`: every setting with its value and origin.

use pubsub::Budgets;
use serde_json::{Value, json};

use super::{ALL, Declaration, Options, Settings, TABLE};
use crate::cli::exit::Result;
use crate::cli::size::amount;
use crate::cli::{output, text};

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
        false => output::print(&to_text(&settings)),
    }
}

/// The effective value of a setting that is not set, where another setting or the machine
/// determines it.
fn effective_value(settings: &Settings, declaration: &Declaration) -> Option<Value> {
    match declaration.name {
        "budget_host" if settings.budget_host.value.is_none() => {
            Budgets::default().of_host().ok().map(Value::from)
        }
        "node_name" if settings.node_name.value.is_none() => {
            settings.label.value.clone().map(Value::from)
        }
        _ => None,
    }
}

fn to_text(settings: &Settings) -> String {
    let rows: Vec<_> = TABLE
        .iter()
        .map(|declaration| {
            let value = (declaration.write)(settings);
            let is_set = declaration.is_set(settings);
            let value = match value.is_empty() || (value == "none" && !is_set) {
                // The effective value is more informative than "none".
                true => declaration.default.replace('`', ""),
                false => value,
            };
            let value = match effective_value(settings, declaration) {
                Some(Value::Number(bytes)) => {
                    format!("{value}: {}", amount(bytes.as_f64().unwrap_or_default()))
                }
                Some(Value::String(text)) => format!("{value}: \"{}\"", text.escape_debug()),
                _ => value,
            };
            let [variable, origin] =
                [&declaration.variable, declaration.origin(settings)].map(str::to_owned);
            vec![declaration.full_name(), variable, value, origin]
        })
        .collect();
    text::table(&rows)
}

fn to_json(settings: &Settings) -> Value {
    let all = TABLE.iter().map(|declaration| {
        let value = (declaration.json)(settings);
        let mut about = json!({
            "value": value,
            "origin": declaration.origin(settings),
            "variable": declaration.variable,
        });
        if let Some(value) = effective_value(settings, declaration) {
            about["effective_value"] = value;
        }
        (declaration.full_name(), about)
    });
    Value::Object(all.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_has_a_line_and_a_value() {
        let settings = Settings::default();
        let lines = to_text(&settings);
        let all = to_json(&settings);
        assert_eq!(lines.lines().count(), TABLE.len());
        for declaration in TABLE.iter() {
            let name = declaration.full_name();
            assert!(lines.lines().any(|line| line.starts_with(&format!("{name} "))), "{lines}");
            assert_eq!(all[&name]["origin"], "default", "{all}");
            let line = lines.lines().find(|line| line.starts_with(&format!("{name} ")));
            let variable = line.and_then(|line| line.split_whitespace().nth(1));
            assert_eq!(variable, Some(&*declaration.variable), "{lines}");
            assert_eq!(all[&name]["variable"], declaration.variable, "{all}");
        }
        assert_eq!(all["topic.depth"]["value"], 16);
    }

    #[test]
    fn text_none_is_not_null_in_json() {
        let mut settings = Settings::default();
        settings.directory.value = "none".into();
        let all = to_json(&settings);
        assert_eq!(all["directory"]["value"], "none");
        assert!(all["label"]["value"].is_null(), "{all}");
        assert!(all["peers"]["value"].as_array().is_some_and(Vec::is_empty), "{all}");
    }

    #[test]
    fn effective_value_of_an_unset_setting_is_shown() {
        let mut settings = Settings::default();
        settings.label.value = Some("left".to_owned());
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
        settings.budget_host.value = Some(crate::cli::settings::Size(1 << 30));
        assert!(to_json(&settings)["budget_host"]["effective_value"].is_null());
    }

    /// The table in docs/reference/settings.md.
    fn for_documentation() -> String {
        let rows = TABLE.iter().map(|declaration| {
            let Declaration { about, default, variable, option, kind, .. } = declaration;
            let kind = if *kind == "true|false" {
                String::new()
            } else {
                format!(" {}", kind.replace('|', " or "))
            };
            let name = declaration.full_name();
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
