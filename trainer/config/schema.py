"""What a run is told: every section, every key, its type, default and meaning.

A recipe is a YAML file with these sections. Keys are overridden on the command line by `--section.key value`, values
being YAML; `includes` names files to start from, and `${NAME:default}` reads the environment (`yaml_files`).
Nothing here imports torch: `--help` and reward workers stay quick.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

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
)


class RunConfig(Section):
    """The run as a whole."""

    name: str = Field(
        default="",
        pattern=r"^([\w-][\w.-]*)?$",
        max_length=200,
        description="folder below output_dir; empty: the recipe's file name",
    )
    output_dir: Path = Field(default=Path("runs"), description="where the folders of runs live")
    seed: Seed = Field(
        default=0, description="decides prompt order and every sample, with step, prompt and sample index"
    )
    steps: Count = Field(default=100, description="rollout-and-update steps to train for, resumed ones included")
    step_deadline_s: Seconds = Field(
        default=1800, description="longest a step may take before stacks are printed and the run ends"
    )
    first_step_deadline_s: Seconds = Field(
        default=3600, description="the same for start-up and the first step, which compile"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda where there is one")
    profile: tuple[Count, Count] | None = Field(
        default=None,
        description="train only: first and last step of which rank 0 writes a trace of torch.profiler to profile/",
    )

    @property
    def folder(self) -> Path:
        """Everything the run writes is below this folder."""
        return self.output_dir / self.name


class ModelConfig(Section):
    """The model that is trained."""

    path: Text = Field(description="folder in Hugging Face format (config.json, safetensors), or a hub name")
    tokenizer: Text | None = Field(default=None, description="folder or hub name; null: the model's own")
    attn_implementation: Text = Field(default="sdpa", description="Transformers' attention on the trainer's side")
    trust_remote_code: bool = Field(default=False, description="run model code that comes with the checkpoint")


class DataConfig(Section):
    """Prompts to train and to evaluate on."""

    path: Text = Field(description="jsonl or parquet file, a folder of them, or a hub name")
    subset: Text | None = Field(default=None, description="configuration of a hub dataset, such as main")
    split: Text = Field(
        default="train", description="split of a folder or hub dataset; slices such as train[:1000] work"
    )
    eval_path: Text | None = Field(default=None, description="held-out prompts; null: path, if eval_split is given")
    eval_split: Text | None = Field(
        default=None, description="split of the held-out prompts; null: split's default, train"
    )
    eval_size: Count | None = Field(
        default=None, description="use only the first this many held-out prompts; null: all"
    )
    prompt_key: Text = Field(default="prompt", description="column with the prompt: a string, or a list of messages")
    messages_key: Text = Field(
        default="messages", description="column with a list of messages, read where prompt_key is absent"
    )
    answer_key: Text | None = Field(
        default="answer", description="column that rewards see as `answer`; null: there is none"
    )
    system_prompt: str | None = Field(default=None, description="system message put first unless the row has its own")
    apply_chat_template: bool = Field(default=True, description="false: a prompt string is tokenised as it stands")
    chat_template_kwargs: dict[str, Any] = Field(
        default={}, description="passed to the chat template, as enable_thinking: false"
    )
    max_prompt_tokens: Count = Field(
        default=1024, description="longer prompts, template included, are dropped and counted"
    )


class SamplingConfig(Section):
    """How answers are sampled in training."""

    temperature: Temperature = Field(
        default=1.0, description="divides the logits in the engine and in the trainer alike"
    )
    max_tokens: Count = Field(default=1024, description="longest answer in tokens")
    top_p: Portion = Field(default=1.0, description="must stay 1: truncation biases the gradient")
    top_k: int = Field(default=-1, ge=-1, le=10**9, description="must stay -1 (off): truncation biases the gradient")
    min_p: Share = Field(default=0.0, description="must stay 0: truncation biases the gradient")
    stop: list[Text] = Field(default=[], description="strings that end an answer")


class HeldOutConfig(Section):
    """One dataset to evaluate on. A key that is null is what `data` or `eval` says for all of them."""

    path: Text = Field(description="as data.path")
    subset: Text | None = Field(default=None, description="configuration of a hub dataset")
    split: Text = Field(default="train", description="as data.split")
    size: Count | None = Field(default=None, description="use only the first this many prompts; null: all")
    prompt_key: Text | None = Field(default=None, description="null: data.prompt_key")
    answer_key: Text | None = Field(default=None, description="null: data.answer_key")
    samples: Held | None = Field(default=None, description="null: eval.samples")
    temperature: Temperature | None = Field(default=None, description="null: eval.temperature")
    top_p: Portion | None = Field(default=None, description="null: eval.top_p")
    max_tokens: Count | None = Field(default=None, description="null: eval.max_tokens")


class EvalConfig(Section):
    """Evaluation on held-out prompts, with its own sampling; `hotbunk eval` uses it, too."""

    every: Natural = Field(default=0, description="evaluate after every this many steps and after the last; 0: never")
    before: bool = Field(default=True, description="also evaluate before the first step (where every > 0)")
    temperature: Temperature = Field(default=0.0, description="0: greedy")
    top_p: Portion = Field(default=1.0, description="nucleus sampling; 1: off")
    max_tokens: Count | None = Field(default=None, description="longest answer in tokens; null: sampling.max_tokens")
    samples: Held = Field(default=1, description="answers for each prompt; their rewards are averaged")
    k: list[Count] = Field(
        default=[], description="estimate pass@k and majority@k for these k, none above samples; empty: neither"
    )
    right_from: Amount = Field(
        default=1.0, description="an answer is right where the first reward function gives at least this"
    )
    datasets: dict[Name, HeldOutConfig] = Field(
        default={},
        description="several held-out datasets by name, in place of data.eval_path; eval/NAME/… tells of each",
    )


class EngineConfig(Section):
    """The vLLM engines."""

    tensor_parallel_size: Held = Field(default=1, description="consecutive ranks that form one engine")
    max_model_len: Count = Field(default=2048, description="prompt and answer together, in tokens")
    kv_cache_gib: Positive | None = Field(
        default=None, description="KV cache of each worker; null: gpu_memory_utilization decides"
    )
    gpu_memory_utilization: Portion = Field(
        default=0.3, description="share of a GPU's memory for weights and KV cache, where kv_cache_gib is null"
    )
    max_num_seqs: Held = Field(default=256, description="answers an engine generates at the same time")
    dtype: Dtype | None = Field(default=None, description="the engine's weights; null: policy.dtype")
    enforce_eager: bool | None = Field(default=None, description="no CUDA graphs; null: true on CPU, false on CUDA")
    load_format: Literal["auto", "dummy"] = Field(
        default="auto", description="dummy: random weights at start, as the first sync overwrites them all anyway"
    )
    plain_cpu_weights: bool = Field(
        default=False, description="CPU only: keep weights unpacked; faster for small models"
    )
    sleep: bool = Field(default=True, description="give the engine's memory back while the policy trains")
    start_timeout_s: Seconds = Field(default=600, description="longest an engine may take to start")
    logits_processors: list[str | dict[str, str]] = Field(
        default=[],
        description="pkg.mod:Name or file.py:Name: classes or factories that change logits before sampling, in the "
        "engine only (generation.engine.logits.factories)",
    )
    extra: dict[str, Any] = Field(
        default={}, description="further fields of vLLM's AsyncEngineArgs, by name, of those Hotbunk does not set"
    )


class SyncConfig(Section):
    """The weights' way from the policy into the engines."""

    verify: Literal["off", "sample", "full"] = Field(
        default="sample",
        description="compare what every worker holds with what the ranks do: not, a sample of it, or all of it",
    )
    bucket_mib: Mebibytes = Field(
        default=512,
        description="size of a staging buffer, of which two exist while weights travel; in the first update, and where "
        "engines re-process what they load, no smaller than the largest weight",
    )
    timeout_s: Seconds = Field(default=300, description="longest wait for any answer of a worker")
    replay: bool = Field(
        default=True, description="record what vLLM's loaders do with the first weights, and from then on repeat it"
    )

    zero_copy: bool = Field(
        default=False,
        description="one rank, unpacked weights: the policy computes with the engine's own, so that a step is the sync",
    )

    @field_validator("verify", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads a bare `off` as false


class PolicyConfig(Section):
    """The sharded policy and its optimizer (AdamW). Master weights are always float32."""

    backend: Literal["fsdp", "deepspeed"] = Field(default="fsdp", description="what shards the policy: FSDP2 or ZeRO")
    zero_stage: Literal[1, 2, 3] = Field(
        default=3, description="deepspeed only: what ZeRO shards, from 1, optimizer state, to 3, weights as well"
    )
    offload_optimizer: bool = Field(
        default=False, description="deepspeed only: optimizer state in the host's memory, the update on the CPU"
    )
    dtype: Dtype = Field(default="bfloat16", description="of forward and backward; gradients are reduced in float32")
    fp32_head: bool = Field(
        default=False, description="logits in float32 in the policy and in the engines, whatever their dtype"
    )
    lr: Rate = Field(default=1e-6, description="peak learning rate")
    betas: tuple[Part, Part] = Field(default=(0.9, 0.99), description="AdamW's decay rates of both moments")
    eps: Positive = Field(default=1e-8, description="AdamW's epsilon")
    weight_decay: NotNegative = Field(default=0.0, description="AdamW's decoupled weight decay")
    warmup_steps: Natural = Field(default=0, description="optimizer steps of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="learning rate after warm-up: it stays, or falls to 0 at run.steps"
    )
    max_grad_norm: Positive = Field(
        default=1.0, description="gradients with a larger global norm are scaled down to it"
    )
    activation_checkpointing: Literal["none", "every_second", "full"] = Field(
        default="none",
        description="layers whose activations are computed again in backward, for less memory and more time: none, "
        "every second one, or all (true means full, false none)",
    )
    max_skipped_steps: Count = Field(default=3, description="end the run after this many non-finite updates in a row")
    compile: bool = Field(
        default=False, description="torch.compile for norms and MLPs; fsdp only; the first steps take a minute"
    )
    reshard_after_forward: bool = Field(default=True, description="free gathered weights between forward and backward")
    offload: Literal["none", "optimizer", "all"] = Field(
        default="none",
        description="what moves to the host's memory while engines are awake: optimizer state, or masters, too",
    )
    offload_reference: bool | None = Field(
        default=None,
        description="keep the frozen reference in the host's memory but while it scores; null: true on CUDA",
    )
    shard_size: Count | None = Field(
        default=None,
        description="fsdp only: neighbouring ranks the model is cut over, such as those of a machine, with a copy on "
        "every such group (HSDP); null: all ranks",
    )

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _all_or_none(cls, value: object) -> object:
        return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


class LoraConfig(Section):
    """Low-rank adapters, trained instead of the weights, which stay as they are on disk (needs peft)."""

    rank: int = Field(default=0, ge=0, le=2**16, description="rank of the adapters; 0: none, all weights are trained")
    alpha: Count = Field(default=32, description="adapters are multiplied by alpha / rank")
    use_rslora: bool = Field(default=False, description="by alpha / √rank instead, which suits large ranks")
    dropout: Part = Field(default=0.0, description="share of an adapter's inputs that training leaves out")
    target_modules: Literal["all-linear"] | list[Text] = Field(
        default="all-linear",
        description="layers with adapters: all linear ones but the head, or names such as q_proj",
    )
    seed: Seed = Field(default=0, description="decides what the adapters start from")
    sync: Literal["adapter", "merged"] = Field(
        default="adapter",
        description="what the engines get: the adapter alone, beside the base they loaded themselves; or whole weights "
        "with the adapter added, which costs a full sync and generates faster",
    )

    @property
    def engines_apply(self) -> bool:
        """Whether the adapter goes to the engines by itself, for them to apply."""
        return self.rank > 0 and self.sync == "adapter"


class CriticConfig(Section):
    """The value model of PPO; nothing else loads it. Keys that are not here it takes from `policy`."""

    shared: bool = Field(
        default=False,
        description="a value head on the policy's own trunk, learned with its loss, in place of a model of its own",
    )
    path: Text | None = Field(
        default=None,
        description="model or reward model (one label) that a model of its own starts from; null: model.path",
    )
    lr: Rate = Field(default=1e-5, description="peak learning rate of a model of its own")
    warmup_steps: Natural = Field(default=0, description="its optimizer steps of linear warm-up")


class BatchConfig(Section):
    """How much is generated and trained on in a step."""

    prompts_per_step: Held = Field(default=32, description="prompts in a step, over all ranks")
    tokens_per_micro_batch: Count = Field(default=16384, description="tokens in a forward pass; memory grows with it")
    packing: bool = Field(
        default=True,
        description="sequences end to end, without padding; false: padded to the longest, which counts as tokens, too",
    )
    updates_per_step: Held = Field(
        default=1, description="optimizer steps a pass over the batch is cut into, between prompts, as evenly as can be"
    )


class RewardFunction(Section):
    """One reward function and its weight."""

    name: Text = Field(
        description="exact_match, numeric_match, math_verify, format_regex, pkg.mod:Name or file.py:Name"
    )
    weight: Amount = Field(default=1.0, description="factor in the sum of rewards")
    kwargs: dict[str, Any] = Field(default={}, description="further keyword arguments of the function")


class RewardConfig(Section):
    """What makes an answer good. Functions run in processes of their own."""

    functions: list[RewardFunction] = Field(
        default=[], description="entries of name, weight and kwargs; their weighted sum counts"
    )
    timeout_s: CallSeconds = Field(
        default=10, description="longest a function may take for one answer before its process is killed"
    )
    workers: Processes = Field(default=2, description="processes on each rank that leads an engine")
    max_error_rate: Share = Field(default=0.1, description="end the run when a larger share of a step's calls fails")
    error_reward: Amount = Field(default=0.0, description="reward of an answer whose function raised or hung")


class RolloutConfig(Section):
    """How a prompt becomes an answer: nothing here, one generation; else tools, an environment, or your own code.

    Objects are named pkg.mod:Name or path/file.py:Name.
    """

    tools: list[Text] = Field(default=[], description="typed Python functions, sync or async, that the policy may call")
    environment: Text | None = Field(
        default=None, description="class with reset(**row), public methods as tools, get_reward() and close()"
    )
    custom: Text | None = Field(default=None, description="async def (llm, row, sampling) -> Trajectory or several")
    sampler: Text | None = Field(
        default=None, description="object called with (llm, prompts, sampling_params), or with such a method generate"
    )
    client: Text | None = Field(
        default=None, description="async def (base_url, api_key, model, row) with any OpenAI client; returns a reward"
    )
    kwargs: dict[str, Any] = Field(default={}, description="keyword arguments of whichever of these four is named")
    max_turns: Held = Field(default=8, description="answers in an episode; sampling.max_tokens is for each of them")
    tool_parser: Text = Field(
        default="hermes",
        description="how calls are written: hermes, inline (<function> name(1, 2) </function>), or one of vLLM's",
    )
    describe_tools: bool = Field(
        default=True, description="give schemas to the chat template; false: the prompts describe the tools"
    )
    tool_timeout_s: CallSeconds = Field(default=30, description="longest a call may take; then its reply is an error")
    max_concurrency: Held = Field(default=64, description="calls that run at the same time, on each engine's leader")
    max_tool_tokens: Count = Field(default=1024, description="tokens of a reply; what is longer is cut")
    tool_error: str = Field(default="Error: {error}", description="how a failed call reads to the policy")
    max_error_rate: Share = Field(default=0.1, description="end the run when a larger share of a step's episodes fails")

    @property
    def code(self) -> list[str]:
        """Which of the keys that name one's own rollout are set; such code may give rewards itself."""
        return [key for key in ("environment", "custom", "sampler", "client") if getattr(self, key) is not None]


class CheckpointConfig(Section):
    """What is saved, and what a run continues from."""

    every: Natural = Field(
        default=0, description="save after every this many steps, and at the end; 0: at the end only"
    )
    background: bool = Field(
        default=True, description="write from a copy in host memory while training goes on; false: training waits"
    )
    keep: Count = Field(default=2, description="newest complete checkpoints to keep")
    keep_best: Natural = Field(default=0, description="checkpoints with the best best_metric to keep besides")
    best_metric: Text = Field(
        default="eval/accuracy", description="figure of metrics.jsonl, the larger the better; -NAME: the smaller"
    )
    grace_s: float = Field(
        default=60,
        ge=0,
        le=1e6,
        description="seconds that SIGTERM leaves to end the step and save; rollouts are given up after half; 0: none",
    )
    resume: Text = Field(
        default="auto", description="auto: the run's newest complete checkpoint, if any; none; or a path"
    )
    resume_anyway: list[str] = Field(
        default=[],
        description="keys or sections, of those a resumed run is compared by, that may differ from the checkpoint's",
    )
    export_hf: bool = Field(default=True, description="write the final model in Hugging Face format")


class TrackingConfig(Section):
    """Where figures go, besides metrics.jsonl."""

    wandb: Literal["auto", "offline", "online", "disabled"] = Field(
        default="auto", description="auto: online when logged in, else offline"
    )
    project: Text = Field(default="hotbunk", description="Weights & Biases project")
    completions_per_step: Natural = Field(default=8, description="answers written to completions.jsonl in each step")


class SftConfig(Section):
    """`hotbunk sft`: supervised warm start on the answers in the data; model, data, policy and batch apply too."""

    steps: Count = Field(default=500, description="optimizer steps")
    batch_size: Held = Field(default=64, description="rows in a step, over all ranks")
    lr: Rate = Field(default=1e-5, description="peak learning rate, in place of policy.lr")
    warmup_steps: Natural = Field(default=0, description="steps of linear warm-up, in place of policy.warmup_steps")
    completion_key: Text = Field(
        default="answer", description="column with the text to learn; an end-of-sequence token is added"
    )
    max_tokens: Count = Field(default=1024, description="rows with longer answers are dropped and counted")


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

    @property
    def held_out(self) -> dict[str, HeldOutConfig]:
        """What there is to evaluate on, by name; what data.eval_path or eval_split stands for has none."""
        data = self.data
        if data.eval_path is None and data.eval_split is None:
            return self.eval.datasets
        subset = data.subset if data.eval_path in (None, data.path) else None
        path, split = data.eval_path or data.path, data.eval_split or "train"
        return {"": HeldOutConfig(path=path, subset=subset, split=split, size=data.eval_size)} | self.eval.datasets
