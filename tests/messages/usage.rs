//! Invalid command lines.

use crate::run::TestNode;

const MORE: &str = "\n\nFor more information, try '--help'.\n";

#[test]
fn unknown_subcommand() {
    let usage = "error: unrecognized subcommand 'fly'\n\nUsage: fabricast <COMMAND>";
    TestNode::new().fails(&["fly"], 2, &(usage.to_owned() + MORE));
}

#[test]
fn missing_topic() {
    let usage = "error: the following required arguments were not provided:\n  <TOPIC>\n\n\
                 Usage: fabricast sub <TOPIC>";
    TestNode::new().fails(&["sub"], 2, &(usage.to_owned() + MORE));
}

#[test]
fn misspelt_option() {
    let usage = "error: unexpected argument '--dephth' found\n\n  tip: a similar argument exists: '--depth'\n\n\
                 Usage: fabricast pub --depth <NUMBER> <TOPIC>";
    TestNode::new().fails(&["pub", "t", "--dephth", "3"], 2, &(usage.to_owned() + MORE));
}

#[test]
fn count_of_zero() {
    let why = "error: invalid value '0' for '--count <COUNT>': has to be at least 1";
    TestNode::new().fails(&["sub", "t", "--count", "0"], 2, &(why.to_owned() + MORE));
}

#[test]
fn size_in_unknown_units() {
    let why =
        "error: invalid value '1MB' for '--size <SIZE>': not a number with an optional K, M or G";
    let arguments = ["pub", "t", "--pattern", "--size", "1MB"];
    TestNode::new().fails(&arguments, 2, &(why.to_owned() + MORE));
}

#[test]
fn topic_with_a_long_name() {
    let name = "x".repeat(300);
    let why = format!(
        "error: invalid value '{name}' for '<TOPIC>': a name has 1 to 200 bytes and no control characters in it, \
         this one has 300 bytes{MORE}"
    );
    TestNode::new().fails(&["pub", &name], 2, &why);
}

#[test]
fn lines_without_a_file() {
    let why = "fabricast: use --lines failed: with --check, --stats or --json messages are not written to standard \
               output. Add --file FILE\n";
    TestNode::new().fails(&["sub", "t", "--lines", "--check"], 2, why);
}

#[test]
fn pattern_below_its_header() {
    let arguments = ["pub", "t", "--pattern", "--size", "39"];
    TestNode::new().fails(
        &arguments,
        2,
        "fabricast: --size is too small. A pattern message has at least 40 bytes\n",
    );
}

#[test]
fn demonstration_with_too_short_time() {
    let arguments = ["demo", "--time", "0.5"];
    TestNode::new().fails(
        &arguments,
        2,
        "fabricast: --time is out of range. Use 1 to 3600 seconds\n",
    );
}

#[test]
fn demonstration_on_a_missing_device() {
    let why = "fabricast: open emulated:99 failed: no such device: there are 2\n";
    TestNode::new().fails(&["demo", "--memory", "emulated:99"], 3, why);
}

#[test]
fn policy_that_contradicts_itself() {
    let why = "error: invalid value '=shm,^shm' for '--policy <POLICY>': parse provider policy failed: invalid argument: \"shm\" is \
               both required and denied";
    TestNode::new().fails(&["info", "--policy", "=shm,^shm"], 2, &(why.to_owned() + MORE));
}

#[test]
fn missing_directory_to_clean() {
    let why = "fabricast: clean /nowhere/at/all failed: no such directory\n";
    TestNode::new().fails(&["clean", "/nowhere/at/all"], 6, why);
}

#[test]
fn missing_agent_card() {
    let why = "fabricast: read /nowhere/at/all failed: No such file or directory (os error 2)\n";
    TestNode::new().fails(&["paths", "--explain", "/nowhere/at/all"], 6, why);
}
