#!/usr/bin/env bash
# Train a recipe on several nodes under Slurm. From the clone, which all nodes must see:
#
#   sbatch --nodes 4 scripts/slurm.sh RECIPE [--section.key value ...]
#
# Three minutes before the time limit the run is asked to save and end, and the job is queued again, to go on from there. So is a
# job that Slurm itself requeues. With RESTARTS=N a run that fails is started again on the nodes that it has.
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

bash scripts/setup.sh # once, on the first node; the others find it finished
export NNODES=$SLURM_JOB_NUM_NODES
# The first node's address on the network that the nodes share and trust: the launcher listens there, and nowhere else.
MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | awk 'NR == 1')}
export MASTER_ADDR
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))} # two jobs on one node do not meet

out_of_time=
# To this shell alone (--signal=B:), perhaps before the next line but one; srun hands SIGTERM on to all nodes.
trap 'out_of_time=yes; [ -z "${!:-}" ] || kill -TERM "$!"' USR1
# All cores of the node: left to itself, Slurm may bind a task to one (https://slurm.schedmd.com/srun.html, --cpus-per-task).
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" bash -c 'NODE_RANK=$SLURM_NODEID exec bash scripts/train.sh "$@"' train.sh "$@" &
ranks=$!
status=0
wait "$ranks" || status=$? # which a signal that is trapped interrupts
while kill -0 "$ranks" 2>/dev/null; do
    status=0
    wait "$ranks" || status=$?
done
[ -z "$out_of_time" ] || [ "$status" = 0 ] || exec scontrol requeue "$SLURM_JOB_ID"
exit "$status"
