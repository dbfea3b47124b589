//! The command `fabricast`.

mod cli;
mod early;

fn main() -> std::process::ExitCode {
    cli::main()
}
