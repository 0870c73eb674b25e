"""A network adds the same time to every pass, however wide: the wider ones cost less in proportion, and pay deeper."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from localspec.controllers.acceptance import GREEDY, SourceAcceptance
from localspec.controllers.auto import AutoController
from localspec.spec_decode.rounds import Round
from tests.support.simulator import CURVES, World, stationary

N_TOKENS = 600


class Counting(AutoController):
    """Counts what it drafts."""

    n_rounds = n_drafted = 0

    def learn(self, round_: Round) -> None:
        self.n_rounds, self.n_drafted = self.n_rounds + 1, self.n_drafted + len(round_.draft)
        super().learn(round_)


def depth(curve: str, delay_ms: float) -> float:
    """Draft tokens a round, on one text; two servers, so a pass waits for two round trips."""
    source = stationary(np.random.default_rng(7), N_TOKENS + 64, 0.8)
    source.step_ms, source.prefill_ms = 5.0, 1.0
    here = World({w: ms + 2 * delay_ms for w, ms in CURVES[curve].items()}, {"model": source})
    controller = Counting(here.true_times(), here.draft_times(), {"model": SourceAcceptance(GREEDY)})
    here.run(controller, N_TOKENS)
    return controller.n_drafted / controller.n_rounds


@pytest.mark.parametrize("curve", CURVES)
def test_the_longer_a_round_trip_the_deeper_the_drafts(curve: str) -> None:
    """A tenth of a token up or down is the noise of the measured times, and steps of the curve."""
    depths = [depth(curve, delay_ms) for delay_ms in (0.0, 2.0, 10.0, 50.0)]
    assert all(nearer < farther + 0.2 for nearer, farther in pairwise(depths))
    assert depths[0] + 0.8 < depths[-1]
