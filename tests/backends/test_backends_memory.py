"""Memories that cannot simply drop rows: sliding windows and recurrent states roll back all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from localspec.backends.base import Context, FloatArray, Model
from localspec.backends.llama import model as model_module
from localspec.backends.llama.model import LlamaContext
from localspec.errors import EngineError, UsageError
from tests.backends.test_backends import rows, some_tokens
from tests.conftest import Backend, TinyFiles, open_backend


def fresh_tail(model: Model, prefix: list[int], tail: list[int], n_ctx: int) -> FloatArray:
    """The rows of ``tail`` from a new context that was fed ``prefix``."""
    with model.new_context(n_ctx) as context:
        if prefix:
            context.decode(prefix, "none")
        return rows(context, tail)


def divergence(p_logits: FloatArray, q_logits: FloatArray) -> float:
    """The largest Kullback-Leibler divergence of two rows that should be equal, in nats."""
    p, q = (x.astype(np.float64) - x.max(axis=1, keepdims=True) for x in (p_logits, q_logits))
    p, q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (p, q))
    return float((np.exp(p) * (p - q)).sum(axis=1).max())


def check_rollback(model: Model, tokens: list[int], cuts: list[int], noise: float, n_ctx: int) -> None:
    """Draft, reject, go on from each cut, and compare with a fresh context; in between take it all back and refill."""
    smallest_defect = np.inf
    with model.new_context(n_ctx) as context:
        context.decode(tokens, "none")
        for cut in cuts:
            context.decode(tokens[5:9])
            context.truncate(cut)
            more = tokens[20:25]
            ours, wanted = rows(context, more), fresh_tail(model, tokens[:cut], more, n_ctx)
            assert divergence(wanted, ours) < noise, f"after truncating to {cut}"
            if cut > 2:
                # One token taken back too many, as a wrong rollback would.
                smallest_defect = min(
                    smallest_defect, divergence(wanted, fresh_tail(model, tokens[: cut - 1], more, n_ctx))
                )
            if cut != cuts[-1]:
                context.reuse(tokens)
                if context.n_past < len(tokens):
                    context.decode(tokens[context.n_past :], "none")
    assert smallest_defect > 3 * noise, "this test could not tell a defect from noise"


def test_a_sliding_window_rolls_back_inside_and_past_the_window(fast_backend: Backend, tiny: TinyFiles) -> None:
    with fast_backend.load(tiny.sliding, n_threads=1) as model:
        check_rollback(model, some_tokens(900), [900, 897, 850, 600, 300, 33, 31, 1, 0], 1e-3, 1024)


RECURRENT = ["llama-cpp mamba", "llama-cpp hybrid", "llama-cpp hybrid 0.3", "llama-cpp hybrid 9", "ik-llama hybrid",
             "mlx mamba"]  # fmt: skip
"""Engine, and file; and for snapshots that are kept of a state memory of so many times the weights'."""


@pytest.fixture(scope="module", params=RECURRENT)
def recurrent(request: pytest.FixtureRequest, tiny: TinyFiles) -> Iterator[Model]:
    """Models whose memory is a state that cannot be rewound, on every engine that computes them."""
    engine, kind, *share = request.param.split()
    file = tiny.recurrent if kind == "mamba" else tiny.hybrid
    with pytest.MonkeyPatch.context() as patch, open_backend(engine).load(file, n_threads=1) as model:
        patch.setattr(model_module, "SNAPSHOT_SHARE", float(share[0]) if share else 0.0)
        assert model.capabilities.rollback == "replay"
        yield model


def test_a_recurrent_memory_replays(recurrent: Model) -> None:
    check_rollback(recurrent, some_tokens(60), [60, 59, 57, 30, 1, 0], 1e-3, 128)


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_a_state_of_another_text_is_never_gone_back_to(recurrent: Model, shared: int) -> None:
    """A conversation, another one that begins like it or not at all, token by token, and a third that shares it."""
    first, second = some_tokens(60), some_tokens(60, seed=1)
    second[:shared] = first[:shared]
    with recurrent.new_context(128) as context:
        context.decode(first[:40], "none")
        context.decode(first[40:50], "none")
        assert context.reuse(second) == shared
        for token in second[shared:]:
            context.decode([token], "none")
        context.truncate(42)
        ours = rows(context, second[42:])
    assert divergence(fresh_tail(recurrent, second[:42], second[42:], 128), ours) < 1e-3
    assert divergence(fresh_tail(recurrent, [*first[:40], *second[40:42]], second[42:], 128), ours) > 0.01


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_fed_and_taken_back_the_memory_holds_what_tokens_says(recurrent: Model, seed: int) -> None:
    random = np.random.default_rng(seed)
    with recurrent.new_context(128) as context:
        for step in range(40):
            more = some_tokens(int(random.integers(1, 12)), seed=100 * seed + step)
            if random.random() < 0.5:
                context.decode(more, "none")
            else:
                for token in more:
                    context.decode([token], "none")
            # Mostly the last few tokens, as rejected drafts are, and at times back to the start.
            back = int(random.integers(0, 8)) if random.random() < 0.7 else int(random.integers(0, 128))
            context.truncate(min(max(0, context.n_past - back), 100))
            kept, probe = list(context.tokens), some_tokens(1, seed=step)
            ours = rows(context, probe)
            assert divergence(fresh_tail(recurrent, kept, probe, 128), ours) < 1e-3, f"step {step}, {len(kept)} tokens"
            context.truncate(len(kept))


def test_a_rejected_draft_of_which_there_are_snapshots_costs_no_pass(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what goes further back is fed again from the last copy, not from the beginning of a long text."""
    monkeypatch.setattr(model_module, "SNAPSHOT_SHARE", 9.0)
    fed: list[int] = []
    compute = LlamaContext._compute
    with open_backend("llama-cpp").load(tiny.hybrid, n_threads=1) as model, model.new_context(512) as context:
        context.decode(some_tokens(200), "none")
        with monkeypatch.context() as patch:
            patch.setattr(
                LlamaContext, "_compute", lambda self, *rest: fed.append(len(rest[0])) or compute(self, *rest)
            )
            for step in range(30):
                context.decode(some_tokens(5, seed=step))
                context.truncate(context.n_past - 1 - step % 4)
            assert fed == [5] * 30
            context.truncate(context.n_past - 6)
            assert 0 < sum(fed[30:]) < 2 * model_module.CHECKPOINT_EVERY
        ours = rows(context, some_tokens(3))
        assert divergence(fresh_tail(model, context.tokens[:-3], some_tokens(3), 512), ours) < 1e-3


def test_a_copy_of_a_memory_with_snapshots_serves_one_without(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken right after a rejection, when the engine has only noted which snapshot to go on from; and back again."""
    tokens, load = some_tokens(60), open_backend("llama-cpp").load
    with load(tiny.hybrid, n_threads=1) as one, load(tiny.hybrid, n_threads=1) as other:
        for model, share in ((one, 9.0), (other, 0.0)):
            monkeypatch.setattr(model_module, "SNAPSHOT_SHARE", share)
            assert (model.n_snapshots > 0) == (share > 0)
        with one.new_context(128) as context, other.new_context(128) as plain:
            context.decode(tokens[:40], "none")
            context.decode(tokens[40:46], "none")
            context.truncate(43)
            plain.import_state(context.export_state())
            expected = fresh_tail(other, tokens[:43], tokens[43:50], 128)
            for each in (plain, context):
                assert divergence(expected, rows(each, tokens[43:50])) < 1e-3
            context.import_state(plain.export_state())
            context.decode(tokens[50:54], "none")
            context.truncate(52)
            expected = fresh_tail(other, tokens[:52], tokens[52:], 128)
            assert divergence(expected, rows(context, tokens[52:])) < 1e-3


def test_what_a_replay_that_failed_lost_is_not_taken_for_kept(
    recurrent: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine runs out of memory in the middle of a replay: the next request finds a memory that is what it says."""
    tokens = some_tokens(60)
    with recurrent.new_context(128) as context:
        context.decode(tokens[:40], "none")
        context.decode(tokens[40:50])
        with monkeypatch.context() as patch:
            fail_all_passes(patch, context)
            with pytest.raises(EngineError):
                go_back_and_on(context, 45, tokens[45])
        assert context.tokens == tokens[: context.n_past]
        context.decode(tokens[context.n_past : 50], "none")
        ours = rows(context, tokens[50:])
    assert divergence(fresh_tail(recurrent, tokens[:50], tokens[50:], 128), ours) < 1e-3


def distance(states: FloatArray, others: FloatArray) -> float:
    """The largest difference, as a share of what a state is as a rule."""
    return float(np.abs(states - others).max() / others.std())


def check_states(model: Model, tokens: list[int], cuts: list[int], n_ctx: int) -> None:
    """Logits and hidden states after rollbacks, in a context that returns states and in one that does not."""
    names = ("norm", *(f"layer:{i}" for i in range(model.n_layers)))
    with model.new_context(n_ctx, hidden=names) as context, model.new_context(n_ctx) as plain:
        for each in (context, plain):
            each.decode(tokens, "none")
        for cut in cuts:
            for each in (context, plain):
                each.truncate(cut)
            forward, wanted = context.decode(tokens[20:25]), rows(plain, tokens[20:25])
            assert np.array_equal(forward.logits, wanted)
            with model.new_context(n_ctx, hidden=names) as fresh:
                fresh.decode(tokens[:cut], "none")
                states = fresh.decode(tokens[20:25]).hidden
                assert all(distance(states[name], forward.hidden[name]) < 0.02 for name in names)
                if cut > 2:
                    fresh.truncate(0)
                    fresh.decode(tokens[: cut - 1], "none")
                    off = fresh.decode(tokens[20:25]).hidden
                    assert all(distance(off[name], forward.hidden[name]) > 0.05 for name in names)
            for each in (context, plain):
                each.reuse(tokens)
                each.decode(tokens[each.n_past :], "none")


def test_hidden_states_after_a_replay(recurrent: Model) -> None:
    check_states(recurrent, some_tokens(60), [59, 57, 30, 1], 128)


def test_hidden_states_in_a_sliding_window(fast_backend: Backend, tiny: TinyFiles) -> None:
    with fast_backend.load(tiny.sliding, n_threads=1) as model:
        check_states(model, some_tokens(300), [299, 260, 33, 31, 1], 512)


def test_what_a_memory_that_replays_cannot_do_is_refused(recurrent: Model) -> None:
    """Rows of floats could not be fed again, and neither could what came before rows of the first layers at once."""
    with recurrent.new_context(32, hidden=("layer:0",)) as context:
        context.decode([5, 6])
        with pytest.raises(UsageError, match="cannot be fed with rows of floats"):
            context.decode_floats(np.zeros((1, recurrent.n_embd), np.float32), [5])
        if not recurrent.capabilities.first_layers:
            with pytest.raises(UsageError, match="cannot end a pass early"):
                context.decode_first_layers([5], 1)
        assert context.tokens == [5, 6]


def go_back_and_on(context: Context, n: int, token: int) -> None:
    """MLX replays where it first needs what it lost, the others at once."""
    context.truncate(n)
    context.decode([token])


def fail_all_passes(patch: pytest.MonkeyPatch, context: Context) -> None:
    """What the engine does when it has no memory left."""
    if isinstance(context, LlamaContext):
        patch.setattr(context._binding.lib, "llama_decode", lambda *_: -3)
        return

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    patch.setattr(type(context.model.network), "hidden", fail)  # type: ignore[attr-defined]


@pytest.mark.real
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ["llama-cpp", "ik-llama", pytest.param("mlx", marks=pytest.mark.slow)])
def test_gemma3_rolls_back_inside_and_past_its_window(engine: str, real_model: Callable[[str], Path]) -> None:
    """The real sliding-window model: 512 tokens of window. MLX takes 0.13 s a token on these CPUs, so fewer there."""
    length, cuts, noise = (530, [521], 1e-3) if engine == "mlx" else (1000, [998, 700, 300], 0.05)
    with open_backend(engine).load(real_model("gemma3-270m")) as model:
        # A text on which a token too many or too few can be told from noise at each of these places.
        text = (Path(__file__).parents[1] / "data" / "text_1000_tokens.txt").read_text(encoding="utf-8")
        tokens = model.tokenize(text, add_special=True)[:length]
        assert len(tokens) == length
        check_rollback(model, tokens, cuts, noise, 1280)
