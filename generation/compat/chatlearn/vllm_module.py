"""ChatLearn's vLLM backend: a class whose methods make prompts, request answers, and decode them.

    class VLLMPolicyInference(VLLMModule):
        def build_dataset(self, train_prompts, is_eval=False): ...
        def _add_request(self, data, is_eval=False):
            return self._add_request_internal(data["prompt"], data["input_ids"], is_eval=is_eval)
        def forward_step(self, data, iteration=0):
            return self.execute_step(data)
        def decode_internal(self, batched_outputs): ...

    with VLLMPolicyInference({"model": path, "seq_length": 512, "max_new_tokens": 256}) as policy:
        policy.setup()
        rows = policy.build_dataset(prompts)
        answers = policy.generate([rows[0], rows[1]])

By itself, a module starts a separate engine. Named in a recipe as `rollout.sampler`, with its
hyper-parameters as `rollout.kwargs.model_args`, it samples for training on the engine that has the
policy's weights. The texts that `decode_internal` returns as `str_outputs` are then reported and
rewarded. `setup` is called before the first step.

Data of vLLM's scheduler that older versions returned is not available any more; using it raises an
error with a remedy. The length of prompts is counted in tokens, not characters, and no prompt is
cut at its end, which asks for the answer.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from generation.compat.chatlearn.hyper_parameters import (
    SAMPLING,
    check_recipe,
    checked,
    read_model_args,
    read_settings,
)
from generation.engine.devices import first_devices
from generation.engine.engine import Engine, Leader
from generation.engine.sampling import SamplingSettings
from generation.engine.settings import EngineSettings
from generation.exact_ids import sampled_logprobs
from generation.rollouts.episode import RolloutSettings
from generation.rollouts.sampler_llm import SamplerLLM
from generation.rollouts.sampler_prompts import PromptText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import RequestOutput, SamplingParams

STEP_REMEDY = "return self.execute_step(data) from forward_step, and vLLM schedules the requests"
_SCHEDULED = ("seq_group_metadata_list", "blocks_to_swap_in", "blocks_to_swap_out", "blocks_to_copy")


class PromptPipeline:
    """A dataset of prompts with their ids: items `{"input_ids": …, "prompt": …}`.

    `prompts` has the same items as pairs of text and ids; `dropped` is the number of prompts with
    too many tokens.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        max_prompt_length: int,
        tokenizer: "PreTrainedTokenizerBase",
        cut: bool = False,
    ) -> None:
        """Encode prompts. Those of more than `max_prompt_length` tokens are dropped, or cut at
        their start if `cut`.
        """
        if not isinstance(max_prompt_length, int) or max_prompt_length < 1:
            raise ValueError(
                "Prompt length for RLHF/OnlineDPO/GRPO trainer must be an integer greater than 0"
            )
        if empty := [index for index, prompt in enumerate(prompts) if not prompt]:
            raise ValueError(f"Got empty prompt: number {empty[0]}")
        self.tokenizer = tokenizer
        items: list[dict[str, Any]] = [
            {"input_ids": tokenizer.encode(prompt), "prompt": prompt} for prompt in prompts
        ]
        for item in items if cut else ():
            # The end of a prompt asks for the answer, so it stays.
            if len(item["input_ids"]) > max_prompt_length:
                item["input_ids"] = item["input_ids"][-max_prompt_length:]
                item["prompt"] = tokenizer.decode(item["input_ids"])
        self.prompts_ids = [item for item in items if len(item["input_ids"]) <= max_prompt_length]
        self.prompts = [(item["prompt"], item["input_ids"]) for item in self.prompts_ids]
        self.dropped = len(items) - len(self.prompts_ids)
        if self.dropped:
            longer = f"more than {max_prompt_length} tokens, and are left out"
            warnings.warn(f"{self.dropped} of {len(items)} prompts have {longer}", stacklevel=2)

    def __len__(self) -> int:
        return len(self.prompts_ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.prompts_ids[index]


class ModuleTokenizer:
    """A tokenizer that modules can use as `self.tokenizer` and as `self.tokenizer.tokenizer`."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


class ScheduledData(dict[str, Any]):
    """A batch as `forward_step` gets it. Keys that vLLM's scheduler once added raise ValueError
    with a remedy.
    """

    def __missing__(self, key: str) -> Any:
        if key in _SCHEDULED:
            raise ValueError(
                f"data[{key!r}] is not available: vLLM's scheduler no longer returns it; {STEP_REMEDY}"
            )
        raise KeyError(key)


def load_tokenizer(engine: Mapping[str, Any]) -> "PreTrainedTokenizerBase":
    """Load the tokenizer that the hyper-parameters name, or the model's. Raises ValueError if they
    name neither.
    """
    from transformers import AutoTokenizer

    if not (name := engine.get("tokenizer") or engine.get("model")):
        raise ValueError("tokenizer is missing: set it or model, or give the module an llm")
    return AutoTokenizer.from_pretrained(name, trust_remote_code=bool(engine.get("trust_remote_code")))


def check_tokenizer(tokenizer: "PreTrainedTokenizerBase", training: "PreTrainedTokenizerBase") -> None:
    """Raise ValueError unless two tokenizers have the same tokens under the same ids."""
    if tokenizer.get_vocab() != training.get_vocab():
        names = tokenizer.name_or_path, training.name_or_path
        raise ValueError(
            f"tokenizer {names[0]} has other tokens than {names[1]}, which the policy is trained with"
        )


_INTERNALS = (
    "scheduler",
    "schedule",
    "build_scheduler",
    "block_manager",
    "cache_engine",
    "profile_cache_blocks",
    "reinit_cache_engine",
    "process_model_outputs",
    "worker",
    "model_runner",
)


class VLLMModule:
    """A policy that answers prompts with vLLM. All methods except `generate` may be overridden.

    `model_args` has the hyper-parameters, including those of files; `llm` is an object with vLLM's
    `generate`.
    """

    def __init__(self, model_args: Mapping[str, Any] | str | Path, llm: Any = None) -> None:
        """Make a module. `model_args` may be a YAML file, either of a model or like `rlhf.yaml`.
        Without `llm`, `setup` starts an engine for `model_args["model"]`.
        """
        self.model_args = read_model_args(model_args)
        self.settings = read_settings(self.model_args)
        self.llm = llm
        self._tokenizer = None if llm is None else ModuleTokenizer(llm.get_tokenizer())
        self._own: Leader | None = None
        self._queue: list[tuple[Any, list[int], SamplingParams]] = []
        self._eval_mode = False
        # Set in training only, before `setup` is called
        self._training_params: SamplingParams | None = None

    def __getattr__(self, name: str) -> Any:
        gone = (
            f"{name} is not available: it is an internal of vLLM, which manages it itself; {STEP_REMEDY}"
        )
        raise AttributeError(
            gone if name in _INTERNALS else f"{type(self).__name__} has no attribute {name!r}"
        )

    @property
    def tokenizer(self) -> ModuleTokenizer:
        """The tokenizer that the hyper-parameters name, or the model's."""
        if self._tokenizer is None:
            self._tokenizer = ModuleTokenizer(load_tokenizer(self.settings.engine))
        return self._tokenizer

    def setup(self) -> None:
        """Prepare the module, by a call of `model_provider`."""
        self.model_provider()

    def model_provider(self) -> Any:
        """Return `llm`. If there is none, start an engine with the model's weights for it, which is
        never updated.
        """
        if self.llm is None:
            engine = self.settings.engine
            if "model" not in engine:
                remedy = "set it to a folder in Hugging Face format, or give the module an llm"
                raise ValueError(f"model is missing: {remedy}")
            devices = first_devices(engine.get("tensor_parallel_size", 1))
            arguments = engine | {"max_model_len": self.settings.seq_length}
            started = Engine(EngineSettings.from_vllm(arguments, sleep=False, device_indices=devices))
            self._own = Leader.start(started, timeout=600.0)
            started.state.adopt_checkpoint(0)
            self._renew_llm(0)
        return self.llm

    def load_checkpoint(self, path: str | Path) -> Any:
        """Switch to the weights of another folder in Hugging Face format, on a new engine. Raises
        ValueError where the module was given its `llm`, whose weights it cannot change.
        """
        if self.llm is not None and self._own is None:
            remedy = "give the module no llm; in training, set model.path"
            raise ValueError(
                f"load_checkpoint({str(path)!r}): the weights of a given llm cannot be changed: {remedy}"
            )
        self.close()
        self.settings.engine["model"] = str(path)
        return self.model_provider()

    def check_recipe(self, recipe: Mapping[str, Any]) -> None:
        """Raise ValueError where the module contradicts the recipe, a mapping of sections, which
        training follows.
        """
        if type(self).build_dataset is not VLLMModule.build_dataset:
            what = (
                f"{type(self).__name__}.build_dataset is not called in training, whose prompts come "
                "from data.path"
            )
            raise ValueError(f"{what}: prepare them there, and leave build_dataset out")
        check_recipe(self.model_args, recipe)
        if self.settings.engine.get("tokenizer"):
            policy = recipe["model"] | {"model": recipe["model"]["path"]}
            check_tokenizer(load_tokenizer(self.settings.engine), load_tokenizer(policy))

    def build_dataset(self, train_prompts: Sequence[str], is_eval: bool = False) -> Any:
        """Return a dataset of the prompts with ids and text. Prompts with too many tokens are left
        out.
        """
        return PromptPipeline(train_prompts, self.settings.max_prompt_length, self.tokenizer.tokenizer)

    def _add_request(self, data: Mapping[str, Any], is_eval: bool = False) -> Any:
        """Queue the prompts of a batch."""
        keys = self.settings
        return self._add_request_internal(
            data[keys.prompt_key], data[keys.input_ids_key], is_eval=is_eval
        )

    def forward_step(self, data: Mapping[str, Any], iteration: int = 0) -> Any:
        """Answer the batch in training."""
        return self._forward_step(data, iteration, eval_mode=False)

    def eval_forward(self, data: Mapping[str, Any], iteration: int = 0) -> Any:
        """Answer the batch in evaluation, with the sampling parameters for that."""
        return self._forward_step(data, iteration, eval_mode=True)

    def decode_internal(self, batched_outputs: "list[RequestOutput]") -> Any:
        """Return unpadded lists with an entry for each answer, in the order of the prompts."""
        answers = [(output, completion) for output in batched_outputs for completion in output.outputs]
        prompts = [list(output.prompt_token_ids or []) for output, _ in answers]
        sampled = [list(completion.token_ids) for _, completion in answers]
        return {
            "all_tokens": [prompt + answer for prompt, answer in zip(prompts, sampled, strict=True)],
            "str_outputs": [completion.text for _, completion in answers],
            "str_prompts": [output.prompt for output, _ in answers],
            "no_padded_query_ids": prompts,
            "logprobs": [sampled_logprobs(completion) for _, completion in answers],
            "loss_mask": [
                [0] * len(p) + [1] * len(answer) for p, answer in zip(prompts, sampled, strict=True)
            ],
        }

    def generate(self, data: Any, iteration: int = 0, is_eval: bool = False) -> Any:
        """Answer a batch, a mapping of lists or a list of a dataset's items. Return the decoded
        answers.
        """
        return self.decode_internal(self._outputs(data, iteration, is_eval))

    def _outputs(self, data: Any, iteration: int, is_eval: bool) -> "list[RequestOutput]":
        """Sample for a batch, which is a mapping of lists or the rows of a dataset."""
        if not isinstance(data, Mapping):
            columns: dict[str, list[Any]] = {}
            for key in data[0] if data else ():
                columns[key] = [row[key] for row in data]
            data = columns
        batch = ScheduledData(data)
        self._queue = []
        self._eval_mode = is_eval
        if self._own is not None:
            self._renew_llm(iteration)
        if self.llm is None:
            raise ValueError(
                f"{type(self).__name__} has nothing to sample with: call its setup(), or give it an llm"
            )
        if not batch:
            return []
        self._queue_batch(batch)
        forward = self.eval_forward if is_eval else self.forward_step
        return forward(batch, iteration=iteration)  # type: ignore[no-any-return]

    def __call__(
        self, llm: Any, prompts: Sequence[Any], sampling_params: "SamplingParams"
    ) -> "list[RequestOutput]":
        """Answer a batch as a sampler in training (level 5), with one output for each prompt of the
        batch.

        The trainer repeats the prompts of a group. Evaluation calls `eval_forward`. The iteration
        is the step, or in evaluation the number of steps so far.
        """
        self.llm = llm
        first = self._training_params is None
        self._training_params = sampling_params
        if first:
            self._tokenizer = ModuleTokenizer(llm.get_tokenizer())
            self.setup()
        items = [
            {self.settings.prompt_key: p, self.settings.input_ids_key: p.token_ids} for p in prompts
        ]
        step = llm.settings.step
        is_eval = llm.settings.evaluation
        outputs = self._outputs(items, step if step >= 0 else -1 - step, is_eval)
        decoded = self.decode_internal(outputs)
        texts = decoded.get("str_outputs") if isinstance(decoded, Mapping) else None
        if not isinstance(texts, list) or [type(text) for text in texts] != [str] * len(prompts):
            lacking = (
                f"decode_internal gave {decoded!r:.60}, not a mapping whose str_outputs has "
                f"{len(prompts)} texts"
            )
            raise ValueError(f"{lacking}: in training they are shown and rewarded, one for each answer")
        for prompt, text in zip(prompts, texts, strict=True):
            prompt.decoded = text
        return outputs

    def execute_step(self, data: Any = None, *scheduled: Any) -> "list[RequestOutput]":
        """Sample for all queued requests, or for `data` if none are queued. Return an output for
        each prompt, in order; its completions are numbered by `index`.
        """
        if scheduled or not (data is None or isinstance(data, Mapping)):
            raise ValueError(f"execute_step takes the batch only: {STEP_REMEDY}")
        if not self._queue and data is not None:
            self._queue_batch(data)
        queue = self._queue
        self._queue = []
        prompts: list[Any] = []
        for prompt, ids, _ in queue:
            has_ids = isinstance(prompt, PromptText) and prompt.token_ids == ids
            prompts.append(prompt if has_ids else {"prompt_token_ids": ids})
        outputs = self.llm.generate(prompts, [params for *_, params in queue], use_tqdm=False)
        for output, (prompt, *_) in zip(outputs, queue, strict=True):
            output.prompt = str(prompt)
        for first in range(0, len(queue), self._answers):
            group = outputs[first : first + self._answers]
            group[0].outputs = [completion for output in group for completion in output.outputs]
            for index, completion in enumerate(group[0].outputs):
                completion.index = index
        return list(outputs[:: self._answers])

    def close(self) -> None:
        """Stop the module's own engine, if it has one."""
        engine = self._own
        self._own = None
        if engine is not None:
            engine.close()
            self.llm = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _answers(self) -> int:
        """The number of requests for each prompt; 1 in training, where batches repeat a prompt for
        each answer.
        """
        return self.settings.n if self._training_params is None else 1

    def _queue_batch(self, data: Mapping[str, Any]) -> None:
        takes_mode = "is_eval" in inspect.signature(self._add_request).parameters
        self._add_request(data, **({"is_eval": self._eval_mode} if takes_mode else {}))

    def _forward_step(self, data: Mapping[str, Any], iteration: int, eval_mode: bool) -> Any:
        checked("iteration", iteration, int, lambda v: v >= 0, "a whole number of at least 0")
        self._eval_mode = bool(checked("eval_mode", eval_mode, bool, lambda _: True, "True or False"))
        return self.execute_step(data)

    def _add_request_internal(self, prompt: Any, input_ids: Any, is_eval: bool = False) -> None:
        """Queue one prompt or a list of them, each `n` times as separate requests, which may fail
        one by one.
        """
        pairs = [(prompt, input_ids)] if isinstance(prompt, str) else zip(prompt, input_ids, strict=True)
        for text, ids in pairs:
            params = self._sampling_params(list(ids), is_eval or self._eval_mode)
            self._queue += [(text, list(ids), params)] * self._answers

    def _sampling_params(self, ids: list[int], is_eval: bool) -> "SamplingParams":
        from vllm import SamplingParams

        settings = self.settings
        single = {stop: self.tokenizer.encode(stop, add_special_tokens=False) for stop in settings.stop}
        stop = [stop for stop, tokens in single.items() if len(tokens) != 1]
        ends = [tokens[0] for tokens in single.values() if len(tokens) == 1]
        fields = settings.eval_sampling if is_eval else settings.sampling
        if self._training_params is not None:
            params = self._training_params.clone()
            ignore_eos = settings.sampling["ignore_eos"]
            for name in SAMPLING:  # a value that differs from the recipe's is refused later, by its name
                if (value := self.model_args.get("eval_" * is_eval + name)) is not None:
                    setattr(params, name, value)
            params.ignore_eos, params.prompt_logprobs = (
                ignore_eos,
                settings.sampling.get("prompt_logprobs"),
            )
            params.stop = [*(params.stop or []), *stop]
            params.stop_token_ids = [*([] if ignore_eos else params.stop_token_ids or []), *ends]
            return params
        if len(ids) > settings.max_prompt_length:
            room = f"the {settings.max_prompt_length} that seq_length and max_new_tokens leave"
            raise ValueError(
                f"a prompt has {len(ids)} tokens, more than {room}: drop it in build_dataset"
            )
        longest = settings.max_tokens(len(ids))
        return SamplingParams(
            max_tokens=longest,
            stop=stop,
            stop_token_ids=ends,
            skip_special_tokens=False,
            logprobs=0,
            **fields,
        )

    def _renew_llm(self, iteration: int) -> None:
        assert self._own is not None
        engine = self._own.engine
        sampling = SamplingSettings(self.settings.max_new_tokens)
        rollout = RolloutSettings(
            1, sampling, policy_version=0, seed=engine.settings.seed, step=iteration
        )
        self.llm = SamplerLLM(engine, self.tokenizer.tokenizer, rollout, self._own.thread.loop)


def get_model(provider: Callable[[], Any], *_: Any) -> Any:
    """Return the model that a `model_provider` returns."""
    return provider()


def print_rank_0(message: str) -> None:
    """Print on the first rank only."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)
