#!/usr/bin/env bash
# Measures again, on one GPU, figures of docs/lab/kernels.md and docs/lab/training_step.md: the triton rows, errors, best trees,
# emission and the recipe's steps, but neither the baselines nor the paper's networks. Also runs the tests that need a GPU.
# Needs data/ptb (`lm_pcfg prepare ptb`).
#   bash docs/lab/measured/measure.sh FOLDER
# Tables and plots go to FOLDER, the output to FOLDER/log. The exit status says how many commands failed.
set -uo pipefail
folder=${1:?usage: measure.sh FOLDER}
mkdir -p "$folder" && folder=$(cd "$folder" && pwd) || exit 1
cd "$(dirname "$0")/../../.." || exit 1
failed=0

measure() {
  printf '\n$ %s\n' "$*"
  local began=$SECONDS
  "$@" || { echo "FAILED, status $?"; failed=$((failed + 1)); }
  echo "($((SECONDS - began)) s)"
}

bench() { measure python -m lm_pcfg bench "$@"; }

# Several at once, because their time is not the question and most of it is the host's: each in a log of its own.
checks=()
check() {
  local log=$logs/${#checks[@]}
  { printf '\n$ %s\n' "$*" && python -m "$@"; } >"$log" 2>&1 &
  checks+=($!)
  while [ "$(jobs -rp | wc -l)" -ge 12 ]; do sleep 0.2; done
}

extremes() { check lm_pcfg bench extremes "$@"; }

all() {
  nvidia-smi --query-gpu=name,clocks.sm,power.draw --format=csv,noheader
  bench inside --methods triton --seconds 0.5 --csv "$folder/inside.csv" --grid \
    512x20x16,512x40x16,2048x40x16,4096x40x16,8192x20x16,8192x40x16,8192x25x64,8192xptbx16,8192x22x16,4096x10x16,4096x16x16,32768x20x16
  bench kernels --csv "$folder/kernels.csv"
  bench viterbi
  bench emission --csv "$folder/emission.csv"
  bench step --config configs/ptb_lm_4096.yaml --nonterminals 2048,4096,8192 --steps 300 \
    --csv "$folder/step.csv" --plot "$folder/step.svg" model.state_dropout=0 tracking.mlflow=false
  bench step --config configs/ptb_lm_4096.yaml --nonterminals 4096,8192 --steps 200 \
    --csv "$folder/step_tf32.csv" model.state_dropout=0 networks.precision=tf32 tracking.mlflow=false
  bench step --config configs/ptb_lm_4096.yaml --nonterminals 32768 --steps 40 \
    --csv "$folder/step_32768.csv" model.state_dropout=0.5 tracking.mlflow=false
  local logs
  logs=$(mktemp -d)
  # shellcheck disable=SC2046 # a list of files
  check pytest -q -m gpu $(grep -l "mark.gpu" tests/test_*.py)
  for seed in 0 1 2 3 4 5 6 7; do  # 10,000 batches
    extremes --batches 1250 --deviation 30 --seed $seed
  done
  for nonterminals in 64 512 1024; do
    for deviation in 1 10; do
      for precision in fp32 tf32 bf16; do
        extremes --batches 3 --longest 80 --deviation $deviation --nonterminals $nonterminals --precision $precision
      done
    done
  done
  for size in "4 320 5" "4 512 5" "4 4096 5" "6 320 7" "8 512 4" "12 512 10" "12 2048 10" "16 320 5" "24 320 7"; do
    read -r longest nonterminals deviation <<<"$size"  # short sentences, the hardest for bf16
    extremes --batches 20 --longest "$longest" --deviation "$deviation" --nonterminals "$nonterminals" --precision bf16
  done
  for nonterminals in 320 512 1024 2048; do  # ... and without any: one short sentence makes its whole batch precise up to N 1024
    for deviation in 5 7 10; do
      extremes --batches 10 --shortest 17 --longest 80 --deviation $deviation --nonterminals $nonterminals --precision bf16
    done
  done
  for number in "${!checks[@]}"; do
    wait "${checks[number]}" || { echo "FAILED, status $?" >>"$logs/$number" && failed=$((failed + 1)); }
    cat "$logs/$number"
  done
  rm -r "$logs"
  echo "$failed failed"
  return $failed
}

all 2>&1 | tee "$folder/log"
