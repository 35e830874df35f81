#!/usr/bin/env bash
# Train a recipe under torchrun, by reinforcement or, with `sft` before it, on the answers in its data:
#
#   bash scripts/train.sh [sft] RECIPE [--section.key value ...]
#
# One node by default, with one rank for each GPU (on CPU one rank), or NPROC_PER_NODE ranks. On several nodes, run it on each of
# them with NNODES, NODE_RANK (0 on the first), MASTER_ADDR (the first's address on a trusted network, the only one that is
# listened at) and, where 29500 is taken, MASTER_PORT; scripts/slurm.sh does so. With RESTARTS=N a run that fails is started again, up
# to N times, from its newest checkpoint. --help and --dry-run answer at once, without ranks.
set -euo pipefail
trap 'exit 130' INT # one that reaches bash alone would be lost while it waits for a command
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${HOTBUNK_VENV:-$root/.venv}/bin/python
# The folder this is started in may have a trainer, a generation or a sharding of its own.
export PYTHONSAFEPATH=1 PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

die() {
    echo "train: $1" >&2
    exit 2
}

count_gpus() {
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true
    else
        nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true
    fi
}

# A variable that is a number, from the least it may be to the greatest; unset or empty it has its default.
check_number() {
    local value=${!1:-$2} few=${!1:-$2}
    [ ${#value} -le 60 ] || few=${value:0:60}...
    [[ $value =~ ^(0|[1-9][0-9]{0,6})$ ]] && [ "$value" -ge "$2" ] && [ "$value" -le "$3" ] ||
        die "$1 is '$few': give it as a whole number from $2 to $3."
}

at_least_one() { echo $(($1 > 1 ? $1 : 1)); }

command=train
if [ "${1:-}" = sft ]; then
    command=sft
    shift
fi
[ -x "$python" ] || die "there is no .venv yet: run bash scripts/setup.sh first."
check_number NPROC_PER_NODE 1 1024
check_number NNODES 1 100000
check_number RESTARTS 0 1000000
ranks=${NPROC_PER_NODE:-$(at_least_one "$(count_gpus)")}
nodes=${NNODES:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(at_least_one $(($(nproc) / ranks)))}

for argument in "${@:---help}"; do
    case $argument in
    -h | --help | --dry-run) WORLD_SIZE=$((nodes * ranks)) exec "$python" -m trainer "$command" "${@:---help}" ;;
    esac
done

rendezvous=()
if [ "$nodes" != 1 ]; then
    check_number NODE_RANK 0 $((nodes - 1))
    check_number MASTER_PORT 1 65535
    [ -n "${NODE_RANK:-}" ] && [ -n "${MASTER_ADDR:-}" ] || die "with NNODES=$nodes, NODE_RANK and MASTER_ADDR must be set, too."
    rendezvous=(--nnodes "$nodes" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
fi
# A mistake in the recipe is reported once, in a sentence, before there are ranks. In the background, since Bash would keep a signal
# that it alone is sent until the check has ended, and then go on.
stop() {
    [ -z "${!:-}" ] || kill "$!" 2>/dev/null || true
    wait || true
    exit "$1"
}
trap 'stop 129' HUP
trap 'stop 130' INT
trap 'stop 143' TERM
WORLD_SIZE=$((nodes * ranks)) "$python" -m trainer "$command" "$@" --check &
wait "$!" || exit
trap - HUP INT TERM
# Ranks that have not ended this long after SIGTERM are killed. They end themselves some seconds after checkpoint.grace_s, so
# torchrun must only not be faster. It is a variable because older torchruns lack the flag.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
launcher=(trainer.launcher)
[ "${RESTARTS:-0}" = 0 ] || launcher=(trainer.run.supervisor "$RESTARTS")
exec "$python" -m "${launcher[@]}" "${rendezvous[@]}" --nproc-per-node "$ranks" -m trainer "$command" "$@"
