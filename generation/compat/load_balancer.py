"""Choose an engine for each request: by prompt prefix, by requests in flight, by KV-cache use, or
in turn.

The engines of a service are not asked for their load. The process that submits a request counts it
(`EngineLoad`), so a choice takes microseconds and knows the latest request. Polled counts would
lag, and send a burst of requests to one engine. Only Ray actors in a plain list are polled, since
no `EngineLoad` counts their requests.
"""

import hashlib
import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

log = logging.getLogger(__name__)


class EngineLoad:
    """The load of one engine, as the process that submits its requests counts it. Safe from any
    thread.
    """

    def __init__(self) -> None:
        self.cache_usage: float | None = None
        self._unfinished = 0
        self._lock = threading.Lock()

    def submitted(self) -> None:
        """Count a request that is about to be submitted."""
        with self._lock:
            self._unfinished += 1

    def finished(self) -> None:
        """Count the end of a submitted request, whether or not it succeeded."""
        with self._lock:
            self._unfinished -= 1

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that were submitted and have not ended."""
        return self._unfinished

    def get_cache_usage(self) -> float | None:
        """Return the last reported share of the KV cache in use, 0 to 1; None before the first
        report.
        """
        return self.cache_usage


class LoadBalancer:
    """Chooses an engine for each request. Strategies are tried in order until one succeeds.

    - "prefix-aware": requests whose prompts begin alike go to the same engine, which has that
      prefix in its cache. If that engine is overloaded, "requests" decides. The choice is the same
      in every process and after a restart.
    - "requests": the engine with the fewest unfinished requests.
    - "kv-cache": the engine with the least KV cache in use; among equal ones, that with the fewest
      unfinished requests.
    - "round-robin": the engines in turn.

    Ties are broken by a seeded random generator. May be called from several threads.
    """

    def __init__(
        self,
        actors: Any,
        strategy: str | Sequence[str] | None = None,
        prefix_length: int = 8,
        overload_threshold: float = 1.5,
        *,
        overload_floor: int = 4,
        seed: int = 0,
    ) -> None:
        """Balance over `actors`, which may gain and lose members while the balancer is in use.

        Args: actors: an `AsyncVLLM`, or a list of objects with the two methods of `EngineLoad` that
            read the load, or of handles of Ray actors with these methods, which are asked at each
            choice. strategy: one strategy or several in order; by default "prefix-aware", then
            "requests". prefix_length: the number of first tokens, or words of a text, that decide
            where a prompt goes. overload_threshold: an engine is overloaded if its requests are
            more than this many times the engines' mean. overload_floor: an engine with fewer
            requests than this is never overloaded. Without a floor, the first request would
            overload its engine, and prefixes would miss their cache at low load. seed: the seed of
            the generator that breaks ties.
        """
        self.actors: list[Any] = getattr(actors, "actors", actors)
        if not isinstance(self.actors, list):
            raise ValueError("actors must be either an AsyncVLLM instance or a list of actors")
        if not self.actors:
            raise ValueError("No actors provided")
        chosen = ["prefix-aware", "requests"] if strategy is None else strategy
        self.strategies = [chosen] if isinstance(chosen, str) else list(chosen)
        self._choose: dict[str, Callable[[Any], int]] = {
            "kv-cache": lambda _: self._by_cache_usage(),
            "prefix-aware": self._by_prefix,
            "requests": lambda _: self._fewest_requests(self._counts()),
            "round-robin": lambda _: self._in_turn(),
        }
        names = list(self._choose)
        if unknown := [name for name in self.strategies if name not in names]:
            raise ValueError(
                f"Invalid strategy '{unknown[0]}'. Must be one of {{{', '.join(map(repr, names))}}}"
            )
        if not self.strategies:
            raise ValueError("At least one strategy must be provided")
        self.strategy = self.strategies[0]
        if prefix_length < 1 or overload_threshold <= 0 or overload_floor < 0:
            needed = (
                "prefix_length must be at least 1, overload_threshold above 0, overload_floor not "
                "negative"
            )
            raise ValueError(f"{needed}: not {prefix_length}, {overload_threshold} and {overload_floor}")
        self.prefix_length = prefix_length
        self.overload_threshold = overload_threshold
        self.overload_floor = overload_floor
        self._random = random.Random(seed)
        self._next_in_turn = 0
        self._turn_lock = threading.Lock()

    def select_actor(self, prompt: Any = None, request_context: Mapping[str, Any] | None = None) -> int:
        """Return the index of the engine that the next request should go to. Raises ValueError if
        there is none.

        Only "prefix-aware" uses `prompt`: a text, token ids, or a prompt dictionary of vLLM's with
        either. The `session_id` of a `request_context` is used instead of the prompt, which keeps
        the requests of a session on one engine, since they share most of their cache. Other entries
        are ignored.
        """
        if not self.actors:
            raise ValueError("No actors available for selection")
        if request_context and "session_id" in request_context:
            prompt = f"session {request_context['session_id']}"
        for strategy in self.strategies:
            if strategy == "prefix-aware" and prompt is None:
                continue
            try:
                return self._choose[strategy](prompt)
            except Exception as error:
                # The next strategy may work where an engine's load cannot be read
                log.warning(
                    "Strategy '%s' failed with error: %s. Trying next strategy...", strategy, error
                )
        log.warning("All strategies %s failed. Falling back to random selection.", self.strategies)
        return self._random.randrange(len(self.actors))

    def get_stats(self) -> dict[str, Any]:
        """Return settings, and each engine's load in `actor_stats`: empty, with an `error`, if it
        cannot be read.
        """
        stats: dict[str, Any] = {
            "strategies": self.strategies,
            "primary_strategy": self.strategy,
            "num_actors": len(self.actors),
            "prefix_length": self.prefix_length,
            "overload_threshold": self.overload_threshold,
            "round_robin_index": self._next_in_turn,
            "actor_stats": [],
        }
        try:
            stats["actor_stats"] = [
                {"actor_index": index, "pending_requests": pending, "cache_usage": usage}
                for index, (pending, usage) in enumerate(
                    zip(self._counts(), self._ask("get_cache_usage"), strict=True)
                )
            ]
        except Exception as error:  # the caller gets the error among the statistics
            log.warning("Error gathering load balancer stats: %s", error)
            stats["error"] = str(error)
        return stats

    def _counts(self) -> list[int]:
        return self._ask("get_num_unfinished_requests")

    def _ask(self, method: str) -> list[Any]:
        calls = [getattr(actor, method) for actor in self.actors]
        if not any(hasattr(call, "remote") for call in calls):
            return [call() for call in calls]
        import ray

        return list(ray.get([call.remote() for call in calls], timeout=10.0))

    def _fewest_requests(self, counts: list[int]) -> int:
        fewest = min(counts)
        if counts.count(fewest) == 1:
            return counts.index(fewest)
        return self._random.choice([i for i, count in enumerate(counts) if count == fewest])

    def _by_cache_usage(self) -> int:
        usages = self._ask("get_cache_usage")
        if None in usages:
            raise ValueError(f"engine {usages.index(None)} has not reported its KV-cache use")
        least = min(usages)
        tied = [i for i, usage in enumerate(usages) if usage - least < 1e-6]
        if len(tied) == 1:
            return tied[0]
        counts = self._counts()
        return tied[self._fewest_requests([counts[i] for i in tied])]

    def _in_turn(self) -> int:
        with self._turn_lock:
            chosen = self._next_in_turn % len(self.actors)
            self._next_in_turn = (chosen + 1) % len(self.actors)
        return chosen

    def _by_prefix(self, prompt: Any) -> int:
        digest = hashlib.blake2b(routing_key(prompt, self.prefix_length), digest_size=8).digest()
        preferred = int.from_bytes(digest, "little") % len(self.actors)
        try:
            counts = self._counts()
        except Exception as error:  # the prefix's engine is a good choice even where loads are unknown
            log.warning("Could not check actor load: %s", error)
            return preferred
        count = counts[preferred]
        overloaded = (
            count >= self.overload_floor and count * len(counts) > sum(counts) * self.overload_threshold
        )
        return self._fewest_requests(counts) if overloaded else preferred


def routing_key(prompt: Any, prefix_length: int) -> bytes:
    """Return the part of a prompt that decides where it goes: its first token ids, or a text's
    first words.

    `prompt` may be a text, token ids, or a dictionary (vLLM's `TokensPrompt`, `TextPrompt`) or
    object with either, of which ids come first. Raises ValueError for an empty prompt, or one of
    another type.
    """
    if isinstance(prompt, str):
        if words := prompt.split(None, prefix_length)[:prefix_length]:
            return ("text " + " ".join(words)).encode(errors="surrogatepass")
        raise ValueError("Empty or whitespace-only string provided")
    if isinstance(prompt, (list, tuple)):
        if len(prompt) == 0:
            raise ValueError("Empty token list provided")
        return ("ids " + " ".join([str(int(token)) for token in prompt[:prefix_length]])).encode()
    inner = prompt.get if isinstance(prompt, Mapping) else lambda name: getattr(prompt, name, None)
    for name in ("prompt_token_ids", "prompt"):
        if (part := inner(name)) is not None:
            return routing_key(part, prefix_length)
    raise ValueError(f"Unsupported prompt type: {type(prompt).__name__}")
