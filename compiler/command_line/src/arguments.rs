//! A program's arguments, or one line that says what is wrong with them; and the status that it ends with.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command, Parser};

use crate::tell;

/// Status of a program that does not take its arguments, as shells and most programs have it.
const MISUSED: u8 = 2;

/// Runs a program with the arguments that it was called with.
///
/// Where help or the version is asked for, it is printed and the program ends. An error is one line on standard error:
/// status 2 where the program does not take what it was given, 1 where `work` fails.
pub fn run<P: Parser>(work: impl FnOnce(P) -> Result<ExitCode>) -> ExitCode {
    let arguments = match parsed(std::env::args_os()) {
        Ok(arguments) => arguments,
        Err(error) => {
            if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
                error.exit()
            }
            tell(format_args!("error: {}", complaint(&error, &P::command())));
            return ExitCode::from(MISUSED);
        }
    };
    work(arguments).unwrap_or_else(|error| {
        tell(format_args!("error: {error:#}"));
        ExitCode::FAILURE
    })
}

fn parsed<P: Parser>(
    arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>,
) -> Result<P, clap::Error> {
    let mut matches = with_negative_numbers(P::command()).try_get_matches_from(arguments)?;
    P::from_arg_matches_mut(&mut matches)
}

/// Takes a negative number as a value that an option was given, so that the option says what is wrong with it.
fn with_negative_numbers(command: Command) -> Command {
    let option = |argument: Arg| {
        let is_option = argument.get_action().takes_values() && !argument.is_positional();
        if is_option { argument.allow_negative_numbers(true) } else { argument }
    };
    command.mut_args(option).mut_subcommands(with_negative_numbers)
}

/// What clap says in several lines, without its usage.
fn complaint(error: &clap::Error, command: &Command) -> String {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return "nothing is asked for; --help lists what can be".into();
    }
    // Clap takes a second word for a subcommand, and then says that a subcommand cannot be used.
    let word = error.get(ContextKind::InvalidSubcommand);
    if let (ErrorKind::ArgumentConflict, Some(ContextValue::String(word))) = (error.kind(), word) {
        let known: Vec<&str> = command.get_subcommands().map(Command::get_name).collect();
        return format!(
            "{word:?} is not expected here: a command comes first, one of {}",
            known.join(", ")
        );
    }
    let text = error.to_string();
    let is_usage = |line: &&str| line.starts_with("Usage:") || line.starts_with("For more");
    // An option that does not exist is hardly meant as a value.
    let is_said = |line: &&str| !line.is_empty() && !line.starts_with("tip: to pass");
    let said = text.lines().take_while(|line| !is_usage(line)).map(str::trim);
    let mut sentence = String::new();
    for line in said.filter(is_said) {
        if sentence.ends_with(':') || line.starts_with('[') {
            sentence.push(' ');
        } else if !sentence.is_empty() {
            sentence.push_str("; ");
        }
        sentence.push_str(line);
    }
    let sentence = sentence.trim_start_matches("error: ");
    format!("{sentence}; --help lists what there is")
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Subcommand};

    use super::*;

    #[derive(Debug, Parser)]
    #[command(name = "program", arg_required_else_help = true)]
    struct Arguments {
        #[arg(long, required = true)]
        input: String,
        #[arg(long, value_parser = ["fast", "slow"])]
        speed: Option<String>,
        #[arg(long)]
        count: Option<u32>,
    }

    #[derive(Debug, Parser)]
    #[command(args_conflicts_with_subcommands = true)]
    struct WithCommands {
        #[command(subcommand)]
        command: Option<Known>,
        plan: Option<String>,
    }

    #[derive(Debug, Subcommand)]
    enum Known {
        Measure,
        Look,
    }

    #[test]
    fn a_misspelt_command_is_told_with_those_that_exist() {
        let error = parsed::<WithCommands>(["program", "mesure", "plan"]).expect_err("no command");
        let expected = "\"plan\" is not expected here: a command comes first, one of measure, look";
        assert_eq!(complaint(&error, &WithCommands::command()), expected);
    }

    fn check(arguments: &[&str], expected: &str) {
        let all = ["program"].iter().chain(arguments);
        let error = parsed::<Arguments>(all).expect_err("they are not taken");
        assert_eq!(complaint(&error, &Arguments::command()), expected);
    }

    #[test]
    fn every_refusal_is_one_line_with_its_cause() {
        check(&[], "nothing is asked for; --help lists what can be");
        check(
            &["--speed", "fast"],
            "the following required arguments were not provided: --input <INPUT>; \
             --help lists what there is",
        );
        check(
            &["--input", "a", "--cuont", "3"],
            "unexpected argument '--cuont' found; tip: a similar argument exists: '--count'; \
             --help lists what there is",
        );
        check(
            &["--input", "a", "--unheard-of"],
            "unexpected argument '--unheard-of' found; --help lists what there is",
        );
        check(
            &["--input", "a", "--count", "many"],
            "invalid value 'many' for '--count <COUNT>': invalid digit found in string; \
             --help lists what there is",
        );
        check(
            &["--input", "a", "--count", "-3"],
            "invalid value '-3' for '--count <COUNT>': -3 is not in 0..=4294967295; \
             --help lists what there is",
        );
        check(
            &["--input", "a", "--speed", "warp"],
            "invalid value 'warp' for '--speed <SPEED>' [possible values: fast, slow]; \
             --help lists what there is",
        );
    }
}
