#!/usr/bin/env bash
# The sequences of stages of three papers at toy size, on two CPU cores, with a table of accuracy after every stage.
# configs/recipes/sequences/README.md says what each stage is and what came out.
#
#   bash launch/sequences.sh r1|long_to_short|base_rl_distilled [--seed N] [--output DIR] [--short]
#
# All begin with one base model, made once in the output folder. --short shows in a few minutes that all stages run and
# teach something: smaller models, sums of two digits, fewer careless texts and steps, one process. Run again, it goes on
# where it was.
set -euo pipefail

usage="usage: sequences.sh r1|long_to_short|base_rl_distilled [--seed N] [--output DIR] [--short]"
sequence=${1:-}
case "$sequence" in
    r1 | long_to_short | base_rl_distilled) shift ;;
    *) echo "error: unknown sequence '$sequence'; $usage" >&2; exit 2 ;;
esac
seed=0 output= processes=2 pretraining=1200 pretraining_rate=2e-3 cold=5 rl=30 prompts=1000 own=300 dpo=80 k=1024
task=(--min-digits 3 --num-train 4000 --num-eval 256) texts=(--num-demonstrations 30000) rl_rate=()
sizes=(192 512) small_sizes=(96 256)
while [ $# -gt 0 ]; do
    case "$1" in
        --seed) seed=$2; shift 2 ;;
        --output) output=$2; shift 2 ;;
        --short)
            processes=1 pretraining=600 pretraining_rate=6e-3 cold=3 rl=10 prompts=256 own=100 dpo=20 k=16
            task=(--min-digits 2 --max-digits 2 --num-train 1000 --num-eval 64)
            texts=(--num-demonstrations 20000 --careful 0.45 --verbose 0.05 --careless 0.5)
            rl_rate=(optimizer.learning_rate=2e-4 optimizer.warmup_steps=2) sizes=(96 256) small_sizes=(64 160)
            shift ;;
        *) echo "error: unknown argument '$1'; $usage" >&2; exit 2 ;;
    esac
done
case "$seed" in *[!0-9]* | "") echo "error: --seed takes a whole number" >&2; exit 2 ;; esac

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
output=${output:-$project/runs/sequences/seed$seed}
case "$output" in /*) ;; *) output=$PWD/$output ;; esac
cd "$project"
source tools/install.sh
export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
[ -n "${GLOO_SOCKET_IFNAME:-}" ] || [ ! -e /sys/class/net/lo ] || export GLOO_SOCKET_IFNAME=lo
mega() { "$PYTHON" -W ignore -m dapo_mega "$@"; }
recipe=configs/recipes/sequences
data=(data.train.path="$output/data/train.parquet" data.evaluation.path="$output/data/eval.parquet")

evaluated=()
accuracy() {  # STAGE [K]: asks the held-out problems 4 times, or 32 of them K times.
    local evaluation="$output/evaluations/$1${2:+, k=$2}"
    evaluated+=("$evaluation.json")
    [ -e "$evaluation.json" ] || mega evaluate --config $recipe/rl.yaml seed="$seed" "${data[@]}" \
        model.path="$output/$1/hf" evaluation.samples_per_prompt="${2:-4}" ${2:+data.evaluation.max_rows=32} \
        --samples "$evaluation" --output "$evaluation.json" > /dev/null
}
sft() {  # STAGE MODEL DATA STEPS LEARNING_RATE [SECTION.KEY=VALUE ...]
    mega sft --processes "$processes" --config configs/quickstart_sft.yaml seed="$seed" output_dir="$output/$1" \
        model.path="$2" data.train.path="$3" num_steps="$4" optimizer.learning_rate="$5" optimizer.warmup_steps=5 "${@:6}"
}
rl() {  # STAGE MODEL [SECTION.KEY=VALUE ...]
    mega train --processes "$processes" --config $recipe/rl.yaml seed="$seed" "${data[@]}" output_dir="$output/$1" \
        model.path="$2" num_steps="$rl" "${rl_rate[@]}" "${@:3}"
}
own_answers() {  # STAGE FOLDER [OPTION ...]: what a stage's model says to the training problems, and is right.
    mega rejection-sample "$output/prepared" --output "$2" --config $recipe/rl.yaml --model "$output/$1/hf" \
        --seed "$seed" --set "${data[@]}" --samples 4 --force "${@:3}"
}
demonstrations() {  # FOLDER [OPTION ...]
    mega prepare arithmetic --output "$output/$1" --seed "$seed" "${task[@]}" "${@:2}"
}
initial_model() {  # FOLDER WIDTH INNER_WIDTH
    mega prepare init-model --output "$output/$1" --seed "$seed" --hidden-size "$2" --intermediate-size "$3" \
        --layers 2 --heads 4 --kv-heads 4
}

r1() {
    demonstrations careful --num-demonstrations 1000 --careful 1 --verbose 0 --careless 0
    echo "stage 1, cold start: a little SFT on answers with their working (seconds)"
    sft stage1 "$output/base/hf" "$output/careful/demonstrations.parquet" "$cold" 2e-4
    accuracy stage1
    echo "stage 2, RL for reasoning: GRPO on accuracy and language consistency (2 minutes)"
    rl stage2 "$output/stage1/hf"
    accuracy stage2
    echo "stage 3, rejection sampling from stage 2, and SFT of the base model on what was right (2 minutes)"
    own_answers stage2 "$output/own" --keep diverse --per-prompt 2
    sft stage3 "$output/base/hf" "$output/own" "$own" 1e-3
    accuracy stage3
    echo "stage 4, RL for all: accuracy, and answers that do not repeat themselves (2 minutes)"
    rl stage4 "$output/stage3/hf" \
        reward.components='[{kind: answer, incorrect: 0}, {kind: repetition, ngram_tokens: 8, weight: 0.2}]'
    accuracy stage4
    echo "distillation: a model of a quarter of the size on what stage 2 said, and RL in its place (3 minutes)"
    initial_model small_initial "${small_sizes[@]}"
    sft small_base "$output/small_initial" "$output/data/demonstrations.parquet" "$pretraining" "$pretraining_rate"
    accuracy small_base
    sft small_distilled "$output/small_base/hf" "$output/own" "$own" 1e-3
    accuracy small_distilled
    rl small_rl "$output/small_base/hf"
    accuracy small_rl
}

long_to_short() {
    demonstrations long_answers --num-demonstrations 6000 --careful 0.3 --verbose 0.7 --careless 0
    echo "a model of long thoughts, which mostly does all sums twice, and one of short ones (a minute)"
    sft long "$output/base/hf" "$output/long_answers/demonstrations.parquet" "$own" 1e-3
    accuracy long
    demonstrations short_answers --num-demonstrations 6000 --careful 1 --verbose 0 --careless 0
    sft short "$output/base/hf" "$output/short_answers/demonstrations.parquet" "$cold" 2e-4
    accuracy short
    echo "model merging: the mean of both (seconds)"
    [ -e "$output/merged/hf" ] || mega convert merge "$output/long/hf" "$output/merged/hf" --others "$output/short/hf"
    accuracy merged
    echo "shortest rejection sampling: SFT of the long model on the shortest of its right answers (2 minutes)"
    own_answers long "$output/shortest" --keep shortest
    sft rejection "$output/long/hf" "$output/shortest" "$own" 1e-3
    accuracy rejection
    echo "DPO: the shortest right answer against longer ones (a minute)"
    "$PYTHON" $recipe/table.py pairs "$output/shortest.responses" "$output/pairs.parquet"
    sft dpo "$output/long/hf" "$output/pairs.parquet" "$dpo" 1e-5 dpo='{beta: 0.1}' data.train.columns.rejected=rejected
    accuracy dpo
    echo "long-to-short RL: GRPO of the long model with the length reward (2 minutes)"
    rl length_rl "$output/long/hf" \
        reward.components='[{kind: answer, incorrect: 0}, {kind: length_kimi, weight: 0.5}]'
    accuracy length_rl
}

base_rl_distilled() {
    accuracy base "$k"
    echo "RL of the base model (2 minutes)"
    rl rl "$output/base/hf"
    accuracy rl "$k"
    echo "a teacher who has seen careful answers only, and the base model on what it says (4 minutes)"
    demonstrations of_the_task --num-demonstrations 6000 --careful 1 --verbose 0 --careless 0
    sft teacher "$output/base/hf" "$output/of_the_task/demonstrations.parquet" "$pretraining" 1e-3
    own_answers teacher "$output/of_teacher" --keep all
    sft distilled "$output/base/hf" "$output/of_teacher" "$own" 1e-3
    accuracy distilled "$k"
}

echo "the base model: random weights that have read careless and careful answers alike (2 minutes on two CPU cores)"
demonstrations data "${texts[@]}"
initial_model initial "${sizes[@]}"
sft base "$output/initial" "$output/data/demonstrations.parquet" "$pretraining" "$pretraining_rate"
if [ ! -e "$output/prepared/card.json" ]; then
    "$PYTHON" $recipe/table.py first "$output/data/train.parquet" "$prompts" "$output/problems.parquet"
    mega prepare dataset "$output/problems.parquet" --output "$output/prepared" \
        --decontaminate "$output/data/eval.parquet"
fi
[ "$sequence" = base_rl_distilled ] || accuracy base
"$sequence"
mega compare "${evaluated[@]%.json}" --output "$output/$sequence" > "$output/$sequence.txt"
"$PYTHON" $recipe/table.py show "${evaluated[@]}" | tee "$output/$sequence.md"
