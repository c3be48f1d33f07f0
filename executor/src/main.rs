//! `hybrid-exec`: runs plans from the command line.

#![expect(clippy::print_stdout, reason = "this is the program that prints")]

mod commands;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    match commands::Cli::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hybrid-exec: {error:#}");
            ExitCode::FAILURE
        }
    }
}
