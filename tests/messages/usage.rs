//! Command lines that are wrong.

use crate::run::TestNode;

const MORE: &str = "\n\nFor more information, try '--help'.\n";

#[test]
fn unknown_subcommand() {
    let usage = "error: unrecognized subcommand 'fly'\n\nUsage: fabricast <COMMAND>";
    TestNode::new().says(&["fly"], 2, &(usage.to_owned() + MORE));
}

#[test]
fn missing_topic() {
    let usage = "error: the following required arguments were not provided:\n  <TOPIC>\n\n\
                 Usage: fabricast sub <TOPIC>";
    TestNode::new().says(&["sub"], 2, &(usage.to_owned() + MORE));
}

#[test]
fn misspelt_option() {
    let usage = "error: unexpected argument '--dephth' found\n\n  tip: a similar argument exists: '--depth'\n\n\
                 Usage: fabricast pub --depth <NUMBER> <TOPIC>";
    TestNode::new().says(&["pub", "t", "--dephth", "3"], 2, &(usage.to_owned() + MORE));
}

#[test]
fn count_of_nothing() {
    let why = "error: invalid value '0' for '--count <COUNT>': has to be at least 1";
    TestNode::new().says(&["sub", "t", "--count", "0"], 2, &(why.to_owned() + MORE));
}

#[test]
fn size_in_unknown_units() {
    let why =
        "error: invalid value '1MB' for '--size <SIZE>': not a number with an optional K, M or G";
    let arguments = ["pub", "t", "--pattern", "--size", "1MB"];
    TestNode::new().says(&arguments, 2, &(why.to_owned() + MORE));
}

#[test]
fn topic_with_a_long_name() {
    let name = "x".repeat(300);
    let why = format!(
        "error: invalid value '{name}' for '<TOPIC>': a name has 1 to 200 bytes and no control characters in it, this one has 300 bytes{MORE}"
    );
    TestNode::new().says(&["pub", &name], 2, &why);
}

#[test]
fn lines_without_a_file() {
    let why = "fabricast: --lines: with --check, --stats or --json messages go to a file only: say which with \
               --file\n";
    TestNode::new().says(&["sub", "t", "--lines", "--check"], 2, why);
}

#[test]
fn pattern_that_is_too_short() {
    let arguments = ["pub", "t", "--pattern", "--size", "39"];
    TestNode::new().says(&arguments, 2, "fabricast: --size is too small. A pattern message has at least 40 bytes\n");
}

#[test]
fn demonstration_of_no_length() {
    let arguments = ["demo", "--time", "0.5"];
    TestNode::new().says(&arguments, 2, "fabricast: --time is out of range. Use 1 to 3600 seconds\n");
}

#[test]
fn demonstration_on_a_device_that_is_not_there() {
    let why = "fabricast: emulated:99: open failed: no such device: there are 2\n";
    TestNode::new().says(&["demo", "--memory", "emulated:99"], 3, why);
}

#[test]
fn policy_that_contradicts_itself() {
    let why = "error: invalid value '=shm,^shm' for '--policy <POLICY>': parse provider policy: invalid argument: \"shm\" is \
               both required and denied";
    TestNode::new().says(&["info", "--policy", "=shm,^shm"], 2, &(why.to_owned() + MORE));
}

#[test]
fn directory_to_clean_that_is_not_there() {
    let why = "fabricast: clean /nowhere/at/all failed: no such directory\n";
    TestNode::new().says(&["clean", "/nowhere/at/all"], 6, why);
}

#[test]
fn agent_that_is_not_there() {
    let why = "fabricast: read /nowhere/at/all failed: No such file or directory (os error 2)\n";
    TestNode::new().says(&["paths", "--explain", "/nowhere/at/all"], 6, why);
}
