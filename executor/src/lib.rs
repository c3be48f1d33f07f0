//! The executor: runs a plan on the devices it names.

pub mod team;
