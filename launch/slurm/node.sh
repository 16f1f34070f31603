#!/usr/bin/env bash
# One node's share of a job, started there by srun: `accelerate launch` with this node's place filled in. Arguments: those
# of lm_pcfg/train.py, or of lm_pcfg itself with ENGINE=score. Environment: what job.sh or score.sbatch exports.
#
# SIGUSR1 and SIGTERM (as SLURM sends them: to this process alone or to all below it) are for the workers: they save and
# exit 0. The launcher ignores them, so that it stays until its workers have ended, and reports their status.
set -uo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
nodes=$SLURM_JOB_NUM_NODES

fail() {
  echo "lm_pcfg node $SLURMD_NODENAME: error: $*" >&2
  exit 1
}

command -v pkill >/dev/null || fail "has no pkill (Debian: procps), by which workers are told to stop"
if [ "${SLURM_GPUS_ON_NODE:-0}" != "$GPUS_PER_NODE" ]; then
  fail "has ${SLURM_GPUS_ON_NODE:-0} GPUs and the first node $GPUS_PER_NODE: ask for sbatch --gpus-per-node"
fi

if [ "$GPUS_PER_NODE" -gt 0 ]; then
  device=cuda # it refuses to go on if PyTorch sees none
else
  device=cpu
  export CUDA_VISIBLE_DEVICES='' # a job without GPUs has none, even if the node has
fi

# The interface by which this node reaches another one of the job.
interface() {
  local other address
  other=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -vx -m 1 "$SLURMD_NODENAME") || return 1
  address=$(getent ahostsv4 "$other" | awk 'NR == 1 { print $1 }')
  ip -o route get "$address" | sed -n 's/.* dev \([^ ]*\).*/\1/p'
}
if [ "$nodes" -gt 1 ] && found=$(interface 2>/dev/null) && [ -n "$found" ]; then
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$found} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$found}
fi

processes=$((nodes * PROCESSES_PER_NODE))
configuration=nodes # one of ours in any case: else Accelerate takes what `accelerate config` left in the home folder
if [ "$processes" = 1 ] && [ "$ENGINE" != deepspeed ]; then
  configuration=one_gpu
fi
launch=(accelerate launch --quiet --config_file "$repository/launch/accelerate/$configuration.yaml" --mixed_precision no --dynamo_backend no)
launch+=(--num_processes "$processes" --num_machines "$nodes" --machine_rank "$SLURM_NODEID")
launch+=(--main_process_ip "$MAIN_ADDRESS" --main_process_port "$MAIN_PORT")
launch+=(--rdzv_backend static)
if [ "$ENGINE" = score ]; then # nothing is saved, so that signals end it
  [ "$processes" = 1 ] || launch+=(--multi_gpu)
  export PYTHONPATH=$repository:$repository/kernels${PYTHONPATH:+:$PYTHONPATH}
  exec "${launch[@]}" -m lm_pcfg "$@"
fi
launch+=(--tee 3 --log_dir "$LOGS/node-$SLURM_NODEID")
if [ "$ENGINE" = deepspeed ]; then
  zero=${DEEPSPEED_CONFIG:-$repository/launch/deepspeed/zero${ZERO:-2}.json}
  [ -r "$zero" ] || fail "no DeepSpeed configuration $zero: set ZERO=1, 2 or 3, or DEEPSPEED_CONFIG"
  launch+=(--use_deepspeed --deepspeed_config_file "$zero" --deepspeed_multinode_launcher standard)
  expected=(engine.expect=deepspeed)
elif [ "$processes" -gt 1 ]; then
  launch+=(--multi_gpu)
  expected=(engine.expect=ddp)
else
  expected=(engine.expect=single)
fi
expected+=("engine.world_size=$processes") # launchers fall back silently; the training then refuses to go on

export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[rank \${rank}] "
export PET_SIGNALS_TO_HANDLE=SIGQUIT # torchrun would pass the others on to the workers and kill them 30 s later
stopping=
trap 'stopping=yes' USR1 TERM
(
  trap '' USR1 TERM INT HUP # inherited: by the launcher, and by the workers until they listen themselves
  exec "${launch[@]}" "$repository/lm_pcfg/train.py" "device=$device" "$@" "${expected[@]}"
) &
launcher=$!

# To the workers themselves, and again and again, as those that are still starting do not listen yet.
while kill -0 "$launcher" 2>/dev/null; do
  if [ -n "$stopping" ]; then
    pkill -USR1 -P "$launcher"
  fi
  sleep 0.5 & # not "wait $launcher": a signal just before that would be seen when the launcher has ended
  wait $!
done
trap '' USR1 TERM # the last one to come must not take the place of the launcher's status
wait "$launcher"
