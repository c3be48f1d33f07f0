//! The data that the programs of this workspace exchange: graphs, plans, machines and traces.

pub mod id;
pub mod tensor;
