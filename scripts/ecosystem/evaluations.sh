#!/usr/bin/env bash
# Has lm-eval and inspect-ai ask `hotbunk serve` eight questions, of which the model answers half correctly, so that both must report an
# accuracy of 0.5. Adds rows to FOLDER/rows.jsonl.
#
#   bash scripts/ecosystem/evaluations.sh FOLDER
set -euo pipefail
folder=$1
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
port=8790
python=$folder/evaluations/bin/python
for question in Add. Add. Add. Add. Play. Play. Play. Play.; do
    echo "{\"prompt\": \"$question\", \"answer\": \"add\"}"
done >"$folder/questions.jsonl"
cat >"$folder/questions.yaml" <<YAML
task: questions
dataset_path: json
dataset_kwargs: {data_files: {test: $folder/questions.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["</tool_call>"], max_gen_toks: 96, do_sample: false}
filter_list: [{name: called, filter: [{function: regex, regex_pattern: '"name": "(\w+)"'}, {function: take_first}]}]
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
YAML
cat >"$folder/questions.py" <<'PYTHON'
import json, sys
from pathlib import Path

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import accuracy, pattern, stderr
from inspect_ai.solver import generate

rows = map(json.loads, Path(sys.argv[1]).read_text().splitlines())
samples = [Sample(input=row["prompt"], target=row["answer"]) for row in rows]
task = Task(dataset=samples, solver=generate(), scorer=pattern(r'"name": "(\w+)"'), metrics=[accuracy(), stderr()])
(log,) = eval(task, model="openai-api/hotbunk/policy", temperature=0, max_tokens=96, display="none", log_dir=sys.argv[2])
print(log.results.scores[0].metrics["accuracy"].value)
PYTHON

.venv/bin/python -m trainer serve "$folder/calling/model" --name policy --port $port &
server=$!
trap 'kill $server 2>/dev/null; wait $server || true' EXIT
for _ in $(seq 240); do
    curl -sf "http://127.0.0.1:$port/health" >/dev/null && break
    kill -0 $server
    sleep 0.5
done

# as NAME FIGURE: adds a row, and succeeds if the figure is 0.5
as() {
    version=$("$python" -c "from importlib.metadata import version; print(version('$1'))")
    echo "$1 $version: accuracy $2"
    echo "{\"name\": \"$1, \`hotbunk serve\`\", \"version\": \"$version\", \"accuracy\": $2, \"lines\": \"base URL\"}" >>"$folder/rows.jsonl"
    [ "$2" = 0.5 ]
}
status=0
OPENAI_API_KEY=none HF_HUB_OFFLINE=1 "$python" -m lm_eval --model local-chat-completions --include_path "$folder" --tasks questions \
    --model_args "model=policy,base_url=http://127.0.0.1:$port/v1/chat/completions,num_concurrent=4" --apply_chat_template \
    --output_path "$folder/lm-eval" >"$folder/lm-eval.log" 2>&1 || { tail -20 "$folder/lm-eval.log"; status=1; }
figure=$("$python" - "$folder/lm-eval" <<'PYTHON'
import json, sys
from pathlib import Path

newest = max(Path(sys.argv[1]).rglob("results_*.json"), key=lambda file: file.stat().st_mtime)
print(json.loads(newest.read_text())["results"]["questions"]["exact_match,called"])
PYTHON
)
as lm-eval "$figure" || status=1
figure=$(HOTBUNK_API_KEY=none HOTBUNK_BASE_URL="http://127.0.0.1:$port/v1" "$python" "$folder/questions.py" "$folder/questions.jsonl" "$folder/inspect" | tail -1)
as inspect-ai "$figure" || status=1
exit $status
