"""Read from the model's chat template which tokens end an answer, and which keys it uses."""

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _get_template_variables

from generation.messages import ChatForm
from generation.trajectory import Trajectory
from trainer.config.schema import DataConfig
from trainer.errors import UserError, shortened

_WORD = "forty-two"  # stands for everything that the assistant writes; no template changes it
_QUESTION = {"role": "user", "content": "?"}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"at": _WORD}}}
_TURNS: dict[str, dict[str, Any]] = {
    "an answer": {"content": _WORD},
    "an answer after a thought": {"content": _WORD, "reasoning_content": _WORD, "thinking": _WORD},
    "a tool call": {"content": "", "tool_calls": [_CALL]},
    "a tool call after text": {"content": _WORD, "tool_calls": [_CALL]},
}
"""An assistant's messages that a template may end differently. The names of thoughts are those of
Qwen3 and gpt-oss.
"""
# Transformers reads these itself
_NOT_TEMPLATES = {"add_generation_prompt", "chat_template", "continue_final_message"}


@dataclass(frozen=True)
class EndTokens:
    """The tokens that end an answer.

    Attributes: eos: the EOS ids of the tokenizer and of generation_config.json. The engine does not
        read that file, so all ids are passed with each request. added: further ids at which answers
        end. of_turns: the ids with which the chat template ends an assistant's turn and which it
        writes nowhere else in a turn, whether answers end there or not. remarks: sentences about
        how `added` came about.
    """

    eos: tuple[int, ...] = ()
    added: tuple[int, ...] = ()
    of_turns: tuple[int, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def ids(self) -> list[int]:
        """All ids that end an answer."""
        return sorted({*self.eos, *self.added})

    def removed_from(self, answer: Sequence[int]) -> list[int]:
        """Return the ids of an answer without the token that ended it."""
        ended = bool(answer) and answer[-1] in self.ids
        return list(answer[:-1] if ended else answer)

    def are_passed_by(self, trajectory: Trajectory) -> bool:
        """Return True if the policy went on after a token with which the chat template ends a
        turn.
        """
        answer = trajectory.response_ids[trajectory.answer_start : -1]
        return not {*self.of_turns}.isdisjoint(answer)

    def resumed(self, added: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> "EndTokens":
        """Return the end tokens of a run that goes on from a checkpoint, whose answers ended at EOS
        and at `added`.
        """
        if tuple(added) == self.added:
            return self
        names = token_names(tokenizer, [*self.eos, *added])
        chosen = token_names(tokenizer, self.ids)
        remark = (
            f"answers end with {names}, as they did before the checkpoint; in a new run they would end "
            f"with {chosen} (sampling.stop_token_ids)"
        )
        return replace(self, added=tuple(added), remarks=(remark,))


def end_tokens(
    model: str,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig | None = None,
    stop_token_ids: Sequence[int] | None = None,
) -> EndTokens:
    """Find the tokens that end an answer: EOS, and `stop_token_ids` or, if these are None, what the
    template implies.

    The chat template's end of an assistant's turn becomes one, unless the template also writes it
    within an answer. `data` says whether and how prompts are rendered; None: with the chat template
    and no arguments. Raises UserError if one of `stop_token_ids` is not a token.
    """
    eos = _eos_ids(model, tokenizer)
    kwargs = {} if data is None else data.chat_template_kwargs
    turns = [turn for turn in _rendered_turns(tokenizer, kwargs) if turn.special]
    inner = {token for turn in turns for token in turn.before}
    of_turns = tuple(sorted({turn.end for turn in turns} - inner))
    if stop_token_ids is not None:
        for token in stop_token_ids:
            if token >= len(tokenizer):
                raise UserError(
                    f"sampling.stop_token_ids: {token} is not one of the tokenizer's {len(tokenizer)} "
                    "ids"
                )
        return EndTokens(eos, tuple(sorted({*stop_token_ids} - {*eos})), of_turns)
    if data is not None and not data.apply_chat_template:
        return EndTokens(eos, of_turns=of_turns)
    added: list[int] = []
    remarks: dict[int, str] = {}
    for turn in turns:
        end = turn.end
        if end in remarks or {*turn.special} & {*eos, *added}:
            continue
        name = token_names(tokenizer, [end])
        why = f"the chat template ends {turn.name} with it, and EOS is {token_names(tokenizer, eos)}"
        if within := next((other.name for other in turns if end in other.before), None):
            remarks[end] = (
                f"answers do not end with {name}: {why}, but within {within} it writes it, too; "
                "sampling.stop_token_ids names the tokens at which answers should end"
            )
        else:
            added.append(end)
            remarks[end] = (
                f"answers end with {name}, too: {why} (sampling.stop_token_ids: [] leaves it out)"
            )
    return EndTokens(eos, tuple(sorted(added)), of_turns, tuple(remarks.values()))


def unread_keys(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> Iterator[str]:
    """Yield a sentence about each argument of the chat template that the template never reads."""
    kwargs = data.chat_template_kwargs
    if not data.apply_chat_template or tokenizer.chat_template is None:
        return
    try:
        template = tokenizer.get_chat_template(kwargs.get("chat_template"), kwargs.get("tools"))
    except ValueError:  # several templates without a default, which rendering reports
        return
    variables = _get_template_variables(template)
    for key in sorted(kwargs.keys() - variables - _NOT_TEMPLATES):
        if key == "tools":
            yield (
                "the chat template never reads tools, so prompts do not describe them: do so in "
                "data.system_prompt, and set rollout.describe_tools to false"
            )
            continue
        close = difflib.get_close_matches(key, variables, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        yield f"data.chat_template_kwargs has {key}, which the chat template never reads{hint}"


@dataclass(frozen=True)
class _Turn:
    """An assistant's turn as the template renders it.

    Attributes:
        before: the ids up to the assistant's last word.
        special: the special tokens after that word, or the added tokens, if none is special.
    """

    name: str
    before: list[int]
    special: list[int]

    @property
    def end(self) -> int:
        """The token that ends the turn.

        A template may open the next turn unasked, so it is the first token after an answer. Calls
        have ends of their own, so it is the last token after a call.
        """
        return self.special[-1 if "call" in self.name else 0]


def _rendered_turns(
    tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
) -> Iterator[_Turn]:
    """Yield the turns that the template can render, as the last ones of their conversations."""
    settings = {**template_kwargs, "add_generation_prompt": False, "continue_final_message": False}

    def template(messages: Sequence[dict[str, Any]], **changes: Any) -> str:
        return str(
            tokenizer.apply_chat_template(list(messages), tokenize=False, **{**settings, **changes})
        )

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def special(ids: list[int]) -> list[int]:
        added = tokenizer.added_tokens_decoder
        marks = [token for token in ids if token in added]
        return [token for token in marks if added[token].special] or marks

    if tokenizer.chat_template is None:
        return
    form = ChatForm(template)
    for name, message in _TURNS.items():
        try:
            question = form.render([_QUESTION], add_generation_prompt=False)
            text = form.render(
                [_QUESTION, {"role": "assistant", **message}], add_generation_prompt=False
            )
        except ValueError:  # a template need not know thoughts or calls
            continue
        pairs = zip(question, text, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        before, word, after = text[shared:].rpartition(_WORD)
        if word:
            yield _Turn(name, encode(before), special(encode(after)))


def _eos_ids(model: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokenizer's EOS id and the EOS ids in generation_config.json, if any; chat models
    have two.
    """
    ids = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    try:
        listed = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # the model has no such file
        listed = None
    if listed is not None:
        ids |= set(listed if isinstance(listed, list) else [listed])
    return tuple(sorted(ids))


def token_names(tokenizer: PreTrainedTokenizerBase, ids: Collection[int]) -> str:
    """Return tokens with their ids, such as <|im_end|> (2) and <|endoftext|> (0); "not set" if
    there are none.
    """
    names = [f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in ids]
    return shortened(" and ".join(names), 120) or "not set"
