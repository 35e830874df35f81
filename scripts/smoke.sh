#!/usr/bin/env bash
# Trains on a small scale that suits a laptop: installs, makes a tiny model, warm-starts it on additions that mostly lack their carries, and
# has it learn to carry by reinforcement, on two ranks with real vLLM engines. Arguments go to the reinforcement:
#
#   bash scripts/smoke.sh [--section.key value ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/examples/run.sh" arithmetic "$@"
