#!/usr/bin/env bash
# Measures again, on one GPU, what kernels/README.md and "What a step costs" in lm_pcfg/training/README.md say of speed,
# memory and errors, and runs the tests that need a GPU. 9 minutes on an H200; needs data/ptb (`lm_pcfg prepare ptb`).
#   bash kernels/measured/measure.sh FOLDER
# Tables and plots go to FOLDER, the output to FOLDER/log. The exit status says how many commands failed.
set -uo pipefail
folder=${1:?usage: measure.sh FOLDER}
mkdir -p "$folder" && folder=$(cd "$folder" && pwd) || exit 1
cd "$(dirname "$0")/../.." || exit 1
failed=0

measure() {
  printf '\n$ %s\n' "$*"
  local began=$SECONDS
  "$@" || { echo "FAILED, status $?"; failed=$((failed + 1)); }
  echo "($((SECONDS - began)) s)"
}

bench() { measure python -m lm_pcfg bench "$@"; }

all() {
  nvidia-smi --query-gpu=name,clocks.sm,power.draw --format=csv,noheader
  bench inside --methods triton --seconds 0.5 --csv "$folder/inside.csv" --grid \
    512x20x16,512x40x16,2048x40x16,4096x40x16,8192x20x16,8192x40x16,8192x25x64,8192xptbx16,8192x22x16,32768x20x16
  bench viterbi
  bench emission
  bench step --config configs/search/base/ptb_4096.yaml --nonterminals 2048,4096,8192 --steps 300 \
    --csv "$folder/step.csv" --plot "$folder/step.svg" model.state_dropout=0 tracking.mlflow=false
  bench step --config configs/search/base/ptb_4096.yaml --nonterminals 32768 --steps 3 \
    --csv "$folder/step_32768.csv" model.state_dropout=0.5 tracking.mlflow=false
  # shellcheck disable=SC2046 # a list of files
  measure python -m pytest -q -m gpu $(grep -l "mark.gpu" tests/test_*.py)
  for nonterminals in 64 512 1024; do
    for deviation in 1 10; do
      for precision in fp32 tf32 bf16; do
        bench extremes --batches 3 --longest 80 --deviation $deviation --nonterminals $nonterminals --precision $precision
      done
    done
  done
  # What short sentences miss in bf16 is known and told; it is no failure of this script.
  for size in "4 512 5" "12 512 10" "12 2048 10"; do
    read -r longest nonterminals deviation <<<"$size"
    printf '\nshort sentences, bf16: '
    python -m lm_pcfg bench extremes --batches 20 --longest "$longest" --deviation "$deviation" \
      --nonterminals "$nonterminals" --precision bf16 --seed 5
  done
  # 10,000 batches, eight processes of 1,250: most of the time is the host's.
  local tests=()
  for seed in 0 1 2 3 4 5 6 7; do
    python -m lm_pcfg bench extremes --batches 1250 --deviation 30 --seed $seed &
    tests+=($!)
  done
  for process in "${tests[@]}"; do wait "$process" || failed=$((failed + 1)); done
  echo "$failed failed"
  return $failed
}

all 2>&1 | tee "$folder/log"
