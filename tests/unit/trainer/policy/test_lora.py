"""Adapters are compared with PEFT: names, starting values, and the sum that is sent in place of a weight."""

from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from generation.engine.settings import EngineSettings
from generation.engine.vllm_compat import engine_arguments
from sharding.send.source import LowRank, MergingWeightSource
from sharding.wire import low_rank
from tests.support.families import BASE, FAMILIES
from tests.support.gathering import sent, sent_in_parts
from trainer.config.schema import LoraConfig
from trainer.errors import UserError
from trainer.policy import lora
from trainer.policy.hf_format import checkpoint_views, parameter_names

LORA = LoraConfig(rank=4, alpha=6, use_rslora=True)

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DENSE = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
# Fused experts and the router are no linear layers
TARGETS = {"qwen2": DENSE, "llama": DENSE, "qwen3_moe": ATTENTION}


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def with_adapters(folder: Path, seed: int | None = None, settings: LoraConfig = LORA) -> PreTrainedModel:
    """Return the model with adapters at their start, or with random values."""
    model = load(folder)
    lora.add_adapters(model, settings, torch.float32, "cpu")
    for name, factor in lora.factors(model).items():
        start = lora.start_value(name, factor.shape, settings.seed)
        factor.data.copy_(start if seed is None else random_values(name, factor.shape, seed))
    return model


def random_values(name: str, shape: torch.Size, seed: int) -> Tensor:
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed + 7 * len(name) + shape[0]))
        * 0.3
    )


def peft_twin(folder: Path, model: PreTrainedModel, settings: LoraConfig = LORA) -> peft.PeftModel:
    """Return PEFT's own model of the folder, with the adapter of `model`."""
    twin = peft.get_peft_model(
        load(folder), lora.peft_config(settings, TARGETS[model.config.model_type])
    )
    state = {lora.peft_name(name): factor.data for name, factor in lora.factors(model).items()}
    assert not peft.set_peft_model_state_dict(twin, state).unexpected_keys
    assert set(peft.get_peft_model_state_dict(twin)) == state.keys()
    return twin


def merging_source(model: PreTrainedModel) -> MergingWeightSource:
    weights = [(name, p) for name, p in parameter_names(model).items() if not lora.is_adapter(name)]
    return MergingWeightSource(
        weights,
        lora.low_rank(model),
        torch.float32,
        lambda name, shape: checkpoint_views(model, name, shape),
    )


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "qwen3_moe"])
def test_names_lead_to_the_checkpoint_and_to_peft_files(tiny_model, architecture: str) -> None:
    folder = tiny_model(architecture=architecture)
    model, plain = with_adapters(folder, seed=1), load(folder)
    assert sent(merging_source(model)).keys() == {
        view.name
        for n, p in parameter_names(plain).items()
        for view in checkpoint_views(plain, n, p.shape)
    }
    peft_twin(folder, model)  # asserts that PEFT has the same names
    assert lora.low_rank(model).keys() <= parameter_names(model).keys()


def test_sent_weights_equal_those_that_peft_merges(tiny_qwen2: Path) -> None:
    model = with_adapters(tiny_qwen2, seed=1)
    merged = dict(peft_twin(tiny_qwen2, model).merge_and_unload().named_parameters())
    plain = dict(load(tiny_qwen2).named_parameters())
    changed = 0
    full_weights, parts = sent(merging_source(model)), sent_in_parts(merging_source(model), 1 << 12)
    for name, values in full_weights.items():
        assert torch.equal(parts[name], values), name
        torch.testing.assert_close(values, merged[name].data, atol=1e-6, rtol=1e-6)
        changed += not torch.equal(values, plain[name].data)
    assert changed == len(lora.low_rank(model)) == 2 * 7


def test_the_base_is_bit_equal_after_fifty_rounds(tiny_qwen2: Path) -> None:
    model = with_adapters(tiny_qwen2)
    source, base = (
        merging_source(model),
        {n: p.detach().clone() for n, p in parameter_names(model).items()},
    )
    name, added = next(iter(lora.low_rank(model).items()))
    for round in range(50):
        for factor in lora.factors(model).values():
            factor.data += 0.1 * torch.randn(
                factor.shape, generator=torch.Generator().manual_seed(round)
            )
        values = sent(source)[name.replace(".base_layer.", ".")]
    exact = base[name].double() + added.scale * (added.b.detach().double() @ added.a.detach().double())
    torch.testing.assert_close(values, exact.float(), atol=1e-5, rtol=1e-6)
    assert (values - base[name]).abs().max() > 1
    assert all(
        torch.equal(p, base[n]) for n, p in parameter_names(model).items() if not lora.is_adapter(n)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("first", "length"), [(0, 35), (0, 10), (3, 9), (12, 2), (28, 7), (30, 8), (35, 4)]
)
def test_a_stretch_gets_its_part_of_the_sum(first: int, length: int, dtype: torch.dtype) -> None:
    """Any stretch of [5, 7] is right, with rows cut in the middle; padding behind the end is not changed."""
    weight = torch.randn(5, 7).to(dtype)
    added = LowRank(torch.randn(2, 7), torch.randn(5, 2), 0.5)
    full_sum = torch.cat([(weight.float() + 0.5 * added.b @ added.a).view(-1), torch.full((10,), 9.0)])
    values = torch.cat([weight.view(-1), torch.full((10,), 9.0, dtype=dtype)])[first : first + length]
    before = values.clone()
    got = added.added_to_stretch(values, first)
    assert got.dtype == torch.float32 and torch.equal(values, before)
    torch.testing.assert_close(got, full_sum[first : first + length])


@pytest.mark.parametrize("width", [64, 100, 4096])
def test_a_part_of_merged_weights_has_the_bits_of_the_total(width: int) -> None:
    """MKL's products of one to three rows have other bits than those of more, and some by four threads than by one."""
    out = low_rank.BLOCK // width * 2 + 4
    weight, added = torch.randn(out, width), LowRank(torch.randn(8, width), torch.randn(out, 8), 0.25)
    full_sum, threads = added.added_to(weight).view(-1), torch.get_num_threads()
    torch.testing.assert_close(full_sum, (weight + 0.25 * added.b @ added.a).view(-1))
    try:
        for first, last, count in [
            (0, 40, 1),
            (3, 700, 2),
            (width, 9 * width, 4),
            (3 * width - 1, out * width, 4),
        ]:
            torch.set_num_threads(count)
            got = added.added_to_stretch(weight.view(-1)[first:last], first)
            assert torch.equal(got, full_sum[first:last]) and torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)


def test_adapters_start_as_nothing_and_from_their_seed_and_name(tiny_qwen2: Path) -> None:
    a, b = (
        "model.layers.0.mlp.up_proj.lora_A.default.weight",
        "model.layers.0.mlp.up_proj.lora_B.default.weight",
    )
    shape = torch.Size((4, 100))
    start = lora.start_value(a, shape, 0)
    assert start is not None and 0.08 < start.abs().max() <= 0.1
    assert torch.equal(start, lora.start_value(a, shape, 0))
    assert not torch.equal(start, lora.start_value(a, shape, 1))
    assert not torch.equal(start, lora.start_value(a.replace("0", "1"), shape, 0))
    assert not lora.start_value(b, shape, 0).any()
    assert lora.start_value("model.layers.0.mlp.up_proj.base_layer.weight", shape, 0) is None
    ids = torch.tensor([[14, 50, 77, 120, 9]])
    assert torch.equal(with_adapters(tiny_qwen2)(ids).logits, load(tiny_qwen2)(ids).logits)


def test_only_adapters_learn_and_switched_off_they_do_nothing(tiny_qwen2: Path) -> None:
    model, ids = with_adapters(tiny_qwen2, seed=1), torch.tensor([[14, 50, 77, 120, 9]])
    assert {n for n, p in model.named_parameters() if p.requires_grad} == lora.factors(model).keys()
    plain = load(tiny_qwen2)(ids).logits
    with lora.switched_off(model):
        assert torch.equal(model(ids).logits, plain)
    assert (model(ids).logits - plain).abs().max() > 0.1
    assert {n for n, p in model.named_parameters() if p.requires_grad} == lora.factors(model).keys()


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        (["q_proj", "query"], "lora.target_modules: Qwen2ForCausalLM has no module query"),
        (["query"], "lora.target_modules does not fit Qwen2ForCausalLM"),
        (["q_proj", "lm_head"], "lora.target_modules: lm_head is not a linear layer inside the model"),
        (
            ["embed_tokens"],
            "lora.target_modules: model.embed_tokens is not a linear layer inside the model",
        ),
    ],
)
def test_invalid_target_modules_are_named(tiny_qwen2: Path, targets: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        with_adapters(tiny_qwen2, settings=LORA.model_copy(update={"target_modules": targets}))


EXPERTS = "down_proj, gate_proj, up_proj: PEFT takes them for the names of experts, which are fused"
MAMBA = "out_proj: kernels of Mamba read their weights past the layer"
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


@pytest.mark.parametrize(
    ("family", "names", "missing"),
    [
        ("qwen3", DENSE, ""),
        ("gpt_oss", ATTENTION, ""),
        ("glm4_moe", ATTENTION, EXPERTS),
        ("deepseek_v3", LATENT, EXPERTS),
        ("granite4", [*ATTENTION, "in_proj", "input_linear", "output_linear"], MAMBA),
        ("falcon_h1", [*DENSE, "in_proj"], MAMBA),
    ],
)
def test_all_linear_is_every_layer_that_peft_can_adapt_and_names_the_others(
    family: str, names: list[str], missing: str
) -> None:
    def empty() -> PreTrainedModel:
        model_type, settings = FAMILIES[family]
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**BASE | settings))

    model, plain = empty(), empty()
    linear = {name for name, m in plain.named_modules() if isinstance(m, torch.nn.Linear)}
    sentences = lora.left_out(model, LORA)
    assert sentences == [f"lora.target_modules leaves out {missing}"] if missing else not sentences
    lora.add_adapters(model, LORA, torch.float32, "meta")
    assert lora._adapted(model).keys() == {path for path in linear if path.rpartition(".")[2] in names}
    twin = peft.get_peft_model(plain, lora.peft_config(LORA, lora._targets(model)))
    assert {*peft.get_peft_model_state_dict(twin)} == {*map(lora.peft_name, lora.factors(model))}
    if missing:
        one = missing.partition(":")[0].partition(",")[0]
        with pytest.raises(UserError, match=f"leave out {one} of {type(plain).__name__}"):
            settings = LORA.model_copy(update={"target_modules": ["q_proj", one]})
            lora.add_adapters(empty(), settings, torch.float32, "meta")


@pytest.mark.parametrize(("rank", "room"), [(1, 8), (8, 8), (9, 16), (512, 512)])
def test_engines_make_room_for_the_rank(rank: int, room: int) -> None:
    arguments = engine_arguments(EngineSettings(model="m", max_model_len=8, lora_rank=rank))
    assert (arguments["enable_lora"], arguments["max_lora_rank"], arguments["max_loras"]) == (
        True,
        room,
        1,
    )
    assert "enable_lora" not in engine_arguments(EngineSettings(model="m", max_model_len=8))
