#!/usr/bin/env bash
# DAPO on a real instruct model (SmolLM2, 135 M parameters) with its own tokenizer and chat template, on two CPU cores.
# configs/recipes/real_model/README.md says what it shows and what came out.
#
#   bash launch/real_model.sh [--seed N] [--output DIR] [--sglang PYTHON] [SECTION.KEY=VALUE ...]
#
# Generates inside the trainer, or with --sglang, the Python of SGLang's environment, by a real engine. Overrides are for
# the run: lora.rank=16, model.dtype=fp32, algorithm.preset=grpo. Run again, it goes on where it was.
set -euo pipefail

seed=0 output= sglang= overrides=()
while [ $# -gt 0 ]; do
    case "$1" in
        --seed) seed=$2; shift 2 ;;
        --output) output=$2; shift 2 ;;
        --sglang) sglang=$2; shift 2 ;;
        -*) echo "error: unknown argument '$1'; usage: real_model.sh [--seed N] [--output DIR] [--sglang PYTHON]" \
            "[SECTION.KEY=VALUE ...]" >&2; exit 2 ;;
        *) overrides+=("$1"); shift ;;
    esac
done
case "$seed" in *[!0-9]* | "") echo "error: --seed takes a whole number" >&2; exit 2 ;; esac

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
models=$project/runs/real_model/smollm2 output=${output:-$project/runs/real_model/seed$seed}
case "$output" in /*) ;; *) output=$PWD/$output ;; esac
case "$sglang" in "" | /*) ;; *) sglang=$PWD/$sglang ;; esac
cd "$project"
source tools/install.sh
export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
[ -n "${GLOO_SOCKET_IFNAME:-}" ] || [ ! -e /sys/class/net/lo ] || export GLOO_SOCKET_IFNAME=lo
mega() { "$PYTHON" -W ignore -m dapo_mega "$@"; }
recipe=configs/recipes/real_model

echo "1/4 the model and its problems (a minute)"
"$PYTHON" -W ignore tools/make_real_model.py "$models"
"$PYTHON" $recipe/problems.py "$output/data" "$seed"
common=(data.train.path="$output/data/train.parquet" data.evaluation.path="$output/data/eval-problems.parquet")
arguments=(--config $recipe/run.yaml seed="$seed" output_dir="$output/run" model.path="$models" "${common[@]}")
mega train "${arguments[@]}" "${overrides[@]}" --dry-run > /dev/null

facts() {  # MODEL NAME: what it knows that is not trained.
    [ -e "$output/$2/facts.json" ] || mega evaluate --config $recipe/facts.yaml model.path="$1" \
        data.train.path="$output/data/eval-facts.parquet" data.evaluation.path="$output/data/eval-facts.parquet" \
        --output "$output/$2/facts.json" --samples "$output/$2"
}
echo "2/4 what it knows besides (two minutes)"
facts "$models" before

echo "3/4 DAPO (half an hour)"
if [ -n "$sglang" ]; then
    [ -n "${DAPO_MEGA_API_KEY:-}" ] ||
        DAPO_MEGA_API_KEY=$("$PYTHON" -c "import secrets; print(secrets.token_hex(32))")
    export DAPO_MEGA_API_KEY
    "$PYTHON" -W ignore -m dapo_mega serve --model "$models" --num-engines 1 --dtype bf16 --python "$sglang" \
        --rendezvous 127.0.0.1:21600 > "$output/engines.log" 2>&1 &
    engines=$!
    trap 'kill $engines 2> /dev/null || true; wait $engines 2> /dev/null || true' EXIT
    overrides+=(rollout.placement=fleet rollout.dtype=bf16 rollout.fleet.rendezvous=127.0.0.1:21600)
fi
"$PYTHON" -W ignore -m dapo_mega.commands._processes --rdzv-backend bound --rdzv-endpoint 127.0.0.1:0 \
    --nproc-per-node 2 launch/train_dapo.py "${arguments[@]}" "${overrides[@]}"

echo "4/4 before and after (two minutes)"
facts "$output/run/hf" after
mega plot "$output/run" --output "$output/curves.png"
mega compare "$output/run@0" "$output/run" --output "$output/problems"
mega compare "$output/before" "$output/after" --output "$output/facts"
evaluations=("$output"/run/samples/evaluation_*.parquet)
"$PYTHON" -W ignore $recipe/kl.py "$models" "${evaluations[-1]}" "$output"/after/samples/evaluation_*.parquet
echo "responses: dapo-mega show-samples '$output/run'"
