#!/usr/bin/env bash
# DeepSeek-R1's four stages and its distillation at toy size, on two CPU cores, with a table of accuracy after each.
# configs/recipes/r1_stages/README.md says what each stage is and what came out.
#
#   bash launch/r1_stages.sh [--seed N] [--output DIR] [--short]
#
# --short shows that all stages run, in two minutes, and teaches little. Run again, it goes on where it was.
set -euo pipefail

seed=0 output= pretraining=600 cold=60 rl=15 prompts=1000 own=300 small=800
while [ $# -gt 0 ]; do
    case "$1" in
        --seed) seed=$2; shift 2 ;;
        --output) output=$2; shift 2 ;;
        --short) pretraining=200 cold=10 rl=1 prompts=64 own=10 small=10; shift ;;
        *) echo "error: unknown argument '$1'; usage: r1_stages.sh [--seed N] [--output DIR] [--short]" >&2; exit 2 ;;
    esac
done
case "$seed" in *[!0-9]* | "") echo "error: --seed takes a whole number" >&2; exit 2 ;; esac

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
output=${output:-$project/runs/r1_stages/seed$seed}
case "$output" in /*) ;; *) output=$PWD/$output ;; esac
cd "$project"
source tools/install.sh
export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
[ -n "${GLOO_SOCKET_IFNAME:-}" ] || [ ! -e /sys/class/net/lo ] || export GLOO_SOCKET_IFNAME=lo
mega() { "$PYTHON" -W ignore -m dapo_mega "$@"; }
recipe=configs/recipes/r1_stages
data=(data.train.path="$output/data/train.parquet" data.evaluation.path="$output/data/eval.parquet")

accuracy() {  # NAME MODEL: asks the held-out problems.
    [ -e "$output/$1.json" ] || mega evaluate --config $recipe/rl.yaml seed="$seed" "${data[@]}" model.path="$2" \
        --output "$output/$1.json" > /dev/null
}
sft() {  # NAME MODEL DATA STEPS LEARNING_RATE
    mega sft --processes 2 --config configs/quickstart_sft.yaml seed="$seed" output_dir="$output/$1" model.path="$2" \
        data.train.path="$3" num_steps="$4" optimizer.learning_rate="$5" optimizer.warmup_steps=5
    accuracy "$1" "$output/$1/hf"
}
rl() {  # NAME MODEL [SECTION.KEY=VALUE ...]
    mega train --processes 2 --config $recipe/rl.yaml seed="$seed" "${data[@]}" output_dir="$output/$1" \
        model.path="$2" num_steps="$rl" "${@:3}"
    accuracy "$1" "$output/$1/hf"
}

echo "a base model: weights that have read careless and careful answers alike (2 minutes; times for two CPU cores)"
mega prepare arithmetic --output "$output/data" --seed "$seed" --min-digits 3 --num-train 4000 --num-eval 256 \
    --num-demonstrations 30000
mega prepare arithmetic --output "$output/careful" --seed "$seed" --min-digits 3 --num-train 4000 --num-eval 256 \
    --num-demonstrations 1000 --careful 1 --verbose 0 --careless 0
"$PYTHON" $recipe/table.py prompts "$output/data/train.parquet" "$prompts" "$output/problems.parquet"
mega prepare init-model --output "$output/initial" --seed "$seed" --hidden-size 192 --layers 2 --heads 4 --kv-heads 4 \
    --intermediate-size 512
sft base "$output/initial" "$output/data/demonstrations.parquet" "$pretraining" 2e-3

echo "stage 1, cold start: a little SFT on long, readable answers (seconds)"
sft stage1 "$output/base/hf" "$output/careful/demonstrations.parquet" "$cold" 2e-4

echo "stage 2, RL for reasoning: GRPO on accuracy and language consistency (2 minutes)"
rl stage2 "$output/stage1/hf"

echo "stage 3, rejection sampling from stage 2, and SFT of the base model on what was right (a minute)"
[ -e "$output/prepared/card.json" ] ||
    mega prepare dataset "$output/problems.parquet" --output "$output/prepared" --decontaminate "$output/data/eval.parquet"
mega rejection-sample "$output/prepared" --output "$output/own" --config $recipe/rl.yaml --model "$output/stage2/hf" \
    --set "${data[@]}" --seed "$seed" --samples 4 --keep diverse --per-prompt 2 --force
sft stage3 "$output/base/hf" "$output/own" "$own" 1e-3

echo "stage 4, RL for all: the same, and answers that do not repeat themselves (2 minutes)"
rl stage4 "$output/stage3/hf" \
    reward.components='[{kind: answer}, {kind: repetition, ngram_tokens: 8, weight: 0.2}]'

echo "distillation: a model of a quarter of the size, on what stage 2 said; beside it RL from where that began (2 minutes)"
mega prepare init-model --output "$output/small" --seed "$seed" --hidden-size 96 --layers 2 --heads 4 --kv-heads 4 \
    --intermediate-size 256
sft small_base "$output/small" "$output/data/demonstrations.parquet" "$pretraining" 2e-3
sft small_distilled "$output/small_base/hf" "$output/own" "$small" 1e-3
rl small_rl "$output/small_base/hf"

"$PYTHON" $recipe/table.py show "$output" | tee "$output/table.md"
