//! Bfloat16 in 12 bits: a trained model says what it says in 16, wherever its weights are.

#[expect(dead_code, reason = "each test file uses a part")]
mod common;

use common::{Shape, compile, distance, engine, gpu_options};
use executor::load;
use ir::plan::Plan;
use ir::tensor::Format;

/// The demo model, whose rows are long enough for 12 bits.
const MODEL: &str = "../../models/demo";

fn plan(shape: Shape, plain_bf16: bool) -> Plan {
    compile(MODEL, shape, |options| {
        // Shaders have no bfloat16; what they fetch in 12 bits they unpack.
        let of_gpus = (shape.gpus() > 0).then(|| "gpu*=f32".parse().unwrap());
        options.formats = of_gpus.into_iter().collect();
        options.plain_bf16 = plain_bf16;
        // A shorter prefill takes less memory, and then nothing may have to leave the GPU.
        options.prefill_tokens = Some(512);
    })
}

fn logits(plan: &Plan, options: &load::Options) -> Vec<f32> {
    let mut engine = engine(plan, options);
    let id = engine.open();
    let prompt: Vec<u32> = (0..48).map(|i| (i * 37 % 700) + 300).collect();
    engine.append(id, &prompt).unwrap();
    engine.advance(&[id]).unwrap().remove(0)
}

#[test]
fn a_trained_model_says_the_same_in_12_bits() {
    let beside_gpus = [Shape::GpuPipeline, Shape::GpuFetching, Shape::GpuHosted];
    for shape in Shape::CPU.into_iter().chain(beside_gpus) {
        let options = if shape.gpus() > 0 { gpu_options() } else { load::Options::default() };
        let [narrow, wide] = [false, true].map(|plain| plan(shape, plain));
        let count = |plan: &Plan| {
            plan.weights.rows().iter().filter(|weight| weight.format == Format::Bf12).count()
        };
        let counts = [count(&narrow), count(&wide)];
        assert!(counts[0] > 0 && counts[1] == 0, "{shape:?}: {counts:?} weights in 12 bits");
        let [narrow, wide] = [narrow, wide].map(|plan| logits(&plan, &options));
        let largest = |logits: &[f32]| {
            let places = logits.iter().enumerate();
            places.max_by(|a, b| a.1.total_cmp(b.1)).map(|(place, _)| place)
        };
        assert_eq!(largest(&narrow), largest(&wide), "{shape:?}");
        let off = distance(&narrow, &wide);
        let span = wide.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        assert!(off < 0.01 * span, "{shape:?}: {off} of {span}");
    }
}
