//! The command `fabricast`.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
