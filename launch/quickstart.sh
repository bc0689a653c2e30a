#!/usr/bin/env bash
# From a fresh clone to a model that DAPO made better, on two CPU cores, in one command.
#
#   bash launch/quickstart.sh [--seed N] [--output DIR] [--processes N] [--sft-steps N] [SECTION.KEY=VALUE ...]
#
# Makes a virtual environment if none is active, installs the package, prepares the task, cold-starts a tiny model by
# supervised fine-tuning, trains it with DAPO and draws the curves. Run again, it resumes or says what is there.
# Overrides are for DAPO's run: algorithm.preset=gspo trains by another method.
set -euo pipefail

seed=0 processes=2 sft_steps= output= overrides=()
while [ $# -gt 0 ]; do
    case "$1" in
        --seed) seed=$2; shift 2 ;;
        --output) output=$2; shift 2 ;;
        --processes) processes=$2; shift 2 ;;
        --sft-steps) sft_steps=$2; shift 2 ;;
        -*) echo "error: unknown argument '$1'; usage: quickstart.sh [--seed N] [--output DIR] [--processes N]" \
            "[--sft-steps N] [SECTION.KEY=VALUE ...]" >&2; exit 2 ;;
        *) overrides+=("$1"); shift ;;
    esac
done
case "$seed$processes$sft_steps" in
    *[!0-9]*) echo "error: --seed, --processes and --sft-steps take whole numbers" >&2; exit 2 ;;
esac

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
output=${output:-$project/runs/quickstart/seed$seed}
case "$output" in /*) ;; *) output=$PWD/$output ;; esac
cd "$project"
source tools/install.sh

# The quickstart is sized for CPU cores: a GPU that happens to be there is left alone.
export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# All processes are on this machine: let gloo use the loopback interface whatever the host name resolves to.
[ -n "${GLOO_SOCKET_IFNAME:-}" ] || [ ! -e /sys/class/net/lo ] || export GLOO_SOCKET_IFNAME=lo
run() {  # No port of other interfaces.
    "$PYTHON" -W ignore -m dapo_mega.commands._processes --rdzv-backend bound --rdzv-endpoint 127.0.0.1:0 \
        --nproc-per-node "$processes" "$@"
}

echo "1/4 task and a model with random weights (10 seconds; all times for two CPU cores)"
"$PYTHON" tools/prepare_data.py arithmetic --output "$output/data" --seed "$seed" --min-digits 3 \
    --num-train 4000 --num-eval 256 --num-demonstrations 30000
"$PYTHON" -W ignore tools/prepare_data.py init-model --output "$output/initial" --seed "$seed" --hidden-size 192 \
    --layers 2 --heads 4 --kv-heads 4 --intermediate-size 512

dapo=(launch/train_dapo.py --config configs/quickstart.yaml seed="$seed" output_dir="$output/dapo"
    data.train.path="$output/data/train.parquet" data.evaluation.path="$output/data/eval.parquet")
# What is wrong with the overrides is said now, not after the cold start.
[ ${#overrides[@]} = 0 ] ||
    "$PYTHON" -W ignore "${dapo[@]}" model.path="$output/initial" "${overrides[@]}" --dry-run > /dev/null

echo "2/4 cold start: supervised fine-tuning on careless and careful answers (2 minutes)"
run launch/train_sft.py --config configs/quickstart_sft.yaml seed="$seed" output_dir="$output/sft" \
    model.path="$output/initial" data.train.path="$output/data/demonstrations.parquet" ${sft_steps:+num_steps="$sft_steps"}

echo "3/4 DAPO (2 minutes)"
run "${dapo[@]}" model.path="$output/sft/hf" "${overrides[@]}"

echo "4/4 curves (seconds)"
"$PYTHON" -W ignore tools/plot_run.py "$output/dapo" --output "$output/curves.png"
echo "trained model (Hugging Face format): $output/dapo/hf"
echo "TensorBoard: tensorboard --logdir '$output/dapo/tensorboard'"
