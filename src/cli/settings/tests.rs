//! Origins of settings, and errors of invalid ones.

use std::ffi::OsString;
use std::path::Path;

use std::time::Duration;

use pubsub::parse_seconds;

use super::*;

fn merge_texts(
    file: &str,
    environment: &[(&str, &str)],
    options: &[(&str, &str)],
) -> Result<Settings, String> {
    let options: Vec<OptionValue> = options
        .iter()
        .map(|(name, text)| {
            let setting = Setting::all().iter().find(|setting| setting.option == *name);
            (setting.unwrap(), (*text).to_owned())
        })
        .collect();
    let variable = |name: &str| {
        let found = environment.iter().find(|(variable, _)| *variable == name);
        found.map(|(_, value)| OsString::from(value))
    };
    merge(Some((Path::new("node.toml"), file)), variable, &options).map_err(|failure| {
        assert_eq!(failure.exit(), Exit::Usage);
        failure.to_string()
    })
}

#[track_caller]
fn wrong(file: &str, why: &str) {
    let error = merge_texts(file, &[], &[]).unwrap_err();
    assert!(error.contains(why), "{file}: {error}");
    assert!(error.starts_with("node.toml, line "), "{error}");
}

#[test]
fn declared_defaults_match_the_values() {
    let settings = Settings::default();
    for setting in Setting::all() {
        assert_eq!(settings.origin(setting.name), None);
        let written = setting.text(&settings);
        let is_literal = !setting.default.contains([' ', '`']);
        if is_literal {
            assert_eq!(written, setting.default, "{}", setting.name);
        } else {
            let is_derived = ["directory", "topic.max_held"].contains(&setting.name);
            assert!(written == "none" || is_derived);
        }
        assert!(setting.about.ends_with('.'), "{}", setting.about);
        let others = Setting::all().iter().filter(|other| other.option == setting.option);
        assert_eq!(others.count(), 1, "{}", setting.option);
    }
}

#[test]
fn command_line_overrides_environment_overrides_file() {
    let file = "label = 'file'\nservice_timeout = 3\n".to_owned()
        + "peers = ['a:1', 'b:2']\n[topic]\ndepth = 3\nlargest = '2M'\nrelease_deadline = 0.5\n";
    let environment = [
        ("FABRICAST_SERVICE_TIMEOUT", "4"),
        ("FABRICAST_TOPIC_DEPTH", "4"),
        ("FABRICAST_LABEL", ""),
    ];
    let settings = merge_texts(&file, &environment, &[("depth", "5")]).unwrap();
    assert_eq!(settings.node.label, "file");
    assert_eq!(settings.origin("label").unwrap(), "file node.toml");
    assert_eq!(settings.node.service_timeout, Duration::from_secs(4));
    assert_eq!(
        settings.origin("service_timeout").unwrap(),
        "environment FABRICAST_SERVICE_TIMEOUT"
    );
    assert_eq!(settings.topic.depth, 5);
    assert_eq!(settings.origin("topic.depth").unwrap(), "option --depth");
    assert_eq!(settings.network.peers, ["a:1", "b:2"]);
    assert_eq!(settings.origin("insecure"), None);
    assert!(settings.sets_topic());
    assert!(!Settings::default().sets_topic());
    let topic = settings.topic;
    assert_eq!((topic.largest, topic.release_deadline), (2 << 20, Duration::from_millis(500)));
}

#[test]
fn every_setting_is_read_as_written() {
    let options = [
        ("directory", "/run/x"),
        ("label", "a label"),
        ("service", "external"),
        ("service-timeout", "0.25"),
        ("budget-host", "3GiB"),
        ("budget-device", "none"),
        ("listen", "[::1]:7700"),
        ("peers", "a:1,b:2"),
        ("rendezvous", "c:3"),
        ("insecure", "true"),
        ("node-name", "left"),
        ("provider", "tcp"),
        ("lanes", "3"),
        ("workers", "2"),
        ("source", "127.0.0.1"),
        ("lost-after", "1.5"),
        ("memory", "emulated:0"),
        ("reliability", "drop-oldest"),
        ("depth", "7"),
        ("max-held", "3"),
        ("largest", "64MiB"),
        ("loans", "2"),
        ("release-deadline", "2"),
    ];
    let all = Setting::all();
    assert_eq!(options.len(), all.len());
    let settings = merge_texts("", &[], &options).unwrap();
    let environment: Vec<_> =
        all.iter().zip(options).map(|(one, (_, text))| (one.variable.as_str(), text)).collect();
    let same = merge_texts("", &environment, &[]).unwrap();
    let as_strings: Vec<_> = all
        .iter()
        .zip(options)
        .filter(|(one, _)| !["peers", "insecure"].contains(&one.name))
        .map(|(one, (_, text))| format!("{} = '{text}'\n", one.name))
        .collect();
    let from_file = merge_texts(&as_strings.concat(), &[], &[]);
    for (at, (name, text)) in options.iter().enumerate() {
        assert_eq!(all[at].text(&settings), *text, "{name}");
        assert_eq!(all[at].text(&same), *text, "{name}");
        if let (Ok(from_file), false) = (&from_file, ["peers", "insecure"].contains(&all[at].name))
        {
            assert_eq!(all[at].text(from_file), *text, "{name}");
        }
    }
    // A number in a file must not be a string.
    let why = from_file.unwrap_err();
    assert!(why.contains("expected, not a string"), "{why}");
}

#[test]
fn unknown_setting_is_reported_with_the_nearest() {
    wrong(
        "service_timeuot = 3\n",
        "line 1: unknown setting \"service_timeuot\"; the nearest is \"service_timeout\"",
    );
    wrong(
        "\n\n[topic]\ndpeth = 3\n",
        "line 4: unknown setting \"dpeth\"; the nearest is \"depth\"",
    );
    wrong("depth = 3\n", "\"depth\" belongs under [topic]");
    wrong("[topic]\nlabel = 'x'\n", "\"label\" belongs above all [tables]");
    wrong("dephth = 3\n", "the nearest is \"depth\", under [topic]");
    wrong("[topics]\ndepth = 3\n", "the nearest is \"topic\"");
    wrong("colour = 'red'\n", "there are directory, label, service");
    wrong("Lost-Aftr = 3\n", "the nearest is \"lost_after\"");
    wrong("topic = 3\n", "\"topic\" is a table, [topic]");
    wrong("\"a\\nb\" = 3\n", "a\\nb");
}

#[test]
fn invalid_value_in_a_file_is_reported_with_its_line() {
    for (file, why) in [
        ("service_timeout = \n", "line 1"),
        ("service_timeout = 3\nservice_timeout = 4\n", "duplicate key"),
        (
            "service_timeout = 'long'\n",
            "service_timeout = 'long': a number of seconds is expected, not a string",
        ),
        ("service_timeout = -1\n", "service_timeout = -1: "),
        ("service_timeout = inf\n", "not a number of seconds"),
        ("service_timeout = nan\n", "not a number of seconds"),
        ("insecure = 'yes'\n", "true or false is expected, not a string"),
        ("peers = 'a:1'\n", "a list of strings is expected, not a string"),
        ("peers = [1]\n", "a string is expected, not a whole number"),
        ("peers = ['']\n", "an element of the list is empty"),
        ("peers = ['nowhere']\n", "not of the form host:port"),
        ("budget_host = 1.5\n", "a size like 4096"),
        ("budget_host = '1Q'\n", "optional K, M or G"),
        ("budget_host = 99999999999999999999\n", "2^64"),
        ("listen = 7700\n", "ADDRESS:PORT is expected, not a whole number"),
        ("service = 'other'\n", "not embedded or external"),
        ("provider = ''\n", "cannot be empty"),
        ("lanes = 0\n", "use 1 to 16"),
        ("workers = 17\n", "use 1 to 16"),
        ("lost_after = 0.01\n", "0.1 to 3600"),
        ("label = ''\n", "cannot be empty"),
        ("label = \"a\\tb\"\n", "control characters"),
        ("[topic]\ndepth = 0\n", "line 2: topic.depth = 0: use 1 to 65536"),
        ("[topic]\ndepth = 4294967297\n", "= 4294967297: use 1 to 65536"),
        ("[topic]\nlargest = \"12Q\"\n", "line 2: topic.largest = \"12Q\": not a number with"),
        ("[topic]\nlargest = 0\n", "1 to "),
        ("[topic]\nreliability = 'often'\n", "not reliable, drop-oldest or drop-newest"),
        ("[topic]\nmemory = 'tape'\n", "host, cuda:0, emulated:0 or GPU-<UUID>"),
    ] {
        wrong(file, why);
    }
}

#[test]
fn all_toml_notations_of_numbers_are_accepted() {
    let file = "budget_host = 0x1_0000\nservice_timeout = 1_0.5\n[topic]\ndepth = 0b11\n";
    let settings = merge_texts(file, &[], &[]).unwrap();
    assert_eq!(settings.node.budgets.host, Some(1 << 16));
    assert_eq!(settings.node.service_timeout, Duration::from_millis(10_500));
    assert_eq!(settings.topic.depth, 3);
}

#[test]
fn invalid_value_of_variable_or_option_names_its_origin() {
    let why = merge_texts("", &[("FABRICAST_TOPIC_DEPTH", "+3")], &[]).unwrap_err();
    assert!(
        why.starts_with("environment FABRICAST_TOPIC_DEPTH is \"+3\": use 1 to 65536"),
        "{why}"
    );
    let why = merge_texts("", &[], &[("depth", "0")]).unwrap_err();
    assert_eq!(why, "option --depth is \"0\": use 1 to 65536");
}

#[test]
fn setting_of_a_file_can_be_unset() {
    let file = "listen = '127.0.0.1:1'\npeers = ['a:1']\n";
    let settings = merge_texts(file, &[], &[("listen", "none"), ("peers", "none")]).unwrap();
    assert_eq!((settings.network.listen, settings.network.peers.len()), (None, 0));
}

#[test]
fn seconds_are_positive_and_limited() {
    assert_eq!(parse_seconds("0.25"), Ok(Duration::from_millis(250)));
    for wrong in ["-1", "soon", "1e9", "NaN", ""] {
        assert!(parse_seconds(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn variable_that_is_not_utf_8_is_an_error() {
    let value = <OsString as std::os::unix::ffi::OsStringExt>::from_vec(b"/run/\xff".to_vec());
    let variable = |name: &str| (name == "FABRICAST_DIRECTORY").then(|| value.clone());
    let failure = merge(None, variable, &[]).unwrap_err();
    assert_eq!(failure.exit(), Exit::Usage);
    assert_eq!(failure.to_string(), "environment FABRICAST_DIRECTORY is not UTF-8");
}
