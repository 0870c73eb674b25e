"""Where training begins: a linear head in closed form, whose block adds nothing yet.

With u_(p+1) the target's last state after token x_(p+1) before its weight, that is result_norm / weight, the rows

    z_p = fc · s_p + W · E[x_(p+1)] + b  ≈  u_(p+1)

are fitted by ridge regression (Hoerl and Kennard 1970) over the examples, and C in the same way, so that a chain goes
on from what was guessed. Of Qwen2.5-Coder 1.5B 18,000 rows so give, in half a minute, a head that is right at 0.23 of
held-out places; two and a half minutes of gradient steps from the target's last block gave 0.20.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from localspec.errors import UnsupportedModel
from localspec.model_files.gguf_file import GGUFFile
from localspec.model_files.head_card import HeadCard, Kind, TargetFacts
from localspec.model_files.tensor_rows import n_rows, tensor_rows
from localspec.training.lessons import MEMORY, Embed, first_lesson
from localspec.training.shards import Passage

Floats = npt.NDArray[np.float32]

_PAIRS_APART = {"llama": False, "qwen2": True}
"""Architectures whose blocks a head can begin with -> whether their rotary embedding turns channels i and i + d/2 of a
head together (as GPT-NeoX did) and not neighbours."""

_BLOCK = re.compile(r"(attn_norm|attn_output|ffn_norm|ffn_gate|ffn_up|ffn_down)\.weight|attn_[qkv]\.(weight|bias)")

_WHOLE = 32
"""Engines need an MLP of whole blocks of this many channels."""

_COLD = 0.02
"""Standard deviation of a matrix that begins at random, as GPT-2's and llama's did."""

_RIDGE = 100.0
"""Rows' worth of regularisation, where inputs have about the size 1. Between 40 and 550 little changes."""

_ROWS_PER_INPUT = 24
"""Examples that are fitted to at most, for each of the inputs."""

_ROWS_AT_ONCE = 4096

_OUTLIER = 4.0
"""The first tokens of texts have states forty times as long as others; they are no examples."""

_SHARPNESS = np.arange(0.1, 1.05, 0.1)
_JUDGED = 512
"""Examples kept apart to choose how sure the head begins."""


def new_card(
    file: GGUFFile,
    fingerprint: str,
    *,
    kind: Kind,
    taps: Sequence[str],
    token_map: npt.NDArray[np.int32],
    steps: int,
    d_ff: int,
) -> HeadCard:
    """The card of an untrained head; its block has the heads of the target's.

    Args:
        file: the target.
        fingerprint: of that file.
        kind, taps, token_map, steps: see ``HeadCard``.
        d_ff: width of the block's MLP; at most the target's is used.

    Raises:
        UnsupportedModel: the target does not say its sizes.
    """
    target = TargetFacts.of(file, fingerprint)
    if kind == "medusa":
        return HeadCard(kind=kind, taps=tuple(taps), token_map=token_map, steps=steps, target=target)
    n_head = file.field("attention.head_count")
    n_head_kv = file.field("attention.head_count_kv", n_head)
    if not all(isinstance(n, int) and n > 0 for n in (n_head, n_head_kv)):
        raise UnsupportedModel(f"{file.path.name} does not say how many heads its layers have")
    n_ff = file.field("feed_forward_length", d_ff)
    return HeadCard(
        kind=kind,
        taps=tuple(taps),
        token_map=token_map,
        steps=steps,
        target=target,
        n_head=n_head,
        n_head_kv=n_head_kv,
        d_head=int(file.field("attention.key_length", target.n_embd // n_head)),
        d_ff=max(_WHOLE, (min(d_ff, n_ff) if isinstance(n_ff, int) else d_ff) // _WHOLE * _WHOLE),
        rope_base=float(file.field("rope.freq_base", 10000.0)),
        norm_eps=float(file.field("attention.layer_norm_rms_epsilon", 1e-6)),
    )


@dataclass(frozen=True)
class Start:
    """What training begins with.

    Attributes:
        weights: by the names of ``HeadCard.shapes``.
        sizes: matrix -> the usual size of each of its inputs [columns], where that is not about 1: steps of the
            optimiser are divided by it.
    """

    weights: dict[str, Floats]
    sizes: dict[str, Floats]


def start(
    file: GGUFFile, card: HeadCard, output: Floats, embed: Embed, passages: Sequence[Passage], seed: int
) -> Start:
    """Fit a head to examples as far as that has a closed form.

    Memory: 16 bytes for each pair of inputs, of which there are (taps + 1) n_embd, and a tenth of a gigabyte.

    Args:
        file: the target.
        card: the head.
        output: the target's output rows for ``card.token_map`` [n_out, n_embd].
        embed: the target's embeddings.
        passages: the examples.
        seed: of what begins at random.
    """
    rng = np.random.default_rng(seed)
    weights = {name: _cold(name, shape, rng) for name, shape in card.shapes().items()}
    if card.kind == "medusa":
        return Start(weights, {})
    if (block := _last_block(file, card)) is not None:
        weights |= block
    weights["output_norm.weight"] = norm = _whole(file, "output_norm.weight")
    examples = _Examples(card, embed, norm, passages)
    n = card.n_embd
    sizes = {"head.fc.weight": examples.sizes[:-n], "head.embed.weight": examples.sizes[-n:]}
    if "norm" in card.taps:
        weights |= _fitted(card, examples)
        weights["output_norm.weight"] = norm * _sharpness(card, weights, embed, passages[-8:], output)
    return Start(weights, sizes)


class _Examples:
    """Rows of inputs and what comes of them, shuffled passage by passage."""

    def __init__(self, card: HeadCard, embed: Embed, norm: Floats, passages: Sequence[Passage]) -> None:
        self._embed, self._passages = embed, passages
        self._taps = len(card.taps)
        self._last = card.taps.index("norm") if "norm" in card.taps else 0
        # A channel that the last norm takes away cannot be told.
        kept = np.abs(norm) > 1e-3 * np.median(np.abs(norm))
        self._weight = np.where(kept, 1 / np.where(kept, norm, 1), 0).astype(np.float32)
        some = np.concatenate([p.states[_first(p) :][:256] for p in passages[:32]]).astype(np.float32)
        self._longest = _OUTLIER * np.median(_lengths(some), axis=0)
        tokens = np.concatenate([p.tokens for p in passages[:32]])
        states = np.median(np.abs(some), axis=0)
        floor = 0.05 * np.median(states, axis=1, keepdims=True) + 1e-6
        embedded = np.full(card.n_embd, np.median(np.abs(embed(tokens[:2048]))) + 1e-6)
        self.sizes: Floats = 1.5 * np.concatenate([np.maximum(states, floor).ravel(), embedded]).astype(np.float32)

    def inputs(self, passage: Passage, first: int, last: int) -> Floats:
        """[n, (n_taps + 1) n_embd], of about the size 1."""
        states = passage.states[first:last].reshape(last - first, -1).astype(np.float32)
        rows: Floats = np.concatenate([states, self._embed(passage.tokens[first + 1 : last + 1])], axis=1)
        rows /= self.sizes
        return rows

    def __iter__(self) -> Iterator[tuple[Floats, Floats, Floats, Floats]]:
        """Inputs of rows, u of the next token, the embedding of the one after it (sizes as in inputs), and its u."""
        for passage in self._passages:
            first, last = _first(passage), len(passage) - 2
            if last <= first:
                continue
            x = self.inputs(passage, first, last)
            u = passage.states[first + 1 : last + 2, self._last].astype(np.float32) * self._weight
            lengths = _lengths(passage.states[first : last + 2].astype(np.float32))
            usual = np.all(lengths < self._longest, axis=1)
            usual = usual[:-2] & usual[1:-1] & usual[2:]
            n = self._weight.size
            after = self._embed(passage.tokens[first + 2 : last + 2]) / self.sizes[-n:]
            yield x[usual], u[:-1][usual], after[usual], u[1:][usual]


def _first(passage: Passage) -> int:
    return max(1, min(first_lesson(passage), len(passage) - 1) - MEMORY)


def _lengths(states: Floats) -> Floats:
    """Root mean square of each state."""
    lengths: Floats = np.sqrt(np.mean(states**2, axis=-1))
    return lengths


def _fitted(card: HeadCard, examples: _Examples) -> dict[str, Floats]:
    """fc, W, b and C."""
    n, n_in = card.n_embd, len(examples.sizes) + 1
    gram = np.zeros((n_in, n_in))
    cross = np.zeros((n_in, 3 * n))
    rows = 0
    for group in _groups(examples, _ROWS_AT_ONCE):
        x, u, after, u_after = group
        x = np.concatenate([x, np.ones((len(x), 1), np.float32)], axis=1)
        gram += x.T @ x
        cross += x.T @ np.concatenate([u, u_after, after], axis=1)
        rows += len(x)
        if rows > _ROWS_PER_INPUT * n_in:
            break
    ridge = np.full(n_in, _RIDGE)
    ridge[-1] = 1e-3
    found = np.linalg.solve(gram + np.diag(ridge), cross[:, :n])  # [n_in, n]
    embed, bias = found[-1 - n : -1], found[-1]
    fitted = {
        "head.fc.weight": found[: -1 - n].T / examples.sizes[:-n],
        "head.embed.weight": embed.T / examples.sizes[-n:],
    }
    fitted["head.embed.bias"] = bias
    if card.kind == "chained":
        # What a row guesses, x · found, leads to the next state but for what its token adds.
        guess_gram = found.T @ gram @ found
        left = cross[:, n : 2 * n] - cross[:, 2 * n :] @ embed - np.outer(gram[:, -1], bias)
        guess_gram[np.diag_indices(n)] += 0.01 * np.trace(guess_gram) / n + 1e-3
        fitted["head.chain.weight"] = np.linalg.solve(guess_gram, found.T @ left).T
    return {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in fitted.items()}


def _sharpness(
    card: HeadCard, weights: dict[str, Floats], embed: Embed, passages: Sequence[Passage], output: Floats
) -> np.float32:
    """By what its last norm is multiplied so that its first guesses are as sure as they should be.

    Args:
        card, weights: the head; its block adds nothing.
        embed: the target's embeddings.
        passages: judged by, those fitted to last.
        output: output rows.
    """
    found = np.zeros(len(_SHARPNESS))
    for passage in passages:
        places = np.arange(_first(passage), len(passage) - 1)[: _JUDGED // len(passages)]
        states = passage.states[places].reshape(len(places), -1).astype(np.float32)
        rows = states @ weights["head.fc.weight"].T + weights["head.embed.bias"]
        rows += embed(passage.tokens[places + 1]) @ weights["head.embed.weight"].T
        logits = (rows / _lengths(rows)[:, None] * weights["output_norm.weight"]) @ output.T
        ids = passage.top_ids[places + 1]
        at = np.searchsorted(card.token_map, ids).clip(max=card.n_out - 1)
        probs = np.exp(passage.top_logprobs[places + 1].astype(np.float32)) * (card.token_map[at] == ids)
        for i, factor in enumerate(_SHARPNESS):
            scaled = factor * logits
            highest = scaled.max(1, keepdims=True)
            logs = scaled - highest - np.log(np.exp(scaled - highest).sum(1, keepdims=True))
            found[i] -= (probs * np.take_along_axis(logs, at, 1)).sum()
    return np.float32(_SHARPNESS[found.argmin()])


def _groups(examples: _Examples, n: int) -> Iterator[list[Floats]]:
    """Rows of several passages together, about n."""
    waiting: list[tuple[Floats, ...]] = []
    for each in examples:
        waiting.append(each)
        if sum(len(rows[0]) for rows in waiting) >= n:
            yield [np.concatenate(part) for part in zip(*waiting, strict=True)]
            waiting = []
    if waiting:
        yield [np.concatenate(part) for part in zip(*waiting, strict=True)]


def _cold(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    # What is added to the rows begins with nothing.
    if name.endswith((".bias", "attn_output.weight", "ffn_down.weight", "fc.weight")) or re.fullmatch(
        r"head\.\d+\.weight", name
    ):
        return np.zeros(shape, np.float32)
    return (rng.standard_normal(shape) * _COLD).astype(np.float32)


def _last_block(file: GGUFFile, card: HeadCard) -> dict[str, Floats] | None:
    """The target's last block under a head's names, its rotary embedding turned into llama's, and adding nothing; None
    if it is of another kind."""
    prefix = f"blk.{card.target.n_layers - 1}."
    names = [name.removeprefix(prefix) for name in file.tensors if name.startswith(prefix)]
    apart = _PAIRS_APART.get(file.architecture)
    if apart is None or not all(map(_BLOCK.fullmatch, names)):
        return None
    if file.field("rope.dimension_count", card.d_head) != card.d_head:
        return None
    block = {f"blk.0.{name}": _whole(file, prefix + name) for name in names}
    wanted = card.shapes() | card.optional_shapes()
    narrow = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")
    if any(block[name].shape != wanted[name] for name in block if not name.endswith(narrow)):
        return None
    if len(block["blk.0.ffn_up.weight"]) < card.d_ff:
        return None
    for name in ("attn_output", "ffn_down"):
        block[f"blk.0.{name}.weight"][:] = 0
    if apart:
        for part in "qk":
            for name in {f"blk.0.attn_{part}.weight", f"blk.0.attn_{part}.bias"} & block.keys():
                block[name] = neighbours(block[name], card.d_head)
    return _narrowed(block, card)


def neighbours(rows: Floats, d_head: int) -> Floats:
    """Rows of queries or keys in which pairs of channels stand half a head apart, so that they stand side by side."""
    halves = rows.reshape(-1, 2, d_head // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _narrowed(block: dict[str, Floats], card: HeadCard) -> dict[str, Floats]:
    """The block with the ``d_ff`` longest channels of its MLP."""
    gate, up, down = (block[f"blk.0.ffn_{part}.weight"] for part in ("gate", "up", "down"))
    if len(gate) > card.d_ff:
        lengths = np.linalg.norm(gate, axis=1) * np.linalg.norm(up, axis=1)
        kept = np.sort(np.argsort(-lengths)[: card.d_ff])
        block |= {"blk.0.ffn_gate.weight": gate[kept], "blk.0.ffn_up.weight": up[kept]}
        block["blk.0.ffn_down.weight"] = down[:, kept]
    return {name: np.ascontiguousarray(values) for name, values in block.items()}


def _whole(file: GGUFFile, name: str) -> Floats:
    rows = tensor_rows(file, name, slice(0, n_rows(file, name)))
    return rows if len(file.tensors[name].shape) > 1 else rows[0]
