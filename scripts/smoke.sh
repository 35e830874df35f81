#!/usr/bin/env bash
# Training, small enough for a laptop: install, make a tiny model, warm-start it on additions that mostly forget their carries, and
# let it learn to carry by reinforcement, on two ranks with real vLLM engines. Arguments go to the reinforcement:
#
#   bash scripts/smoke.sh [--section.key value ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/examples/run.sh" arithmetic "$@"
