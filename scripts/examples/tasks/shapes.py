"""Shapes in small pictures, which a tiny vision-language model learns to name by reinforcement within minutes.

`make` writes pictures, train.jsonl and eval.jsonl (prompt, image, answer), and a model that was trained on other
pictures, most of them with a wrong name: that of the next shape in the list. So the model recognises shapes, and
reinforcement teaches which of two names is right. Prompts are text, with the picture before it.
"""

import json
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image as Pillow
from PIL import ImageDraw
from transformers import AutoModelForImageTextToText

from generation.images import Image, ImageProcessor
from scripts.tiny_vlm import make_tiny_vlm

SHAPES = ["disc", "box", "bar", "cross"]
QUESTION = "Name it: "
SIDE = 56


def draw(shape: str, rng: random.Random) -> Pillow.Image:
    """Return a picture of a shape with random size, place and colour on white."""
    picture = Pillow.new("RGB", (SIDE, SIDE), "white")
    size = rng.randint(20, 36)
    x, y = rng.randint(2, SIDE - size - 2), rng.randint(2, SIDE - size - 2)
    colour, pen = tuple(rng.randint(0, 140) for _ in range(3)), ImageDraw.Draw(picture)
    third = size // 3
    if shape == "disc":
        pen.ellipse((x, y, x + size, y + size), fill=colour)
    elif shape == "box":
        pen.rectangle((x, y, x + size, y + size), outline=colour, width=4)
    elif shape == "bar":
        pen.rectangle((x, y + third, x + size, y + 2 * third), fill=colour)
    else:
        pen.rectangle((x, y + third, x + size, y + 2 * third), fill=colour)
        pen.rectangle((x + third, y, x + 2 * third, y + size), fill=colour)
    return picture


def write_rows(folder: Path, name: str, count: int, rng: random.Random) -> None:
    """Write pictures, and the file with their prompts and answer."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    lines = []
    for index in range(count):
        shape = SHAPES[index % len(SHAPES)]
        draw(shape, rng).save(folder / name / f"{index}.png")
        lines.append(
            json.dumps({"prompt": QUESTION, "image": f"{name}/{index}.png", "answer": shape}) + "\n"
        )
    (folder / f"{name}.jsonl").write_text("".join(lines))


def warm_up(folder: Path, steps: int, wrong: float, rng: random.Random) -> None:
    """Train the model in `folder` to name shapes; a share `wrong` of the names is the next one in the list."""
    processor, end = ImageProcessor(folder), "<|im_end|>"
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(steps):
        batch: list[dict[str, Any]] = []
        for _ in range(32):
            kind = rng.randrange(len(SHAPES))
            name = SHAPES[(kind + (rng.random() < wrong)) % len(SHAPES)]
            batch.append({"image": Image.read(draw(SHAPES[kind], rng)), "answer": name + end})
        loss = batch_loss(model, processor, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"warm-up {step + 1}/{steps}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)


def batch_loss(model: Any, processor: ImageProcessor, batch: list[dict[str, Any]]) -> torch.Tensor:
    """Return the cross entropy of the answers, a scalar."""
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    prompt, [(start, length)] = processor.expand(
        [{"role": "user", "content": content}], [batch[0]["image"]]
    )
    answers = [
        processor.tokenizer(row["answer"], add_special_tokens=False)["input_ids"] for row in batch
    ]
    longest = max(map(len, answers))
    ids = torch.tensor([prompt + answer + [0] * (longest - len(answer)) for answer in answers])
    labels = torch.tensor(
        [[-100] * len(prompt) + answer + [-100] * (longest - len(answer)) for answer in answers]
    )
    kinds = torch.zeros_like(ids)
    kinds[:, start : start + length] = 1
    features = processor.features([row["image"] for row in batch])
    return model(input_ids=ids, labels=labels, mm_token_type_ids=kinds, **features).loss


def make(folder: Path, *, steps: int = 700, wrong: float = 0.6, seed: int = 0) -> None:
    """Make the data, and the model after a warm-up of `steps` steps with a share `wrong` of wrong names."""
    torch.manual_seed(seed)
    # Matrices are so small that several threads would mostly wait for each other
    torch.set_num_threads(1)
    rng = random.Random(seed)
    write_rows(folder / "data", "train", 512, rng)
    write_rows(folder / "data", "eval", 128, rng)
    make_tiny_vlm(folder / "model", layers=2, vision_layers=1, largest_image=2, seed=seed)
    warm_up(folder / "model", steps, wrong, rng)
