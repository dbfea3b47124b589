//! Ranks that a real torchrun starts, if Python has PyTorch.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The interpreter to use instead of `python3`.
const VARIABLE: &str = "FABRICAST_PYTHON_TORCH";

fn python() -> String {
    env::var(VARIABLE).unwrap_or_else(|_| "python3".to_owned())
}

fn has_torch(python: &str) -> bool {
    let mut command = Command::new(python);
    command.args(["-c", "import torch"]).stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// The example `gather_rank`, which cargo builds beside the tests.
fn program() -> PathBuf {
    let test = env::current_exe().expect("the path of this program");
    let built = test.ancestors().nth(2).expect("target/PROFILE/deps/NAME");
    let program = built.join("examples/gather_rank");
    assert!(program.exists(), "cargo build --package fabricast-control --example gather_rank");
    program
}

#[test]
fn ranks_of_torchrun_gather_without_pytorch() {
    let python = python();
    if !has_torch(&python) {
        testkit::skip!("{python} has no PyTorch; {VARIABLE} names another interpreter");
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/gpu/torchrun_gather");
    let mut command = Command::new(&python);
    command.arg(script).arg("--program").arg(program()).stdin(Stdio::null());
    let output = command.output().expect("Python starts");
    let (text, errors) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    print!("{text}");
    assert!(output.status.success() && text.ends_with("ok\n"), "{text}{errors}");
}
