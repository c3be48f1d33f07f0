#!/usr/bin/env bash
# All checks: installs what is missing, then format, lints, tests and documentation. One profile, so Burn is built once.
set -euo pipefail
cd "$(dirname "$0")/.."
source .ci/packages
# A display for the viewer's window, OpenGL and Vulkan, all in software.
install_packages xvfb xdotool libgl1 libegl1 libgl1-mesa-dri libxkbcommon-x11-0 libxcursor1 libxi6 libxrandr2 \
  libvulkan1 mesa-vulkan-drivers || echo "they are not all there: what needs a display or Vulkan and finds none is skipped"

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
echo "== window"
programs="${CARGO_TARGET_DIR:-target}/release"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$programs/hybridc" compile models/demo -o "$folder/plan.ron"
tests/viewer_window.sh "$programs/hybrid-viewer" "$folder/plan.ron"
echo "== lints"
cargo clippy --release --locked --workspace --all-targets -- -D warnings
echo "== documentation"
RUSTDOCFLAGS="-D warnings -A rustdoc::private-intra-doc-links" cargo doc --release --locked --workspace --no-deps --document-private-items
