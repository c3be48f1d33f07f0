//! What tests of whole runs share: golden checkpoints, machines of this host, plans on disk.

use std::path::{Path, PathBuf};

use compiler::Options;
use compiler::options::Request;
use executor::engine::Engine;
use executor::load::{self, PlanFile};
use ir::machine::Machine;
use ir::plan::Plan;
use ir::tensor::DType;

/// Ways to place a model on the devices of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// One device does everything.
    One,
    /// Two stages, one after the other.
    Pipeline,
    /// Two devices share every layer, one doing three times as much as the other.
    Shared,
}

impl Shape {
    pub(crate) const ALL: [Shape; 3] = [Shape::One, Shape::Pipeline, Shape::Shared];

    fn request(self) -> Request {
        let names = ["numa0", "numa1"].map(str::to_owned);
        match self {
            Shape::One => Request::Pipeline(vec![names[0].clone()]),
            Shape::Pipeline => Request::Pipeline(names.to_vec()),
            Shape::Shared => {
                let [first, second] = names;
                Request::TensorParallel(vec![(first, Some(3.0)), (second, Some(1.0))])
            }
        }
    }
}

/// The folder of a golden checkpoint.
pub(crate) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(name)
}

/// This host in two devices of each NUMA node; on a single processor they share it.
pub(crate) fn machine() -> Machine {
    probe::machine(Some(2)).unwrap()
}

/// A plan of a golden checkpoint that computes in f32.
pub(crate) fn compile(name: &str, shape: Shape, change: impl FnOnce(&mut Options)) -> Plan {
    let model = models::lower(&golden(name)).unwrap();
    let mut options = Options {
        formats: vec!["f32".parse().unwrap()],
        kv_type: Some(DType::F32),
        max_sequences: 4,
        request: shape.request(),
        ..Options::default()
    };
    change(&mut options);
    compiler::compile(&model, &machine(), &options, &mut |_, _| ()).unwrap()
}

/// Writes a plan where it can be opened from.
pub(crate) fn written(plan: &Plan) -> (tempfile::TempDir, PlanFile) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.ron");
    std::fs::write(&path, plan.to_ron().unwrap()).unwrap();
    let file = PlanFile::open(&path).unwrap();
    (folder, file)
}

/// An engine that runs a plan.
pub(crate) fn engine(plan: &Plan, options: &load::Options) -> Engine {
    let (_folder, file) = written(plan);
    Engine::new(load::load(file, options, |_, _| ()).unwrap())
}
