#!/usr/bin/env bash
# All checks: installs what is missing, then format, lints, tests and documentation. One profile, so Burn is built once.
set -euo pipefail
cd "$(dirname "$0")/.."
source .ci/packages
source .ci/programs
# A display for the viewer's window, OpenGL and Vulkan, all in software.
install_packages xvfb xdotool libgl1 libegl1 libgl1-mesa-dri libxkbcommon-x11-0 libxcursor1 libxi6 libxrandr2 \
  libvulkan1 mesa-vulkan-drivers || echo "they are not all there: what needs a display and finds none is skipped"

# Whether a driver for Vulkan lies where the loader looks for one.
has_vulkan() {
  [ -z "${VK_DRIVER_FILES:-${VK_ICD_FILENAMES:-}}" ] || return 0
  local folder folders
  IFS=: read -ra folders <<<"/etc:${XDG_DATA_DIRS:-/usr/local/share:/usr/share}"
  for folder in "${folders[@]}"; do
    if compgen -G "$folder/vulkan/icd.d/*.json" >/dev/null; then return 0; fi
  done
  return 1
}

profile=default
if [[ $(nvidia-smi -L 2>/dev/null) == GPU* ]]; then
  profile=gpu
elif ! has_vulkan; then
  echo "there is no NVIDIA GPU and no Vulkan driver to run a GPU's kernels on: install mesa-vulkan-drivers" >&2
  exit 1
fi
if ! cargo fmt --version >/dev/null 2>&1 || ! cargo clippy --version >/dev/null 2>&1; then
  { command -v rustup >/dev/null && rustup component add rustfmt clippy; } ||
    { echo "rustfmt or clippy is missing: install both, of the same version as cargo" >&2; exit 1; }
fi

echo "== format"
cargo fmt --all --check
echo "== build"
cargo build --release --locked --workspace --all-targets
echo "== tests"
if cargo nextest --version >/dev/null 2>&1; then
  cargo nextest run --release --locked --workspace --profile "$profile"
else
  cargo test --release --locked --workspace --all-targets
fi
cargo test --release --locked --workspace --doc
echo "== window"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$programs/hybridc" compile models/demo -o "$folder/plan.ron"
tests/viewer_window.sh "$programs/hybrid-viewer" "$folder/plan.ron"
echo "== lints"
cargo clippy --release --locked --workspace --all-targets -- -D warnings
echo "== documentation"
RUSTDOCFLAGS="-D warnings -A rustdoc::private-intra-doc-links" cargo doc --release --locked --workspace --no-deps --document-private-items
echo "== another processor"
other=aarch64-unknown-linux-gnu
installed=$(rustup target list --installed 2>/dev/null || true)
if grep -qx "$other" <<<"$installed"; then
  PKG_CONFIG_ALLOW_CROSS=1 cargo check --target "$other" --locked -p executor --lib
else
  echo "skipped: Rust for $other is not installed"
fi
