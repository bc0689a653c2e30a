#!/usr/bin/env bash
# Environment, linters and tests. Arguments go to pytest, which then runs one test at a time.
#   tools/test.sh                          everything: 20 minutes on two cores, and the installation
#   tools/test.sh --quick                  all but whole runs, engines and what is marked slow: five minutes
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
unset PYTHONDONTWRITEBYTECODE  # Each process would compile anew what it imports, in more time than it takes for all else.
# Tests of rollout engines need SGLang, in an environment of its own; where it cannot be made they are skipped.
sglang=
if [ -z "$quick${DAPO_MEGA_SGLANG_PYTHON:-}" ] && [[ "$*" != *tests/* || "$*" == *tests/integration* ]]; then
    sglang="${SGLANG_VENV:-$PWD/.venv-sglang}"
    bash tools/install_sglang.sh "$sglang" &
    sglang_installation=$!
fi
# Trackers of runs are tested with their own packages; where these cannot be had, their tests are skipped.
trackers=
if [ -z "$quick${DAPO_MEGA_TRACKERS:-}" ] && [[ "$*" != *tests/* || "$*" == *tests/integration* ]]; then
    trackers="${TRACKERS_VENV:-$PWD/.venv-trackers}"
    PYTHON="$PYTHON" bash tools/install_trackers.sh "$trackers" &
    trackers_installation=$!
fi
# So are libraries that are optional, whose tests run behind all others.
extras=
with_extras=(tests/numerics/test_real_model.py tests/integration/test_{real_model,verifiers}.py tests/numerics/test_lora.py
    tests/unit/data/test_real_tokenizers.py tests/unit/environments/test_{dialogues,endpoint,openenv}.py
    tests/unit/preparation/test_reasoning_gym.py)
if [ -z "$quick" ] && [ $# -eq 0 ]; then
    extras="${EXTRAS_VENV:-$PWD/.venv-extras}"
    PYTHON="$PYTHON" bash tools/install_extras.sh "$extras" &
    extras_installation=$!
fi
"$PYTHON" -m ruff check . && "$PYTHON" -m ruff format --check . && "$PYTHON" -m mypy || { wait; exit 1; }
if [ -n "$sglang" ] && wait "$sglang_installation"; then export DAPO_MEGA_SGLANG_PYTHON="$sglang/bin/python"; fi
if [ -n "$trackers" ] && wait "$trackers_installation"; then export DAPO_MEGA_TRACKERS="$trackers"; fi
# The suite shows the CPU path, also where there is a GPU; the GPU's own tests: python -m pytest -m gpu
export CUDA_VISIBLE_DEVICES=
# Without arguments of the caller's: several files at a time, and what takes long first. Four on two cores, as many tests
# wait for what they have started. (Not loadgroup: xdist 3.8 does not group under pytest 9.2.)
together="--dist loadfile --no-loadscope-reorder"
failed=
if [ -n "$quick" ]; then
    set -- -m "not integration and not slow" "$@"
    [ $# -gt 2 ] || set -- "$@" -n 4 $together tests/distributed tests/numerics tests/unit
elif [ $# -eq 0 ]; then
    # Where Transformer Engine's Python files cannot be had, their tests are skipped.
    PYTHON="$PYTHON" bash tools/install_te_sources.sh || true
    read -ra elsewhere <<< "${TESTED_ELSEWHERE:-}"  # By .ci/run, on another Python.
    set -- -n 4 $together "${with_extras[@]/#/--ignore=}" "${elsewhere[@]/#/--deselect=}"
    set -- "$@" tests/te_cpu tests/integration tests/distributed tests/numerics tests/gpu tests/unit
fi
"$PYTHON" -m pytest "$@" || failed=yes
if [ -n "$extras" ]; then
    if wait "$extras_installation"; then
        PYTHON="$extras/bin/python"
        export DAPO_MEGA_TOKENIZERS="$extras/tokenizers" DAPO_MEGA_VERIFIERS="$extras/verifiers/bin/python"
        [ -x "$DAPO_MEGA_VERIFIERS" ] || unset DAPO_MEGA_VERIFIERS
        [ ! -e "$DAPO_MEGA_TOKENIZERS/smollm2" ] || export DAPO_MEGA_REAL_MODEL="$DAPO_MEGA_TOKENIZERS/smollm2"
    fi
    "$PYTHON" -m pytest -n 2 $together "${with_extras[@]}" || failed=yes
fi
[ -z "$failed" ]
