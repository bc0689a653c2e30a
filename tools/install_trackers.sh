#!/usr/bin/env bash
# Installs the packages of `tracking.backends` for their tests, into a folder of their own beside an environment that
# has this package, of which nothing is changed:
#   bash tools/install_trackers.sh [FOLDER]     default: .venv-trackers in the project folder; 250 MB, a minute or two
# Into an environment to train with: pip install -e '.[wandb]', or mlflow, or trackio.
#   PYTHON=python3   the interpreter of that environment
set -euo pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder="${1:-$project/.venv-trackers}"
PYTHON="${PYTHON:-python3}"
stamp="$folder/.dapo_mega_installed"
wanted="$("$PYTHON" -c 'import sys; print(sys.prefix)') $(cat "$project/setup.py" "$0" | cksum)"
[ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ] || exit 0
[ -e "$stamp" ] || [ -z "$(ls -A "$folder" 2> /dev/null)" ] ||
    { echo "error: $folder holds what this script did not put there; delete it, or give another folder" >&2; exit 1; }

log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$PYTHON" -m venv --clear --without-pip "$folder"
: > "$stamp"
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$PYTHON" -c 'import sys; print(*(p for p in sys.path if p.endswith("site-packages")), sep="\n")' > "$site/beside.pth"
packages=$("$PYTHON" - "$project/setup.py" <<'EOF'
import ast, sys
for node in ast.parse(open(sys.argv[1]).read()).body:
    if isinstance(node, ast.Assign) and node.targets[0].id == "TRACKERS":
        print("\n".join(package for packages in ast.literal_eval(node.value).values() for package in packages))
EOF
)
mapfile -t wanted_packages <<< "$packages"
"$folder/bin/python" -m pip install --quiet "${wanted_packages[@]}" 2> "$log" ||
    { cat "$log" >&2; echo "error: the trackers could not be installed into $folder; see above" >&2; exit 1; }
printf '%s' "$wanted" > "$stamp"
