#!/usr/bin/env bash
# Installs trainer and rollout engines into one environment, for machines with Hopper GPUs or newer.
#   bash tools/install_gpu.sh [--apex] [FOLDER]   default: .venv-gpu in the project folder; about 15 GB, 20 minutes
#   bash tools/install_gpu.sh --resolve           only shows the packages that would be installed; needs no GPU
# Needs Python 3.12, a driver for CUDA 13, and nvcc of CUDA 13 with a C++ compiler: Transformer Engine's extension (and
# Apex) are compiled on the machine. The versions stand in tools/gpu_requirements.txt, each with its reason.
#   PYTHON_BASE=python3.12   the interpreter that makes the environment
#   MAX_JOBS=8               compilers at a time, each up to 4 GB
#   TORCH_INDEX=URL          index of torch's wheels (default: pip's own)
set -euo pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
pins="$project/tools/gpu_requirements.txt"
apex= resolve= folder=
for argument in "$@"; do
    case "$argument" in
        --apex) apex=yes ;;
        --resolve) resolve=yes ;;
        -*) echo "error: unknown argument '$argument'; usage: install_gpu.sh [--apex] [FOLDER] | --resolve" >&2; exit 2 ;;
        *) folder=$argument ;;
    esac
done
base=${PYTHON_BASE:-python3.12}

if [ -n "$resolve" ]; then
    # uv reads what packages need without downloading them; pip would fetch gigabytes to answer.
    uv=$(mktemp -d)
    trap 'rm -rf "$uv"' EXIT
    if ! command -v uv > /dev/null; then
        "${PYTHON_BASE:-python3}" -m venv "$uv" && "$uv/bin/pip" install --quiet uv
        PATH="$uv/bin:$PATH"
    fi
    uv pip compile --quiet --python-version 3.12 --python-platform x86_64-manylinux_2_34 --no-header --no-annotate \
        "$pins" "$project/setup.py" --extra gpu
    exit
fi

fail() { echo "error: $1" >&2; exit 2; }
"$base" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2> /dev/null ||
    fail "$base is not Python 3.12, which the pinned packages have wheels for; set PYTHON_BASE to one"
nvidia-smi > /dev/null 2>&1 || fail "nvidia-smi does not run: there is no GPU here, or no driver; without one see README.md"
nvcc=${CUDA_HOME:+$CUDA_HOME/bin/}nvcc
release=$("$nvcc" --version 2> /dev/null | sed -n 's/.*release \([0-9]*\).*/\1/p') || true
[ "$release" = 13 ] || fail "nvcc of CUDA 13 is needed to compile Transformer Engine, '$nvcc' is ${release:-not there}; \
install the CUDA toolkit and set CUDA_HOME to its folder"

folder=${folder:-$project/.venv-gpu}
[ -x "$folder/bin/python" ] || "$base" -m venv "$folder"
install() { "$folder/bin/python" -m pip install "$@"; }
pin() { grep "^$1" "$pins"; }

# 1. torch before everything: the extensions below are compiled against what is installed.
install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(pin torch==)"
install setuptools wheel ninja cmake pybind11
# 2. Transformer Engine, without the isolation in which its build would fetch another torch.
NVTE_FRAMEWORK=pytorch MAX_JOBS=${MAX_JOBS:-8} install --no-build-isolation --constraint <(sed 's/\[.*\]//' "$pins") \
    "$(pin transformer-engine)"
# 3. The rest in one call, so that pip sees all conditions together; the project editable, which engines load it from.
install --requirement "$pins" --editable "$project[gpu]"
# 4. NVIDIA's Apex, for its fused weight-gradient accumulation: the package of that name on the index is another one.
if [ -n "$apex" ]; then
    APEX_CPP_EXT=1 APEX_CUDA_EXT=1 MAX_JOBS=${MAX_JOBS:-8} install --no-build-isolation \
        "apex @ git+https://github.com/NVIDIA/apex@26.09"
fi
"$folder/bin/python" -m pip check
"$folder/bin/python" "$project/tools/gpu_environment.py"
echo "next: source $folder/bin/activate && bash tools/gpu_first_hour.sh"
