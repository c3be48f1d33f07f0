#!/usr/bin/env bash
# Installs what is missing, builds, compiles the demo model for this machine and asks it a question.
set -euo pipefail
cd "$(dirname "$0")/../.."
source .ci/packages

cargo build --release --locked -p compiler -p executor
programs="${CARGO_TARGET_DIR:-target}/release"
plan="${CARGO_TARGET_DIR:-target}/demo.plan.ron"
"$programs/hybridc" compile models/demo/model.safetensors -o "$plan"
exec "$programs/hybrid-exec" "$plan" --chat --prompt "${1:-Explain lifetimes.}"
