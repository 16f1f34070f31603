# shellcheck shell=bash
# What every sbatch script here does, sourced by it on the first node of a job: check the settings, start node.sh on every
# node, pass stop signals on, and requeue the job until the run is FINISHED or has FAILED. docs/clusters.md has the variables.
#
# Needs `repository`, its folder. Afterwards: train_job ENGINE [SETTING ...]
: "${repository:?}"
set -uo pipefail

# The id of one element of an array may be the id of the whole array as well: scontrol is given both numbers.
job=$SLURM_JOB_ID
if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then
  job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi

say() { echo "lm_pcfg job $job: $*" >&2; }

fail() {
  say "error: $*"
  exit 1
}

# SLURM's early warning. Bash runs a trap between two commands only: whatever takes long is in the background.
warned=
warning() {
  say "early warning: the workers are to save and stop"
  warned=yes
}
trap warning USR1
trap 'say "SIGTERM: SLURM tells the workers to save and stop"' TERM # it signals the steps as well

if [ -x "${VENV:=$repository/.venv}/bin/accelerate" ]; then
  PATH="$VENV/bin:$PATH"
fi
command -v accelerate >/dev/null || fail "no accelerate on the PATH: set VENV to the environment lm_pcfg is installed in"

# The settings, one an element; quotes in OVERRIDES keep spaces together.
[ -n "${CONFIG:-}" ] || fail "no CONFIG: use CONFIG=configs/tiny.yaml sbatch ..."
settings=(resume=auto)
separated=$(xargs -r printf '%s\n' <<<"${OVERRIDES:-}") || fail "OVERRIDES cannot be taken apart: $OVERRIDES"
if [ -n "$separated" ]; then
  mapfile -t -O 1 settings <<<"$separated"
fi

# resolved name|folder [SETTING ...]: of the run. A mistake in the settings shows here, before any node works.
resolved() {
  python "$repository/lm_pcfg/train.py" --print-config --config "$CONFIG" "${settings[@]}" "${@:2}" | python -c '
import sys, yaml
settings = yaml.safe_load(sys.stdin)
print({"name": settings["name"], "folder": settings["runs_folder"] + "/" + settings["name"]}[sys.argv[1]])' "$1"
}

newest_checkpoint() { (cd "$run_folder/checkpoints" 2>/dev/null && printf '%s\n' step-*[0-9] | grep -v '\*' | tail -n 1); }

# train_job ddp|deepspeed [SETTING ...]: the job from here to its end.
train_job() {
  export ENGINE=$1
  settings+=("${@:2}")
  run_folder=$(resolved folder) || fail "settings: see above"
  if [ -e "$run_folder/FINISHED" ]; then
    say "$run_folder is FINISHED, nothing to do (to train it further remove that file; for another run set name=...)"
    exit 0
  fi
  refuse_failed
  if [ -e "$run_folder/config.yaml" ]; then
    settings+=(resume=auto) # what OVERRIDES says of resume is for the first start of a run
  fi

  local nodes=$SLURM_JOB_NUM_NODES status
  export GPUS_PER_NODE=${SLURM_GPUS_ON_NODE:-0}
  export PROCESSES_PER_NODE=${PROCESSES_PER_NODE:-1}
  if [ "$GPUS_PER_NODE" -gt 0 ]; then
    PROCESSES_PER_NODE=$GPUS_PER_NODE
  fi
  MAIN_ADDRESS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  # Below the ports that Linux hands out itself (32768 and up). Each element of a job array has a job id of its own.
  # Another one at each start, in case the first is taken.
  local start=${SLURM_RESTART_COUNT:-0}
  MAIN_PORT=${MAIN_PORT:-$((12000 + (SLURM_JOB_ID + 1009 * start) % 20000))}
  LOGS=$run_folder/logs/job-$job/start-$start
  export MAIN_ADDRESS MAIN_PORT LOGS
  mkdir -p "$LOGS" || fail "cannot write to $run_folder"
  say "$ENGINE, nodes: $nodes, processes a node: $PROCESSES_PER_NODE, GPUs a node: $GPUS_PER_NODE," \
    "rendezvous: $MAIN_ADDRESS:$MAIN_PORT, logs: $LOGS"

  # From version 22.05 on srun does not take these over from sbatch, and would give each node's task a single one.
  local cpus=()
  if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
    cpus=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
  fi

  status=0
  if [ -z "$warned" ]; then
    srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 "${cpus[@]}" --kill-on-bad-exit=1 --wait=600 \
      --cpu-bind=none --mpi=none --export=ALL bash "$repository/launch/slurm/node.sh" --config "$CONFIG" "${settings[@]}" &
    local srun=$!
    while kill -0 "$srun" 2>/dev/null; do
      if [ -n "$warned" ]; then # again and again: an srun that is still starting does not pass it on
        kill -USR1 "$srun" 2>/dev/null
      fi
      sleep 1 & # not "wait $srun": a warning just before that would be seen when srun has ended
      wait $!
    done
    trap '' USR1 # a late warning must not take the place of the status
    wait "$srun"
    status=$?
  fi
  end_or_requeue "$status"
}

# A run that diverged would do so again.
refuse_failed() {
  if [ -e "$run_folder/FAILED" ]; then
    fail "$run_folder has FAILED: $(head -c 2000 "$run_folder/FAILED"); it is left alone, so set name=... for another run," \
      "or remove that file to continue from its last checkpoint"
  fi
}

end_or_requeue() {
  local status=$1 state='' newest last='' starts=0 attempt
  if [ -e "$run_folder/FINISHED" ]; then
    say "$run_folder is FINISHED"
    exit 0
  fi
  refuse_failed
  for attempt in 1 2 3 4 5 6; do # the controller may be away for a moment
    state=$(scontrol show job "$job" | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p')
    if [ -n "$state" ]; then
      break
    fi
    say "attempt $attempt: SLURM does not say how the job is"
    sleep 5
  done
  if [ "$state" != RUNNING ]; then # cancelled, requeued, out of time: SLURM has decided already
    say "not finished; the job is ${state:-unknown to SLURM}, so it is not requeued from here"
    exit "$status"
  fi
  # Not for ever: one start in three has to bring a new checkpoint.
  local memory=${LOGS%/*}/starts-without-progress
  newest=$(newest_checkpoint)
  if [ -e "$memory" ]; then
    read -r starts last <"$memory"
  fi
  if [ "$newest" = "$last" ]; then
    starts=$((starts + 1))
  else
    starts=0
  fi
  echo "$starts $newest" >"$memory"
  if [ "$starts" -ge "${MAX_STARTS_WITHOUT_PROGRESS:-3}" ]; then
    fail "not finished (status $status), and $starts starts in a row brought no new checkpoint, so it is not requeued;" \
      "the reason is above, or in $LOGS"
  fi
  say "not finished (status $status), newest checkpoint: ${newest:-none}; requeued"
  scontrol requeue "$job" || fail "SLURM refuses; submit the same command again, and the run continues"
}
