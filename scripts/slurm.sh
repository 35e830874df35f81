#!/usr/bin/env bash
# Train a recipe on several nodes under Slurm. From the clone, which all nodes must see:
#
#   sbatch --nodes 4 scripts/slurm.sh RECIPE [--section.key value ...]
#
#SBATCH --job-name=hotbunk
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=TERM@120
#SBATCH --output=runs/slurm-%j.log
set -euo pipefail
cd "$SLURM_SUBMIT_DIR" # the script itself runs from a copy in Slurm's spool folder

bash scripts/setup.sh # once, on the first node; the others find it finished
export NNODES=$SLURM_JOB_NUM_NODES
# The first node's address on the network that the nodes share and trust: the launcher listens there, and nowhere else.
MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | awk 'NR == 1')}
export MASTER_ADDR
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))} # two jobs on one node do not meet
# All cores of the node: left to itself, Slurm may bind a task to one (https://slurm.schedmd.com/srun.html, --cpus-per-task).
exec srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" bash -c 'NODE_RANK=$SLURM_NODEID exec bash scripts/train.sh "$@"' train.sh "$@"
