#!/usr/bin/env bash
# Installs what is missing, builds, compiles the demo model for this machine and asks it a question.
set -euo pipefail
cd "$(dirname "$0")/../.."
source .ci/packages
source .ci/programs

# The whole workspace's programs: these share features, and so builds, with tests/run.sh.
cargo build --release --locked --workspace --bins
plan="$target/demo.plan.ron"
"$programs/hybridc" compile models/demo/model.safetensors -o "$plan"
exec "$programs/hybrid-exec" "$plan" --chat --prompt "${1:-Explain lifetimes.}"
