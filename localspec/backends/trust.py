"""Is this engine right about this file? Wrong kernels exist, and must never reach an answer.

Passes of different widths, passes that branch and passes over several sequences run different kernels over the same
weights. Before an engine first answers with a file in one of these ways, a fixed text goes through it in that way and
in one that was checked before; at the bottom are single-token passes. Where another engine is installed, the same text
goes through that too: at once if the first comparison leaves a doubt, else in idle time, and at the latest at the
fourth load. Every verdict is remembered by engine version and the file's fingerprint. A file whose batches come out
wrong is repacked, once, into tensor types that come out right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from localspec.backends import repack
from localspec.backends.base import Context, FloatArray, Model, Piece, Progress
from localspec.backends.registry import engine_module, unavailable_reason
from localspec.errors import Cancelled, EngineError, EngineMismatch, LocalspecError
from localspec.model_files.gguf import fingerprint
from localspec.system.files import JsonStore, home, remembered
from localspec.system.machine import read_memory
from localspec.system.steps import Steps, exhaust

MAX_MEAN_KL = 0.15
"""Largest mean KL divergence [nats] between two computations of the same logits that counts as kernel noise: every
healthy file measured has under 0.005, a broken one 0.8 to 2.2."""

DOUBTFUL_KL = 0.03  # mean KL divergence [nats] over which a few passes do not settle it

MAX_KL = 0.03
"""As ``MAX_MEAN_KL``, for tokens that branch: healthy engines have 0.003 to 0.005, ik-llama with flash attention 0.5.
Stricter, because chains do as well."""

MAX_PUT_OFF = 3
"""Loads for which the comparison with another engine may be put off to idle time that then did not suffice."""

CHECK_TEXT = (
    "The harbour was quiet before dawn. Two boats lay at the pier, and a man with a lantern counted crates: "
    "fourteen of oranges, three of glass, one marked only with a number, 2718. "
    "def area(r):\n    return 3.14159 * r ** 2\n"
)

_FORMAT = 3


@dataclass(frozen=True, slots=True)
class Agreement:
    """How two computations of the same positions compare."""

    mean_kl: float  # mean KL divergence over the positions [nats]
    top1: float  # share of positions with the same most probable token

    @property
    def holds(self) -> bool:
        return self.mean_kl <= MAX_MEAN_KL


def agreement(a: FloatArray, b: FloatArray) -> Agreement:
    """Compare logits [n, n_vocab] of two computations, row by row."""
    total = 0.0
    for rows in zip(a, b, strict=True):
        p, q = (row.astype(np.float64) - float(row.max()) for row in rows)
        p, q = p - np.log(np.exp(p).sum()), q - np.log(np.exp(q).sum())
        total += float((np.exp(p) * (p - q)).sum())
    same = float(np.mean(np.argmax(a, axis=1) == np.argmax(b, axis=1)))
    return Agreement(max(0.0, total / len(a)) if np.isfinite(total) else float("inf"), same)


def _worst(found: Iterable[Agreement]) -> Agreement:
    return max(found, key=lambda each: each.mean_kl)


def check_tokens(model: Model, n: int) -> list[int]:
    """The fixed text, at most n tokens of it; n other ones where a vocabulary has too few for it."""
    tokens = model.tokenize(CHECK_TEXT, add_special=True)
    return tokens[:n] if len(tokens) >= 8 else [i % model.n_vocab for i in range(1, n + 1)]


# -- what is remembered ------------------------------------------------------------------------------------------------


def verdict_key(backend: str, options: Mapping[str, Any], digest: str) -> dict[str, str]:
    """What a verdict depends on: the engine and its version, where the weights run, the file."""
    module = engine_module(backend)
    engine = module.binding().version if hasattr(module, "binding") else ""
    key = {"engine": f"{backend} {engine}", "gpu layers": str(options.get("n_gpu_layers")), "file": digest}
    return key | ({"placement": str(placement)} if (placement := options.get("placement")) else {})


def verdicts() -> JsonStore:
    """What was found, by ``verdict_key``: ``holds``, ``why``, and ``waits`` (loads for which the comparison with
    another engine was put off) where that is still to be made."""
    return JsonStore(home() / "trust", _FORMAT)


def _verdict(found: Agreement, limit: float = MAX_MEAN_KL, wrong: str = "") -> dict[str, Any]:
    holds = found.mean_kl <= limit
    return {"holds": holds, "why": f"{'' if holds else wrong}KL {found.mean_kl:.2g} nats"}


def _why_wrong(
    model: Model, n_gpu_layers: int | None, memory: str, limit: float, check: Callable[[], Agreement]
) -> str | None:
    """By how much a kind of memory of a loaded model is wrong; None where it is right. Checked once."""
    options = {"n_gpu_layers": n_gpu_layers, "placement": model.placement}
    key = verdict_key(model.backend, options, fingerprint(model.path)) | {"memory": memory, "cache": model.kv_type}
    verdict = remembered(verdicts(), key, lambda: _verdict(check(), limit))
    return None if verdict["holds"] else f"({verdict['why']})"


# -- passes over one sequence, before the first answer -----------------------------------------------------------------


def load_checked(
    backend: str, path: Path, options: dict[str, Any], say: Callable[[str], None], *, put_off: bool = False
) -> Model:
    """Load a file with arguments of the engine's ``load``, or a repacked copy of it that the engine computes rightly.

    Args:
        say: takes what is being done, in a line.
        put_off: leave the comparison with another engine to ``SecondOpinion``, at most ``MAX_PUT_OFF`` times.

    Raises:
        EngineMismatch: the engine is wrong about the file and no repacked copy helps.
    """
    module = engine_module(backend)
    store, source = verdicts(), fingerprint(path)

    def key(digest: str) -> dict[str, str]:
        return verdict_key(backend, options, digest)

    verdict = store.get(key(source))
    if verdict is None or verdict["holds"]:
        model: Model = module.load(path, **options)
        if model.capabilities.batch_invariant:
            return model
        if verdict is None:
            say(f"checking that {model.engine} computes {path.name} correctly (once per file)")
            verdict = remembered(store, key(source), lambda: _examine_alone(model))
        if "waits" in verdict:
            if put_off and verdict["waits"] < MAX_PUT_OFF:
                verdict = {**verdict, "waits": verdict["waits"] + 1}
            else:
                verdict = _compare(model, path, options, verdict)
            store.put(key(source), verdict)
        if verdict["holds"]:
            return model
        model.close()
    if (repacked := repack.near_exact_copy(path, source, say)) is not None:
        copy: Model = module.load(repacked, **options)
        found = remembered(
            store, key(fingerprint(repacked)), lambda: _compare(copy, path, options, _examine_alone(copy))
        )
        if found["holds"]:
            return copy
        copy.close()
        repacked.unlink(missing_ok=True)
    raise EngineMismatch(
        f"{backend} gives wrong results for {path.name} ({verdict['why']}); use --backend llama-cpp "
        "(pip install 'localspec[llama-cpp]') or another quantisation of the model"
    )


def _examine_alone(model: Model) -> dict[str, Any]:
    own = check_model(model)
    found = _verdict(own, wrong="its batches differ from its single tokens, ")
    if not own.holds or not other_engines(model):
        return found
    return {**found, "waits": MAX_PUT_OFF if own.mean_kl > DOUBTFUL_KL else 0}  # at once if in doubt


def check_model(model: Model) -> Agreement:
    """``checking`` at once."""
    return exhaust(checking(model))


def checking(model: Model) -> Steps[Agreement]:
    """Compare passes of a model, wide and narrow, with those of single tokens; more where few leave a doubt."""
    found = yield from _comparing(model, 48, 4)
    if DOUBTFUL_KL < found.mean_kl <= MAX_MEAN_KL:
        found = _worst([found, (yield from _comparing(model, 64, 20))])
    return found


_NARROW = (7, 6, 5, 4, 3, 2)


def _passes(context: Context, tokens: Sequence[int], start: int, *widths: int) -> Steps[list[FloatArray]]:
    """The rows of passes of these widths, one after another, over the tokens from ``start`` on."""
    context.truncate(start)
    rows = []
    for width in widths:
        rows.append(context.decode(tokens[context.n_past : context.n_past + width]).logits.copy())
        yield
    return rows


def _comparing(model: Model, n_tokens: int, n_single: int) -> Steps[Agreement]:
    """The worst of passes over 1 to 8 and 40 tokens, and one that branches; of 48, in the time of 30 single tokens.

    Every width is tied to single-token passes: 8 on a memory that single passes wrote, 40 by single tokens behind it,
    and the narrow ones by 40.
    """
    tokens = check_tokens(model, n_tokens)
    few = min(2 * n_single, len(tokens) // 2)
    with model.new_context(len(tokens) + 8) as context:
        single = yield from _passes(context, tokens, 0, *[1] * max(1, few // 2))
        (batched,) = yield from _passes(context, tokens, 0, few)
        (wide,) = yield from _passes(context, tokens, few, len(tokens) - few)
        n_behind = min(n_single + 2, len(wide))
        behind = yield from _passes(context, tokens, len(tokens) - n_behind, *[1] * n_behind)
        pairs = [(np.concatenate(single), batched[: len(single)]), (np.concatenate(behind), wide[-n_behind:])]
        if (start := len(wide) - sum(_NARROW)) >= 0:
            for rows in (yield from _passes(context, tokens, few + start, *_NARROW)):
                pairs.append((rows, wide[start : start + len(rows)]))
                start += len(rows)
        if context.can_branch and len(wide) >= 4:
            context.truncate(len(tokens) - 4)
            first, second, third, fourth = tokens[-4:]
            tree = context.decode_tree([first, fourth, second, first, third, fourth], [-1, -1, 0, 0, 2, 4])
            pairs.append((tree.logits[[0, 2, 4, 5]], wide[-4:]))
            yield
            context.keep([0, 2])
            pairs.append((context.decode([third, fourth]).logits.copy(), wide[-2:]))
            yield
    return _worst(agreement(*pair) for pair in pairs)


# -- the same text in another engine -----------------------------------------------------------------------------------
#
# What all kernels of an engine get wrong alike shows only against another engine. Loading that takes seconds and as
# much memory again, so it waits for idle time.

_PIECE = 16

ROOM = 1.3  # free memory, in sizes of the file, under which no second copy of a model is loaded for the comparison


def other_engines(model: Model) -> list[str]:
    """Engines that a model could be compared on."""
    names = ("llama-cpp", "ik-llama")
    return [name for name in names if name != model.backend and unavailable_reason(name) is None]


def load_elsewhere(
    model: Model, path: Path, options: Mapping[str, Any], progress: Progress | None = None
) -> Model | None:
    """The same file on another engine; None where no other can have it."""
    on_cpu = {**options, "n_gpu_layers": 0, "progress": progress}
    placement = on_cpu.pop("placement", None)
    if placement and placement.rpc:
        return None  # it is somewhere else because there is no room for it here
    for name in other_engines(model):
        try:
            loaded: Model = engine_module(name).load(path, **on_cpu)
        except LocalspecError:
            continue
        if loaded.n_vocab == model.n_vocab:
            return loaded
        loaded.close()
    return None


def comparing_models(model: Model, other: Model) -> Steps[Agreement]:
    """Compare passes over the fixed text in two engines, a pass at a time."""
    tokens = check_tokens(model, 64)
    widths = [_PIECE] * -(-len(tokens) // _PIECE)
    with model.new_context(len(tokens) + 8) as context:
        rows = yield from _passes(context, tokens, 0, *widths)
    with other.new_context(len(tokens) + 8) as context:
        others = yield from _passes(context, tokens, 0, *widths)
    return agreement(np.concatenate(rows), np.concatenate(others))


def _comparing_verdict(model: Model, other: Model, verdict: dict[str, Any]) -> Steps[dict[str, Any]]:
    """The verdict on an engine that agrees with itself, once it was compared with another."""
    across = yield from comparing_models(model, other)
    # An engine that contradicts itself on this file says nothing about another.
    if not across.holds and (yield from checking(other)).holds:
        return {"holds": False, "why": f"it differs from {other.engine}, KL {across.mean_kl:.2g} nats"}
    return _settled(verdict)


def _settled(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """A verdict that waits for no comparison any more."""
    return {name: value for name, value in verdict.items() if name != "waits"}


def _compare(model: Model, path: Path, options: dict[str, Any], verdict: dict[str, Any]) -> dict[str, Any]:
    other = load_elsewhere(model, path, options) if "waits" in verdict else None
    if other is None:
        return _settled(verdict)
    with other:
        try:
            return exhaust(_comparing_verdict(model, other, verdict))
        except EngineError:  # one that fails on the file, for want of memory say, contradicts no other
            return _settled(verdict)


@dataclass
class SecondOpinion:
    """Another installed engine, compared in idle time with the one that a model is loaded with."""

    model: Model  # that answers
    path: Path  # its file as the user named it
    options: dict[str, Any]  # what it was loaded with
    refuse: Callable[[str], None]  # called with a line if the engine turns out to be wrong
    # What else to do with a model that is right, on the engine that answers and on the other; and whether that has
    # found what it looks for.
    compare: Callable[[Model, Model], Steps[None]]
    compared: bool

    @property
    def waits(self) -> bool:
        """Whether there is something to find out."""
        if self.model.capabilities.batch_invariant or self.model.path != self.path:
            return False
        if not other_engines(self.model):
            return False
        verdict = verdicts().get(self._key())
        return verdict is not None and bool(verdict["holds"]) and ("waits" in verdict or not self.compared)

    def steps(self, stopped: Callable[[], bool]) -> Steps[None]:
        """Load the other engine's model, compare, measure, remember; Cancelled where it is stopped while it loads."""
        if read_memory().available < ROOM * self.model.size_bytes:
            return
        store, key = verdicts(), self._key()
        other = load_elsewhere(self.model, self.path, self.options, lambda fraction: not stopped())
        if other is None:
            if stopped():
                raise Cancelled("loading was stopped")
            if verdict := store.get(key):
                store.put(key, _settled(verdict))
            return
        with other:
            yield
            if (verdict := store.get(key)) is None:
                return
            if "waits" in verdict:
                verdict = yield from _comparing_verdict(self.model, other, verdict)
                store.put(key, verdict)
            if not verdict["holds"]:
                self.refuse(
                    f"{self.model.engine} gives wrong results for {self.path.name} ({verdict['why']}): "
                    "answers may be wrong. Start again to use another engine or a repacked copy of the file"
                )
            elif not self.compared:
                yield from self.compare(self.model, other)

    def _key(self) -> dict[str, str]:
        return verdict_key(self.model.backend, self.options, fingerprint(self.path))


# -- other memories, each before the first of its kind ----------------------------------------------------------------
#
# What answers do in a context made for tokens that branch, in one that took up a saved state, or among several
# sequences, is done once, and every row compared with that of a context of one sequence, which ``check_model`` checked.


def _expected(alone: Context, before: Sequence[int], tokens: Sequence[int]) -> FloatArray:
    """The rows of tokens behind a text, in a context that is known to be right."""
    _read(alone, before)
    return alone.decode(tokens).logits


def _read(context: Context, text: Sequence[int]) -> None:
    """Make a context hold a text."""
    if (n := context.reuse(text)) < len(text):
        context.decode(text[n:], "none")


_N_BEFORE = 244
"""Tokens before the first tree, which then lies on both sides of the 256th place: engines leave out what lies behind
the last place in use, in steps of 32 to 256."""

_SIDE = [*range(-1, 7)]  # a side branch as long as drafts are at most times, before the chain itself

_TREES: tuple[tuple[list[int], list[int]], ...] = (
    ([*_SIDE, -1, 8, 9, 10, 8, 9], [0, 1, 2, 3, 4]),  # a side branch goes on, from among what is dropped
    ([-1, 0, 1, 2, 0, 1, 5], [0, 1, 5, 6]),
    ([-1, -1, -1, 0, 1, 2, 2], [2]),
    ([*_SIDE, -1, -1, 9], [9, 10]),
)
"""The parents of trees fed one after another, and the path that is kept of each."""


def why_no_branches(
    model: Model, n_gpu_layers: int | None = None, say: Callable[[str], None] = lambda line: None
) -> str | None:
    """Why drafts may not branch; None where they may. Checked once for an engine and a file, which ``say`` is given."""
    reason = model.why_no_trees()
    if reason is not None or not model.capabilities.trees_apart:
        return reason  # where contexts are all alike, ``check_model`` looked at trees too

    def check() -> Agreement:
        say(f"checking that {model.engine} computes branching drafts of {model.path.name} correctly (once)")
        return check_branches(model)

    try:
        wrong = _why_wrong(model, n_gpu_layers, "branches", MAX_KL, check)
    except EngineError as error:  # for want of memory, it may be: not so for ever
        return str(error)
    return wrong and f"{model.engine} gives wrong results for branching drafts of {model.path.name} {wrong}"


def check_branches(model: Model) -> Agreement:
    """Compare a context made for tokens that branch with one that is not, also where they do not: such a context may
    compute all otherwise. The worst pass, in the time of reading some hundred tokens twice."""
    words = check_tokens(model, 48)
    text = [words[i % len(words)] for i in range(_N_BEFORE)]
    room, found = _N_BEFORE + 128, list[Agreement]()
    with model.new_context(room, branches=True) as context, model.new_context(room) as alone:

        def feed(n: int) -> None:
            before, tokens = list(context.tokens), [words[(context.n_past + i) % len(words)] for i in range(n)]
            rows = context.decode(tokens).logits.copy()
            found.append(agreement(rows, _expected(alone, before, tokens)))

        context.decode(text[:150], "none")
        for width in (1, 2, 5, 40, 1):
            feed(width)
        _read(context, text[:60])
        _read(context, text)
        for parents, kept in _TREES:
            before = list(context.tokens)
            # What follows a token differs from path to path, as it does in drafts.
            tokens = [words[(3 * at + 1) % len(words)] for at in range(len(parents))]
            rows = context.decode_tree(tokens, parents).logits.copy()
            for leaf in set(range(len(parents))) - set(parents):
                path = [leaf]
                while parents[path[0]] >= 0:
                    path.insert(0, parents[path[0]])
                found.append(agreement(rows[path], _expected(alone, before, [tokens[at] for at in path])))
            context.keep(kept)
            feed(1)
        feed(33)
        context.truncate(_N_BEFORE + 1)
        feed(3)
    return _worst(found)


def why_not_restored(model: Model, memory: str = "one", n_gpu_layers: int | None = None) -> str | None:
    """Why no context goes on from what another held; None where it does as that would. Checked once for an engine, a
    file and a kind of memory: ``one`` sequence, ``branches`` (see ``Model.new_context``), ``several`` sequences."""
    if model.capabilities.batch_invariant:
        return None
    wrong = _why_wrong(model, n_gpu_layers, f"restored {memory}", MAX_KL, lambda: check_restored(model, memory))
    return wrong and f"{model.engine} does not go on from a saved memory of {model.path.name} as it was {wrong}"


def check_restored(model: Model, memory: str = "one") -> Agreement:
    """Compare passes behind a text with those of a context that took up its state, in the time of reading it once."""
    tokens = check_tokens(model, 48)
    n, found = max(1, len(tokens) - 12), list[Agreement]()
    with ExitStack() as stack:
        if memory == "several":
            batch = stack.enter_context(model.new_batch(2, 2 * len(tokens)))
            one, other = batch[0], batch[1]
        else:
            one, other = (
                stack.enter_context(model.new_context(len(tokens) + 8, branches=memory == "branches")) for _ in "12"
            )
        one.decode(tokens[:n], "none")
        other.import_state(one.export_state())
        for piece in filter(None, (tokens[n : n + 1], tokens[n + 1 : n + 4], tokens[n + 4 :])):
            rows = one.decode(piece).logits.copy()
            found.append(agreement(rows, other.decode(piece).logits))
    return _worst(found)


_BATCH_PIECE = 33  # rows of a prompt that are fed together with others: from 32 on ik-llama has other kernels


def ensure_batches(model: Model, n_gpu_layers: int | None = None) -> None:
    """Check an engine's passes over several sequences of a file, which was loaded with so many layers on a GPU, unless
    that was done before; EngineMismatch where they differ from those over one."""
    if not model.capabilities.batches:
        return  # each sequence is a context, and those were checked
    wrong = _why_wrong(model, n_gpu_layers, "several", MAX_MEAN_KL, lambda: check_batch(model))
    if wrong:
        raise EngineMismatch(
            f"{model.engine} gives different results for batched conversations of {model.path.name} "
            f"{wrong}; answer one at a time, or use another --backend"
        )


def check_batch(model: Model) -> Agreement:
    """Compare sequences fed in one pass with each alone, in the time of about sixty single tokens; the worst pass.

    Prompts of different lengths, a prefix that two share, drafts of which some is taken back, a piece of a prompt next
    to others' rows, a sequence that leaves and one that comes.
    """
    tokens = check_tokens(model, 48)
    n, shared = len(tokens), len(tokens) // 3
    texts = [tokens * 2, [*tokens[:shared], *tokens[::-1] * 2], [*tokens[n // 2 :], *tokens * 2]]
    passes: list[list[tuple[int, int, FloatArray]]] = []  # of each the sequences, where their rows begin, and the rows
    with model.new_batch(len(texts), sum(map(len, texts))) as batch:

        def feed(*widths: int) -> None:
            starts = [batch[i].n_past for i in range(len(texts))]
            pieces = [Piece(i, texts[i][starts[i] :][:width]) for i, width in enumerate(widths) if width]
            found = zip(pieces, batch.decode(pieces), strict=True)
            passes.append([(each.sequence, starts[each.sequence], forward.logits.copy()) for each, forward in found])

        def take_back(*counts: int) -> None:
            for i, count in enumerate(counts):
                batch.truncate(i, batch[i].n_past - count)

        batch.decode([Piece(0, texts[0][: n // 2], "none"), Piece(2, texts[2][:n], "none")])
        batch.copy_prefix(0, 1, shared)
        feed(1, 1, 1)
        feed(5, 3, 2)
        take_back(3, 2, 0)
        feed(2, 1, _BATCH_PIECE)
        take_back(batch[0].n_past, 0, 0)
        feed(0, 2, 1)
        feed(_BATCH_PIECE, 1, 1)
    # Once the batch is closed, in one context: a GPU that is nearly full has no room for several.
    expected: list[list[FloatArray]] = [[] for _ in passes]
    with model.new_context(max(map(len, texts))) as alone:
        for i, text in enumerate(texts):
            for fed, of_pass in zip(passes, expected, strict=True):
                places = [(start, start + len(rows)) for sequence, start, rows in fed if sequence == i]
                of_pass += [_expected(alone, text[:start], text[start:end]).copy() for start, end in places]
    return _worst(
        agreement(np.concatenate([rows for _, _, rows in fed]), np.concatenate(of_pass))
        for fed, of_pass in zip(passes, expected, strict=True)
    )
