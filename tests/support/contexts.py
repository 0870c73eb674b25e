"""What any order of operations on contexts must leave: a machine that tries them, and helpers of the contract's tests.

On the reference backend logits must be equal to the bit. The fast engines round differently with the width of a pass:
on F32 files two ways of computing a row differ by at most a few thousandths, while a row computed from a wrong position
or a stale cache differs by several units (``test_the_tolerance_tells_noise_from_a_defect``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from localspec.backends.base import NORM, Context, ContextState, FloatArray, Forward, Model, Piece, layer_name
from localspec.backends.llama.model import LlamaModel
from localspec.errors import ContextFull, EngineError, UsageError
from tests.support.ggufs import Shape, llama_weights, write_llama

NOISE = 0.05
"""Largest difference of two logits that rounding explains on the tiny F32 file."""


def some_tokens(n: int, seed: int = 0, n_vocab: int = 384) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(5, n_vocab, n)]


def rows(context: Context, tokens: Sequence[int]) -> FloatArray:
    """One row per token, from one pass."""
    return context.decode(tokens).logits.copy()


def fresh(model: Model, tokens: Sequence[int], start: int = 0, hidden: Sequence[str] = ()) -> Forward:
    """The rows of a text from ``start`` on, from a context that was fed nothing else."""
    with model.new_context(max(256, len(tokens)), hidden=hidden) as context:
        if start:
            context.decode(tokens[:start], "none")
        forward = context.decode(tokens[start:])
        return Forward(forward.logits.copy(), forward.hidden)


def fresh_rows(model: Model, tokens: Sequence[int], start: int = 0) -> FloatArray:
    return fresh(model, tokens, start).logits


def agree(model: Model, left: FloatArray, right: FloatArray, noise: float = NOISE) -> bool:
    assert left.shape == right.shape
    if model.capabilities.batch_invariant:
        return bool(np.array_equal(left, right))
    return float(np.abs(left - right).max(initial=0.0)) < noise


def check_next(model: Model, context: Context, more: list[int], noise: float = NOISE) -> None:
    """Feed a context, and compare with one of its own."""
    text = [*context.tokens, *more]
    assert agree(model, rows(context, more), fresh_rows(model, text)[-len(more) :], noise)


def every_state(model: Model) -> list[str]:
    """The names of all hidden states."""
    return [*map(layer_name, range(model.n_layers)), NORM]


def path_to(parents: Sequence[int], at: int) -> list[int]:
    return [] if at < 0 else [*path_to(parents, parents[at]), at]


def watch_passes(
    context: Context,
    patch: pytest.MonkeyPatch,
    before: Callable[[int], None] = lambda n: None,
    after: Callable[[int], None] = lambda n: None,
) -> list[int]:
    """From now on, the tokens of every pass; ``before`` and ``after`` each are called with its number, from 1."""
    sizes: list[int] = []
    decode = context._decode

    def watched(tokens: Sequence[int], rows: Any) -> Any:
        sizes.append(len(tokens))
        n = len(sizes)
        before(n)
        forward = decode(tokens, rows)
        after(n)
        return forward

    patch.setattr(context, "_decode", watched)
    return sizes


@contextmanager
def breaking_off(model: Model, times: int = 1) -> Iterator[None]:
    """Within it so many passes end with an error once rows are computed: Ctrl-C, or on MLX want of memory."""
    left = iter(range(times))
    with pytest.MonkeyPatch.context() as patch:

        def after(owner: Any, name: str, error: type[BaseException]) -> None:
            compute = getattr(owner, name)

            def broken(*arguments: Any, **options: Any) -> Any:
                found = compute(*arguments, **options)
                if next(left, None) is not None:
                    raise error("broken off")
                return found

            patch.setattr(owner, name, broken)

        if model.backend == "mlx":
            import mlx.core as mx

            after(mx, "eval", RuntimeError)
        elif isinstance(model, LlamaModel):
            after(model.binding.lib, "llama_decode", KeyboardInterrupt)
        else:
            with model.new_context(1) as context:
                kind = type(context)
            for name in ("_decode", "_decode_tree"):
                after(kind, name, KeyboardInterrupt)
        yield


BROKEN = (KeyboardInterrupt, EngineError)


class Memories(RuleBasedStateMachine):
    """Contexts of every kind, alone and in a batch, and what each has to hold whatever was done before.

    Args:
        model: the weights.
        expected: (text, start) -> the rows of a text from ``start`` on, with the states of all ``hidden``.
        hidden: names of the states that the contexts return.
        embedding: what rows of floats are taken from [n_vocab, n_embd]; None feeds none.
        noise: largest difference of logits; a state's is relative to the largest number in it.
        size: how many times the room there is, and how many times as long the longer inputs are.
    """

    where = st.integers(0, 4)
    number = st.integers(0, 9999)
    width = st.integers(1, 12) | st.integers(1, 60)

    def __init__(
        self,
        model: Model,
        expected: Callable[[list[int], int], Forward],
        hidden: Sequence[str],
        embedding: FloatArray | None,
        noise: float,
        size: int,
    ) -> None:
        super().__init__()
        self.size, self.n_ctx, self.n_cells = size, 120 * size, 220 * size
        self.model, self.expected, self.hidden = model, expected, hidden
        self.embedding, self.noise = embedding, noise
        self.stack = ExitStack()
        self.batch = self.stack.enter_context(model.new_batch(3, self.n_cells, n_ctx=self.n_ctx, hidden=hidden))
        branching = model.new_context(150 * size, hidden=hidden, branches=True)
        alone = model.new_context(self.n_ctx, hidden=hidden), branching
        self.contexts = [*map(self.stack.enter_context, alone), *(self.batch[i] for i in range(3))]
        self.texts: list[list[int]] = [[] for _ in self.contexts]
        self.partial: list[tuple[int, int] | None] = [None for _ in self.contexts]
        self.states: list[ContextState] = []

    def teardown(self) -> None:
        try:
            for i, context in enumerate(self.contexts):
                assert context.tokens == self.texts[i]
                context.truncate(context.n_whole)
                self.forget(i, context.n_whole)
                if context.n_free:
                    self.feed(i, 1, "all", 7)
            held, total = self.n_cells - self.batch.free_cells, sum(len(text) for text in self.texts[2:])
            assert held == total or (self.batch.shares_prefix and held < total)
        finally:
            self.stack.close()

    def fed(self, i: int, tokens: Sequence[int], use: Callable[[], Forward], layers: int | None = None) -> Any:
        """What a pass returns, if it is one that is not to be refused."""
        held = self.partial[i]
        if len(tokens) > self.contexts[i].n_free:
            with pytest.raises(ContextFull):
                use()
        elif held is not None and held[1] != layers:
            with pytest.raises(UsageError, match="truncate them first"):
                use()
        else:
            return use()
        assert self.contexts[i].tokens == self.texts[i]
        return None

    def check(self, forward: Forward, text: list[int], start: int, logits: Any = "all") -> None:
        """The rows of a pass over ``text`` from ``start`` on."""
        wanted, n = self.expected(text, start), len(text) - start
        part = {"all": slice(0, n), "last": slice(n - 1, n), "none": slice(0, 0)}[logits]
        assert forward.logits.dtype == np.float32
        assert agree(self.model, forward.logits, wanted.logits[part], self.noise)
        assert set(forward.hidden) == set(self.hidden)
        last = {"norm", layer_name(self.model.n_layers - 1)}  # of these there is a row for each row of logits
        for name, states in forward.hidden.items():
            self.check_states(name, states, wanted.hidden[name][part if name in last else slice(0, n)])

    def check_states(self, name: str, states: FloatArray, wanted: FloatArray) -> None:
        assert agree(self.model, states, wanted, 0.02 * max(1.0, np.abs(wanted).max(initial=0))), name

    def many(self, n: int, seed: int) -> list[int]:
        return some_tokens(n if n <= 12 else n * self.size, seed)

    @rule(i=where, n=width, logits=st.sampled_from(["all", "last", "none"]), seed=number)
    def feed(self, i: int, n: int, logits: Any, seed: int) -> None:
        tokens = self.many(n, seed)
        forward = self.fed(i, tokens, lambda: self.contexts[i].decode(tokens, logits))
        if forward is not None:
            self.texts[i] += tokens
            self.check(forward, self.texts[i], len(self.texts[i]) - len(tokens), logits)
            self.check_no_tree(i)

    def check_no_tree(self, i: int) -> None:
        """A tree of which no path was kept is gone, whatever came after it."""
        if self.contexts[i].can_branch:
            with pytest.raises(UsageError, match="no tree"):
                self.contexts[i].keep([0])

    @rule(numbers=st.permutations(range(3)), n=st.integers(1, 3), widths=st.tuples(width, width, width), seed=number)
    def feed_together(self, numbers: list[int], n: int, widths: tuple[int, ...], seed: int) -> None:
        wants = ["all", "last", "none"]
        pieces = [Piece(i, self.many(widths[i], seed + i), wants[(seed + i) % 3]) for i in numbers[:n]]  # type: ignore[arg-type]
        if any(self.partial[2 + piece.sequence] for piece in pieces):
            return
        try:
            if seed % 7 == 0 and all(self.contexts[2 + piece.sequence].n_free > 60 * self.size for piece in pieces):
                with breaking_off(self.model), pytest.raises(BROKEN):
                    self.batch.decode(pieces)
                for i in range(2, 5):
                    self.check_left(i)
                return
            forwards = self.batch.decode(pieces)
        except ContextFull:
            room = [self.n_ctx - len(self.texts[2 + piece.sequence]) < len(piece.tokens) for piece in pieces]
            assert any(room) or sum(len(piece.tokens) for piece in pieces) > self.batch.free_cells
            assert [context.tokens for context in self.contexts] == self.texts
            return
        for piece, forward in zip(pieces, forwards, strict=True):
            text = self.texts[2 + piece.sequence]
            text += piece.tokens
            self.check(forward, text, len(text) - len(piece.tokens), piece.logits)

    @precondition(lambda self: self.embedding is not None and self.model.capabilities.float_rows)
    @rule(i=where, n=width, logits=st.sampled_from(["all", "last", "none"]), seed=number)
    def feed_floats(self, i: int, n: int, logits: Any, seed: int) -> None:
        tokens = self.many(n, seed)
        layout: Any = [np.ascontiguousarray, np.asfortranarray, np.float64, lambda rows: np.repeat(rows, 2, 0)[::2]]
        floats = layout[seed % 4](self.embedding[tokens])  # type: ignore[index]
        forward = self.fed(i, tokens, lambda: self.contexts[i].decode_floats(floats, tokens, logits))
        if forward is not None:
            self.texts[i] += tokens
            self.check(forward, self.texts[i], len(self.texts[i]) - len(tokens), logits)

    @precondition(lambda self: self.hidden and self.model.capabilities.first_layers)
    @rule(i=where, n=width, layers=st.integers(1, 2), seed=number)
    def feed_first_layers(self, i: int, n: int, layers: int, seed: int) -> None:
        context, tokens = self.contexts[i], self.many(n, seed)
        held, start, whole = self.partial[i], len(self.texts[i]), context.n_whole
        layers = min(layers, self.model.n_layers - 1) if held is None or not seed % 4 else held[1]
        forward = self.fed(i, tokens, lambda: context.decode_first_layers(tokens, layers), layers)
        if forward is not None:
            self.texts[i] += tokens
            self.partial[i] = self.partial[i] or (whole, layers)
            assert len(forward) == 0
            assert set(forward.hidden) == {name for name in map(layer_name, range(layers)) if name in self.hidden}
            wanted = self.expected(self.texts[i], start)
            for name, states in forward.hidden.items():
                self.check_states(name, states, wanted.hidden[name])

    @rule(i=where, share=st.floats(0, 1), back=st.integers(0, 9))
    def cut(self, i: int, share: float, back: int) -> None:
        """Mostly the last few tokens, as rejected drafts are."""
        text = self.texts[i]
        n = max(0, len(text) - back) if share < 0.7 else int(len(text) * (1 - share))
        self.contexts[i].truncate(n)
        self.forget(i, n)
        self.check_no_tree(i)

    def forget(self, i: int, n: int) -> None:
        del self.texts[i][n:]
        if (held := self.partial[i]) is not None and n <= held[0]:
            self.partial[i] = None

    @rule(i=where, j=where, seed=number)
    def reuse(self, i: int, j: int, seed: int) -> None:
        """Go on with another's text, or one's own and something else."""
        other = [*self.texts[j][: seed % 50], *some_tokens(3, seed)]
        n = next((at for at, (a, b) in enumerate(zip(self.texts[i], other, strict=False)) if a != b), None)
        n = min(len(self.texts[i]), len(other)) if n is None else n
        assert self.contexts[i].reuse(other) == n
        self.forget(i, n)
        self.check_no_tree(i)

    @rule(i=where, n=st.integers(1, 10), seed=number, branches=st.booleans())
    def break_off(self, i: int, n: int, seed: int, branches: bool) -> None:
        """What was fed before is still there, or is named no more."""
        context, tokens = self.contexts[i], some_tokens(n, seed)
        if self.partial[i] is not None or n > context.n_free:
            return
        parents = [*range(-1, n // 2 - 1), *[-1] * (n - n // 2)]
        feed = partial(context.decode_tree, tokens, parents) if branches and context.can_branch else None
        with breaking_off(self.model), pytest.raises(BROKEN):
            (feed or partial(context.decode, tokens))()
        self.check_left(i)
        self.check_no_tree(i)

    def check_left(self, i: int) -> None:
        """After a pass that broke off: all is there, but for rows of floats that MLX cannot feed again."""
        context, text = self.contexts[i], self.texts[i]
        assert context.tokens == text[: context.n_past]
        assert context.tokens == text or (self.embedding is not None and self.model.backend == "mlx")
        del text[context.n_past :]

    @rule(
        i=st.sampled_from([1, 1, 1, 0, 3]),
        steps=st.lists(st.integers(0, 3), min_size=1, max_size=12),
        kept=number,
        seed=number,
    )
    def branch(self, i: int, steps: list[int], kept: int, seed: int) -> None:
        context, text = self.contexts[i], self.texts[i]
        if not context.can_branch or self.partial[i] is not None or len(steps) > context.n_free:
            return
        parents = [max(-1, at - 1 - step) for at, step in enumerate(steps)]
        tokens = some_tokens(len(parents), seed)
        forward = context.decode_tree(tokens, parents)
        assert context.tokens == text
        for at in range(len(tokens)):
            path = [*text, *(tokens[each] for each in path_to(parents, at))]
            self.check(forward.take([at]), path, len(path) - 1)
        path = path_to(parents, kept % (len(parents) + 1) - 1)
        if kept % 5:
            context.keep(path)
            text += [tokens[at] for at in path]
        assert context.tokens == text

    @precondition(lambda self: self.model.capabilities.saves_state)
    @rule(i=where)
    def save(self, i: int) -> None:
        context = self.contexts[i]
        if self.partial[i] is not None:
            with pytest.raises(UsageError, match="truncate them first"):
                context.export_state()
            return
        state = context.export_state()
        assert list(state.tokens) == self.texts[i]
        assert state.n_bytes <= context.state_bytes
        self.states.append(state)

    @precondition(lambda self: self.states)
    @rule(i=where, which=number)
    def restore(self, i: int, which: int) -> None:
        context, state = self.contexts[i], self.states[which % len(self.states)]
        try:
            context.import_state(state)
        except ContextFull:
            assert len(state.tokens) > context.n_free
        else:
            self.texts[i], self.partial[i] = list(state.tokens), None
        assert context.tokens == self.texts[i]

    @rule(source=st.integers(0, 2), step=st.integers(1, 2), n=number)
    def copy_prefix(self, source: int, step: int, n: int) -> None:
        target = (source + step) % 3
        n %= self.batch[source].n_whole + 1
        try:
            self.batch.copy_prefix(source, target, n)
        except ContextFull:
            assert n > self.batch.free_cells
            n = 0
        self.texts[2 + target], self.partial[2 + target] = self.texts[2 + source][:n], None


def try_any_order(
    model: Model,
    oracle: Model,
    *,
    hidden: Sequence[str] = (),
    embedding: FloatArray | None = None,
    noise: float = NOISE,
    n_examples: int = 12,
    n_steps: int = 40,
    size: int = 1,
) -> None:
    """Do things in many orders, and compare each row with that of a context of ``oracle`` that did nothing else."""

    def expected(text: list[int], start: int) -> Forward:
        return fresh(oracle, text, start, hidden)

    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: Memories(model, expected, hidden, embedding, noise, size),
        settings=settings(max_examples=n_examples, stateful_step_count=n_steps, phases=[Phase.generate]),  # no minutes
    )


SHAPE = Shape(n_layer=3, n_head=2, n_head_kv=1)
"""With heads of 64 channels, on which ik-llama's flash attention ends the process over rows of two sequences."""

WEIGHTS = llama_weights(SHAPE, 384)
EMBEDDING = WEIGHTS["token_embd.weight"]
EVERY = ("layer:0", "layer:1", "layer:2", "norm")
"""The states of ``three_layers``."""


def three_layers(folder: Path) -> Path:
    """A model of three layers, F32, whose ``WEIGHTS`` are known."""
    return write_llama(folder / "tiny-three-layers.gguf", SHAPE, weights=WEIGHTS)
