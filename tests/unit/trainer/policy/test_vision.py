"""Rows with images give the values and gradients of plain Transformers on each alone, packed and padded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from generation.images import ImageProcessor
from tests.conftest import TinyModel
from tests.support.image_rows import make_rows, make_sample, noise, plain_outputs
from tests.support.recipes import make_config
from tests.support.row_advantages import advantages
from trainer.config.schema import LoraConfig, ModelConfig, PolicyConfig
from trainer.errors import UserError
from trainer.estimates.model_sizes import model_sizes
from trainer.learning.batching import micro_batches
from trainer.model_structure import freeze, vision_modules
from trainer.policy import InPlacePolicy
from trainer.policy.attention import require_packing, require_sharing
from trainer.policy.buffers import saved_buffers
from trainer.policy.hf_format import (
    build_meta_model,
    checkpoint_activations,
    checkpoint_views,
    load_sharded,
    make_vision,
    parameter_names,
)
from trainer.policy.hf_saving import save_pretrained
from trainer.policy.lora import add_adapters, factors
from trainer.policy.module import AutoValueModel, PolicyModule, outputs
from trainer.types import MicroBatch, Outputs, Sample

TEMPERATURE = 0.7
CLOSE = {"atol": 1e-5, "rtol": 1e-5}  # float32's rounding
FAMILIES = ["qwen2_5_vl", "qwen3_vl", "llava"]
# Recurrent layers; marks in images; inputs of each layer
HYBRID, MARKED, PER_LAYER = "qwen3_5", "mistral3", "gemma4"
CPU = torch.device("cpu")


def make_module(folder: Path) -> PolicyModule:
    built = build_meta_model(folder, ModelConfig(path=str(folder)), torch.float32, CPU)
    load_sharded(built, folder, CPU)
    return PolicyModule(built, vision=make_vision(built, folder))


def total_loss(
    module: PolicyModule, samples: list[Sample], packing: bool, budget: int = 10_000
) -> Tensor:
    """Return the loss of all micro-batches."""
    batches = micro_batches(samples, budget, 0, "cpu", packing=packing)
    pairs = [(outputs(module, batch, TEMPERATURE), batch) for batch in batches]
    return torch.stack(
        [(out.logprobs * advantages(batch) + 0.1 * out.entropy).sum() for out, batch in pairs]
    ).sum()


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor | None]:
    names = dict(model.named_parameters())
    return dict(
        zip(names, torch.autograd.grad(loss, list(names.values()), allow_unused=True), strict=True)
    )


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("kind", [*FAMILIES, HYBRID, MARKED, PER_LAYER])
def test_rows_with_images_have_the_log_probabilities_of_plain_transformers(
    tiny_vlm: TinyModel, kind: str, packing: bool
) -> None:
    """Where a placeholder's id was sampled, too (https://github.com/modelscope/ms-swift/issues/9287); with rotary
    positions from 0 in each row of a pack (https://github.com/PrimeIntellect-ai/prime-rl/pull/2819); and with images
    where a padded row has them (https://github.com/huggingface/trl/issues/5785).
    """
    folder = tiny_vlm(architecture=kind)
    module, processor = make_module(folder), ImageProcessor(str(folder))
    plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    samples = make_rows(processor)
    with torch.no_grad():
        for batch in micro_batches(samples, 10_000, 0, "cpu", packing=packing):
            logprobs = outputs(module, batch, TEMPERATURE).logprobs
            for row, number in enumerate(batch.rows):
                expected, _ = plain_outputs(plain, processor, samples[number], TEMPERATURE)
                torch.testing.assert_close(logprobs[row, : len(expected)], expected, **CLOSE)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("kind", FAMILIES)
def test_an_update_starts_from_the_scores_before_it(
    tiny_vlm: TinyModel, kind: str, packing: bool
) -> None:
    """Old and new log-probabilities are equal on policy, bit for bit
    (https://github.com/verl-project/verl/issues/2996).
    """
    folder = tiny_vlm(architecture=kind)
    settings = PolicyConfig(dtype="float32", lr=1e-3, activation_checkpointing="full")
    policy = InPlacePolicy(ModelConfig(path=str(folder)), settings, CPU)
    batches = micro_batches(make_rows(ImageProcessor(str(folder))), 20, 0, CPU, packing=packing)
    assert len(batches) > 1 and any(not batch.images for batch in batches)
    old, new = policy.score(batches, TEMPERATURE), []

    def loss(batch: MicroBatch, result: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        new.append(result.logprobs.detach().clone())
        return -result.logprobs.sum(), {}

    policy.update(batches, loss, TEMPERATURE)
    assert [torch.equal(before.logprobs, after) for before, after in zip(old, new, strict=True)] == [
        True
    ] * len(new)


@pytest.mark.parametrize("kind", FAMILIES)
def test_gradients_do_not_depend_on_how_rows_with_images_are_batched(
    tiny_vlm: TinyModel, kind: str
) -> None:
    folder = tiny_vlm(architecture=kind)
    module, samples = make_module(folder), make_rows(ImageProcessor(str(folder)))
    together = gradients(module.model, total_loss(module, samples, packing=True))
    for packing, budget in [(True, 1), (False, 10_000), (False, 1)]:
        by_name = gradients(module.model, total_loss(module, samples, packing, budget))
        for name, expected in together.items():
            got = by_name[name]
            assert (expected is None) == (got is None), name
            if expected is not None and got is not None:
                scale = float(max(1.0, expected.abs().max()))
                torch.testing.assert_close(
                    got, expected, atol=1e-5 * scale, rtol=0, msg=lambda m, name=name: f"{name}: {m}"
                )


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("kind", FAMILIES)
def test_rows_without_images_enter_the_encoder_without_effect(
    tiny_vlm: TinyModel, kind: str, packing: bool
) -> None:
    """The encoder's parameters have gradients of zero, on which other ranks' are added
    (https://github.com/PrimeIntellect-ai/prime-rl/pull/2819); all others' are the same, bit for bit.
    """
    folder = tiny_vlm(architecture=kind)
    module = make_module(folder)
    rows = [row for row in make_rows(ImageProcessor(str(folder))) if not row.images]
    entered = gradients(module.model, total_loss(module, rows, packing))
    module.vision = None
    without = gradients(module.model, total_loss(module, rows, packing))
    for name, expected in without.items():
        gradient = entered[name]
        if expected is None:
            assert gradient is None or not gradient.any()
        else:
            assert gradient is not None and torch.equal(gradient, expected)
    of_images = {name for name in entered if name.startswith(tuple(vision_modules(module.model)))}
    assert {name for name in of_images if entered[name] is not None} == used_parameters(module, folder)


def used_parameters(module: PolicyModule, folder: Path) -> set[str]:
    """Return the names of the encoder's parameters that have a gradient from an image."""
    module.vision = make_vision(module.model, folder)
    rows = [row for row in make_rows(ImageProcessor(str(folder))) if row.images]
    by_name = gradients(module.model, total_loss(module, rows, packing=True))
    return {
        name
        for name in by_name
        if name.startswith(tuple(vision_modules(module.model))) and by_name[name] is not None
    }


def test_an_image_with_other_features_than_tokens_is_an_error(tiny_vlm: TinyModel) -> None:
    """The sums of features and tokens agree, but not those of each image (https://github.com/verl-project/verl/issues/3469)."""
    module = make_module(tiny_vlm())
    [row] = make_rows(ImageProcessor(str(tiny_vlm())))[2:3]
    (first, one), (second, many) = row.image_spans[:2]
    named = replace(row.images[0], name="image 1 of row 5 of rows.jsonl")
    spans = (first, one + 1), (second, many - 1), *row.image_spans[2:]
    [batch] = micro_batches(
        [replace(row, images=(named, *row.images[1:]), image_spans=spans)],
        10_000,
        0,
        "cpu",
        packing=True,
    )
    sentence = r"image 1 of row 5 of rows.jsonl, an .* have \[1, 6, 3\] features, but \[2, 5, 3\] placeholder tokens"
    with pytest.raises(ValueError, match=sentence):
        outputs(module, batch, TEMPERATURE)


@pytest.mark.parametrize("kind", ["gemma3", "gemma4_unified"])
def test_images_that_attend_both_ways_need_padded_rows_and_text_does_not(
    tiny_vlm: TinyModel, kind: str
) -> None:
    """Pack of text are computed without a mask, before and after padded rows with one."""
    folder = tiny_vlm(architecture=kind)
    module, processor = make_module(folder), ImageProcessor(str(folder))
    plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    samples = make_rows(processor)[: 2 if kind == "gemma4_unified" else None]
    texts = [make_sample(processor, [n], n) for n in (9, 4, 7)]
    for rows, packing in [(texts, True), (samples, False), (texts, True)]:
        [batch] = micro_batches(rows, 10_000, 0, "cpu", packing=packing)
        with torch.no_grad():
            logprobs = outputs(module, batch, TEMPERATURE).logprobs
            for row, number in enumerate(batch.rows):
                expected, _ = plain_outputs(plain, processor, rows[number], TEMPERATURE)
                torch.testing.assert_close(logprobs[row, : len(expected)], expected, **CLOSE)
    with pytest.raises(
        UserError, match=r"batch.packing is true, but Gemma\w+Model lets the tokens of an image"
    ):
        total_loss(module, samples, packing=True)
    require_packing(module.model)
    require_sharing(module.model)
    with pytest.raises(
        UserError, match=r"batch.packing is true, but Gemma\w+ForConditionalGeneration lets the tokens"
    ):
        require_packing(module.model, images=True)
    with pytest.raises(UserError, match="sequence_parallel is above 1, but Gemma"):
        require_sharing(module.model, images=True)


def test_a_layer_that_is_recomputed_has_the_mask_of_its_images(tiny_vlm: TinyModel) -> None:
    folder = tiny_vlm(architecture="gemma3")
    module, rows = make_module(folder), make_rows(ImageProcessor(str(folder)))
    kept = gradients(module.model, total_loss(module, rows, packing=False))
    checkpoint_activations(module.model.train(), "full")
    for name, gradient in gradients(module.model, total_loss(module, rows, packing=False)).items():
        expected = kept[name]
        assert (gradient is None) == (expected is None)
        assert gradient is None or expected is None or torch.equal(gradient, expected)


def test_a_checkpoint_whose_tensors_are_several_weights_each_is_refused(tiny_vlm: TinyModel) -> None:
    """Kimi K2.5's encoder has queries, keys and values in one tensor, in another order than Transformers'."""
    sentence = "makes several weights of one tensor of its checkpoint \\(wqkv\\): use another model"
    with pytest.raises(UserError, match=sentence):
        make_module(tiny_vlm(architecture="kimi_k25"))


@pytest.mark.parametrize("kind", FAMILIES)
def test_ranks_may_share_a_sequence_with_images(tiny_vlm: TinyModel, kind: str) -> None:
    model = make_module(tiny_vlm(architecture=kind)).model
    require_sharing(model)
    model.config._attn_implementation = "eager"
    with pytest.raises(UserError, match="computes its attention in its own way"):
        require_sharing(model)


@pytest.mark.parametrize("kind", FAMILIES)
def test_frozen_modules_are_named_by_vision_or_by_patterns(tiny_vlm: TinyModel, kind: str) -> None:
    model = make_module(tiny_vlm(architecture=kind)).model
    freeze(model, ["vision", "model.language_model.layers.0", "*.embed_tokens"])
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {
        name
        for name, _ in model.named_parameters()
        if not name.startswith(("model.language_model", "lm_head"))
        or name.startswith(("model.language_model.layers.0.", "model.language_model.embed_tokens."))
    }
    with pytest.raises(UserError, match="has nothing that layers.0 fits"):
        freeze(model, ["layers.0"])
    with pytest.raises(UserError, match="leaves .* nothing to learn"):
        freeze(model, ["*"])


@pytest.mark.parametrize("kind", FAMILIES)
def test_adapters_are_beside_the_language_model_s_layers_alone(tiny_vlm: TinyModel, kind: str) -> None:
    folder = tiny_vlm(architecture=kind)
    built = build_meta_model(folder, ModelConfig(path=str(folder)), torch.float32, CPU)
    add_adapters(built, LoraConfig(rank=2), torch.float32, "meta")
    adapted = {name.partition(".lora_")[0] for name in factors(built)}
    layers = built.base_model.get_decoder().layers
    assert len(adapted) == 7 * len(layers) and all(
        name.startswith("model.language_model.layers") for name in adapted
    )


def test_the_encoder_s_activations_count_in_the_budget_of_a_micro_batch(tiny_vlm: TinyModel) -> None:
    """An image's token counts as two more: two blocks of 64 for four patches, beside two layers of 128."""
    module = make_module(tiny_vlm())
    assert module.work.of.image_token == 2.0
    row = make_rows(ImageProcessor(str(tiny_vlm())))[2]  # 10 tokens of images, of 24
    assert (len(row.input_ids), sum(count for _, count in row.image_spans)) == (24, 10)
    for ways, budget, expected in [(1, 88, 1), (1, 87, 2), (2, 128, 1), (2, 127, 2)]:
        # each rank has all images
        batches = micro_batches([row, row], budget, 0, "cpu", packing=True, ways=ways, image_token=2.0)
        assert len(batches) == expected


def test_an_encoder_s_work_is_counted_by_patches(tiny_vlm: TinyModel) -> None:
    module = make_module(tiny_vlm())
    [batch] = micro_batches(
        make_rows(ImageProcessor(str(tiny_vlm())))[2:3], 1000, 0, "cpu", packing=True
    )
    of = module.work.of
    elements = sum(
        p.numel()
        for n, p in module.model.named_parameters()
        if n.startswith("model.visual") and p.dim() > 1
    )
    assert of.vision == of.vision_learned == elements
    with torch.no_grad():
        outputs(module, batch, TEMPERATURE)
    seen = module.work.flops
    module.work.flops, batch.images = 0.0, []
    with torch.no_grad():
        outputs(module, batch, TEMPERATURE)
    blank = 4
    assert seen - module.work.flops == 2.0 * elements * (40 - blank)


def test_frozen_weights_stay_in_an_in_place_policy(tiny_vlm: TinyModel) -> None:
    """Frozen weights are kept in bfloat16 as well; all are named, so that an engine gets them."""
    folder = tiny_vlm()
    settings = PolicyConfig(dtype="bfloat16", lr=1e-2, freeze=["vision"])
    policy = InPlacePolicy(ModelConfig(path=str(folder)), settings, CPU)
    before = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    assert before.keys() == dict(policy.model.named_parameters()).keys()
    assert {p.dtype for p in policy.model.parameters()} == {torch.bfloat16}
    batches = micro_batches(make_rows(ImageProcessor(str(folder))), 10_000, 0, CPU, packing=True)
    policy.update(batches, lambda batch, outputs: (-outputs.logprobs.sum(), {}), 1.0)
    changed = {
        name for name, weight in policy.named_parameters() if not torch.equal(weight, before[name])
    }
    assert changed == {name for name in before if not name.startswith("model.visual")}
    assert changed == policy.state_dict()["model"].keys()


def test_the_plan_counts_image_encoders(tiny_vlm: TinyModel) -> None:
    """With images a token of one counts more, as the processor says above."""
    folder, data = tiny_vlm(), {"path": "unread", "max_images": 1}
    config = make_config(model={"path": str(folder)}, data=data)
    sizes = model_sizes(config, str(folder))
    assert sizes.flops.image_token == 2.0
    text = make_config(model={"path": str(folder)}, data={"path": "unread"})
    assert model_sizes(text, str(folder)).flops.image_token == 0.0
    model = make_module(folder).model
    assert sizes.total == sum(parameter.numel() for parameter in model.parameters())
    blocks = sum(p.numel() for block in model.base_model.visual.blocks for p in block.parameters())
    assert sum(shape.numel() for name in sizes.units for shape in sizes.units[name]) == sizes.total
    assert sum(shape.numel() for n in ("encoder.0", "encoder.1") for shape in sizes.units[n]) == blocks
    layers = [
        sum(p.numel() for p in layer.parameters()) for layer in model.base_model.language_model.layers
    ]
    assert sizes.rest == sizes.total - sum(layers) - blocks
    critic = model_sizes(config, str(folder), kind=AutoValueModel, num_labels=1)
    head = dict(sizes.shapes)["lm_head.weight"].numel()
    assert (
        critic.head == 0 and critic.total == sizes.total - head + critic.shapes["score.weight"].numel()
    )


@pytest.mark.parametrize("kind", [*FAMILIES, "gemma3", HYBRID, MARKED, PER_LAYER])
def test_weights_keep_the_names_of_their_checkpoint_and_an_export_has_the_processor(
    tiny_vlm: TinyModel, kind: str, tmp_path: Path
) -> None:
    """vLLM reads these names, and without a processor builds Qwen's encoder without the norm of its input."""
    folder = tiny_vlm(architecture=kind)
    built = make_module(folder).model
    stored = load_file(folder / "model.safetensors")
    tensors = {**parameter_names(built), **saved_buffers(built)}
    names = [v.name for n, p in tensors.items() for v in checkpoint_views(built, n, p.shape)]
    assert sorted(names) == sorted(stored)
    save_pretrained(built, tmp_path, torch.float32, folder)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == stored.keys() and all(
        torch.equal(saved[name], stored[name]) for name in stored
    )
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(p, built.get_parameter(name)) for name, p in plain.named_parameters())
    assert {path.name for path in folder.glob("*processor*")} <= {
        path.name for path in tmp_path.iterdir()
    }


@pytest.mark.parametrize("kind", [*FAMILIES, HYBRID, MARKED, PER_LAYER])
def test_equal_images_of_a_common_prompt_are_computed_once_and_other_pixels_are_not(
    tiny_vlm: TinyModel, kind: str
) -> None:
    """Three answers to a prompt with two images, one answer with other pixels in the first, and a row of text."""
    folder = tiny_vlm(architecture=kind)
    processor, module = ImageProcessor(str(folder)), make_module(folder)
    wide, small, other = noise(1, 84, 28), noise(2, 28, 28), noise(3, 84, 28)
    prompt = make_sample(processor, [5, wide, 3, small, 4], 1)
    samples = [
        replace(prompt, input_ids=[*prompt.input_ids[:-6], *range(n, n + 6)]) for n in (20, 30, 40, 50)
    ]
    samples[3] = replace(samples[3], images=(other, small))
    samples.append(make_sample(processor, [9], 2))
    found, encoded = [], []
    assert module.vision is not None
    features = module.vision._processor.features
    module.vision._processor.features = lambda images: encoded.append(len(images)) or features(images)
    for least in (None, 3):
        (batch,) = micro_batches(samples, 10_000, 0, "cpu", packing=True, shared_min=least)
        out = outputs(module, batch, TEMPERATURE)
        scored = {
            row: out.logprobs[n, : len(samples[row].input_ids) - 1] for n, row in enumerate(batch.rows)
        }
        loss = (out.logprobs * advantages(batch) + 0.1 * out.entropy).sum()
        assert batch.layout.pack is not None
        found.append((scored, gradients(module.model, loss), len(batch.layout.pack.tokens)))
    (whole, expected, tokens), (shared, got, fewer) = found
    size = len(prompt.input_ids) - 7  # up to the last token of the prompt
    assert encoded == [8, 3]
    assert tokens - fewer == 2 * (size + 1) + prompt.image_spans[0][0]
    for row, logprobs in whole.items():
        torch.testing.assert_close(shared[row], logprobs, **CLOSE)
    # Of its encoder, queries and keys cancel: packs are 2.4e-4 from float64, and sharing 3.4e-5 from packs.
    # Of the hybrid, those of a decay: sharing is 9e-6 from packs.
    limit = 5e-5 if kind in (HYBRID, PER_LAYER) else 5e-6
    for name, gradient in expected.items():
        if gradient is not None and not name.endswith("k_proj.bias"):
            sharing = got[name]
            assert sharing is not None and float((sharing - gradient).norm()) <= limit * float(
                gradient.norm()
            ), name


@pytest.mark.parametrize("kind", FAMILIES)
def test_ranks_that_share_a_tree_with_images_have_consecutive_parts_of_it(
    tiny_vlm: TinyModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places of image tokens and rotary positions on two ranks, end to end, are those of one."""
    folder = tiny_vlm(architecture=kind)
    processor, module = ImageProcessor(str(folder)), make_module(folder)
    assert module.vision is not None
    prompt = make_sample(processor, [5, noise(1, 84, 28), 3, noise(2, 28, 28), 4], 1)
    samples = [
        replace(prompt, input_ids=[*prompt.input_ids[:-6], *range(n, n + 6)]) for n in (20, 30, 40)
    ]
    samples.append(make_sample(processor, [9, noise(1, 84, 28)], 2))
    places, positions = list[list[int]](), list[Any]()
    for ways, number in ((1, 0), (2, 0), (2, 1)):
        monkeypatch.setattr("trainer.learning.batching.rank", lambda number=number: number)
        (batch,) = micro_batches(samples, 10_000, 0, "cpu", 1, packing=True, ways=ways, shared_min=3)
        assert batch.layout.pack is not None and batch.layout.pack.tree is not None
        inputs = module.vision.inputs(batch)
        places.append((inputs["places"] + batch.layout.pack.begin).tolist())
        positions.append(inputs["named"].get("position_ids"))
    assert places[1] + places[2] == places[0] and places[1] and places[2]
    if positions[0] is not None:
        assert torch.equal(torch.cat(positions[1:], 2), positions[0])
