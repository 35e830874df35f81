#!/usr/bin/env bash
# Tries other projects' agents, environments, tools and evaluations, unchanged: bash scripts/try_ecosystem.sh [FOLDER [NAME ...]]
#
# Makes Python environments for them in FOLDER (runs/ecosystem by default; needs a package index), a random model, and a model that calls
# tools. Trains two steps of each trial of scripts/ecosystem/trial.py, or of those named, and checks the records. Has lm-eval and inspect-ai
# evaluate `hotbunk serve`, and TorchRL's clients use a service. Prints the figures of docs/ecosystem.md. The exit status is 1 if a check
# fails. Takes half an hour on two cores; TorchRL's clients alone (`bash scripts/try_ecosystem.sh torchrl`), some minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ "${1:-}" != torchrl ] || set -- runs/ecosystem torchrl
folder=$(realpath -m "${1:-runs/ecosystem}")
shift || true
mkdir -p "$folder"
[ $# -gt 0 ] || rm -rf "$folder/trials" "$folder/rows.jsonl" # with names, only the records of those trials are replaced

# environment NAME PACKAGE...: makes a Python environment of that name with these packages
environment() {
    [ -x "$folder/$1/bin/python" ] || python3 -m venv "$folder/$1"
    "$folder/$1/bin/python" -m pip install --quiet --prefer-binary "${@:2}"
}
# beside PACKAGE...: makes the environment for libraries that run in Hotbunk's process; it has Hotbunk's packages, and adds those missing
beside() {
    [ -x "$folder/libraries/bin/python" ] || python3 -m venv "$folder/libraries"
    own=$("$folder/libraries/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$own/hotbunk.pth"
    environment libraries "$@"
}
torchrl() {
    .venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --group torchrl &&
        .venv/bin/python -m pytest -n 0 tests/engine/generation/compat/test_torchrl_client.py
}
if [ "$*" = torchrl ]; then
    torchrl
    exit
fi
environment agents openai-agents 'pydantic-ai-slim[openai]' langgraph langchain-openai 'smolagents[openai]' anthropic
environment litellm litellm # separate, since it requires another release of openai than openai-agents
environment verifiers 'verifiers>=0.4,<0.5' uv
environment evaluations 'lm-eval[api]' inspect-ai openai
beside gymnasium textarena openenv-core reasoning-gym

if [ ! -e "$folder/calling/model" ]; then
    .venv/bin/python scripts/make_tiny.py "$folder/model" --layers 2
    .venv/bin/python - "$folder/model/config.json" <<'PYTHON'
import json, sys
from pathlib import Path

config = json.loads(Path(sys.argv[1]).read_text())
config["max_position_embeddings"] = 16384  # for the longest prompt of a framework
Path(sys.argv[1]).write_text(json.dumps(config))
PYTHON
    .venv/bin/python scripts/ecosystem/calls.py "$folder/calls.jsonl"
    cat >"$folder/calling.yaml" <<YAML
run: {output_dir: $folder, name: calling}
model: {path: $folder/model}
data: {path: $folder/calls.jsonl, max_prompt_tokens: 256, answer_key: null}
policy: {dtype: float32, betas: [0.9, 0.95], schedule: linear}
batch: {tokens_per_micro_batch: 8192}
sft: {steps: 60, batch_size: 8, lr: 3.0e-3, warmup_steps: 5, max_tokens: 128}
tracking: {wandb: disabled}
YAML
    NPROC_PER_NODE=1 bash scripts/train.sh sft "$folder/calling.yaml" --resume none
fi

status=0
for name in "${@:-agents litellm verifiers mcp-command mcp-url gymnasium-tools gymnasium-text textarena openenv reasoning-gym}"; do
    for each in $name; do
        .venv/bin/python scripts/ecosystem/trial.py "$folder" "$each" || status=1
    done
done
[ $# -gt 0 ] || bash scripts/ecosystem/evaluations.sh "$folder" || status=1
[ $# -gt 0 ] || torchrl || status=1
.venv/bin/python - "$folder/rows.jsonl" <<'PYTHON'
import json, sys
from pathlib import Path

print("\n| what | version | trajectories | failed | `gap/max` | lines that know Hotbunk |\n|---|---|---|---|---|---|")
rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
for row in {row["name"]: row for row in rows}.values():  # the newest row of each name
    seen = "{trajectories} | {failed} | {gap:.1e}" if "gap" in row else "accuracy {accuracy}, as it is | |"
    print("| {name} | {version} | {seen} | {lines} |".format(**row | {"seen": seen.format_map(row)}))
PYTHON
exit $status
