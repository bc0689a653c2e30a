#!/usr/bin/env bash
# Environment, linters and tests. Arguments go to pytest, which then runs one test at a time.
#   tools/test.sh                          everything: half an hour on two cores
#   tools/test.sh --quick                  all but whole runs, engines and what is marked slow: at most four minutes
#   tools/test.sh [--quick] tests/unit -k buffer
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/install.sh "[dev]"
quick=""
if [ "${1:-}" = --quick ]; then
    quick=yes
    shift
fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
# Tests of rollout engines need SGLang, in an environment of its own; where it cannot be made they are skipped.
if [ -z "$quick${DAPO_MEGA_SGLANG_PYTHON:-}" ] && [[ "$*" != *tests/* || "$*" == *tests/integration* ]]; then
    sglang="${SGLANG_VENV:-$PWD/.venv-sglang}"
    if bash tools/install_sglang.sh "$sglang"; then export DAPO_MEGA_SGLANG_PYTHON="$sglang/bin/python"; fi
fi
# The suite shows the CPU path, also where there is a GPU; the GPU's own tests: python -m pytest -m gpu
export CUDA_VISIBLE_DEVICES=
if [ -n "$quick" ]; then
    set -- -m "not integration and not slow" "$@"
    # Without arguments of the caller's: three files at a time, as tests often wait, and what takes long first.
    [ $# -gt 2 ] || set -- "$@" -n 3 --dist loadfile --no-loadscope-reorder tests/distributed tests/numerics tests/unit
elif [ $# -eq 0 ]; then
    # (Not loadgroup: xdist 3.8 does not group under pytest 9.2.)
    set -- -n 2 --dist loadfile --no-loadscope-reorder \
        tests/integration tests/distributed tests/numerics tests/gpu tests/unit
fi
exec "$PYTHON" -m pytest "$@"
