#!/usr/bin/env bash
# The first hour on a machine with a GPU: what no CPU can show, in the order of what matters, with one report.
#
#   bash tools/gpu_first_hour.sh [--output DIR] [--only STEP,STEP...] [--list]
#
# Uses the environment of tools/install_gpu.sh. Every step has a limit in seconds and none waits for the one before to
# succeed. DIR must be new or empty (default: runs/gpu_first_hour/DATE-TIME); DIR/report.md is there from the first step
# on. Exit status 1: a step failed; 2: an argument is wrong.
#   PYTHON=python                    the interpreter, or a command that begins with it
#   DAPO_MEGA_SGLANG_PYTHON=python   the interpreter of the engines (default: PYTHON)
#   SMALL=1                          tiny shapes and two steps of training: to see whether this script works
set -uo pipefail
fail() { echo "error: $1" >&2; exit 2; }
usage="usage: gpu_first_hour.sh [--output DIR] [--only STEP,...] [--list]"
output= only= mode=run
while [ $# -gt 0 ]; do
    case "$1" in
        --output | --only)
            case "${2:-}" in "" | --*) fail "$1 needs a value; $usage" ;; esac
            if [ "$1" = --only ]; then only=,$2,; else output=$2; fi
            shift 2 ;;
        --list) mode=list; shift ;;
        *) fail "unknown argument '$1'; $usage" ;;
    esac
done
case "$output" in "" | /*) ;; *) output=$PWD/$output ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
output=${output:-$PWD/runs/gpu_first_hour/$(date -u +%Y-%m-%d-%H%M%S)}
read -ra python <<< "${PYTHON:-python}"
export DAPO_MEGA_SGLANG_PYTHON=${DAPO_MEGA_SGLANG_PYTHON:-$(command -v "${python[0]}")}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore
failed=0 names=()

# One step: its output in DIR/NAME.log, a row and the log's end in the report.
step() {  # NAME LIMIT_S WHAT COMMAND...
    local name=$1 limit=$2 what=$3 started=$SECONDS status result
    shift 3
    case $mode in
        list) printf '%-16s %4d s  %s\n' "$name" "$limit" "$what"; return ;;
        name) names+=("$name"); return ;;
    esac
    [ -z "$only" ] || [[ "$only" == *,$name,* ]] || return
    echo "$name: $what (at most $limit s)"
    timeout --kill-after=15 "$limit" "$@" > "$output/$name.log" 2>&1 < /dev/null
    status=$?
    case $status in
        0) result=passed ;;
        124 | 137) result="stopped after its $limit s" ;;
        *) result="failed (exit status $status)" ;;
    esac
    # A step whose tests were all left out has shown nothing.
    if [ $status = 0 ] && tail -n 1 "$output/$name.log" | grep -q skipped && ! tail -n 1 "$output/$name.log" | grep -q passed
    then result="skipped"; fi
    case $result in passed | skipped) ;; *) failed=1 ;; esac
    echo "$name: $result, $((SECONDS - started)) s"
    echo "| $name | $what | $result | $((SECONDS - started)) |" >> "$output/rows"
    printf '\n## %s: %s\n\n```\n%s\n```\n' "$name" "$result" "$(tail -n 40 "$output/$name.log")" >> "$output/sections"
    { cat "$output/head"; cat "$output/rows" "$output/sections"; } > "$output/report.md"
}

learn() {  # FOLDER OVERRIDES...: the quickstart's task in one process on the device
    local folder=$1 sizes=(4000 256 30000) sft=(num_steps=1200) dapo=(num_steps=50)
    shift
    if [ -n "${SMALL:-}" ]; then sizes=(64 8 100) sft=(num_steps=2) dapo=(num_steps=2 evaluation.at_start=false evaluation.at_end=false
        evaluation.every=0 batch.groups_per_step=4 batch.generation_groups=4 batch.mini_batch_groups=2
        algorithm.dynamic_sampling=false); fi
    rm -rf "$folder"
    "${python[0]}" tools/prepare_data.py arithmetic --output "$folder/data" --min-digits 3 \
        --num-train "${sizes[0]}" --num-eval "${sizes[1]}" --num-demonstrations "${sizes[2]}" &&
    "${python[0]}" tools/prepare_data.py init-model --output "$folder/initial" --hidden-size 256 --layers 2 --heads 4 \
        --kv-heads 4 --intermediate-size 512 &&
    "${python[@]}" launch/train_sft.py --config configs/quickstart_sft.yaml output_dir="$folder/sft" \
        model.path="$folder/initial" data.train.path="$folder/data/demonstrations.parquet" "${sft[@]}" "$@" &&
    "${python[@]}" launch/train_dapo.py --config configs/quickstart.yaml output_dir="$folder/dapo" \
        model.path="$folder/sft/hf" data.train.path="$folder/data/train.parquet" \
        data.evaluation.path="$folder/data/eval.parquet" "${dapo[@]}" "$@"
}

# `timeout` starts programs only: the function and what it uses reach a shell of its own.
python_words=$(printf '%q ' "${python[@]}")
learning=(bash -c "python=($python_words); $(declare -f learn); learn \"\$@\"" learn)
tests=("${python[@]}" -m pytest -q -p no:cacheprovider -rs)
mfu=("${python[@]}" tools/benchmark.py mfu)
if [ -n "${SMALL:-}" ]; then
    shapes=(tiny) mfu+=(--layers 1 --tokens 256 --segment 128 --rounds 2 --warmup 1)
    logprobs=(--tokens 64 --hidden 64 --vocabulary 512)
else
    shapes=(1.5b 7b) logprobs=(--tokens 8192 --hidden 3584 --vocabulary 152064 --dtype bf16 --repeats 5)
fi

steps() {
    step environment 120 "versions and devices" "${python[@]}" tools/gpu_environment.py
    step layers 360 "Transformer Engine in bf16 and FP8 against the local layers" \
        "${tests[@]}" -m gpu tests/gpu/test_transformer_engine.py
    step kernels 300 "Triton kernels against their oracle in torch" "${tests[@]}" tests/gpu/test_logprob_kernels.py
    step engines 540 "SGLang: weights by CUDA IPC, by disk and by NCCL (needs a second GPU)" \
        "${tests[@]}" tests/gpu/test_fleet.py
    step families 360 "all model families against transformers" \
        "${tests[@]}" tests/numerics/test_policy_against_transformers.py tests/numerics/test_deepseek.py
    for shape in "${shapes[@]}"; do
        step "mfu-$shape" 180 "time, MFU and memory of an update, bf16" "${mfu[@]}" --shape "$shape"
        for recipe in blockwise tensorwise delayed; do
            step "mfu-$shape-$recipe" 120 "the same in FP8, of FP8's peak" \
                "${mfu[@]}" --shape "$shape" --fp8 "$recipe" --peak 1979e12
        done
    done
    step logprobs 120 "log-probs without whole logits: time and memory" "${python[@]}" tools/benchmark.py logprobs "${logprobs[@]}"
    step learn-bf16 330 "the quickstart's task in bf16" "${learning[@]}" "$output/learn-bf16" model.dtype=bf16
    step learn-fp8 330 "the quickstart's task in FP8" \
        "${learning[@]}" "$output/learn-fp8" model.dtype=bf16 compute.fp8.scaling=blockwise
}

if [ $mode = list ]; then steps; exit; fi
mode=name
steps
for name in $(tr , ' ' <<< "$only"); do
    [[ " ${names[*]} " == *" $name "* ]] || fail "no step is called '$name'; there are: ${names[*]}"
done
mode=run
[ -z "$(ls -A "$output" 2> /dev/null)" ] ||
    fail "$output is not empty; give a new folder with --output, so that no earlier report is lost"
mkdir -p "$output" || fail "$output cannot be made; give another folder with --output"
printf '# The first hour on a GPU\n\n%s, commit %s\n\n| step | what | result | seconds |\n|---|---|---|---|\n' \
    "$(date -u '+%Y-%m-%d %H:%M UTC')" "$(git rev-parse --short HEAD 2> /dev/null || echo unknown)" > "$output/head"
steps
echo "report: $output/report.md"
exit $failed
