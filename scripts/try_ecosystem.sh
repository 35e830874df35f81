#!/usr/bin/env bash
# Trains a tiny model with agents of other people's frameworks, as installed and without a setting changed: bash scripts/try_ecosystem.sh [FOLDER]
#
# Makes environments for them in FOLDER (runs/ecosystem by default; needs a package index), and a random model. In each environment two steps
# are trained, with two episodes a step of every framework (rollout.client with a command, docs/rollouts.md). Prints the rows of docs/ecosystem.md:
# versions, and what failed. The exit status is 1 if anything did. Ten minutes on two cores, most of them for the packages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(realpath -m "${1:-runs/ecosystem}")
rm -rf "$folder/model" "$folder/runs"
mkdir -p "$folder"
cp scripts/examples/hotbunk_client.py scripts/ecosystem/frameworks.py "$folder"
.venv/bin/python scripts/make_tiny.py "$folder/model" --layers 2

# try NAME "PACKAGES" "FRAMEWORKS, by their names in frameworks.py": in an environment of that name
try() {
    [ -x "$folder/$1/bin/python" ] || python3 -m venv "$folder/$1"
    # shellcheck disable=SC2086
    "$folder/$1/bin/pip" install --quiet --prefer-binary $2
    .venv/bin/python - "$folder" "$1" "$3" <<'PYTHON'
import json, string, sys
from pathlib import Path

folder = Path(sys.argv[1])
config = json.loads((folder / "model/config.json").read_text())
config["max_position_embeddings"] = 16384  # for the longest of the frameworks' own prompts
(folder / "model/config.json").write_text(json.dumps(config))
names = sys.argv[3].split(", ")
rows = [json.dumps({"prompt": "What is 2+3?", "answer": "5", "framework": name}) + "\n" for name in names]
(folder / "data.jsonl").write_text("".join(rows))
recipe = f"""
run: {{output_dir: {folder}/runs, name: {sys.argv[2]}, steps: 2}}
model: {{path: {folder}/model}}
data: {{path: {folder}/data.jsonl, max_prompt_tokens: 512}}
sampling: {{max_tokens: 64, stop: {json.dumps(list(string.ascii_lowercase + string.digits))}}}  # else all answers of a random model are cut
engine: {{max_model_len: 16384, max_num_seqs: 16, kv_cache_gib: 0.25}}
policy: {{dtype: float32, lr: 1.0e-3}}
algorithm: {{group_size: 2}}
batch: {{prompts_per_step: {len(names)}, tokens_per_micro_batch: 16384}}
tracking: {{wandb: disabled, completions_per_step: 100}}
checkpoint: {{export_hf: false}}
rollout:
  max_error_rate: 1.0
  client: {{command: [{folder}/{sys.argv[2]}/bin/python, {folder}/frameworks.py], workers: 4}}
"""
(folder / "recipe.yaml").write_text(recipe)
PYTHON
    NPROC_PER_NODE=1 bash scripts/train.sh "$folder/recipe.yaml"
    .venv/bin/python - "$folder" "$1" <<'PYTHON'
import json, sys
from collections import Counter
from pathlib import Path

folder = Path(sys.argv[1])
rows = [json.loads(line)["framework"] for line in (folder / "data.jsonl").read_text().splitlines()]
seen = dict(line.rsplit(" ", 1) for line in (folder / f"runs/{sys.argv[2]}/clients.log").read_text().splitlines() if line.rsplit(" ", 1)[0] in rows)
answers = [json.loads(line) for line in (folder / f"runs/{sys.argv[2]}/completions.jsonl").read_text().splitlines()]
found, errors = Counter(), {}
for answer in answers:
    name = rows[answer["prompt_id"]]
    found[name] += not answer["error"]
    if answer["error"]:
        errors.setdefault(name, answer["error"])
print("\n| framework | version | trajectories in two steps | first error |\n|---|---|---|---|")
for name in rows:
    print(f"| {name} | {seen.get(name, '')} | {found[name]} | {errors.get(name, '')[:150]} |")
keys = ("gap/max", "rollout/failed", "turns/mean", "server/retemplated", "server/strict_ignored", "server/unread_calls", "train_tokens")
for line in (folder / f"runs/{sys.argv[2]}/metrics.jsonl").read_text().splitlines():
    print({key: value for key, value in json.loads(line).items() if key in keys})
sys.exit(bool(errors))
PYTHON
}

status=0
try agents "openai-agents pydantic-ai-slim[openai] langgraph langchain-openai smolagents[openai] anthropic" \
    "openai, openai Responses, anthropic, openai-agents, pydantic-ai, langgraph, smolagents" || status=1
try litellm litellm litellm || status=1 # which wants another release of openai than openai-agents does
exit $status
