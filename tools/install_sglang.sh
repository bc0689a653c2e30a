#!/usr/bin/env bash
# Makes an environment with SGLang for a machine without a GPU, for rollout engines and their tests:
#   bash tools/install_sglang.sh [FOLDER]     default: .venv-sglang in the project folder; 1.7 GB, a few minutes
# An engine then takes 1.7 GB of memory beside the model and its cache, and about 30 s to start on idle cores.
# On a machine with GPUs install SGLang as its own documentation says, in an environment of its own, and then there, in
# the project folder, what this script does at its end: pip install --no-deps --editable .
#   TORCH=torch==2.13.0   the torch to install, of the version that this SGLang is made for
#   PYTHON_BASE=python3   the interpreter that makes the environment
set -euo pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder="${1:-$project/.venv-sglang}"
parts="$project/tools/sglang_cpu"
python="$folder/bin/python"
stamp="$folder/.dapo_mega_installed"
wanted="$parts $(cat "$parts"/*.txt "$project/setup.py" "$0" | cksum)"
[ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ] || exit 0
rm -f "$stamp"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() {
    "$python" -m pip install --quiet "$@" 2> "$log" ||
        { cat "$log" >&2; echo "error: SGLang could not be installed into $folder; see above" >&2; exit 1; }
}

echo "installing SGLang into $folder (a few minutes)"
[ -x "$python" ] || "${PYTHON_BASE:-python3}" -m venv "$folder"
install "${TORCH:-torch==2.13.0}"
install --requirement "$parts/requirements.txt"
install --no-deps --requirement "$parts/without-dependencies.txt"
# For --router only, so engines are installed also where it cannot be had.
"$python" -m pip install --quiet --no-deps sglang-router==0.3.2 2> "$log" ||
    echo "sglang-router could not be installed into $folder: dapo-mega serve --router will not start" >&2
# Seen by this environment only; packages that are installed in it go before the stand-ins.
echo "$parts/stubs" > "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sglang_cpu_stand_ins.pth"
# What engines need of this project to take weights in pieces and as changes. Editable: they load what is in the folder.
install --no-deps --no-build-isolation --editable "$project"
"$python" -c 'import sglang.srt.server_args' 2> "$log" ||
    { cat "$log" >&2; echo "error: SGLang cannot be imported from $folder; see above" >&2; exit 1; }
printf '%s' "$wanted" > "$stamp"
