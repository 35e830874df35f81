"""Measure what every process of a long run holds, step by step; to run by hand, in some twenty minutes.

    python tests/support/long_run.py FOLDER [STEPS] [RUN...]

Trains a tiny model (300 steps a run by default) with a checkpoint every fifth step. In the run `client`, episodes are
an OpenAI client's that is offered a tool, calls it and sends the result back; in `tools`, Hotbunk calls the tool; in
`carried`, answers grow by a few tokens at a time, and most continue in the next step. By default all three run. After
each step the resident memory, descriptors and threads of every process are recorded. The slope of its memory is that of
Theil and Sen (the median over all pairs of steps), after a warm-up of a fifth of the run: memory that a checkpoint's
copy takes for some steps does not change it. At most 50 KiB a step are allowed.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from tests.support.real_run import Run, write_recipe  # noqa: E402

ALLOWED = 50.0  # KiB a step
POOL = min(32, (os.cpu_count() or 1) + 4)
"""Threads of asyncio's executor: the OpenAI client asks for its platform there, and it grows only when all are busy."""
CALL = '<tool_call>{"name": "two", "arguments": {}}</tool_call>'
ROLES = {"guardian": "guardian.py", "engine core": "VLLM::", "launcher": "trainer.launcher"}
ROLES |= {"resource tracker": "resource_tracker", "reward worker": "multiprocessing", "rank": "trainer"}


@dataclass
class Held:
    """The resources of one process after each step: resident KiB, descriptors, threads."""

    steps: list[int] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def note(self, step: int, process: psutil.Process) -> None:
        with process.oneshot():
            figures = process.memory_info().rss / 1024, process.num_fds(), process.num_threads()
        for values, value in zip((self.memory, self.descriptors, self.threads), figures, strict=True):
            values.append(value)  # type: ignore[attr-defined]
        self.steps.append(step)


def two() -> int:
    """Return the number two."""
    return 2


TOOL = {
    "type": "function",
    "function": {"name": "two", "parameters": {"type": "object", "properties": {}}},
}


async def client(base_url: str, api_key: str, model: str, row: dict[str, Any]) -> None:
    """Plays an agent of two turns with a tool of its own; the reward function scores them."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as openai:
        messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
        for _ in range(2):
            request = {"model": model, "messages": messages, "tools": [TOOL]}
            answer = (await openai.chat.completions.create(**request)).choices[0].message
            messages.append(answer.model_dump(exclude_none=True))
            for call in answer.tool_calls or []:
                messages.append({"role": "tool", "content": str(two()), "tool_call_id": call.id})
            if not answer.tool_calls:
                messages.append({"role": "user", "content": "call two"})


def teach(folder: Path) -> None:
    """Train the model in `folder` to answer questions with CALL, and results with 2, as a random one never would."""
    torch.manual_seed(0)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in itertools.count():
        messages, answer_text = (
            [{"role": "user", "content": f"{step * 7 % 100}+{step * 3 % 100}="}],
            CALL,
        )
        if step % 2:
            messages += [{"role": "assistant", "content": CALL}, {"role": "tool", "content": "2"}]
            answer_text = "2"
        tools = [TOOL] if step // 2 % 2 else None
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        prompt, answer = (
            tokenizer(part, add_special_tokens=False)["input_ids"]
            for part in (text, f"{answer_text}<|im_end|>")
        )
        ids, labels = torch.tensor([prompt + answer]), torch.tensor([[-100] * len(prompt) + answer])
        loss = model(ids, labels=labels).loss
        if not step % 2 and loss.item() < 0.02:
            # about every second call is complete: there is something left to learn
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"taught to call a tool in {step} steps", flush=True)
    model.save_pretrained(folder)


def role(process: psutil.Process) -> str:
    """Name the part of a run that this process is, by its command line; empty for short-lived processes."""
    words = " ".join(process.cmdline())
    return next((name for name, part in ROLES.items() if part in words), "")


def watch(run: Run, seconds: float = 3600.0) -> dict[str, Held]:
    """Record all processes after each row of metrics.jsonl, until the run has ended successfully."""
    held: defaultdict[str, Held] = defaultdict(Held)
    deadline, seen = time.monotonic() + seconds, 0
    while run.process.poll() is None:
        assert time.monotonic() < deadline, run.output()
        if (step := len(run.rows())) > seen:
            seen = step
            for process in run.processes():
                try:
                    if name := role(process):
                        held[f"{name} {process.pid}"].note(step, process)
                except psutil.NoSuchProcess:
                    continue
        time.sleep(0.1)
    assert run.process.returncode == 0, run.output()
    return held


def slope(steps: list[int], memory: list[float]) -> float:
    """KiB a step, by the estimator of Theil and Sen."""
    points = list(zip(steps, memory, strict=True))
    return statistics.median((b - a) / (j - i) for (i, a), (j, b) in itertools.combinations(points, 2))


def verdict(name: str, held: Held, warm: int) -> tuple[str, bool]:
    """Describe one process in a line, and return it with whether the process stays within the limits."""
    first = next(i for i, step in enumerate(held.steps) if step >= warm)
    grows = slope(held.steps[first:], held.memory[first:])
    memory = f"{held.memory[0] / 1024:7.1f} {held.memory[first] / 1024:7.1f} {held.memory[-1] / 1024:7.1f} MiB"
    counts, good = "", grows <= ALLOWED
    for values, more in ((held.descriptors, 0), (held.threads, POOL - 1)):
        before, after = (
            int(statistics.median(part)) for part in (values[first : first + 15], values[-15:])
        )
        counts += f"   {values[0]:3d} {before:3d} {after:3d}"
        good &= after <= before + more
    return f"{name:24} {grows:+8.1f} KiB/step   {memory}{counts}{'' if good else '   TOO MUCH'}", good


def main(folder: Path, steps: int = 300, names: Sequence[str] = ()) -> int:
    """Run the training, and print a table for each run."""
    from trainer.commands.tiny_model import make_tiny_model

    model = make_tiny_model(folder / "model", layers=2, intermediate_size=128)
    teach(model)
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": steps, "step_deadline_s": 300, "first_step_deadline_s": 600},
        "checkpoint": {"every": 5},
        "sampling": {"max_tokens": 48},
        "engine": {"max_model_len": 320},
        "policy": {"lr": 1e-6},
        "batch": {"prompts_per_step": 2, "tokens_per_micro_batch": 1024},
    }
    tools = {"tools": [f"{__file__}:two"], "describe_tools": False, "max_turns": 2}
    rollouts = {
        "client": {"client": f"{__file__}:client"},
        "tools": tools,
        "carried": {"slice_tokens": 8, "ahead": 1},
    }
    good, warm = True, steps // 5
    for name in names or rollouts:
        began = time.monotonic()
        run = Run(write_recipe(folder, model, rollout=rollouts[name], **sections), ranks=1, name=name)
        watched = watch(run)
        rows = run.rows()
        calls = sum(row.get("tools/calls", 0) for row in rows)
        turns = statistics.mean(row["turns/mean"] for row in rows)
        figures = f"{turns:.2f} turns, {calls:.0f} calls"
        if name == "carried":
            carried = statistics.mean(row["carry/answers"] for row in rows)
            figures = f"{carried:.1f} answers carried, ages up to {max(row['stale/age_max'] for row in rows):.0f}"
            assert carried > 1, "the run did not exercise what it measures"
        print(f"{name}: {len(rows)} steps in {time.monotonic() - began:.0f} s, {figures}")
        print(f"{'':24} {'slope':>17}   memory at first, {warm}, last      descriptors   threads")
        for process, resources in watched.items():
            if resources.steps[0] <= warm and resources.steps[-1] >= steps - warm:
                line, fine = verdict(process, resources, warm)
                good &= fine
                print(line)
        done = {"client": turns == 2.0, "tools": calls > steps, "carried": True}
        assert done[name], "the run did not exercise what it measures"
    return int(not good)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="for models, data and runs")
    parser.add_argument(
        "steps", type=int, nargs="?", default=300, help="steps of each run (default: 300)"
    )
    parser.add_argument("names", nargs="*", metavar="RUN", help="client, tools, carried (default: all)")
    sys.exit(main(**vars(parser.parse_args())))
