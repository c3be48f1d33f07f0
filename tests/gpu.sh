#!/usr/bin/env bash
# Every check that a real GPU takes part in: kernels against their references, whole models against golden outputs, a
# hundred runs over two GPUs and two CPU ranks where there are two, and one run under compute-sanitizer where that is
# installed. Needs an NVIDIA driver and the CUDA libraries.
set -euo pipefail
cd "$(dirname "$0")/.."
source .ci/packages

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null ||
  { echo "there is no NVIDIA GPU here: tests/run.sh checks the kernels on a device in software" >&2; exit 1; }
filter='package(executor) and test(kernels::gpu) + test(a_gpu) + test(captured_runs) + test(every_rate)'
filter+=' + test(sums_by_groups) + test(every_device_counts) + test(in_12_bits)'
if cargo nextest --version >/dev/null 2>&1; then
  cargo nextest run --release --locked --workspace -E "$filter"
else
  cargo test --release --locked --workspace gpu
  for test in captured_runs sums_by_groups every_device_counts in_12_bits; do
    cargo test --release --locked --workspace "$test"
  done
fi
programs="${CARGO_TARGET_DIR:-target}/release"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
compile() { "$programs/hybridc" compile tests/golden/llama3 --format f32 --kv-type f32 "$@"; }
answer() { timeout 60 "$programs/hybrid-exec" "$1" --prompt "the quick brown fox" --max-tokens 24 --temperature 0; }

if [ "$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)" -ge 2 ]; then
  # Two GPUs and two CPU ranks share every layer, and two GPUs in two stages read each other's values while a prompt
  # passes in parts: a hundred runs in a row of each give the tokens of one processor.
  "$programs/hybridc" probe --split 2 -o "$folder/machine.ron"
  compile --pipeline numa0 -o "$folder/alone.ron"
  compile --machine "$folder/machine.ron" --tensor-parallel gpu0,gpu1,numa0,numa1 -o "$folder/ranks.ron"
  compile --tensor-parallel gpu0,gpu1 -o "$folder/gpus.ron"
  compile --pipeline gpu0,gpu1 --prefill-tokens 2 -o "$folder/stages.ron"
  answer "$folder/alone.ron" >"$folder/expected"
  for plan in gpus ranks stages; do
    for run in $(seq 100); do
      answer "$folder/$plan.ron" >"$folder/given" && cmp -s "$folder/expected" "$folder/given" ||
        { echo "run $run of $plan gave other tokens than numa0" >&2; exit 1; }
    done
  done
else
  echo "there is one GPU: sums over GPUs were not tried"
fi

sanitizer=$(command -v compute-sanitizer || echo "${CUDA_PATH:-/usr/local/cuda}/bin/compute-sanitizer")
if [ -x "$sanitizer" ]; then
  compile --pipeline gpu0 -o "$folder/plan.ron"
  "$sanitizer" --tool memcheck --error-exitcode 3 \
    "$programs/hybrid-exec" "$folder/plan.ron" --prompt "hello" --max-tokens 8
else
  echo "compute-sanitizer is not installed: memory accesses were not checked"
fi
