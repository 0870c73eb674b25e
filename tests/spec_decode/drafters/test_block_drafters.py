"""Block drafters (DFlash, DSpark): what a block, or a pass of masks, costs, and what is asked of the engine.

What is asked of all published heads is in test_published_heads.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec import LocalspecError
from localspec.commands.doctor.facts import payoff
from localspec.controllers.acceptance import GREEDY as TYPICAL
from localspec.controllers.acceptance import SourceAcceptance
from localspec.controllers.auto import AutoController
from localspec.controllers.cost_model import PassTimes
from localspec.engine.pair import Pair
from localspec.heads.base import HeadContext
from localspec.heads.listing import inspect
from localspec.heads.published import EngineHead
from tests.conftest import TinyFiles
from tests.spec_decode.drafters.test_published_heads import GREEDY, PROMPT, open_llm
from tests.support import ggufs
from tests.support.published_heads import write_dflash

pytestmark = pytest.mark.usefixtures("llama_cpp")


def write_block(tiny: TinyFiles, folder: Path, **options: Any) -> Path:
    return write_dflash(tiny.pair.target, folder / "block.gguf", **options)


def test_a_pass_fills_in_as_many_masks_as_may_be_drafted(
    tiny: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(tiny, write_block(tiny, tmp_path, block_size=8)) as llm:
        context, found = llm.inspect().state.models[0].drafter.context, list[int]()
        real = context.guesses
        monkeypatch.setattr(context, "guesses", lambda *given: (found.append(given[1]), real(*given))[1])
        for length in (3, 16):
            llm.generate(PROMPT, GREEDY, draft_length=length)
    assert set(found) <= set(range(1, 8))
    assert found.count(3) > 10
    assert found.count(7) > 10


def planned(times: dict[int, float], one_pass: bool = True, rows_of_draft: bool = False) -> tuple[int, int]:
    """The width of a pass, and how many tokens the controller takes of a drafter that is right four times in five."""
    controller = AutoController(
        PassTimes({w: 10.0 + 0.2 * w for w in range(1, 20)}),
        {"head": PassTimes(times)},
        {"head": SourceAcceptance(TYPICAL)},
        one_pass=frozenset(["head"] * one_pass),
        rows_of_draft=frozenset(["head"] * rows_of_draft),
    )
    plan, n = controller.plan(16, 20), 0
    width = plan.width("head") if rows_of_draft else 16
    while n < width and plan.more("head", 0 if n and one_pass else 1) and plan.keep("head", 0.8) is not None:
        n += 1
    return width, n


def test_what_a_block_costs_does_not_depend_on_how_deep_is_drafted() -> None:
    """Where a step is dear a chain ends early, or does not begin; a block of the same price is used to its end. A pass
    of masks, whose first row has its price and each further one, is as wide as its rows are worth."""
    assert planned({1: 2.0}, one_pass=False)[1] < planned({1: 2.0})[1]
    assert planned({1: 4.0}, one_pass=False)[1] <= 2 < planned({1: 4.0})[1]
    assert planned({1: 60.0})[1] == planned({1: 60.0, 16: 61.0}, rows_of_draft=True)[1] == 0
    flat, steep = {1: 2.0, 16: 2.1}, {1: 2.0, 16: 2.0 + 15 * 2.0}
    assert planned(flat, rows_of_draft=True)[0] > planned(steep, rows_of_draft=True)[0] >= 1


def test_what_a_pass_of_several_tokens_needs_to_pay_falls_with_its_length() -> None:
    """The more so the less its rows cost."""
    chain, rows, block = (
        payoff("head", lambda width: 10.0, 8.0, pass_ms)
        for pass_ms in (None, lambda n: 8.0 + 0.5 * (n - 1), lambda n: 8.0)
    )
    needed = [[share or 1.0 for share in each.break_even.values()] for each in (chain, rows, block)]
    assert needed[0][0] == needed[1][0] == needed[2][0]
    assert needed[2] == sorted(needed[2], reverse=True)
    assert needed[2][3] < needed[1][3] < needed[0][3]
    assert needed[2][5] < 0.7 * needed[0][5]
    assert block.speedup[0.8] > chain.speedup[0.8]
    assert rows.best_length[0.8] < block.best_length[0.8]


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
            assert isinstance(context, HeadContext)
            for token, n in ((0, 0), (0, 5), (-1, 2), (384, 2)):
                with pytest.raises(LocalspecError, match="cannot decode a block"):
                    context.guesses(token, n)
            for _ in range(4):  # no state before it is needed, and what was guessed can stay
                context.truncate(0)
                logits, ids = context.guesses(0, 4)
                assert (logits.shape, ids) == ((4, 384), None)
            with pytest.raises(LocalspecError, match="do not fit"):
                context.guesses(0, 4)
            context.truncate(0)

    with open_llm(tiny, write_block(tiny, tmp_path)) as llm:
        llm.run(ask)


def test_the_kinds_that_are_not_run_are_refused_by_name(tiny: TinyFiles, tmp_path: Path) -> None:
    fork = ggufs.write_gguf(tmp_path / "fork.gguf", "dflash-draft", {}, {"fc.weight": np.eye(32)})
    with pytest.raises(LocalspecError, match=r"fork\.gguf is a DFlash drafter in the format of a fork of llama\.cpp"):
        open_llm(tiny, fork)
    assert "DFlash" in inspect(fork)["cannot_generate_text"]
