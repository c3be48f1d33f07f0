//! A program's arguments, or one line that says what is wrong with them; and the status that it ends with.

use std::error::Error as _;
use std::ffi::OsString;
use std::fmt::Display;
use std::num::{ParseFloatError, ParseIntError};
use std::path::Path;
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
/// status 2 where the program does not take what it was given, 1 where `work` fails otherwise than by [`misuse`].
pub fn run<P: Parser>(work: impl FnOnce(P) -> Result<ExitCode>) -> ExitCode {
    let given: Vec<OsString> = std::env::args_os().collect();
    let first = given.get(1).and_then(|word| word.to_str());
    let refuse = |error: &clap::Error| {
        tell(format_args!("error: {}", complaint(error, &P::command(), first)));
        ExitCode::from(MISUSED)
    };
    let arguments = match parsed(&given) {
        Ok(arguments) => arguments,
        Err(error) => {
            if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
                error.exit()
            }
            return refuse(&error);
        }
    };
    work(arguments).unwrap_or_else(|error| {
        if let Some(misuse) = error.downcast_ref::<clap::Error>() {
            return refuse(misuse);
        }
        tell(format_args!("error: {error:#}"));
        ExitCode::FAILURE
    })
}

/// The error of arguments that make no sense together, though the program takes each.
pub fn misuse(cause: impl Display) -> anyhow::Error {
    let error: clap::Error = clap::Error::raw(ErrorKind::ValueValidation, cause);
    error.into()
}

/// The file that an option names for what is written; `None` is standard output, whose name is `-`.
pub fn output_file(path: &Path) -> Option<&Path> {
    (path != Path::new("-")).then_some(path)
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

/// What clap says in several lines, without its usage. `first` is what follows the program's name.
fn complaint(error: &clap::Error, command: &Command, first: Option<&str>) -> String {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return "nothing is asked for; --help lists what can be".into();
    }
    // Clap takes a second word for a subcommand, and then says that a subcommand cannot be used.
    let word = text_of(error, ContextKind::InvalidSubcommand);
    if let (ErrorKind::ArgumentConflict, Some(word)) = (error.kind(), word) {
        return stray_word(word, command, first);
    }
    let sentence = wrong_number(error).unwrap_or_else(|| one_line(&error.to_string()));
    let tip = long_options(error, command, first).unwrap_or_default();
    format!("{sentence}{tip}; --help lists what there is")
}

fn text_of(error: &clap::Error, kind: ContextKind) -> Option<&str> {
    let Some(ContextValue::String(text)) = error.get(kind) else { return None };
    Some(text)
}

/// What is wrong with a word behind one that is no command.
fn stray_word(word: &str, command: &Command, first: Option<&str>) -> String {
    let shown = command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set());
    let known: Vec<&str> = shown.map(Command::get_name).collect();
    let names = known.join(", ");
    let mut positionals = command.get_positionals().filter_map(Arg::get_value_names);
    let taken_for = positionals.next().and_then(|names| names.first());
    let first = first.filter(|first| !first.starts_with('-') && !known.contains(&word));
    match first.zip(taken_for) {
        Some((first, _)) if Path::new(first).exists() => {
            format!(
                "{word:?} is not expected behind {first:?}: text of several words goes in quotes"
            )
        }
        Some((first, name)) => format!(
            "{first:?} is no command but taken for {name}, behind which {word:?} is not expected: begin with {name} \
             itself, or with a command, one of {names}"
        ),
        None => format!("{word:?} is not expected here: a command comes first, one of {names}"),
    }
}

/// What is wrong with a number, where clap repeats what Rust says of digits in a string.
fn wrong_number(error: &clap::Error) -> Option<String> {
    let argument = text_of(error, ContextKind::InvalidArg)?;
    let value = text_of(error, ContextKind::InvalidValue)?.trim();
    let source = error.source()?;
    let is_number = source.is::<ParseFloatError>() || source.is::<ParseIntError>();
    if value.is_empty() && is_number {
        return Some(format!("invalid value '' for '{argument}': a number is missing"));
    }
    let cause = if source.is::<ParseFloatError>() {
        "is no number"
    } else if !source.is::<ParseIntError>() {
        return None;
    } else if value.trim_start_matches('-').chars().all(|c| c.is_ascii_digit()) {
        "is out of range"
    } else {
        "is no whole number"
    };
    Some(format!("invalid value '{value}' for '{argument}': {value} {cause}"))
}

/// A tip that names the long options which a short one may be meant as, since other programs have it.
fn long_options(error: &clap::Error, command: &Command, first: Option<&str>) -> Option<String> {
    let given = text_of(error, ContextKind::InvalidArg)?.strip_prefix('-')?;
    let letter = given.chars().next().filter(char::is_ascii_alphanumeric)?;
    if error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let command = first.and_then(|name| command.find_subcommand(name)).unwrap_or(command);
    let names: Vec<String> = command
        .get_arguments()
        .filter_map(Arg::get_long)
        .filter(|name| name.starts_with(letter))
        .map(|name| format!("--{name}"))
        .collect();
    let tip = || format!("; tip: options with this letter: {}", names.join(", "));
    (!names.is_empty()).then(tip)
}

/// The lines of an error in one, without those that say how the program is used.
fn one_line(text: &str) -> String {
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
    sentence.trim_start_matches("error: ").to_owned()
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
        #[arg(long)]
        most: Option<usize>,
        #[arg(long)]
        part: Option<f32>,
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
        let refusal = |words: [&str; 2]| {
            let all = ["program"].iter().chain(&words);
            let error = parsed::<WithCommands>(all).expect_err("no command");
            complaint(&error, &WithCommands::command(), words.first().copied())
        };
        assert_eq!(
            refusal(["mesure", "plan"]),
            "\"mesure\" is no command but taken for PLAN, behind which \"plan\" is not expected: \
             begin with PLAN itself, or with a command, one of measure, look"
        );
        assert_eq!(
            refusal(["plan", "look"]),
            "\"look\" is not expected here: a command comes first, one of measure, look"
        );
        let there = std::env::temp_dir();
        let there = there.to_str().expect("a name in UTF-8");
        assert_eq!(
            refusal([there, "world"]),
            format!(
                "\"world\" is not expected behind {there:?}: text of several words goes in quotes"
            )
        );
    }

    #[test]
    fn arguments_that_fit_no_other_are_refused_as_one_that_is_not_taken() {
        let error = misuse("-a 0 -b 0 does nothing");
        let error = error.downcast_ref::<clap::Error>().expect("it is of the arguments");
        assert_eq!(
            complaint(error, &Arguments::command(), None),
            "-a 0 -b 0 does nothing; --help lists what there is"
        );
    }

    fn check(arguments: &[&str], expected: &str) {
        let all = ["program"].iter().chain(arguments);
        let error = parsed::<Arguments>(all).expect_err("they are not taken");
        let first = arguments.first().copied();
        assert_eq!(complaint(&error, &Arguments::command(), first), expected);
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
            "invalid value 'many' for '--count <COUNT>': many is no whole number; \
             --help lists what there is",
        );
        check(
            &["--input", "a", "--most", "-1"],
            "invalid value '-1' for '--most <MOST>': -1 is out of range; \
             --help lists what there is",
        );
        check(
            &["--input", "a", "--part", "half"],
            "invalid value 'half' for '--part <PART>': half is no number; \
             --help lists what there is",
        );
        check(
            &["-i", "a"],
            "unexpected argument '-i' found; tip: options with this letter: --input; \
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
