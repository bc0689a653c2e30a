#!/usr/bin/env bash
# Sourced by the other scripts: puts $PYTHON on an environment that has the package and what it needs.
# Uses the active virtual environment, or makes .venv in the project folder. Installs only what is missing.
#   TORCH=torch==2.14.1   the torch to install when there is none (install your CUDA build yourself beforehand);
#                         on Python 3.11 it is 2.13.0, which Megatron-Core 0.16 is tested with
#   PYTHON_BASE=python3   the interpreter that makes .venv
set -euo pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if [ -n "${VIRTUAL_ENV:-}" ]; then
    PYTHON="$VIRTUAL_ENV/bin/python"
else
    PYTHON="$project/.venv/bin/python"
    [ -x "$PYTHON" ] || PYTHON="${PYTHON_BASE:-python3}"
fi
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: Python 3.11 or newer is needed, $("$PYTHON" --version) was found; set PYTHON_BASE to a newer one" >&2
    exit 2
}
if [ -z "${VIRTUAL_ENV:-}" ] && [ "$PYTHON" != "$project/.venv/bin/python" ]; then
    "$PYTHON" -m venv "$project/.venv"
    PYTHON="$project/.venv/bin/python"
fi

extras="${1:-}"
stamp="$("$PYTHON" -c 'import sys; print(sys.prefix)')/.dapo_mega_installed"
wanted="$project $(cksum < "$project/setup.py")"
installed="$(cat "$stamp" 2>/dev/null || true)"
if [ "$installed" != "$wanted$extras" ] && [ "$installed" != "$wanted[dev]" ]; then
    echo "installing into $("$PYTHON" -c 'import sys; print(sys.prefix)') (a few minutes the first time)"
    torch=$("$PYTHON" -c 'import sys; print("torch==2.14.1" if sys.version_info >= (3, 12) else "torch==2.13.0")')
    "$PYTHON" -c 'import torch' 2>/dev/null || "$PYTHON" -m pip install --quiet "${TORCH:-$torch}"
    # Without the constraint pip may swap torch for another build while it resolves the rest.
    constraints=$(mktemp)
    "$PYTHON" -W ignore -c 'import torch; print("torch==" + torch.__version__.split("+")[0])' > "$constraints"
    "$PYTHON" -m pip install --quiet --constraint "$constraints" --editable "$project$extras" \
        2> "$constraints.log" || { cat "$constraints.log" >&2; echo "error: the installation failed; see above" >&2; exit 1; }
    rm -f "$constraints" "$constraints.log"
    printf '%s' "$wanted$extras" > "$stamp"
fi
