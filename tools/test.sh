#!/usr/bin/env bash
# Environment, linters and all tests. Arguments go to pytest: tools/test.sh tests/unit -k buffer
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/install.sh "[dev]"

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
# Tests of rollout engines need SGLang, in an environment of its own; where it cannot be made they are skipped.
if [ -z "${DAPO_MEGA_SGLANG_PYTHON:-}" ] && [[ "$*" != *tests/* || "$*" == *tests/integration* ]]; then
    sglang="${SGLANG_VENV:-$PWD/.venv-sglang}"
    if bash tools/install_sglang.sh "$sglang"; then export DAPO_MEGA_SGLANG_PYTHON="$sglang/bin/python"; fi
fi
# The suite shows the CPU path, also where there is a GPU; the GPU's own tests: python -m pytest -m gpu
export CUDA_VISIBLE_DEVICES=
if [ $# -gt 0 ]; then
    exec "$PYTHON" -m pytest "$@"
fi
# Two files at a time, those that take long first. (Not loadgroup: xdist 3.8 does not group under pytest 9.2.)
exec "$PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
    tests/integration tests/distributed tests/numerics tests/gpu tests/unit
