"""Metrics in Prometheus's text form: those of vLLM that others look at, and the simulator's own instruments."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backhaul_simulator.requests import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric."""

    name: str
    kind: str
    """`counter` (whose name ends in `_total`) or `gauge`."""
    help: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def exposition(samples: Iterable[Sample]) -> str:
    """Returns the text form; samples of one name stay together."""
    families: dict[str, list[Sample]] = {}
    for sample in samples:
        families.setdefault(sample.name, []).append(sample)
    return "\n".join([*_lines(families), ""])


def _lines(families: Mapping[str, Sequence[Sample]]) -> Iterator[str]:
    for name, samples in families.items():
        family = name.removesuffix("_total") if samples[0].kind == "counter" else name
        yield f"# HELP {family} {samples[0].help}"
        yield f"# TYPE {family} {samples[0].kind}"
        for sample in samples:
            labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in sample.labels.items())
            yield f"{name}{{{labels}}} {float(sample.value)}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def engine_samples(stats: Stats, *, rank: int, model: str, block_size: int) -> Iterator[Sample]:
    """Yields what vLLM tells of an engine (`v1/metrics/loggers.py`)."""
    labels = {"engine": str(rank), "model_name": model}

    def gauge(name: str, text: str, value: float, **more: str) -> Sample:
        return Sample(f"vllm:{name}", "gauge", text, value, {**labels, **more})

    def counter(name: str, text: str, value: float, **more: str) -> Sample:
        return Sample(f"vllm:{name}_total", "counter", text, value, {**labels, **more})

    yield gauge("num_requests_running", "Number of requests in model execution batches.", stats.running)
    yield gauge("num_requests_waiting", "Number of requests waiting to be processed.", stats.waiting)
    usage = 1 - stats.blocks_free / stats.blocks
    yield gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", usage)
    yield counter("prefix_cache_queries", "Prefix cache queries, in tokens.", stats.prefix_queries)
    yield counter("prefix_cache_hits", "Prefix cache hits, in tokens.", stats.prefix_hits)
    yield counter("num_preemptions", "Cumulative number of preemption from the engine.", stats.preemptions)
    yield counter("prompt_tokens", "Number of prefill tokens processed.", stats.prompt_tokens)
    by_source = {
        "local_compute": stats.prompt_tokens - stats.local_tokens - stats.external_tokens,
        "local_cache_hit": stats.local_tokens,
        "external_kv_transfer": stats.external_tokens,
    }
    for source, count in by_source.items():
        yield counter("prompt_tokens_by_source", "Number of prompt tokens by source.", count, source=source)
    yield counter("generation_tokens", "Number of generation tokens processed.", stats.generation_tokens)
    for reason, count in stats.finished.items():
        yield counter("request_success", "Count of successfully processed requests.", count, finished_reason=reason)
    info = {"block_size": str(block_size), "num_gpu_blocks": str(stats.blocks + 1), "engine": str(rank)}
    info["enable_prefix_caching"] = "True"
    yield Sample("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig", 1, info)


def ledger_samples(ledger: Mapping[str, Any], *, rank: int) -> Iterator[Sample]:
    """Yields the instruments' figures; those by kind have the label `kind`, and those of each kind the label `what`."""
    labels = {"engine": str(rank)}
    for name, value in ledger.items():
        for more, number in _numbers(value, ("kind", "what")):
            if name != "rank":
                yield Sample(f"simulator_{name}", "gauge", f"The instruments' {name}.", number, {**labels, **more})


def _numbers(value: Any, labels: Sequence[str]) -> Iterator[tuple[dict[str, str], float]]:
    if isinstance(value, int | float):
        yield {}, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            for more, number in _numbers(inner, labels[1:]):
                yield {labels[0]: str(key), **more}, number
