//! Machines that cannot be, as a file that was written by hand may say.

use compiler::Options;
use ir::machine::{Device, DeviceKind, LinearRate, Machine};
use ir::tensor::DType;
use tests::machines::{gpu, linked, numa};
use tests::toys::Toy;

const GIB: u64 = 1 << 30;

/// Compiles a toy for a GPU and a node that were changed, which fails with `part` in the message.
fn refused(part: &str, change: impl FnOnce(&mut Machine)) {
    let mut machine = linked(vec![gpu(0, GIB), numa(0, GIB)]);
    change(&mut machine);
    let model = Toy::llama().model().expect("the toy is a model");
    match compiler::compile(&model, &machine, &Options::default(), &mut |_, _| ()) {
        Ok(_) => panic!("it compiled instead of saying: {part}"),
        Err(error) => assert!(format!("{error:#}").contains(part), "{error:#}"),
    }
}

#[test]
fn what_is_there_twice_is_refused() {
    refused("cpus of numa0 has processor 3 twice", |machine| {
        machine.devices.rows_mut()[1].kind = DeviceKind::Numa { node: 0, cpus: vec![3, 4, 3] };
    });
    refused("gpu0 and gpu1 have the same ordinal 0", |machine| {
        machine.devices.rows_mut()[1] = Device { name: "gpu1".into(), ..gpu(0, GIB) };
    });
    refused("link 2 (from 0 to 1): another leads there, too", |machine| {
        let again = machine.links[0].clone();
        machine.links.push(again);
    });
    refused(
        "other_caches of numa0 has rates for bf16 caches, which are given already",
        |machine| {
            let rates = &mut machine.devices.rows_mut()[1].rates;
            rates.other_caches.push(rates.attention(DType::Bf16));
        },
    );
    refused("in linear of numa0 has two curves", |machine| {
        let linear = &mut machine.devices.rows_mut()[1].rates.linear;
        let again: LinearRate = linear[0].clone();
        linear.push(again);
    });
}

#[test]
fn names_are_such_that_options_can_name_them() {
    for name in ["", "a,b", "a=b", "numa:0", "gpu*", "a b"] {
        refused(&format!("a device is named {name:?}"), |machine| {
            machine.devices.rows_mut()[0].name = name.into();
        });
    }
}

#[test]
fn links_that_are_missing_are_named_with_what_to_do() {
    let mut machine = linked(vec![numa(0, GIB), numa(1, GIB)]);
    machine.links.clear();
    let model = Toy::llama().model().expect("the toy is a model");
    for request in ["--pipeline", "--tensor-parallel"] {
        let devices = "numa0,numa1";
        let parsed = if request == "--pipeline" {
            compiler::options::parse_pipeline(devices)
        } else {
            compiler::options::parse_tensor_parallel(devices)
        };
        let options = Options { request: parsed.expect("it is a request"), ..Options::default() };
        let refused = compiler::compile(&model, &machine, &options, &mut |_, _| ());
        let refused = format!("{:#}", refused.expect_err("there is no link"));
        assert!(refused.contains("no link leads from numa"), "{refused}");
        assert!(refused.contains("add one to the machine's links"), "{refused}");
    }
}
