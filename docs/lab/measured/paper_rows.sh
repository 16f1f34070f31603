#!/usr/bin/env bash
# Trains rows of the paper's tables side by side on one GPU, with a rate that falls to 0, each for as many epochs as are given with it;
# then scores their best checkpoints and compares their trees with NLTK's. For the table of docs/lab/families.md.
# Needs data/ptb (`lm_pcfg prepare ptb`).
#   bash docs/lab/measured/paper_rows.sh TREES SECONDS CONFIG:EPOCHS ...
#   bash docs/lab/measured/paper_rows.sh wsj.mrg 1300 ptb_lm_rank_4096:15 ptb_lm_tn_500:13
# A training that takes longer than SECONDS is stopped by SIGTERM, with a checkpoint. Logs and results: runs/rows/CONFIG.*
set -uo pipefail
trees=${1:?usage: paper_rows.sh TREES SECONDS CONFIG:EPOCHS ...} limit=${2:?seconds of each training}
shift 2
mkdir -p runs/rows

row() {
  local config=${1%:*} epochs=${1#*:} began=$SECONDS
  local at=runs/rows/$config samples=()
  timeout -s TERM "$limit" python -m lm_pcfg train --config "configs/paper/$config.yaml" "name=$config" runs_folder=runs/rows \
    "training.epochs=$epochs" optimizer.schedule.kind=linear batch.sentences=16 tracking.mlflow=false resume=auto >"$at.log" 2>&1
  echo "$config: training ended with status $? after $((SECONDS - began)) s"
  case $config in *_c_pcfg_* | *_sc_*) samples=(--samples 8) ;; esac
  python -m lm_pcfg score data/ptb/ptb.test.txt --checkpoint "$at" --json "${samples[@]}" >"$at.score.json" 2>>"$at.log"
  python -m lm_pcfg evaluate "$trees" --lowercase --fold-numbers --checkpoint "$at" --json >"$at.trees.json" 2>>"$at.log"
  echo "$config: scored after $((SECONDS - began)) s: $(cat "$at.score.json") $(cut -c1-300 "$at.trees.json")"
}

for one; do row "$one" & done
wait
