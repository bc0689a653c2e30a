#!/usr/bin/env bash
# RL against more SFT from the same warm start, on GeneralPoints with three cards, on one CPU core: a quarter of an hour
# a seed. configs/recipes/general_points/README.md says what comes out.
#
#   bash launch/general_points.sh [--seeds "0 1 2"] [--output DIR]
#
# Run again, it goes on where it was. Writes comparison.json and comparison.png to the output folder.
set -euo pipefail

seeds="0 1 2" output=
while [ $# -gt 0 ]; do
    case "$1" in
        --seeds) seeds=$2; shift 2 ;;
        --output) output=$2; shift 2 ;;
        *) echo "error: unknown argument '$1'; usage: general_points.sh [--seeds \"0 1 2\"] [--output DIR]" >&2; exit 2 ;;
    esac
done

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
output=${output:-$project/runs/general_points}
case "$output" in /*) ;; *) output=$PWD/$output ;; esac
cd "$project"
source tools/install.sh
export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
mega() { "$PYTHON" -W ignore -m dapo_mega "$@"; }
recipe=configs/recipes/general_points
sft_steps=(150 300 450)

for seed in $seeds; do
    folder=$output/seed$seed
    common=(seed="$seed" data.train.path="$folder/data/train.parquet" data.evaluation.path="$folder/data")
    mega prepare general-points --output "$folder/data" --seed "$seed" --num-train 500 --num-eval 64 \
        --cards 3 --target 12 --prompt-style short
    mega prepare init-model --output "$folder/initial" --seed "$seed" --tokenizer "$folder/data/tokenizer" \
        --hidden-size 128 --layers 4 --kv-heads 4 --max-positions 160
    mega sft --config $recipe/sft.yaml seed="$seed" output_dir="$folder/warm_start" model.path="$folder/initial" \
        data.train.path="$folder/data/warm_start.parquet"
    mega train --config $recipe/rl.yaml "${common[@]}" output_dir="$folder/rl" model.path="$folder/warm_start/hf"
    mega sft --config $recipe/sft.yaml seed="$((seed + 1000))" output_dir="$folder/sft" num_steps="${sft_steps[-1]}" \
        model.path="$folder/warm_start/hf" data.train.path="$folder/data/demonstrations.parquet" \
        optimizer.learning_rate=2e-4 optimizer.schedule=constant checkpoint.hf_every="${sft_steps[0]}"
    for step in "${sft_steps[@]}"; do  # Evaluated as RL's start is; the step of RL after it is not looked at.
        mega train --config $recipe/rl.yaml "${common[@]}" output_dir="$folder/sft_at_$step" num_steps=1 \
            model.path="$folder/sft/hf_step_$(printf %08d "$step")" evaluation.every=0 checkpoint.save_hf_at_end=false
    done
done
# shellcheck disable=SC2086
"$PYTHON" -W ignore $recipe/compare.py "$output" $seeds
