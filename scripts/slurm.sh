#!/usr/bin/env bash
# Train a recipe on several nodes under Slurm. Start it in the clone, which must be on a file system that all nodes share:
#
#   sbatch --nodes 4 scripts/slurm.sh RECIPE [--section.key value ...]
#
# Three minutes before the time limit, the run is asked to save and end, and the job is queued again. It then continues from there, as does
# a job that Slurm itself requeues. With RESTARTS=N, a run that fails is started again on the same nodes.
#SBATCH --job-name=hotbunk
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=runs/slurm-%j.log
set -euo pipefail
cd "$SLURM_SUBMIT_DIR" # the script itself runs from a copy in Slurm's spool folder

bash scripts/setup.sh # runs once, on the first node; the other nodes use the same .venv
export NNODES=$SLURM_JOB_NUM_NODES
# The first node's address on the network that the nodes share and trust: the launcher listens there, and nowhere else.
MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | awk 'NR == 1')}
export MASTER_ADDR
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))} # so that two jobs on one node have different ports

out_of_time=
# Slurm sends the signal to this shell only (--signal=B:), perhaps before srun has started. srun forwards SIGTERM to all nodes.
trap 'out_of_time=yes; [ -z "${!:-}" ] || kill -TERM "$!"' USR1
# The task gets all cores of the node; by default, Slurm may bind it to one core (https://slurm.schedmd.com/srun.html, --cpus-per-task).
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" bash -c 'NODE_RANK=$SLURM_NODEID exec bash scripts/train.sh "$@"' train.sh "$@" &
ranks=$!
status=0
wait "$ranks" || status=$? # a trapped signal interrupts this wait
while kill -0 "$ranks" 2>/dev/null; do
    status=0
    wait "$ranks" || status=$?
done
[ -z "$out_of_time" ] || [ "$status" = 0 ] || exec scontrol requeue "$SLURM_JOB_ID"
exit "$status"
