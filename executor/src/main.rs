//! `hybrid-exec`: runs plans from the command line.

mod commands;

use std::io::IsTerminal as _;
use std::process::ExitCode;

use tracing_subscriber::EnvFilter;

/// What is logged unless `RUST_LOG` says otherwise.
const LOGGED: &str = "error,executor=info";

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(LOGGED));
    // Files of what was logged hold no colours.
    let is_terminal = std::io::stderr().is_terminal();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(is_terminal);
    // Where nobody reads what is logged, nobody reads that either.
    log.log_internal_errors(false).with_writer(std::io::stderr).init();
    command_line::run(|cli: commands::Cli| cli.run().map(|()| ExitCode::SUCCESS))
}
