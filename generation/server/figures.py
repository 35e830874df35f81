"""The server's figures, as Prometheus reads them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from starlette.responses import Response

from generation.engine.engine import Engine
from generation.engine.lifecycle import EngineStateError
from generation.server.conversations import FIGURES, Conversations


def exposition(worker: Engine, conversations: Conversations, requests: Counter[tuple[str, int]]) -> Response:
    """vLLM's figures, where the engine keeps any, and our own. `requests` are those answered, by path and status."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    class Own:
        def collect(self) -> Iterator[Any]:
            answered = CounterMetricFamily("hotbunk_requests", "requests answered", labels=["path", "status"])
            for (path, status), count in sorted(requests.items()):
                answered.add_metric([path, str(status)], count)
            yield answered
            waiting = sum(each.history.retemplated for each in conversations.values())
            for name, meaning in FIGURES.items():
                count = conversations.counts[name] + (waiting if name == "retemplated" else 0)
                yield CounterMetricFamily(f"hotbunk_{name}", meaning, value=count)
            yield GaugeMetricFamily("hotbunk_trajectories", "trajectories being captured", value=len(conversations))
            with suppress(EngineStateError):  # it sleeps
                version = worker.state.usable_version()
                yield GaugeMetricFamily("hotbunk_weight_version", "the version of the weights", value=version)

    own = CollectorRegistry()
    own.register(Own())
    text = generate_latest(own) + generate_latest(get_prometheus_registry())
    return Response(text, media_type=CONTENT_TYPE_LATEST)
