#!/usr/bin/env bash
# Environment, linters and all tests. Arguments go to pytest: tools/test.sh tests/unit -k buffer
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/install.sh "[dev]"

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
# The suite shows the CPU path, also where there is a GPU; the GPU's own tests: python -m pytest -m gpu
CUDA_VISIBLE_DEVICES= "$PYTHON" -m pytest "$@"
