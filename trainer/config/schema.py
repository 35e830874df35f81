"""A recipe: every section, every key, its type, default and meaning.

A recipe is a YAML file with these sections. Keys are overridden on the command line by `--section.key value`, values
being YAML; `includes` names files to start from, and `${NAME:default}` reads the environment (`yaml_files`),
as does `${oc.env:NAME}`, which `TrainConfig.recorded` keeps as it is.
Nothing here imports torch: `--help` and reward workers stay quick.
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
    Held,
    Mebibytes,
    Name,
    Natural,
    NotNegative,
    Part,
    Place,
    Portion,
    Positive,
    Processes,
    Rate,
    Seconds,
    Section,
    Seed,
    Share,
    Temperature,
    Text,
    key,
    replaced,
)


class RunConfig(Section):
    """The run as a whole."""

    name: Annotated[str, Field(pattern=r"^([\w-][\w.-]*)?$", max_length=200)] = key(
        "", "folder below output_dir; empty: the recipe's file name"
    )
    output_dir: Path = key(Path("runs"), "where the folders of runs live")
    seed: Seed = key(0, "decides prompt order and every sample, with step, prompt and sample index")
    steps: Count = key(100, "rollout-and-update steps to train for, resumed ones included")
    step_deadline_s: Seconds = key(1800, "longest a step may take before stacks are printed and the run ends")
    first_step_deadline_s: Seconds = key(3600, "the same for start-up and the first step, which compile")
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto", "what to train on", auto="CUDA where there is a GPU", cpu="the processor", cuda="GPUs"
    )
    profile: tuple[Count, Count] | None = key(
        None, "train only: first and last step of which rank 0 writes a trace of torch.profiler to profile/"
    )

    @property
    def folder(self) -> Path:
        """Everything the run writes is below this folder."""
        return self.output_dir / self.name


class ModelConfig(Section):
    """The model that is trained."""

    path: Text = key(..., "folder in Hugging Face format (config.json, safetensors), or a hub name")
    tokenizer: Text | None = key(None, "folder or hub name; null: the model's own")
    attn_implementation: Text = key("sdpa", "Transformers' attention on the trainer's side")
    trust_remote_code: bool = key(False, "run model code that comes with the checkpoint")
    routes: Literal["own", "recorded", "engine"] = key(
        "own", "the experts of a mixture that the trainer sends a token to (docs/algorithms.md)",
        own="those its routers choose in every pass", recorded="those of its first pass over the step's batch",
        engine="those that the engine sent it to",
    )  # fmt: skip


class DataConfig(Section):
    """Prompts to train on, and the columns that those to evaluate on have as well."""

    path: Text = key(..., "jsonl or parquet file, a folder of them, a hub name, or reasoning_gym:NAME?size=1000")
    subset: Text | None = key(None, "configuration of a hub dataset, such as main")
    split: Text = key("train", "split of a folder or hub dataset; slices such as train[:1000] work")
    prompt_key: Text = key("prompt", "column with the prompt: a string, or a list of messages")
    messages_key: Text = key("messages", "column with a list of messages, read where prompt_key is absent")
    answer_key: Text | None = key("answer", "column that rewards see as `answer`, or a.b, a field of one; null: none")
    system_prompt: str | None = key(None, "system message put first unless the row has its own")
    apply_chat_template: bool = key(True, "false: a prompt string is tokenised as it stands")
    chat_template_kwargs: dict[str, Any] = key({}, "passed to the chat template, as enable_thinking: false")
    max_prompt_tokens: Count = key(1024, "longer prompts, template included, are dropped and counted")
    max_images: Natural = key(0, "most images of a prompt and its answer together; 0: text alone")
    image_key: Text | None = key(None, "column with a prompt's image, or a list: paths, bytes or encoded images")
    max_image_pixels: Count = key(4_194_304, "the largest image, width times height")
    larger_images: Literal["refuse", "resize"] = key(
        "refuse", "what becomes of an image with more pixels than that", refuse="the run does not start",
        resize="it is made smaller, in its proportions",
    )  # fmt: skip


class SamplingConfig(Section):
    """How answers are sampled in training."""

    temperature: Temperature = key(1.0, "divides the logits in the engine and in the trainer alike")
    max_tokens: Count = key(1024, "longest answer in tokens")
    stop: list[Text] = key([], "strings that end an answer")


class HeldOutConfig(Section):
    """One dataset to evaluate on. A key that is null is what `data` or `eval` says for all of them."""

    path: Text = key(..., "as data.path")
    subset: Text | None = key(None, "configuration of a hub dataset")
    split: Text = key("train", "as data.split")
    size: Count | None = key(None, "use only the first this many prompts; null: all")
    prompt_key: Text | None = key(None, "null: data.prompt_key")
    answer_key: Text | None = key(None, "null: data.answer_key")
    image_key: Text | None = key(None, "null: data.image_key")
    samples: Held | None = key(None, "null: eval.samples")
    temperature: Temperature | None = key(None, "null: eval.temperature")
    top_p: Portion | None = key(None, "null: eval.top_p")
    max_tokens: Count | None = key(None, "null: eval.max_tokens")


class EvalConfig(Section):
    """Evaluation on held-out prompts, with its own sampling; `hotbunk eval` uses it, too."""

    every: Natural = key(0, "evaluate after every this many steps and after the last; 0: never")
    before: bool = key(True, "also evaluate before the first step (where every > 0)")
    temperature: Temperature = key(0.0, "0: greedy")
    top_p: Portion = key(1.0, "nucleus sampling; 1: off")
    max_tokens: Count | None = key(None, "longest answer in tokens; null: sampling.max_tokens")
    samples: Held = key(1, "answers for each prompt; their rewards are averaged")
    k: list[Count] = key([], "estimate pass@k and majority@k for these k, none above samples; empty: neither")
    right_from: Amount = key(1.0, "an answer is right where the first reward function gives at least this")
    datasets: dict[Name, HeldOutConfig] = key(
        {}, "held-out datasets by name; where there are several, eval/NAME/… are the figures of one"
    )


class EngineConfig(Section):
    """The vLLM engines."""

    tensor_parallel_size: Held = key(1, "consecutive ranks that form one engine")
    placement: Literal["shared", "ranks", "ray"] = key(
        "shared", "where the engines are (docs/apart.md)",
        shared="on the devices of the ranks that train, in turns with them",
        ranks="on the devices of the last engine.ranks ranks, which only generate while the others train",
        ray="in actors of the Ray cluster at RAY_ADDRESS, or of one of its own; the last rank only holds them",
    )  # fmt: skip
    ranks: Held = key(1, "with placement ranks: number of trailing ranks that only generate")
    replicas: Held = key(1, "with placement ray: number of engines; the run begins with those that there is room for")
    max_model_len: Count = key(2048, "prompt and answer together, in tokens")
    kv_cache_gib: Positive | None = key(None, "KV cache of each worker; null: gpu_memory_utilization decides")
    gpu_memory_utilization: Portion = key(
        0.3, "share of a GPU's memory for weights and KV cache, where kv_cache_gib is null"
    )
    max_num_seqs: Held = key(256, "answers an engine generates at the same time")
    dtype: Dtype | None = key(
        None, "of the engine's weights; null: policy.dtype", float32="exact, for checks", bfloat16="usual on GPUs"
    )
    enforce_eager: bool | None = key(None, "no CUDA graphs; null: true on CPU, false on CUDA")
    load_format: Literal["auto", "dummy"] = key(
        "auto", "what the engines start with",
        auto="the model's weights", dummy="random weights: the first sync overwrites them all anyway",
    )  # fmt: skip
    plain_cpu_weights: bool = key(False, "CPU only: keep weights unpacked; faster for small models")
    sleep: bool = key(True, "give the engine's memory back while the policy trains")
    start_timeout_s: Seconds = key(600, "longest an engine may take to start")
    restarts: Natural = key(3, "engines that may die within an hour and are started again; one more ends the run")
    logits_processors: list[str | dict[str, str]] = key(
        [],
        "pkg.mod:Name or file.py:Name: classes or factories that change logits before sampling, in the engine only "
        "(generation.engine.logits)",
    )
    extra: dict[str, Any] = key({}, "further fields of vLLM's AsyncEngineArgs, by name, of those Hotbunk does not set")


WAYS = ("auto", "staged", "pull", "zero_copy", "storage")


class SyncConfig(Section):
    """The weights' way from the policy into the engines."""

    verify: Literal["off", "sample", "full"] = key(
        "sample", "compare the weights of every worker with those of the ranks",
        off="not at all", sample="a sample of them", full="all of them",
    )  # fmt: skip
    bucket_mib: Mebibytes = key(
        512,
        "size of a staging buffer, of which two exist while weights travel; in the first update, and where engines "
        "re-process what they load, no smaller than the largest weight",
    )
    timeout_s: Seconds = key(300, "longest wait for any answer of a worker")
    replay: bool = key(True, "record what vLLM's loaders do with the first weights, and from then on repeat it")
    way: str = key(
        "auto", "how weights get to the engine; your own way is pkg.mod:Name or file.py:Name (docs/weight-path.md)",
        auto="the first that holds here of zero_copy, pull and staged; on CUDA staged; to engines apart by broadcast",
        staged="through two buffers that trainer and engine have mapped",
        pull="engines read the shards of all ranks of their machine, and nothing is gathered or staged",
        zero_copy="one rank, unpacked weights: the policy computes with the engine's own, so that a step is the sync",
        storage="through the run's folder weights, which other engines can load, too",
    )  # fmt: skip

    @field_validator("verify", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads a bare `off` as false

    @field_validator("way")
    @classmethod
    def _known_way(cls, value: str) -> str:
        if value not in WAYS and ":" not in value:
            raise ValueError(f"{value!r} is not a way: it is one of {', '.join(WAYS)}, or pkg.mod:Name or file.py:Name")
        return value


class PolicyConfig(Section):
    """The sharded policy and its optimizer (AdamW). Master weights are always float32."""

    accelerate_config: Text | None = key(
        None,
        "Accelerate's YAML file, whose sharding, precision, offloading and checkpointing apply where no key is set",
    )
    backend: Literal["fsdp", "deepspeed"] = key("fsdp", "what shards the policy", fsdp="FSDP2", deepspeed="ZeRO")
    zero_stage: Literal[1, 2, 3] = key(
        3, "deepspeed only: what ZeRO shards", **{"1": "optimizer state", "2": "gradients, too", "3": "weights, too"}
    )
    offload_optimizer: bool = key(False, "deepspeed only: optimizer state in the host's memory, the update on the CPU")
    dtype: Dtype = key(
        "bfloat16", "of forward and backward; gradients are reduced in float32",
        float32="exact, for checks", bfloat16="half the memory and faster",
    )  # fmt: skip
    fp32_head: bool = key(False, "logits in float32 in the policy and in the engines, whatever their dtype")
    lr: Rate = key(1e-6, "peak learning rate")
    betas: tuple[Part, Part] = key((0.9, 0.99), "AdamW's decay rates of both moments")
    eps: Positive = key(1e-8, "AdamW's epsilon")
    weight_decay: NotNegative = key(0.0, "AdamW's decoupled weight decay")
    warmup_steps: Natural = key(0, "optimizer steps of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = key(
        "constant", "learning rate after warm-up",
        constant="it stays", linear="it falls in a straight line to 0 at run.steps",
        cosine="it falls along half a cosine to 0 at run.steps",
    )  # fmt: skip
    max_grad_norm: Positive = key(1.0, "gradients with a larger global norm are scaled down to it")
    activation_checkpointing: Literal["none", "every_second", "full"] = key(
        "none", "layers whose activations are computed again in backward, for less memory and more time",
        none="none; also false", every_second="every second one", full="all; also true",
    )  # fmt: skip
    max_skipped_steps: Count = key(3, "end the run after this many non-finite updates in a row")
    compile: bool = key(False, "torch.compile for norms and MLPs; fsdp only; the first steps take a minute")
    reshard_after_forward: bool = key(True, "free gathered weights between forward and backward")
    offload: Literal["none", "optimizer", "all"] = key(
        "none", "what moves to the host's memory while engines are awake",
        none="nothing", optimizer="optimizer state", all="master weights, too",
    )  # fmt: skip
    offload_reference: bool | None = key(
        None, "keep the frozen reference in the host's memory except while it scores; null: on for CUDA"
    )
    freeze: list[Text] = key(
        [],
        "what does not learn: vision (all that only images pass), or names and patterns of modules, such as "
        "model.language_model.layers.0 or *.embed_tokens",
    )
    shard_size: Count | None = key(
        None,
        "fsdp only: neighbouring ranks the model is cut over, such as those of a machine, with a copy on every such "
        "group (HSDP); null: all ranks",
    )
    sequence_parallel: Count = key(
        1, "neighbouring ranks that share micro-batches, each with a part of the tokens, for answers too long for one"
    )

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _all_or_none(cls, value: object) -> object:
        return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


class LoraConfig(Section):
    """Low-rank adapters, trained instead of the weights, which stay as they are on disk (needs peft)."""

    rank: Annotated[int, Field(ge=0, le=2**16)] = key(0, "rank of the adapters; 0: none, all weights are trained")
    alpha: Count = key(32, "adapters are multiplied by alpha / rank")
    use_rslora: bool = key(False, "by alpha / √rank instead, which suits large ranks")
    dropout: Part = key(0.0, "share of an adapter's inputs that training leaves out")
    target_modules: Literal["all-linear"] | list[Text] = key(
        "all-linear", "layers with adapters; or names such as q_proj",
        **{"all-linear": "all linear ones except the head"},
    )  # fmt: skip
    seed: Seed = key(0, "decides what the adapters start from")
    sync: Literal["adapter", "merged"] = key(
        "adapter", "what the engines get",
        adapter="the adapter alone, beside the base they loaded themselves",
        merged="whole weights with the adapter added: a full sync, but faster generation",
    )  # fmt: skip

    @property
    def engines_apply(self) -> bool:
        """True if the adapter goes to the engines by itself, for them to apply."""
        return self.rank > 0 and self.sync == "adapter"


class CriticConfig(Section):
    """The value model of PPO; nothing else loads it. Its other keys are those of `policy`."""

    shared: bool = key(
        False, "a value head on the policy's own trunk, learned with its loss, in place of a model of its own"
    )
    path: Text | None = key(
        None, "model or reward model (one label) that a model of its own starts from; null: model.path"
    )
    lr: Rate = key(1e-5, "peak learning rate of a model of its own")
    warmup_steps: Natural = key(0, "its optimizer steps of linear warm-up")


class BatchConfig(Section):
    """How much is generated and trained on in a step."""

    prompts_per_step: Held = key(32, "prompts in a step, over all ranks")
    tokens_per_micro_batch: Count = key(
        16384, "tokens in a forward pass, of all ranks that share it; memory grows with it"
    )
    packing: bool = key(
        True, "sequences end to end, without padding; false: padded to the longest, which counts as tokens, too"
    )
    updates_per_step: Held = key(
        1, "optimizer steps a pass over the batch is cut into, between prompts, as evenly as can be"
    )


class RewardFunction(Section):
    """One reward function and its weight."""

    name: Text = key(
        ..., "exact_match, numeric_match, math_verify, format_regex, reasoning_gym, pkg.mod:Name or file.py:Name"
    )
    weight: Amount = key(1.0, "factor in the sum of rewards")
    kwargs: dict[str, Any] = key({}, "further keyword arguments of the function")


class RewardConfig(Section):
    """How answers are scored. Functions run in processes of their own."""

    functions: list[RewardFunction] = key([], "names, or entries of name, weight and kwargs; their weighted sum counts")
    timeout_s: CallSeconds = key(10, "longest a function may take for one answer before its process is killed")
    workers: Processes = key(2, "processes on each rank that leads an engine")
    max_error_rate: Share = key(0.1, "end the run when a larger share of a step's calls fails")
    failed: Literal["leave_out", "error_reward"] = key(
        "leave_out", "an answer whose function exceeds timeout_s, raises or dies",
        leave_out="leaves its group before any mean is taken", error_reward="its reward is error_reward",
    )  # fmt: skip
    error_reward: Amount = key(0.0, "reward of an answer whose function failed, with failed: error_reward")

    @field_validator("functions", mode="before")
    @classmethod
    def _names_alone(cls, value: object) -> object:
        return (
            [{"name": each} if isinstance(each, str) else each for each in value] if isinstance(value, list) else value
        )


class ProcessesConfig(Section):
    """Episodes in processes of a Python of their own."""

    workers: Processes = key(8, "processes, and so episodes at the same time, on each rank that leads an engine")
    env: dict[str, str] = key({}, "environment variables of the processes")
    timeout_s: CallSeconds = key(600, "longest an episode may take before its process is killed")


class ClientConfig(ProcessesConfig):
    """An agent in a Python of its own, which is started with PATH, HOME, LANG and `env`; see docs/rollouts.md."""

    command: list[Text] = Field(min_length=1, description="program and arguments, such as [venv/bin/python, agent.py]")


class VerifiersConfig(ProcessesConfig):
    """An environment of the verifiers library (0.4), in the Python that has both; its tasks are the prompts."""

    environment: Text = key(..., "the taskset's id")
    args: dict[str, Any] = key({}, "verifiers' own settings of it, as below [env] in its recipes")
    python: Text = key(..., "the Python that verifiers and the environment are installed in, such as venv/bin/python")
    tasks: Count = key(10_000, "so many of the tasks are used, from the first on")


class McpServerConfig(Section):
    """An MCP server whose tools the policy may call: a command to start, or an address."""

    command: list[Text] = key([], "program and arguments; it is given PATH, HOME and the like, and `env`")
    url: Text | None = key(None, "address of one that runs already (streamable HTTP)")
    env: dict[str, str] = key({}, "further environment variables of the command")
    session: Literal["trajectory", "shared"] = key(
        "trajectory", "how long a session lasts, and the command with it, from the first call on",
        trajectory="until its trajectory ends", shared="until the run ends: one on each engine's leader",
    )  # fmt: skip


class InlineTagsConfig(Section):
    """The tags around calls and results inside an answer."""

    start: Text = key("<function>", "before a call")
    end: Text = key("</function>", "behind a call, where the engine stops")
    result_start: str = key("<result>", "before its result")
    result_end: str = key("</result>", "behind its result")


class RolloutConfig(Section):
    """How a prompt becomes an answer: nothing here, one generation; else tools, an environment, or your own code.

    Objects are named pkg.mod:Name or path/file.py:Name.
    """

    tools: list[Text] = key([], "typed Python functions, sync or async, that the policy may call")
    mcp: dict[Name, McpServerConfig] = key({}, "MCP servers by name, whose tools the policy may call")
    environment: Text | None = key(None, "class with reset(**row), public methods as tools, get_reward() and close()")
    custom: Text | None = key(None, "async def (llm, row, sampling) -> Trajectory or several")
    sampler: Text | None = key(
        None, "object called with (llm, prompts, sampling_params), or with such a method generate"
    )
    client: Text | ClientConfig | None = key(
        None, "async def (base_url, api_key, model, row) with any OpenAI client, or a command; returns a reward"
    )
    verifiers: VerifiersConfig | None = key(
        None, "an environment of the verifiers library, whose tasks are the prompts"
    )
    kwargs: dict[str, Any] = key({}, "keyword arguments of the environment, custom, sampler or client")
    max_turns: Held = key(8, "answers in an episode; sampling.max_tokens is for each of them")
    tool_parser: Text = key(
        "hermes", "how calls are written: hermes, inline (<function> name(1, 2) </function>), or one of vLLM's"
    )
    inline_tags: InlineTagsConfig = key(InlineTagsConfig(), "with tool_parser inline: the tags around calls")
    describe_tools: bool = key(True, "give schemas to the chat template; false: the prompts describe the tools")
    tool_timeout_s: CallSeconds = key(30, "longest a call may take; then its reply is an error")
    tool_rates: dict[str, Positive] = key({}, "calls a second that a tool, by its name, gets from each engine's leader")
    max_concurrency: Held = key(64, "calls that run at the same time, on each engine's leader")
    max_tool_tokens: Count = key(1024, "tokens of a reply; what is longer is cut")
    tool_error: str = key("Error: {error}", "how a failed call reads to the policy")
    max_error_rate: Share = key(0.1, "end the run when a larger share of a step's episodes fails")
    order: Literal["data", "longest_first"] = key(
        "data", "prompts that engines begin first, which changes no answer",
        data="those that come first in the data", longest_first="those whose last answers were longest",
    )  # fmt: skip
    max_image_mib: Count = key(32, "encoded images that tools, environments or clients may add to an episode")
    fetch_images: bool = key(False, "fetch the images that clients name by address, from public addresses only")
    slice_tokens: Count | None = key(
        None, "tokens by which an answer grows at a time; it may go on in the next step, under new weights; null: all"
    )
    ahead: Annotated[float, Field(ge=0, le=64)] = key(
        0.0, "prompts in flight beyond a step's, in steps: how many steps before it is trained an answer begins"
    )
    max_age: Natural | None = key(
        None, "refuse a recipe whose answers may have begun more steps before they are trained; null: any"
    )
    lag: Annotated[int, Field(ge=0, le=1)] = key(
        0, "with engine.placement ranks or ray: number of steps by which a step's answers are ordered ahead"
    )
    old_tokens: Literal["correct", "mask"] = key(
        "correct", "tokens that earlier weights sampled",
        correct="learned from with their own importance weight", mask="context, and nothing is learned from them",
    )  # fmt: skip

    @property
    def ages(self) -> bool:
        """True if a step's tokens may have been sampled by earlier weights than the policy's."""
        return self.slice_tokens is not None or self.lag > 0

    @property
    def code(self) -> list[str]:
        """The keys that are set of those that name one's own rollout; such code may give rewards itself."""
        named = ("environment", "custom", "sampler", "client", "verifiers")
        return [key for key in named if getattr(self, key) is not None]


class CheckpointConfig(Section):
    """Saving a run, and continuing one."""

    every: Natural | Literal["auto"] = key(
        0, "save after every this many steps, and at the end; 0: at the end only",
        auto="as often as pays, by what a checkpoint costs and how often the run has failed",
    )  # fmt: skip
    background: bool = key(True, "write from a copy in host memory while training continues; false: training waits")
    keep: Count = key(2, "newest complete checkpoints to keep")
    keep_best: Natural = key(0, "checkpoints with the best best_metric to keep besides")
    best_metric: Text = key("eval/accuracy", "figure of metrics.jsonl, the larger the better; -NAME: the smaller")
    grace_s: Annotated[float, Field(ge=0, le=1e6)] = key(
        60, "seconds that SIGTERM leaves to end the step and save; rollouts are given up after half; 0: none"
    )
    rollouts: bool = key(
        False,
        "keep answers on disk until a checkpoint has what was learned from them, so that a run that is started again "
        "does not sample them again",
    )
    patience_s: Annotated[float, Field(ge=0, le=1e6)] = key(
        600,
        "seconds to wait for room on a full disk, or for a lost mount, before the run ends; at most half a deadline",
    )
    resume: Text = key("auto", "auto: the run's newest complete checkpoint, if any; none; or a path")
    resume_anyway: list[str] = key(
        [], "keys or sections, of those a resumed run is compared by, that may differ from the checkpoint's"
    )
    export_hf: bool = key(True, "write the final model in Hugging Face format")


class TrackingConfig(Section):
    """Where figures go, besides metrics.jsonl."""

    wandb: Literal["auto", "offline", "online", "disabled"] = key(
        "auto", "Weights & Biases",
        auto="online when logged in, else offline", offline="a folder to send later", online="sent as the run goes",
        disabled="nothing",
    )  # fmt: skip
    project: Text = key("hotbunk", "Weights & Biases project, and MLflow's experiment")
    also: list[Literal["tensorboard", "mlflow", "trackio"]] = key(
        [], "further trackers, whose packages have to be installed",
        tensorboard="event files, in a folder of that name in the run's",
        mlflow="a run at MLFLOW_TRACKING_URI, or in mlflow.db in the run's folder",
        trackio="a run in trackio's store on this machine, or where its own variables say",
    )  # fmt: skip
    completions_per_step: Natural = key(8, "answers written to completions.jsonl in each step")
    tokens_per_step: Natural = key(
        2, "answers of each step whose tokens are written to tokens.jsonl, each with its gap, entropy and advantage"
    )


class SftConfig(Section):
    """`hotbunk sft`: supervised warm start on the answers in the data; model, data, policy and batch apply too."""

    steps: Count = key(500, "optimizer steps")
    batch_size: Held = key(64, "rows in a step, over all ranks")
    lr: Rate = key(1e-5, "peak learning rate, in place of policy.lr")
    warmup_steps: Natural = key(0, "steps of linear warm-up, in place of policy.warmup_steps")
    completion_key: Text = key("answer", "column with the text to learn; an end-of-sequence token is added")
    max_tokens: Count = key(1024, "rows with longer answers are dropped and counted")


class TrainConfig(Section):
    """A whole recipe."""

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

    _unresolved: dict[Place, str] = PrivateAttr(default_factory=dict)

    def keep_unresolved(self, texts: Mapping[Place, str]) -> None:
        """Have `recorded` write these texts in their places; a number that is a key's own value stays."""
        values = self.model_dump(mode="json")
        self._unresolved |= {
            place: text
            for place, text in texts.items()
            if len(place) != 2 or not isinstance(values[str(place[0])][place[1]], int | float)
        }

    def recorded(self) -> dict[str, Any]:
        """The recipe for a run's files, in JSON values: what the environment holds (`${oc.env:NAME}`) unresolved."""
        values = replaced(self.model_dump(mode="json"), self._unresolved)
        if self.rollout.verifiers is not None:
            values["data"]["subset"] = None  # a copy of that section, which `load_config` makes again
        return values
