#!/usr/bin/env bash
# Puts Transformer Engine's Python files, without its libraries, into a folder of their own, for tests on an emulated
# device (tests/te_cpu): 8 MB. They must not lie among installed packages, where Megatron-Core would import them.
#   bash tools/install_te_sources.sh [FOLDER]     default: .te-sources in the project folder
set -euo pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder="${1:-$project/.te-sources}"
wanted="transformer_engine==2.11.0 einops==0.8.1"
[ "$(cat "$folder/.installed" 2>/dev/null || true)" != "$wanted" ] || exit 0
rm -rf "$folder"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# shellcheck disable=SC2086
"${PYTHON:-python3}" -m pip install --quiet --no-deps --target "$folder" $wanted 2> "$log" ||
    { cat "$log" >&2; echo "error: Transformer Engine's Python files could not be installed into $folder" >&2; exit 1; }
printf '%s' "$wanted" > "$folder/.installed"
