"""Block drafters (DFlash, DSpark): what a block costs, and what is asked of the engine.

What is asked of all published heads is in test_published_heads.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec import LocalspecError
from localspec.backends.base import Context, FloatArray
from localspec.commands.doctor.facts import payoff
from localspec.controllers.acceptance import GREEDY as TYPICAL
from localspec.controllers.acceptance import SourceAcceptance
from localspec.controllers.auto import AutoController
from localspec.controllers.cost_model import PassTimes
from localspec.engine.answer import rounds as rounds_of_pair
from localspec.engine.pair import Pair
from localspec.heads.listing import inspect
from localspec.heads.published import EngineHead
from tests.conftest import TinyFiles
from tests.spec_decode.drafters.test_published_heads import (
    GREEDY,
    PROMPT,
    open_llm,
)
from tests.support import ggufs
from tests.support.published_heads import write_dflash

pytestmark = pytest.mark.usefixtures("llama_cpp")


def write_block(tiny: TinyFiles, folder: Path, **options: Any) -> Path:
    return write_dflash(tiny.pair.target, folder / "block.gguf", **options)


def test_a_pass_fills_in_as_many_masks_as_may_be_drafted(tiny: TinyFiles, tmp_path: Path) -> None:
    def widths(pair: Pair) -> list[int]:
        (draft,) = pair.state.models
        head, found = draft.drafter.head, list[int]()  # type: ignore[attr-defined]
        real = head.block_logits

        def counted(context: Context, token: int, n: int, n_best: int) -> FloatArray:
            found.append(n)
            return real(context, token, n, n_best)  # type: ignore[no-any-return]

        head.block_logits = counted
        list(rounds_of_pair(pair, pair.target.tokenize(PROMPT), GREEDY, 3, lambda n_cached: None, lambda: False))
        list(rounds_of_pair(pair, pair.target.tokenize(PROMPT), GREEDY, 20, lambda n_cached: None, lambda: False))
        return found

    with open_llm(tiny, write_block(tiny, tmp_path, block_size=8)) as llm:
        found = llm.run(widths)
    assert set(found) <= set(range(1, 8))
    assert found.count(3) > 10
    assert found.count(7) > 10


# -- what it costs -----------------------------------------------------------------------------------------------------


def planned(one_pass: frozenset[str], step_ms: float) -> int:
    """How many tokens the controller takes of a drafter that is right four times in five, as it says."""
    times = PassTimes({w: 10.0 + 0.2 * w for w in range(1, 20)})
    controller = AutoController(
        times, {"head": PassTimes({1: step_ms})}, {"head": SourceAcceptance(TYPICAL)}, one_pass=one_pass
    )
    plan, n = controller.plan(16, 20), 0
    while plan.more("head", 0 if n and one_pass else 1) and plan.keep("head", 0.8) is not None:
        n += 1
    return n


def test_what_a_block_costs_does_not_depend_on_how_deep_is_drafted() -> None:
    """Where a step is dear a chain ends early, or does not begin; a block of the same price is used to its end."""
    assert planned(frozenset(), 2.0) < planned(frozenset({"head"}), 2.0)
    assert planned(frozenset(), 4.0) <= 2 < planned(frozenset({"head"}), 4.0)
    assert planned(frozenset({"head"}), 60.0) == 0


def test_what_a_block_needs_to_pay_falls_with_its_length() -> None:
    chain, block = (payoff("head", lambda width: 10.0, 8.0, block_ms) for block_ms in (None, lambda n: 8.0))
    needed = [[share or 1.0 for share in each.break_even.values()] for each in (chain, block)]
    assert needed[0][0] == needed[1][0]
    assert needed[1] == sorted(needed[1], reverse=True)
    assert needed[1][5] < 0.7 * needed[0][5]
    assert block.speedup[0.8] > chain.speedup[0.8]


def test_a_block_is_what_is_timed(tiny: TinyFiles, tmp_path: Path) -> None:
    """Whole blocks behind states of the target, by how many states are new."""

    def passes(pair: Pair) -> list[tuple[int, int]]:
        (draft,) = pair.state.models
        assert draft.drafter.info.one_pass
        found: list[tuple[int, int]] = []
        with draft.passes.context(draft.model, 64) as context:
            for n, logits in ((20, "none"), (1, "all"), (3, "last")):
                draft.passes.feed(context, [0] * n, logits)  # type: ignore[arg-type]
                found.append((n, context.n_past))
        return found

    with open_llm(tiny, write_block(tiny, tmp_path)) as llm:
        assert llm.run(passes) == [(20, 20), (1, 21), (3, 24)]


def test_no_block_is_asked_of_the_engine_that_it_cannot_take(tiny: TinyFiles, tmp_path: Path) -> None:
    def ask(pair: Pair) -> None:
        (draft,) = pair.state.models
        head = draft.drafter.head  # type: ignore[attr-defined]
        assert isinstance(head, EngineHead)
        with head.new_context(4) as context:
            for token, n in ((0, 0), (0, 5), (-1, 2), (384, 2)):
                with pytest.raises(LocalspecError, match="cannot decode a block"):
                    head.block_logits(context, token, n)
            for _ in range(4):  # no state before it is needed, and what was guessed can stay
                context.truncate(0)
                logits, ids = head.block_logits(context, 0, 4)
                assert (logits.shape, ids) == ((4, 384), None)
            with pytest.raises(LocalspecError, match="do not fit"):
                head.block_logits(context, 0, 4)
            context.truncate(0)

    with open_llm(tiny, write_block(tiny, tmp_path)) as llm:
        llm.run(ask)


def test_the_kinds_that_are_not_run_are_refused_by_name(tiny: TinyFiles, tmp_path: Path) -> None:
    fork = ggufs.write_gguf(tmp_path / "fork.gguf", "dflash-draft", {}, {"fc.weight": np.eye(32)})
    with pytest.raises(LocalspecError, match=r"fork\.gguf is a DFlash drafter in the format of a fork of llama\.cpp"):
        open_llm(tiny, fork)
    assert "DFlash" in inspect(fork)["cannot_generate_text"]
