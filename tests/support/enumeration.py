"""Exact laws of random programs: every branch of their randomness is followed, none is sampled.

``explore(program)`` runs the program once for each way its random choices can fall and adds up the probabilities. The
program draws through a ``BranchingNoise``, which stands in for ``sampling.Noise``: the code under test is the real one,
and only the two primitives it draws with are replaced by what they mean,

* a uniform number u that is multiplied by q and compared with p: smaller with probability min(1, p / q);
* ``Distribution.sample``, which draws token i with probability p_i (``branching_samples`` patches it in;
  ``test_randomness`` shows that the real one does that).

Each address (position, stream) may be drawn from once in a run. That is the condition under which addressed noise is as
good as fresh noise, so a second draw is an error, not a branch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from localspec.backends.base import Context
from localspec.sampling.sampling import Distribution, SamplingParams, distribution
from localspec.spec_decode.rounds import Round

Outcome = TypeVar("Outcome", bound=Hashable)


class NoiseReused(AssertionError):
    """The same random number would have been used for two decisions."""


class Branches:
    """One run: follows a script of choices, then takes the first branch of each new choice."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script = list(script)
        self.path: list[int] = []
        self.widths: list[int] = []
        self.probability = 1.0

    def choose(self, weights: Sequence[float] | npt.NDArray[np.float64]) -> int:
        """An index, drawn with probabilities proportional to ``weights``; those of weight 0 are no branch."""
        alive = [i for i, weight in enumerate(weights) if weight > 0]
        at = len(self.path)
        branch = self.script[at] if at < len(self.script) else 0
        self.path.append(branch)
        self.widths.append(len(alive))
        self.probability *= float(weights[alive[branch]]) / float(np.sum(weights))
        return alive[branch]


def explore(program: Callable[[Branches], Outcome], max_runs: int = 200_000) -> dict[Outcome, float]:
    """The exact law of what ``program`` returns."""
    law: dict[Outcome, float] = defaultdict(float)
    script: list[int] = []
    for _ in range(max_runs):
        run = Branches(script)
        law[program(run)] += run.probability
        script = run.path
        while script and script[-1] + 1 == run.widths[len(script) - 1]:
            script.pop()
        if not script:
            return dict(law)
        script[-1] += 1
    raise RuntimeError(f"more than {max_runs} branches")


class BranchingNoise:
    """Stands in for ``sampling.Noise``: every draw is a branch."""

    def __init__(self, branches: Branches) -> None:
        self.branches = branches
        self.used: set[tuple[int, int]] = set()

    def _use(self, position: int, stream: int) -> None:
        if (position, stream) in self.used:
            raise NoiseReused(f"position {position}, stream {stream}")
        self.used.add((position, stream))

    def uniform(self, position: int, stream: int) -> Any:
        self._use(position, stream)
        return _Uniform(self.branches)

    def sample(self, law: Distribution, position: int, stream: int = 0) -> int:
        self._use(position, stream)
        return int(law.ids[self.branches.choose(law.probs)])


def branching_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``Distribution.sample`` branch when it is given a ``BranchingNoise``."""
    real = Distribution.sample

    def sample(self: Distribution, noise: Any, position: int, stream: int = 0) -> int:
        if isinstance(noise, BranchingNoise):
            return noise.sample(self, position, stream)
        return real(self, noise, position, stream)

    monkeypatch.setattr(Distribution, "sample", sample)


class _Uniform:
    """A uniform number in (0, 1), known only through one comparison."""

    def __init__(self, branches: Branches, scale: float = 1.0) -> None:
        self.branches = branches
        self.scale = scale

    def __mul__(self, factor: float) -> _Uniform:
        return _Uniform(self.branches, self.scale * factor)

    def __lt__(self, bound: float) -> bool:
        below = min(1.0, bound / self.scale) if self.scale > 0 else float(bound > 0)
        return self.branches.choose([below, 1.0 - below]) == 0


def law_of_answers(patch: pytest.MonkeyPatch, answer: Callable[[], Sequence[Round]]) -> dict[tuple[int, ...], float]:
    """The exact law of the tokens of an answer, whose decoder draws with a ``BranchingNoise``."""
    branching_samples(patch)

    def program(branches: Branches) -> tuple[int, ...]:
        noise = BranchingNoise(branches)
        patch.setattr("localspec.spec_decode.decoder.Noise", lambda seed: noise)
        return tuple(token.id for round_ in answer() for token in round_.emitted)

    law = explore(program)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    return law


def largest_difference(left: dict[Outcome, float], right: dict[Outcome, float]) -> float:
    """The largest difference that two laws give to an outcome."""
    return max(abs(left.get(key, 0.0) - right.get(key, 0.0)) for key in left.keys() | right.keys())


def law_of_two(context: Context, prompt: Sequence[int], params: SamplingParams) -> dict[tuple[int, ...], float]:
    """What two tokens after a prompt are drawn with, by the context's own logits."""
    context.truncate(0)
    first = distribution(context.decode(prompt, "last").logits[0], prompt, params)
    found: dict[tuple[int, ...], float] = {}
    for token in map(int, first.ids):
        second = distribution(context.decode([token], "last").logits[0], [*prompt, token], params)
        context.truncate(len(prompt))
        found |= {(token, int(other)): first.prob(token) * second.prob(int(other)) for other in second.ids}
    return found
