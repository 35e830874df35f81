"""What every generation backend takes and gives: token ids in, token ids out, in right-padded batches."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, NotRequired, TypedDict

import torch

from .batch import BatchedDataDict


class ResourcesConfig(TypedDict, total=False):
    """Where engines that stand apart from the trainer run."""

    gpus_per_node: int | None
    num_nodes: int | None


class ColocatedConfig(TypedDict):
    """Whether engine and trainer share their devices, so that the engine sleeps between generations."""

    enabled: bool
    resources: NotRequired[ResourcesConfig]


class GenerationConfig(TypedDict):
    """How responses are drawn, for any backend.

    `top_k` None or -1 and `top_p` 1.0 truncate nothing; `pad_token_id` is what rows are padded with, 0 by default;
    `stop_strings` hold for every sample, beside those a sample brings itself.
    """

    backend: str
    model_name: str
    max_new_tokens: int
    temperature: float
    top_p: NotRequired[float]
    top_k: NotRequired[int | None]
    stop_token_ids: NotRequired[list[int] | None]
    stop_strings: NotRequired[list[str] | None]
    pad_token_id: NotRequired[int]
    colocated: NotRequired[ColocatedConfig]


class GenerationDatumSpec(TypedDict):
    """What is generated from: `input_ids` [B, S], right-padded integers; `input_lengths` [B]; stop strings by sample
    (None where it has none of its own).
    """

    input_ids: torch.Tensor
    input_lengths: torch.Tensor
    stop_strings: NotRequired[list[list[str] | None]]
    __extra__: NotRequired[Any]


class GenerationOutputSpec(TypedDict):
    """What was generated, on the CPU.

    Attributes:
        output_ids: [B, S + the longest response], the input's dtype: each row its prompt, its response, padding.
        generation_lengths: [B] int64, tokens of the response.
        unpadded_sequence_lengths: [B] int64, tokens of prompt and response together.
        logprobs: as `output_ids`, float32: the log-probability (nats) of the token at the same place under the
            distribution it was drawn from; 0 on prompt and padding.
        truncated: [B] bool, whether the response was cut at its longest length, or where the context ends.
        errors: B strings, empty for a sample that was generated; otherwise what went wrong with this one, whose row
            then holds its prompt alone.
    """

    output_ids: torch.Tensor
    generation_lengths: torch.Tensor
    unpadded_sequence_lengths: torch.Tensor
    logprobs: torch.Tensor
    truncated: torch.Tensor
    errors: list[str]
    __extra__: NotRequired[Any]


class GenerationInterface(ABC):
    """A generation backend. Every failure is raised: what returns a bool returns True."""

    @abstractmethod
    def init_collective(self, ip: str, port: int, world_size: int, *, train_world_size: int) -> list[Future[None]]:
        """Start joining the process group that weights are broadcast in; wait for the futures when the trainer's ranks
        are joining, too.
        """

    @abstractmethod
    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """One response to every prompt, in the order of the prompts; an empty batch gives an empty batch."""

    @abstractmethod
    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Take the memory that generation needs. Free of charge when it is held already."""

    @abstractmethod
    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Give memory back, and forget what was computed with these weights."""

    def shutdown(self) -> bool:
        """Stop everything that was started; safe to call twice."""
        return True

    def prepare_refit_info(self, state_dict_info: Mapping[str, tuple[Any, Any]]) -> None:
        """Announce what weights will come: name -> (shape, dtype)."""
        raise NotImplementedError(f"{type(self).__name__} takes no weights while it runs")

    def update_weights_via_ipc_zmq(self) -> list[Future[bool]]:
        """Start to receive weights from trainer ranks on the same devices."""
        raise NotImplementedError(f"{type(self).__name__} takes no weights from its own device")

    def update_weights_from_collective(self) -> list[Future[bool]]:
        """Start to receive weights by broadcast, in the group of `init_collective`."""
        raise NotImplementedError(f"{type(self).__name__} takes no weights by broadcast")
