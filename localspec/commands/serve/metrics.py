"""What the server counts, for ``/v1/localspec/stats`` and, in Prometheus' text format, for ``/metrics``."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from localspec.runtime.stream import Reply
from localspec.spec_decode.rounds import SpecStats

OUTCOMES = ("answered", "cancelled", "invalid", "rejected", "failed")
"""How a request ends: answered, its client left, a wrong request (4xx), turned away (429, 503), failed (500)."""

_OF_ONE_ANSWER = ("time_to_first_token_s", "estimated_plain_tokens_per_second", "estimated_speedup", "reason")
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class Histogram:
    """Counts of values in ranges, cumulative when written, as Prometheus has them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str) -> Iterator[str]:
        below = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            below += count
            le = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f'{name}_bucket{{le="{le}"}} {below}'
        yield f"{name}_sum {self.total:.6f}"
        yield f"{name}_count {below}"


class Metrics:
    """Totals since the start. Used from the event loop only."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        self.stats = SpecStats()
        self.request_seconds = Histogram(_SECONDS)
        self.first_token_seconds = Histogram(_SECONDS)
        self.token_seconds = Histogram(_TOKEN_SECONDS)

    def finished(self, endpoint: str, outcome: str, seconds: float) -> None:
        """A request is over, one way or the other."""
        self.requests[endpoint, outcome] += 1
        if outcome == "answered":
            self.request_seconds.observe(seconds)

    def count(self, reply: Reply) -> None:
        """An answer is complete, or was cut short."""
        stats = reply.stats
        self.stats = SpecStats.total([self.stats, stats])
        if stats.time_to_first_token_s is not None:
            self.first_token_seconds.observe(stats.time_to_first_token_s)
        if stats.completion_tokens:
            self.token_seconds.observe(stats.seconds_decode / stats.completion_tokens)

    @property
    def mean_request_seconds(self) -> float:
        """How long a request takes, by those that were answered."""
        n = sum(self.request_seconds.counts)
        return self.request_seconds.total / n if n else 2.0

    def as_dict(self) -> dict[str, Any]:
        """The totals under the names of ``SpecStats``."""
        by_outcome: Counter[str] = Counter()
        for (_, outcome), count in self.requests.items():
            by_outcome[outcome] += count
        totals = {name: value for name, value in self.stats.items() if name not in _OF_ONE_ANSWER}
        return {"requests": {outcome: by_outcome[outcome] for outcome in OUTCOMES}, **totals}

    def prometheus(self, gauges: Sequence[tuple[str, str, float]], info: dict[str, str]) -> str:
        """The text exposition format, version 0.0.4.

        Args:
            gauges: (name, what it is, value) of what is known elsewhere.
            info: labels of ``localspec_info``.
        """
        lines: list[str] = []

        def family(name: str, kind: str, about: str, samples: Iterable[str]) -> None:
            lines.extend((f"# HELP {name} {about}", f"# TYPE {name} {kind}", *samples))

        stats = self.stats
        family("localspec_info", "gauge", "What is served.", [_sample("localspec_info", info, 1)])
        for name, about, value in gauges:
            family(name, "gauge", about, [_sample(name, {}, value)])
        requests = [({"endpoint": e, "outcome": o}, n) for (e, o), n in sorted(self.requests.items())]
        sources = sorted(stats.by_source.items())
        positions = [({"position": str(i)}, n) for i, n in enumerate(stats.accepted_per_position)]
        phases = [({"phase": phase}, stats[f"seconds_{phase}"]) for phase in ("draft", "other", "prompt", "verify")]
        counters: tuple[tuple[str, str, Sequence[tuple[dict[str, str], float]]], ...] = (
            ("requests", "Requests by how they ended.", requests),
            ("prompt_tokens", "Tokens of prompts.", [({}, stats.prompt_tokens)]),
            ("cached_prompt_tokens", "Those that were in memory.", [({}, stats.cached_tokens)]),
            ("completion_tokens", "Tokens of answers.", [({}, stats.completion_tokens)]),
            ("rounds", "Passes of the target that emitted tokens.", [({}, stats.num_rounds)]),
            (
                "draft_tokens",
                "Draft tokens sent to the target, by drafter.",
                [({"source": source}, counts["num_draft_tokens"]) for source, counts in sources],
            ),
            (
                "accepted_tokens",
                "Draft tokens it accepted, by drafter.",
                [({"source": source}, counts["num_accepted_tokens"]) for source, counts in sources],
            ),
            ("accepted_tokens_per_position", "Accepted draft tokens by place in the draft.", positions),
            ("seconds", "Time by what it went into.", phases),
        )
        for stem, about, samples in counters:
            name = f"localspec_{stem}_total"
            family(name, "counter", about, [_sample(name, labels, value) for labels, value in samples])
        for stem, about, histogram in (
            ("request", "From a request to the end of its answer.", self.request_seconds),
            ("time_to_first_token", "From its turn to the first token.", self.first_token_seconds),
            ("time_per_output_token", "Decoding time over tokens.", self.token_seconds),
        ):
            name = f"localspec_{stem}_seconds"
            family(name, "histogram", about, histogram.lines(name))
        return "\n".join(lines) + "\n"


def _sample(name: str, labels: dict[str, str], value: float) -> str:
    inner = ",".join(f'{key}="{text.translate(_ESCAPES)}"' for key, text in labels.items())
    number = str(int(value)) if float(value).is_integer() else f"{value:.6f}"
    return f"{name}{{{inner}}} {number}" if inner else f"{name} {number}"
