"""What the server counts, for ``/v1/localspec/stats`` and, in Prometheus' text format, for ``/metrics``."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from localspec.runtime.stream import Reply

OUTCOMES = ("answered", "cancelled", "invalid", "rejected", "failed")
"""How a request ends: answered, its client left, a wrong request (4xx), turned away (429, 503), failed (500)."""

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
        self.started = time.time()
        self.requests: Counter[tuple[str, str]] = Counter()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.rounds = 0
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.drafted_at: Counter[int] = Counter()
        self.accepted_at: Counter[int] = Counter()
        self.seconds: Counter[str] = Counter()
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
        self.prompt_tokens += stats.prompt_tokens
        self.cached_tokens += stats.cached_tokens
        self.completion_tokens += stats.completion_tokens
        self.rounds += stats.num_rounds
        for source, counts in stats.by_source.items():
            self.drafted[source] += counts["num_draft_tokens"]
            self.accepted[source] += counts["num_accepted_tokens"]
        for i, n in enumerate(stats.drafted_per_position):
            self.drafted_at[i] += n
        for i, n in enumerate(stats.accepted_per_position):
            self.accepted_at[i] += n
        for phase in ("prompt", "draft", "verify", "other"):
            self.seconds[phase] += getattr(stats, f"seconds_{phase}")
        if stats.time_to_first_token_s is not None:
            self.first_token_seconds.observe(stats.time_to_first_token_s)
        if stats.completion_tokens:
            self.token_seconds.observe(stats.seconds_decode / stats.completion_tokens)

    def as_dict(self) -> dict[str, Any]:
        """The totals under the names of ``SpecStats``."""
        drafted, accepted = self.drafted.total(), self.accepted.total()
        seconds = sum(self.seconds[phase] for phase in ("draft", "verify", "other"))
        n = max(self.drafted_at, default=-1) + 1
        by_outcome: Counter[str] = Counter()
        for (_, outcome), count in self.requests.items():
            by_outcome[outcome] += count
        return {
            "requests": {outcome: by_outcome[outcome] for outcome in OUTCOMES},
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "num_rounds": self.rounds,
            "num_draft_tokens": drafted,
            "num_accepted_tokens": accepted,
            "acceptance_rate": accepted / drafted if drafted else 0.0,
            "mean_acceptance_length": self.completion_tokens / self.rounds if self.rounds else 0.0,
            "drafted_per_position": [self.drafted_at[i] for i in range(n)],
            "accepted_per_position": [self.accepted_at[i] for i in range(n)],
            "tokens_per_second": self.completion_tokens / seconds if seconds else 0.0,
            "by_source": {
                source: {"num_draft_tokens": self.drafted[source], "num_accepted_tokens": self.accepted[source]}
                for source in self.drafted
            },
            **{f"seconds_{phase}": self.seconds[phase] for phase in ("prompt", "draft", "verify", "other")},
        }

    def prometheus(self, gauges: Sequence[tuple[str, str, float]], info: dict[str, str]) -> str:
        """The text exposition format, version 0.0.4.

        Args:
            gauges: (name, what it is, value) of what is known elsewhere.
            info: labels of ``localspec_info``.
        """
        lines: list[str] = []

        def family(name: str, kind: str, about: str, samples: Iterator[str] | Sequence[str]) -> None:
            lines.extend((f"# HELP {name} {about}", f"# TYPE {name} {kind}", *samples))

        def counter(name: str, about: str, samples: Sequence[tuple[dict[str, str], float]]) -> None:
            family(name, "counter", about, [f"{name}{_labels(labels)} {_number(value)}" for labels, value in samples])

        family("localspec_info", "gauge", "What is served.", [f"localspec_info{_labels(info)} 1"])
        for name, about, value in gauges:
            family(name, "gauge", about, [f"{name} {_number(value)}"])
        requests = [({"endpoint": e, "outcome": o}, n) for (e, o), n in sorted(self.requests.items())]
        counter("localspec_requests_total", "Requests by how they ended.", requests)
        counter("localspec_prompt_tokens_total", "Tokens of prompts.", [({}, self.prompt_tokens)])
        counter("localspec_cached_prompt_tokens_total", "Those that were in memory.", [({}, self.cached_tokens)])
        counter("localspec_completion_tokens_total", "Tokens of answers.", [({}, self.completion_tokens)])
        counter("localspec_rounds_total", "Passes of the target that emitted tokens.", [({}, self.rounds)])
        for name, about, counts in (
            ("draft", "Guesses sent to the target, by drafter.", self.drafted),
            ("accepted", "Guesses it accepted, by drafter.", self.accepted),
        ):
            counter(f"localspec_{name}_tokens_total", about, [({"source": s}, n) for s, n in sorted(counts.items())])
        positions = [({"position": str(i)}, n) for i, n in sorted(self.accepted_at.items())]
        counter("localspec_accepted_tokens_per_position_total", "Accepted guesses by place in the draft.", positions)
        phases = [({"phase": phase}, seconds) for phase, seconds in sorted(self.seconds.items())]
        counter("localspec_seconds_total", "Time by what it went into.", phases)
        for name, about, histogram in (
            ("localspec_request_seconds", "From a request to the end of its answer.", self.request_seconds),
            ("localspec_time_to_first_token_seconds", "From its turn to the first token.", self.first_token_seconds),
            ("localspec_time_per_output_token_seconds", "Decoding time over tokens.", self.token_seconds),
        ):
            family(name, "histogram", about, histogram.lines(name))
        return "\n".join(lines) + "\n"


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items()) + "}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.6f}"
