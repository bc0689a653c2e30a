#!/usr/bin/env bash
# Puts Transformer Engine's Python files, without its libraries, into a folder of their own, for tests on an emulated
# device (tests/te_cpu): 8 MB. They must not lie among installed packages, where Megatron-Core would import them.
#   bash tools/install_te_sources.sh [FOLDER]     default: .te-sources in the project folder
#   PYTHON=python3        the interpreter of the tests, which says what Megatron-Core there is, and so what this takes
#   TE_VERSION=2.16.1     another version
set -euo pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder="${1:-$project/.te-sources}"
PYTHON="${PYTHON:-python3}"
version=$("$PYTHON" -c 'import sys; print("2.20.2" if sys.version_info >= (3, 12) else "2.11.0")')
wanted="transformer_engine==${TE_VERSION:-$version} einops==0.8.1"
[ "$(cat "$folder/.installed" 2>/dev/null || true)" != "$wanted" ] || exit 0
rm -rf "$folder"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# shellcheck disable=SC2086
"$PYTHON" -m pip install --quiet --no-deps --target "$folder" $wanted 2> "$log" ||
    { cat "$log" >&2; echo "error: Transformer Engine's Python files could not be installed into $folder" >&2; exit 1; }
printf '%s' "$wanted" > "$folder/.installed"
