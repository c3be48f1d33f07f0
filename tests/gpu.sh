#!/usr/bin/env bash
# Every check that a real GPU takes part in: kernels against their references, whole models against golden outputs, a
# hundred runs over two GPUs and two CPU ranks where there are two, and one run under compute-sanitizer where that is
# installed. Needs an NVIDIA driver and the CUDA libraries: kernels that do not find them fail. What lacks anything
# else, such as a second GPU, is skipped and says so.
#
# PROGRAMS=FOLDER takes what was built elsewhere: hybridc, hybrid-exec and, in FOLDER/tests, the test programs of the
# executor, unit and integration, and of golden.rs, running.rs, failures.rs, bf12.rs and formats.rs in tests/tests.
# ROUNDS=N runs several GPUs N times instead of a hundred.
set -euo pipefail
cd "$(dirname "$0")/.."

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null ||
  { echo "there is no NVIDIA GPU here: tests/run.sh checks the kernels on a device in software" >&2; exit 1; }
names=(kernels::gpu ops::gpu calibrate:: a_gpu captured_runs every_rate sums_by_groups every_device_counts in_12_bits
  values_of_16_bits caches_that_a_gpu_borrows)
if [ -n "${PROGRAMS:-}" ]; then
  programs=$PROGRAMS
  tests=("$programs"/tests/*)
else
  source .ci/packages
  source .ci/programs
  cargo build --release --locked --workspace --bins
  mapfile -t tests < <(cargo test --release --locked --workspace --lib --bins --tests --no-run --message-format=json |
    sed -n 's/.*"profile":{[^}]*"test":true}.*"executable":"\([^"]*\)".*/\1/p')
fi
export HYBRID_TEST_GPU=cuda
for name in "${names[@]}"; do
  listed=$(for test in "${tests[@]}"; do
    "$test" --list --format terse "$name" || { echo "$test lists no tests" >&2; exit 1; }
  done)
  [[ $listed == *": test"* ]] ||
    { echo "no test is named $name: a test program is missing, or it has another name" >&2; exit 1; }
done
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# Each in a process of its own, some at a time: most of what they take is the compiling of kernels, on one core each.
# Processes that fill one cache of compiled kernels at the same time can lose a launch; those that come one after another
# share one, as plans do, and must not take each other's kernels for their own.
for test in "${tests[@]}"; do
  "$test" --list --format terse "${names[@]}" | sed -n 's/: test$//p' |
    while read -r name; do printf '%s\0%s\0' "$test" "$name"; done
done | CACHES="$folder" xargs -0 -P "$(($(nproc) / 2 + 1))" --process-slot-var=SLOT -n 2 sh -c '
  export XDG_CACHE_HOME="$CACHES/cache$SLOT"
  output=$("$0" --exact "$1" --show-output 2>&1) || { echo "$1: failed"; echo "$output"; exit 1; }
  skipped=$(printf "%s\n" "$output" | sed -n "s/^skipped/$1: &/p" | sort -u)
  echo "${skipped:-$1: ok}"'
compile() { "$programs/hybridc" compile tests/golden/llama3 --format f32 --kv-type f32 "$@"; }
answer() { timeout 60 "$programs/hybrid-exec" "$1" --prompt "the quick brown fox" --max-tokens 24 --temperature 0; }

count=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)
# The fixture has three layers and eight heads.
gpus=$(seq -s, -f 'gpu%g' 0 $((count < 4 ? count - 1 : 3)))
if [ "$count" -ge 2 ]; then
  # All GPUs, up to four, and two CPU ranks share every layer, and the GPUs in stages read each other's values while a
  # prompt passes in parts: a hundred runs in a row of each give the tokens of one processor.
  "$programs/hybridc" probe --split 2 -o "$folder/machine.ron"
  compile --pipeline numa0 -o "$folder/alone.ron"
  compile --machine "$folder/machine.ron" --tensor-parallel "$gpus,numa0,numa1" -o "$folder/ranks.ron"
  compile --tensor-parallel "$gpus" -o "$folder/gpus.ron"
  compile --pipeline "$gpus" --prefill-tokens 2 -o "$folder/stages.ron"
  answer "$folder/alone.ron" >"$folder/expected"
  rounds=${ROUNDS:-100}
  for plan in ranks gpus stages; do
    for run in $(seq "$rounds"); do
      answer "$folder/$plan.ron" >"$folder/given" && cmp -s "$folder/expected" "$folder/given" ||
        { echo "run $run of $plan gave other tokens than numa0" >&2; exit 1; }
    done
    echo "$plan of $gpus: the tokens of numa0 in $rounds of $rounds runs"
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
