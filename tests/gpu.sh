#!/usr/bin/env bash
# Every check that a real GPU takes part in: kernels against their references, whole models against golden outputs, and
# one of these under compute-sanitizer where it is installed. Needs an NVIDIA driver and the CUDA libraries.
set -euo pipefail
cd "$(dirname "$0")/.."
source .ci/packages

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null ||
  { echo "there is no NVIDIA GPU here: tests/run.sh checks the kernels on a device in software" >&2; exit 1; }
filter='package(executor) and test(kernels::gpu) + test(a_gpu) + test(captured_runs) + test(every_rate)'
if cargo nextest --version >/dev/null 2>&1; then
  cargo nextest run --release --locked --workspace -E "$filter"
else
  cargo test --release --locked --workspace gpu
  cargo test --release --locked --workspace captured_runs
fi
sanitizer=$(command -v compute-sanitizer || echo "${CUDA_PATH:-/usr/local/cuda}/bin/compute-sanitizer")
if [ -x "$sanitizer" ]; then
  programs="${CARGO_TARGET_DIR:-target}/release"
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  "$programs/hybridc" compile tests/golden/llama3 --format f32 --kv-type f32 --pipeline gpu0 -o "$folder/plan.ron"
  "$sanitizer" --tool memcheck --error-exitcode 3 "$programs/hybrid-exec" "$folder/plan.ron" --prompt "hello" -n 8
else
  echo "compute-sanitizer is not installed: memory accesses were not checked"
fi
