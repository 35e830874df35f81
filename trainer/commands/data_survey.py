"""A survey of a recipe's data: what the model is shown, its length, the columns that are read, and
what looks wrong.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.chat_template import end_tokens, token_names, unread_keys
from trainer.config.schema import DataConfig, HeldOutConfig, TrainConfig
from trainer.data import RenderedRow, columns_read, load_tokenizer, prompt_rows
from trainer.data.summary import TokenLengths, shown_key
from trainer.rewards.loading import BoundReward, TrlReward
from trainer.rewards.reward_pool import RewardPool
from trainer.rewards.trial import judge_answers
from trainer.rollouts.level import RolloutLevel
from trainer.sft_rows import transcript_rows


@dataclass(frozen=True)
class Example:
    """A row as the model sees it.

    Attributes:
        pieces: the text in order, with special tokens, and for each piece whether it is trained on.
        tools: the names of the tools that the chat template has got.
    """

    row: int
    pieces: list[tuple[str, bool]]
    tools: list[str]
    tokens: int
    images: int


@dataclass
class Survey:
    """The facts about a recipe's data.

    Attributes: path: the data's path. rows, used: number of rows, and of those that are not
        dropped. lengths: of the rows that have tokens, dropped ones included; None if no row has
        any. limit: the most tokens of a row that is used. ends: names of the tokens that end an
        answer. columns_read: the columns from which prompts are made. columns_passed: the other
        columns; `readers` get them with the row, and nobody reads them if there are none. readers:
        the reward functions and keys of `rollout` that get all columns. dropped, remarks: indices
        of rows by the reason why they are dropped, and by what is suspicious in them, answers for
        which a reward can never be 1 among it. duplicates: pairs of a row and the first row with
        the same tokens. shared: by evaluation dataset, the rows of the training data that occur in
        it, too. template: sentences about the chat template. examples: the first rows that are
        used.
    """

    path: str
    limit: int
    rows: int = 0
    used: int = 0
    lengths: TokenLengths | None = None
    ends: list[str] = field(default_factory=list)
    columns_read: list[str] = field(default_factory=list)
    columns_passed: list[str] = field(default_factory=list)
    readers: list[str] = field(default_factory=list)
    dropped: dict[str, list[int]] = field(default_factory=dict)
    remarks: dict[str, list[int]] = field(default_factory=dict)
    duplicates: list[tuple[int, int]] = field(default_factory=list)
    shared: dict[str, list[int]] = field(default_factory=dict)
    template: list[str] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)


def survey(config: TrainConfig, examples: int, *, sft: bool = False) -> Survey:
    """Read all rows of a recipe's data, as `hotbunk train` or `hotbunk sft` would, and return the
    facts about them.

    Only digests and lengths of rows are kept. Raises UserError that names the file, and the row, if
    data cannot be read or a row cannot be used.
    """
    tokenizer = load_tokenizer(config.model)
    level = RolloutLevel(config, tokenizer)
    rewards = RewardPool(config.reward)
    data = level.data.model_copy(update={"answer_key": None}) if sft else rewards.columns(level.data)

    def rendered(held_out: HeldOutConfig | None = None) -> Iterator[RenderedRow]:
        if sft:
            return transcript_rows(config, tokenizer, held_out)
        return prompt_rows(data, tokenizer, level.image_rules, held_out=held_out)

    ends = end_tokens(config.model.path, tokenizer, data, config.sampling.stop_token_ids)
    facts = Survey(data.path, data.max_prompt_tokens + (config.sft.max_tokens if sft else 0))
    facts.ends = [token_names(tokenizer, [token]) for token in ends.ids]
    facts.template = [*unread_keys(tokenizer, data), *ends.remarks]
    facts.readers = [] if sft else _readers(rewards.functions, config)
    read = columns_read(data)
    read += [config.sft.completion_key] if sft else _named_by_rewards(rewards.functions)
    first_rows: dict[bytes, int] = {}
    lengths: list[int] = []

    def used_rows() -> Iterator[tuple[int, dict[str, Any]]]:
        """Add all rows to the facts, and yield those that are not dropped."""
        for row in rendered():
            if not facts.rows:
                _add_columns(facts, row, read, data)
            _add(facts, row, first_rows)
            if row.token_ids:
                lengths.append(len(row.token_ids))
            if row.dropped:
                continue
            if len(facts.examples) < examples:
                pieces = _pieces(row, tokenizer)
                tools = [str((tool.get("function") or tool).get("name")) for tool in row.tools]
                facts.examples.append(
                    Example(row.index, pieces, tools, len(row.token_ids), len(row.images))
                )
            yield row.index, row.row

    functions = [] if sft else rewards.functions
    reasons: dict[tuple[str, type], str] = {}  # why a function can never be 1 for an answer of this type
    for judgement in judge_answers(functions, used_rows(), tokenizer, config.reward.timeout_s):
        if judgement.reason:
            kind = judgement.label, type(judgement.answer)
            reason = reasons.setdefault(
                kind, f"reward {judgement.label!r} can never be 1, since {judgement.reason}"
            )
            facts.remarks.setdefault(reason, []).append(judgement.row)
    facts.lengths = TokenLengths.of(lengths) if lengths else None
    for name, dataset in config.eval.datasets.items() if config.eval.every else ():
        keys = {shown_key(row.token_ids, row.images) for row in rendered(dataset)}
        facts.shared[name] = sorted(first_rows[key] for key in keys & first_rows.keys())
    return facts


def _add_columns(facts: Survey, row: RenderedRow, read: Sequence[str], data: DataConfig) -> None:
    """Add the columns, by whether prompts, answers or rewards are made from them."""
    fields = {key.partition(".")[0] for key in read}
    for name in row.row:
        if name == "answer" and data.answer_key not in (None, "answer"):
            # The row keeps a copy of that column for rewards.
            continue
        columns = facts.columns_read if name in fields or name in read else facts.columns_passed
        columns.append(name)


def _add(facts: Survey, row: RenderedRow, first_rows: dict[bytes, int]) -> None:
    """Add a row to the facts; `first_rows` has the first row with each key."""
    facts.rows += 1
    for remark in row.remarks:
        facts.remarks.setdefault(remark, []).append(row.index)
    if row.dropped:
        facts.dropped.setdefault(row.dropped, []).append(row.index)
        return
    facts.used += 1
    first = first_rows.setdefault(shown_key(row.token_ids, row.images), row.index)
    if first != row.index:
        facts.duplicates.append((row.index, first))


def _pieces(row: RenderedRow, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """Return a row's text in pieces that are trained or not; an image is shown as one of its
    tokens.
    """
    if not row.learned:
        return [(row.text, False)]
    repeated = {index for start, length in row.image_spans for index in range(start + 1, start + length)}
    tokens = [
        pair
        for index, pair in enumerate(zip(row.token_ids, row.learned, strict=True))
        if index not in repeated
    ]
    pieces = []
    for trained, run in groupby(tokens, lambda pair: pair[1]):
        pieces.append((tokenizer.decode([token for token, _ in run]), bool(trained)))
    return pieces


def _readers(rewards: Sequence[BoundReward], config: TrainConfig) -> list[str]:
    """Return the names of whatever gets entire rows and may read any column."""
    readers = [f"rollout.{key}" for key in config.rollout.code]
    for reward in rewards:
        trl = reward.function if isinstance(reward.function, TrlReward) else None
        if "row" in reward.keywords and (trl is None or trl.names is None):
            readers.append(f"reward {reward.label}")
    return readers


def _named_by_rewards(rewards: Sequence[BoundReward]) -> list[str]:
    """Return the columns that functions with TRL's signature ask for by name, and other parameters
    of theirs.
    """
    functions = [reward.function for reward in rewards if isinstance(reward.function, TrlReward)]
    return [name for function in functions for name in function.names or ()]
