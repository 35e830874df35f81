"""The schema of a recipe: every section and key, with its type, default and meaning.

A recipe is a YAML file with these sections. Keys are overridden on the command line by
`--section.key value`, values being YAML; `includes` names files to start from, and
`${NAME:default}` reads the environment (`yaml_files`), as does `${oc.env:NAME}`, which
`TrainConfig.recorded` keeps as it is. Nothing here imports torch, so that `--help` and reward
workers start quickly.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, field_validator

from trainer.config.algorithm import AlgorithmConfig
from trainer.config.section import (
    Amount,
    CallSeconds,
    Count,
    Dtype,
    KeyPath,
    Location,
    Mebibytes,
    Name,
    Natural,
    NotNegative,
    Portion,
    Positive,
    Processes,
    Rate,
    Seconds,
    Section,
    Seed,
    Share,
    ShareBelowOne,
    Size,
    Temperature,
    Text,
    Word,
    key,
    known,
    replaced,
)


class RunConfig(Section):
    """Settings of the run as a whole."""

    name: Annotated[str, Field(pattern=r"^([\w-][\w.-]*)?$", max_length=200)] = key(
        "", "folder below output_dir; empty: the recipe's file name"
    )
    output_dir: Location = key("runs", "folder that holds the folders of runs")
    seed: Seed = key(
        0, "seed of the prompt order and, with step, prompt and sample index, of every sample"
    )
    steps: Count = key(100, "rollout-and-update steps to train for, including those before a resume")
    step_deadline_s: Seconds = key(
        1800, "seconds a step may take; after that, stacks are printed and the run ends"
    )
    first_step_deadline_s: Seconds = key(
        3600, "the same for start-up and for the first step, both of which compile"
    )
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto",
        "device to train on",
        auto="CUDA if there is a GPU, else the CPU",
        cpu="the CPU",
        cuda="GPUs",
    )
    profile: tuple[Count, Count] | None = key(
        None, "train only: first and last step that rank 0 traces with torch.profiler, into profile/"
    )

    @property
    def folder(self) -> Path:
        """The folder that holds everything the run writes."""
        return Path(self.output_dir) / self.name


class ModelConfig(Section):
    """The model to train."""

    path: Location = key(..., "folder in Hugging Face format (config.json, safetensors), or a hub name")
    tokenizer: Location | None = key(None, "folder or hub name of the tokenizer; null: the model's own")
    attn_implementation: Text = key(
        "sdpa", "attention implementation of Transformers that the trainer uses"
    )
    trust_remote_code: bool = key(False, "run model code that comes with the checkpoint")
    routes: Literal["own", "recorded", "engine"] = key(
        "own",
        "mixtures of experts: the experts to which the trainer routes a token (docs/algorithms.md)",
        own="those that the routers choose in every pass",
        recorded="those of the first pass over the step's batch",
        engine="those that the engine chose",
    )


class DataConfig(Section):
    """Training prompts, and the columns that training and evaluation data share."""

    path: Location = key(
        ..., "jsonl or parquet file, a folder of them, a hub name, or reasoning_gym:NAME?size=1000"
    )
    subset: Text | None = key(None, "configuration of a hub dataset, such as main")
    split: Text = key("train", "split of a folder or hub dataset; slices such as train[:1000] work")
    prompt_key: Text = key("prompt", "column with the prompt: a string, or a list of messages")
    messages_key: Text = key(
        "messages", "column with a list of messages, read if there is no column prompt_key"
    )
    tools_key: Text | None = key(
        "tools", "column with tools that a prompt describes: schemas, or names; null: none"
    )
    answer_key: Text | None = key(
        "answer", "column that rewards get as `answer`, or a.b, a field of one; null: none"
    )
    system_prompt: str | None = key(None, "system message that is put first unless the row has one")
    continue_final: bool = key(
        False, "continue a final assistant turn of a prompt, which is refused otherwise"
    )
    apply_chat_template: bool = key(
        True, "apply the chat template; false: a prompt string is tokenised as it is"
    )
    chat_template_kwargs: dict[str, Any] = key(
        {}, "arguments of the chat template, such as enable_thinking: false"
    )
    max_prompt_tokens: Count = key(
        1024, "most tokens of a templated prompt; longer ones are dropped and counted"
    )
    max_images: Natural = key(0, "most images of a prompt and its answer together; 0: text only")
    image_key: Text | None = key(
        None, "column with a prompt's image or images: paths, bytes or encoded images"
    )
    max_image_pixels: Count = key(4_194_304, "most pixels of an image, width times height")
    larger_images: Literal["refuse", "resize"] = key(
        "refuse",
        "what happens to an image with more pixels than max_image_pixels",
        refuse="the run does not start",
        resize="it is scaled down, in its proportions",
    )


class SamplingConfig(Section):
    """Sampling of answers in training."""

    temperature: Temperature = key(1.0, "divisor of the logits, in the engine and in the trainer alike")
    max_tokens: Count = key(1024, "most tokens of an answer")
    stop: list[Text] = key([], "strings that end an answer")
    stop_token_ids: list[Natural] | None = key(
        None,
        "ids of the tokens that end an answer besides EOS, in evaluations as well; null: the one with "
        "which the chat template ends an assistant's turn; []: none (docs/data.md)",
    )


class HeldOutConfig(Section):
    """One evaluation dataset. A key that is null takes the value that `data` or `eval` has for all
    of them.
    """

    path: Location = key(..., "dataset, as in data.path")
    subset: Text | None = key(None, "configuration of a hub dataset")
    split: Text = key("train", "split, as in data.split")
    size: Count | None = key(None, "number of prompts to use, from the first on; null: all")
    prompt_key: Text | None = key(None, "column with the prompt; null: data.prompt_key")
    answer_key: Text | None = key(None, "column with the answer; null: data.answer_key")
    image_key: Text | None = key(None, "column with images; null: data.image_key")
    samples: Size | None = key(None, "answers per prompt; null: eval.samples")
    temperature: Temperature | None = key(None, "sampling temperature; null: eval.temperature")
    top_p: Portion | None = key(None, "nucleus sampling; null: eval.top_p")
    max_tokens: Count | None = key(None, "most tokens of an answer; null: eval.max_tokens")


class EvalConfig(Section):
    """Evaluation on held-out prompts, with its own sampling; `hotbunk eval` uses it, too."""

    every: Natural = key(
        0, "steps from one evaluation to the next; the last step has one, too; 0: never"
    )
    before: bool = key(True, "also evaluate before the first step (if every > 0)")
    temperature: Temperature = key(0.0, "sampling temperature; 0: greedy")
    top_p: Portion = key(1.0, "nucleus sampling; 1: off")
    max_tokens: Count | None = key(None, "most tokens of an answer; null: sampling.max_tokens")
    samples: Size = key(1, "answers per prompt; their rewards are averaged")
    k: list[Count] = key(
        [], "values of k, at most samples, to estimate pass@k and majority@k for; empty: none"
    )
    right_from: Amount = key(1.0, "least value of the first reward function that makes an answer right")
    datasets: dict[Name, HeldOutConfig] = key(
        {}, "evaluation datasets by name; if there are several, the figures of each are eval/NAME/…"
    )


class EngineConfig(Section):
    """The vLLM engines."""

    tensor_parallel_size: Size = key(1, "number of consecutive ranks that form one engine")
    placement: Literal["shared", "ranks", "ray"] = key(
        "shared",
        "where the engines run (docs/apart.md)",
        shared="on the devices of the ranks that train, taking turns with them",
        ranks="on the devices of the last engine.ranks ranks, which only generate while the "
        "others train",
        ray="in actors of Ray, in the cluster at RAY_ADDRESS or a new one; the last rank only "
        "holds them",
    )
    ranks: Size = key(1, "with placement ranks: number of trailing ranks that only generate")
    replicas: Size = key(
        1, "with placement ray: number of engines; the run starts with as many as have room"
    )
    max_model_len: Count = key(2048, "most tokens of prompt and answer together")
    kv_cache_gib: Positive | None = key(
        None, "GiB of each worker's KV cache; null: gpu_memory_utilization decides"
    )
    gpu_memory_utilization: Portion = key(
        0.3, "share of a GPU's memory for weights and KV cache, if kv_cache_gib is null"
    )
    max_num_seqs: Size = key(256, "most answers that an engine generates at the same time")
    dtype: Dtype | None = key(
        None,
        "dtype of engine weights; null: policy.dtype",
        float32="exact, for checks",
        bfloat16="usual on GPUs",
    )
    enforce_eager: bool | None = key(None, "run without CUDA graphs; null: true on CPU, false on CUDA")
    load_format: Literal["auto", "dummy"] = key(
        "auto",
        "weights that the engines start with",
        auto="the model's weights",
        dummy="random weights, all of which the first sync overwrites",
    )
    plain_cpu_weights: bool = key(False, "CPU only: keep weights unpacked; faster for small models")
    sleep: bool = key(True, "release the engine's memory while the policy trains")
    deep_sleep: bool = key(
        False,
        "CUDA only: while an engine sleeps, its CUDA graphs wait in host memory, and NCCL's buffers "
        "are freed; no GPU has run it yet",
    )
    start_timeout_s: Seconds = key(600, "seconds that an engine may take to start")
    restarts: Natural = key(
        3, "most restarts of dead engines within an hour; one more death ends the run"
    )
    logits_processors: list[str | dict[str, str]] = key(
        [],
        "classes or factories (pkg.mod:Name or file.py:Name) that change logits before sampling, in "
        "the engine only (generation.engine.logits)",
    )
    extra: dict[str, Any] = key(
        {}, "further fields of vLLM's AsyncEngineArgs by name, except those that Hotbunk sets"
    )


WAY_NAMES = ("auto", "staged", "pull", "zero_copy", "storage")
OPTIMIZERS = ("adamw", "muon")


class SyncConfig(Section):
    """The transfer of weights from the policy to the engines."""

    verify: Literal["off", "sample", "full"] = key(
        "sample",
        "which weights of every worker are compared with those of the ranks",
        off="none",
        sample="a sample of them",
        full="all of them",
    )
    bucket_mib: Mebibytes = key(
        512,
        "MiB of a staging buffer, of which two exist during a sync; in the first sync, and if engines "
        "re-process what they load, a buffer holds at least the largest weight",
    )
    first_gap_limit: Positive | None = key(
        0.1,
        "nats; the run ends if trainer and engine are further apart on average in the first step that "
        "measures it, as they then do not compute the same model. A fiftieth of it holds if both "
        "compute in float32; null: no limit",
    )
    timeout_s: Seconds = key(300, "seconds to wait for an answer of a worker")
    replay: bool = key(
        True, "record what vLLM's loaders do in the first sync, and repeat it in later ones"
    )
    way: str = key(
        "auto",
        "how weights get to the engines; or your own class, pkg.mod:Name or file.py:Name "
        "(docs/weight-path.md)",
        auto="the first possible one of zero_copy, pull, staged; on CUDA staged; a broadcast to remote "
        "engines",
        staged="through two buffers that trainer and engine both map",
        pull="engines read the shards of all ranks of their machine; nothing is gathered or staged",
        zero_copy="one rank, unpacked weights: the policy computes with the engine's weights, "
        "so a step is the sync",
        storage="through the run's folder weights, which other engines can load from, too",
    )

    delta: bool = key(
        False,
        "with engine.placement ranks or ray: send only what has changed since the last sync "
        "(docs/apart.md)",
    )

    @field_validator("verify", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads a bare `off` as false

    @field_validator("way")
    @classmethod
    def _known_way(cls, value: str) -> str:
        return known(value, WAY_NAMES)


class PolicyConfig(Section):
    """The sharded policy and its optimizer. Master weights are always float32."""

    accelerate_config: Location | None = key(
        None,
        "Accelerate's YAML file; its sharding, precision, offloading and checkpointing apply to keys "
        "that are not set",
    )
    backend: Literal["fsdp", "deepspeed"] = key(
        "fsdp", "what shards the policy", fsdp="FSDP2", deepspeed="ZeRO"
    )
    zero_stage: Literal[1, 2, 3] = key(
        3,
        "deepspeed only: what ZeRO shards",
        **{"1": "optimizer state", "2": "gradients, too", "3": "weights, too"},
    )
    update_on: Literal["device", "host"] = key(
        "device",
        "where optimizer state stays, and the optimizer's step is computed",
        device="on the accelerator",
        host="in host memory, by the CPU; with FSDP2 master weights and gradients are there as well",
    )
    dtype: Dtype = key(
        "bfloat16",
        "dtype of forward and backward; gradients are reduced in float32",
        float32="exact, for checks",
        bfloat16="half the memory and faster",
    )
    fp32_head: bool = key(
        False, "compute logits in float32, in the policy and in the engines, whatever their dtype"
    )
    optimizer: str = key(
        "adamw",
        "the optimizer; or your own class, pkg.mod:Name or file.py:Name, which is tried in 240 steps "
        "(docs/memory-and-scale.md says what no trial can see)",
        adamw="AdamW, fused",
        muon="fsdp only: Muon for the matrices of hidden layers, AdamW for everything else",
    )
    optimizer_options: dict[str, Any] = key({}, "further arguments of Muon, or of your own class")
    lr: Rate = key(1e-6, "peak learning rate")
    betas: tuple[ShareBelowOne, ShareBelowOne] = key((0.9, 0.99), "decay rates of AdamW's two moments")
    eps: Positive = key(1e-8, "AdamW's epsilon")
    weight_decay: NotNegative = key(0.0, "decoupled weight decay of matrices")
    warmup_steps: Natural = key(0, "optimizer steps of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = key(
        "constant",
        "learning rate after warm-up",
        constant="it stays",
        linear="it falls in a straight line to 0 at run.steps",
        cosine="it falls along half a cosine to 0 at run.steps",
    )
    max_grad_norm: Positive = key(
        1.0, "largest global gradient norm; gradients beyond it are scaled down to it"
    )
    activation_checkpointing: Literal["auto", "none", "products", "every_second", "full"] = key(
        "auto",
        "layers whose activations are recomputed in backward, which saves memory and costs time",
        auto="on CUDA the first of none, products and full that fits by the plan, which the run keeps "
        "when it resumes; on a CPU none",
        none="no layers; also false",
        products="fsdp only: all layers, but results of matrix products and of attention are kept",
        every_second="every second layer",
        full="all layers; also true",
    )
    offload_activations: bool = key(
        False, "keep the inputs of recomputed layers in host memory until backward"
    )
    max_skipped_steps: Count = key(3, "number of non-finite updates in a row that ends the run")
    compile: bool | None = key(
        None,
        "fsdp only: torch.compile for norms, rotary embeddings, gates of MLPs and, on CUDA, logits, in "
        "a minute of the first step; null: true on CUDA, where the first update compares it with plain "
        "computation",
    )
    reshard_after_forward: bool = key(True, "free gathered weights between forward and backward")
    offload: Literal["none", "optimizer", "all"] = key(
        "none",
        "what moves to host memory while engines are awake",
        none="nothing",
        optimizer="optimizer state",
        all="optimizer state and master weights",
    )
    offload_reference: bool | None = key(
        None, "keep the frozen reference in host memory except while it scores; null: true on CUDA"
    )
    freeze: list[Text] = key(
        [],
        "modules that are not trained: vision (all that only images pass through), or names and "
        "patterns, such as model.language_model.layers.0 or *.embed_tokens",
    )
    shard_size: Count | None = key(
        None,
        "fsdp only: number of neighbouring ranks, such as those of a machine, over which one copy of "
        "the model is sharded (HSDP); null: all ranks",
    )
    sequence_parallel: Count = key(
        1,
        "number of ranks that share a micro-batch, each with a part of the tokens, for answers too "
        "long for one rank",
    )

    expert_parallel: Count = key(
        1,
        "fsdp only, mixtures of experts: number of neighbouring ranks over which experts are split; "
        "tokens are sent to them instead of the experts' weights",
    )

    @field_validator("optimizer")
    @classmethod
    def _known_optimizer(cls, value: str) -> str:
        return known(value, OPTIMIZERS)

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _all_or_none(cls, value: object) -> object:
        return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


class LoraConfig(Section):
    """Low-rank adapters, which are trained in place of the model's weights (needs peft)."""

    rank: Annotated[int, Field(ge=0, le=2**16)] = key(
        0, "rank of the adapters; 0: none, all weights are trained"
    )
    alpha: Count = key(32, "adapters are multiplied by alpha / rank")
    use_rslora: bool = key(False, "multiply adapters by alpha / √rank instead, which suits large ranks")
    dropout: ShareBelowOne = key(0.0, "share of an adapter's inputs that training drops")
    target_modules: Literal["all-linear"] | list[Text] = key(
        "all-linear",
        "layers with adapters; or a list of names such as q_proj",
        **{"all-linear": "all linear layers except the head"},
    )
    seed: Seed = key(0, "seed of the adapters' initial values")
    start: Location | None = key(
        None,
        "folder of a PEFT adapter to go on from, with its rank, alpha and layers; null: new adapters",
    )
    sync: Literal["adapter", "merged"] = key(
        "adapter",
        "what the engines receive",
        adapter="the adapter alone, which they add to the base model that they loaded",
        merged="full weights with the adapter added: a full sync, but faster generation",
    )

    @property
    def engines_apply(self) -> bool:
        """True if the engines receive the adapter alone and apply it themselves."""
        return self.rank > 0 and self.sync == "adapter"


class CriticConfig(Section):
    """The value model of PPO, which no other algorithm loads. Its other settings are those of
    `policy`.
    """

    shared: bool = key(
        False,
        "a value head on the policy's trunk, trained with the policy's loss, in place of a separate "
        "model",
    )
    path: Location | None = key(
        None, "model or reward model (one label) that a separate model starts from; null: model.path"
    )
    lr: Rate = key(1e-5, "peak learning rate of a separate model")
    warmup_steps: Natural = key(0, "optimizer steps of linear warm-up of a separate model")


class BatchConfig(Section):
    """The size of a step, and its division into updates and micro-batches."""

    prompts_per_step: Size = key(32, "prompts in a step, over all ranks")
    tokens_per_micro_batch: Count = key(
        16384, "tokens of a forward pass, over all ranks that share it; memory grows with it"
    )
    packing: bool = key(
        True,
        "lay sequences end to end; false: pad them to the longest, where padding counts as tokens, too",
    )
    share_prefixes: bool | Literal["auto"] = key(
        "auto",
        "compute tokens that sequences of a micro-batch have in common from their beginning once for "
        "all",
        auto="where it is possible; where not, the run says why",
    )
    shared_tokens_min: Count = key(64, "fewest tokens in common that are computed once")
    updates_per_step: Size = key(
        1, "optimizer steps in a pass over the batch, which is cut between prompts as evenly as possible"
    )

    @property
    def shared_min(self) -> int | None:
        """The fewest tokens in common that are computed once; None: sequences share nothing.

        They share nothing with `auto`, either: `with_chosen_prefixes` replaces it before a run
        begins.
        """
        return self.shared_tokens_min if self.share_prefixes is True else None


class RewardFunction(Section):
    """One reward function and its weight."""

    name: Text = key(
        ...,
        "exact_match, numeric_match, math_verify, format_regex, reasoning_gym, pkg.mod:Name or "
        "file.py:Name",
    )
    weight: Amount = key(1.0, "factor in the sum of rewards")
    kwargs: dict[str, Any] = key({}, "further keyword arguments of the function")


class RewardConfig(Section):
    """Reward functions, which run in processes of their own."""

    functions: list[RewardFunction] = key(
        [], "names, or entries of name, weight and kwargs; their weighted sum counts"
    )
    timeout_s: CallSeconds = key(
        10, "seconds that a function may take for one answer before its process is killed"
    )
    workers: Processes = key(2, "processes on each rank that leads an engine")
    max_error_rate: Share = key(0.1, "largest share of a step's calls that may fail before the run ends")
    failed: Literal["leave_out", "error_reward"] = key(
        "leave_out",
        "what happens to an answer whose function exceeds timeout_s, raises or dies",
        leave_out="it leaves its group before any mean is taken",
        error_reward="its reward is error_reward",
    )
    error_reward: Amount = key(
        0.0, "reward of an answer whose function failed, with failed: error_reward"
    )

    @field_validator("functions", mode="before")
    @classmethod
    def _names_alone(cls, value: object) -> object:
        if not isinstance(value, list):
            return value
        return [{"name": item} if isinstance(item, str) else item for item in value]


class ProcessesConfig(Section):
    """Processes that run episodes in a Python of their own."""

    workers: Processes = key(
        8, "processes, each with one episode at a time, on each rank that leads an engine"
    )
    env: dict[str, str] = key({}, "environment variables of the processes")
    timeout_s: CallSeconds = key(600, "seconds that an episode may take before its process is killed")


class ClientConfig(ProcessesConfig):
    """An agent that runs in a Python of its own, with PATH, HOME, LANG and `env`
    (docs/rollouts.md).
    """

    command: list[Word] = Field(
        min_length=1, description="program and arguments, such as [venv/bin/python, agent.py]"
    )


class VerifiersConfig(ProcessesConfig):
    """An environment of the verifiers library (0.4) in a Python of its own; its tasks are the
    prompts.
    """

    environment: Text = key(..., "id of the taskset")
    args: dict[str, Any] = key({}, "settings of the environment, as below [env] in verifiers' recipes")
    python: Location = key(
        ..., "Python in which verifiers and the environment are installed, such as venv/bin/python"
    )
    tasks: Count = key(10_000, "number of tasks to use, from the first on")


class McpServerConfig(Section):
    """An MCP server whose tools the policy may call: a command to start, or an address."""

    command: list[Word] = key(
        [], "program and arguments; the process gets PATH, HOME and the like, and `env`"
    )
    url: Text | None = key(None, "address of a server that runs already (streamable HTTP)")
    env: dict[str, str] = key({}, "further environment variables of the command")
    session: Literal["trajectory", "shared"] = key(
        "trajectory",
        "how long a session, and its command, lasts from the first call on",
        trajectory="until its trajectory ends",
        shared="until the run ends: one on each engine's leader",
    )


class InlineTagsConfig(Section):
    """Tags around calls and results inside an answer."""

    start: Text = key("<function>", "tag before a call")
    end: Text = key("</function>", "tag after a call, at which the engine stops")
    result_start: str = key("<result>", "tag before the call's result")
    result_end: str = key("</result>", "tag after the call's result")


class RolloutConfig(Section):
    """The way from a prompt to an answer: one generation by default, else tools, an environment, or
    your own code.

    Objects are named pkg.mod:Name or path/file.py:Name.
    """

    tools: list[Text] = key([], "typed Python functions, sync or async, that the policy may call")
    mcp: dict[Name, McpServerConfig] = key({}, "MCP servers by name, whose tools the policy may call")
    environment: Text | None = key(
        None, "class with reset(**row), public methods as tools, get_reward() and close()"
    )
    custom: Text | None = key(
        None, "async def (llm, row, sampling) that returns a Trajectory or a list of them"
    )
    sampler: Text | None = key(
        None,
        "object called with (llm, prompts, sampling_params), or with a `generate` method of that "
        "signature",
    )
    client: Text | ClientConfig | None = key(
        None,
        "async def (base_url, api_key, model, row) that uses any OpenAI client and returns a reward; "
        "or a command",
    )
    verifiers: VerifiersConfig | None = key(
        None, "an environment of the verifiers library, whose tasks are the prompts"
    )
    kwargs: dict[str, Any] = key({}, "keyword arguments of the environment, custom, sampler or client")
    max_turns: Size = key(8, "most answers in an episode; sampling.max_tokens applies to each of them")
    tool_parser: Text = key(
        "hermes",
        "how calls are written: hermes, inline (<function> name(1, 2) </function>), or one of vLLM's",
    )
    inline_tags: InlineTagsConfig = key(
        InlineTagsConfig(), "with tool_parser inline: the tags around calls"
    )
    describe_tools: bool = key(
        True, "pass schemas to the chat template; false: the prompts describe the tools"
    )
    tool_timeout_s: CallSeconds = key(
        30, "seconds that a call may take; after that, its reply is an error"
    )
    tool_rates: dict[str, Positive] = key(
        {}, "most calls a second of a tool, by its name, from each engine's leader"
    )
    max_concurrency: Size = key(64, "most calls that run at the same time on each engine's leader")
    max_tool_tokens: Count = key(1024, "most tokens of a reply; longer replies are cut")
    tool_error: str = key("Error: {error}", "reply that the policy reads after a failed call")
    max_error_rate: Share = key(
        0.1, "largest share of a step's episodes that may fail before the run ends"
    )
    max_image_mib: Count = key(
        32, "most MiB of encoded images that tools, environments or clients add to an episode"
    )
    fetch_images: bool = key(
        False, "fetch images that clients name by address, from public addresses only"
    )
    slice_tokens: Count | None = key(
        None,
        "tokens by which answers grow at a time; what is unfinished goes on in the next step; null: "
        "no limit",
    )
    ahead: Annotated[float, Field(ge=0, le=64)] = key(
        0.0, "extra prompts kept in flight, as a multiple of batch.prompts_per_step"
    )
    max_age: Natural | None = key(
        None,
        "refuse a recipe whose answers may begin more than this many steps before they are trained "
        "on; null: any",
    )
    lag: Annotated[int, Field(ge=0, le=1)] = key(
        0, "with engine.placement ranks or ray: number of steps by which answers are ordered in advance"
    )
    old_tokens: Literal["correct", "mask"] = key(
        "correct",
        "how tokens that earlier weights sampled are used",
        correct="trained on with their own importance weight",
        mask="as context only, outside the loss",
    )

    @property
    def ages(self) -> bool:
        """True if a step's tokens may have been sampled by earlier weights than the policy's."""
        return self.slice_tokens is not None or self.lag > 0

    @property
    def code(self) -> list[str]:
        """Names of the keys that are set and name the user's rollout code, which may give rewards
        itself.
        """
        named = ("environment", "custom", "sampler", "client", "verifiers")
        return [key for key in named if getattr(self, key) is not None]


class CheckpointConfig(Section):
    """Saving and resuming a run."""

    every: Natural = key(
        0, "steps from one checkpoint to the next; the end of the run is saved, too; 0: only the end"
    )
    background: bool = key(
        True, "write from a copy in host memory while training continues; false: training waits"
    )
    keep: Count = key(2, "number of newest complete checkpoints to keep")
    keep_best: Natural = key(0, "number of checkpoints with the best best_metric to keep as well")
    best_metric: Text = key(
        "eval/accuracy", "figure of metrics.jsonl, the larger the better; -NAME: smaller is better"
    )
    grace_s: Annotated[float, Field(ge=0, le=1e6)] = key(
        60,
        "seconds from SIGTERM in which to end the step and save; rollouts are given up after half; 0: "
        "none",
    )
    rollouts: bool = key(
        False,
        "keep answers on disk until a checkpoint includes their updates, so that a restarted run does "
        "not sample them again",
    )
    patience_s: Annotated[float, Field(ge=0, le=1e6)] = key(
        600,
        "seconds to wait for space on a full disk, or for a lost mount, before the run ends; at most "
        "half a deadline",
    )
    resume: Location = key(
        "auto", "auto: from the run's newest complete checkpoint, if any; none; or from a path"
    )
    resume_anyway: list[str] = key(
        [], "keys or sections that may differ from the checkpoint's, out of those that resuming compares"
    )
    export_hf: bool = key(True, "write the final model in Hugging Face format")

    @field_validator("every", mode="before")
    @classmethod
    def _steps(cls, value: object) -> object:
        if value == "auto":
            raise ValueError("should be a number of steps, such as that of half an hour: auto is gone")
        return value


class TrackingConfig(Section):
    """Trackers that record a run's figures besides metrics.jsonl."""

    wandb: Literal["auto", "offline", "online", "disabled"] = key(
        "auto",
        "Weights & Biases",
        auto="online when logged in, else offline",
        offline="a folder to upload later",
        online="uploaded during the run",
        disabled="off",
    )
    project: Text = key("hotbunk", "project of Weights & Biases, and experiment of MLflow")
    also: list[Literal["tensorboard", "mlflow", "trackio"]] = key(
        [],
        "further trackers, whose packages must be installed",
        tensorboard="event files in the folder tensorboard of the run",
        mlflow="a run at MLFLOW_TRACKING_URI, or in mlflow.db in the run's folder",
        trackio="a run in trackio's store on this machine, or where trackio's variables say",
    )
    completions_per_step: Natural = key(8, "answers written to completions.jsonl in each step")
    tokens_per_step: Natural = key(
        2,
        "answers whose tokens are written to tokens.jsonl in each step, with gap, entropy and advantage",
    )


class SftConfig(Section):
    """`hotbunk sft`: a supervised warm start on answers in the data; model, data, policy and batch
    apply, too.
    """

    steps: Count = key(500, "optimizer steps")
    batch_size: Size = key(64, "rows in a step, over all ranks")
    lr: Rate = key(1e-5, "peak learning rate, in place of policy.lr")
    warmup_steps: Natural = key(0, "steps of linear warm-up, in place of policy.warmup_steps")
    completion_key: Text = key(
        "answer", "column with the text to learn; an end-of-sequence token is added"
    )
    max_tokens: Count = key(
        1024, "most tokens of an answer; rows with longer ones are dropped and counted"
    )


class TrainConfig(Section):
    """A recipe: all its sections."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    sampling: SamplingConfig = SamplingConfig()
    eval: EvalConfig = EvalConfig()
    engine: EngineConfig = EngineConfig()
    sync: SyncConfig = SyncConfig()
    policy: PolicyConfig = PolicyConfig()
    lora: LoraConfig = LoraConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    batch: BatchConfig = BatchConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    sft: SftConfig = SftConfig()

    _unresolved: dict[KeyPath, str] = PrivateAttr(default_factory=dict)

    def keep_unresolved(self, texts: Mapping[KeyPath, str]) -> None:
        """Make `recorded` write these texts at their paths, except where a key of a section holds a
        number.
        """
        values = self.model_dump(mode="json")
        for path, text in texts.items():
            of_key = len(path) == 2
            if not (of_key and isinstance(values[str(path[0])][path[1]], int | float)):
                self._unresolved[path] = text

    def recorded(self) -> dict[str, Any]:
        """Return the recipe in JSON values, for a run's files; what the environment holds
        (`${oc.env:NAME}`) is unresolved.
        """
        values = replaced(self.model_dump(mode="json"), self._unresolved)
        if self.rollout.verifiers is not None:
            # `load_config` fills it again with a copy of rollout.verifiers
            values["data"]["subset"] = None
        return values
