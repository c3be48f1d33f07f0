#!/usr/bin/env bash
# All checks: installs what is missing, then format, lints, tests and documentation. One profile, so Burn is built once.
set -euo pipefail
cd "$(dirname "$0")/.."
source .ci/packages

echo "== format"
cargo fmt --all --check
echo "== build"
cargo build --release --locked --workspace --all-targets
echo "== tests"
if cargo nextest --version >/dev/null 2>&1; then
  cargo nextest run --release --locked --workspace
else
  cargo test --release --locked --workspace --all-targets
fi
cargo test --release --locked --workspace --doc
echo "== lints"
cargo clippy --release --locked --workspace --all-targets -- -D warnings
echo "== documentation"
RUSTDOCFLAGS="-D warnings -A rustdoc::private-intra-doc-links" cargo doc --release --locked --workspace --no-deps --document-private-items
