"""What training starts from: the card of the head to be made, and an earlier head's weights or a linear head fitted in
closed form, whose block adds nothing yet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from localspec.errors import LocalspecError, UnsupportedModel, UsageError
from localspec.heads.card import HeadCard, TargetFacts
from localspec.heads.file import check_head, head_weights, read_card
from localspec.heads.trained import heads_for
from localspec.heads.training.lessons import Embed, first_lesson
from localspec.heads.training.run_folder import Recipe
from localspec.heads.training.shards import Passage
from localspec.model_files.gguf import GGUFFile, n_rows, tensor_rows

Floats = npt.NDArray[np.float32]

# Architectures whose blocks a head can begin with -> whether their rotary embedding turns channels i and i + d/2 of a
# head together (as GPT-NeoX did) and not neighbours
_PAIRS_APART = {"llama": False, "qwen2": True}

_BLOCK = re.compile(r"(attn_norm|attn_output|ffn_norm|ffn_gate|ffn_up|ffn_down)\.weight|attn_[qkv]\.(weight|bias)")

_WHOLE = 32  # engines need an MLP of whole blocks of this many channels
_COLD = 0.02  # standard deviation of a matrix that begins at random, as GPT-2's and llama's did

_LONGEST_LICENSE = 200


def new_card(file: GGUFFile, fingerprint: str, recipe: Recipe, token_map: npt.NDArray[np.int32]) -> HeadCard:
    """The card of an untrained head; its block has the heads of the target's, and its MLP at most its width.

    Its licence is the target's, whose answers it learns from.

    Raises:
        UnsupportedModel: the target does not say its sizes, or has too few layers.
    """
    target, license = TargetFacts.of(file, fingerprint), file.metadata.get("general.license")
    n_head = file.field("attention.head_count")
    n_head_kv = file.field("attention.head_count_kv", n_head)
    if not all(isinstance(n, int) and n > 0 for n in (n_head, n_head_kv)):
        raise UnsupportedModel(f"{file.path.name} does not say how many heads its layers have")
    n_ff = file.field("feed_forward_length", recipe.d_ff)
    d_ff = min(recipe.d_ff, n_ff) if isinstance(n_ff, int) else recipe.d_ff
    d_head = int(file.field("attention.key_length", target.n_embd // n_head))
    if recipe.kind == "eagle3":
        n_head = n_head_kv = _eagle3_heads(target.n_embd)
        d_head = EAGLE3_D_HEAD
    return HeadCard(
        kind=recipe.kind,
        taps=recipe.taps(target.n_layers),
        token_map=token_map,
        steps=recipe.steps,
        target=target,
        license=license[:_LONGEST_LICENSE] if isinstance(license, str) else "",
        n_head=n_head,
        n_head_kv=n_head_kv,
        d_head=d_head,
        d_ff=max(_WHOLE, d_ff // _WHOLE * _WHOLE),
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


# -- an earlier head ---------------------------------------------------------------------------------------------------

NO_HEAD = "none"


def earlier_head(target: Path, fingerprint: str, recipe: Recipe, named: str | Path | None) -> Path | None:
    """The file of the head to start from; None for a linear head.

    ``named`` is the file of a head; "none"; or None for the one that drafters would take, if it fits.

    Raises:
        UsageError: the named one does not fit, or cannot be read; says why.
    """
    if named == NO_HEAD or (named is None and recipe.kind == "eagle3"):
        return None
    with GGUFFile(target) as file:
        n_out = min(recipe.n_out, TargetFacts.of(file, fingerprint).n_vocab)
        wanted = new_card(file, fingerprint, recipe, np.arange(n_out, dtype=np.int32))
    if named is None:
        return next((path for path in heads_for(target) if _misfit(read_card(path), wanted) is None), None)
    try:
        reason = _misfit(read_card(Path(named)), wanted)
    except (LocalspecError, OSError) as error:
        raise UsageError(f"cannot begin with the head {named}: {error}") from None
    if reason is not None:
        raise UsageError(f"cannot begin with the head {named}: {reason}")
    return Path(named)


def _misfit(card: HeadCard, wanted: HeadCard) -> str | None:
    """Why training cannot start from a head; None if it can."""
    if card.kind != wanted.kind:
        return f"it is a {card.kind} one, and a {wanted.kind} one is to be made"
    if card.target.fingerprint != wanted.target.fingerprint:
        return f"it was made for another file, {card.target.name}"
    if (card.taps, card.steps, card.shapes()) != (wanted.taps, wanted.steps, wanted.shapes()):
        return "its sizes, or the states that it reads, are others than those of the head to be made"
    return None


def going_on(path: Path, target: GGUFFile, card: HeadCard, embed: Embed, passages: Sequence[Passage]) -> Start:
    """The weights of an earlier head; its training data is not needed."""
    with GGUFFile(path) as file:
        check_head(file)
        weights = {name: head_weights(file, name) for name in file.tensors}
    sizes = Examples(card, embed, tensor_rows(target, "output_norm.weight", slice(0, 1))[0], passages).sizes
    n = card.n_embd
    return Start(weights, {"head.fc.weight": sizes[:-n], "head.embed.weight": sizes[-n:]})


# -- a linear head in closed form --------------------------------------------------------------------------------------
#
# With u_(p+1) the target's last state after token x_(p+1) before its weight, that is result_norm / weight, the rows
#
#     z_p = fc · s_p + W · E[x_(p+1)] + b  ≈  u_(p+1)
#
# are fitted by ridge regression (Hoerl and Kennard 1970) over the examples, and C in the same way, so that a chain
# continues what was guessed.

RIDGE = 100.0  # rows' worth of regularisation, where inputs have about the size 1. Between 40 and 550 little changes.
ROWS_PER_INPUT = 24  # most examples for each of the inputs

ROWS_AT_ONCE = 4096

_PROMPT_ROWS = 64  # rows of a prompt that are fitted to besides those of the answer
_OUTLIER = 4.0  # the first tokens of texts have states forty times as long as others; they are no examples


class Examples:
    """Rows of inputs and the rows that follow, passage by passage.

    Args:
        norm: the weight of the target's last norm.
        passages: whose last state, where the head does not read "norm", is that.

    Attributes:
        sizes: the usual size of each input: the states side by side, then an embedding.
        weight: last states times this are u.
    """

    def __init__(self, card: HeadCard, embed: Embed, norm: Floats, passages: Sequence[Passage]) -> None:
        self._embed, self._passages = embed, passages
        self._last = card.taps.index("norm") if "norm" in card.taps else -1
        # A channel that the last norm takes away cannot be told.
        kept = np.abs(norm) > 1e-3 * np.median(np.abs(norm))
        self.weight = np.where(kept, 1 / np.where(kept, norm, 1), 0).astype(np.float32)
        some = np.concatenate([p.states[first_row(p) :][:256] for p in passages[:32]]).astype(np.float32)
        self._longest = _OUTLIER * np.median(lengths_of(some), axis=0)
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
            first, last = first_row(passage), len(passage) - 2
            if last <= first:
                continue
            x = self.inputs(passage, first, last)
            u = passage.states[first + 1 : last + 2, self._last].astype(np.float32) * self.weight
            lengths = lengths_of(passage.states[first : last + 2].astype(np.float32))
            usual = np.all(lengths < self._longest, axis=1)
            usual = usual[:-2] & usual[1:-1] & usual[2:]
            n = self.weight.size
            after = self._embed(passage.tokens[first + 2 : last + 2]) / self.sizes[-n:]
            yield x[usual], u[:-1][usual], after[usual], u[1:][usual]


def first_row(passage: Passage) -> int:
    return max(1, min(first_lesson(passage), len(passage) - 1) - _PROMPT_ROWS)


def lengths_of(states: Floats) -> Floats:
    lengths: Floats = np.sqrt(np.mean(states**2, axis=-1))
    return lengths


def groups_of(examples: Examples, n: int) -> Iterator[list[Floats]]:
    """Rows of several passages together, about n."""
    waiting: list[tuple[Floats, ...]] = []
    for each in examples:
        waiting.append(each)
        if sum(len(rows[0]) for rows in waiting) >= n:
            yield [np.concatenate(part) for part in zip(*waiting, strict=True)]
            waiting = []
    if waiting:
        yield [np.concatenate(part) for part in zip(*waiting, strict=True)]


_SHARPNESS = np.arange(0.1, 1.05, 0.1)
_JUDGED = 512  # examples kept apart to choose how sure the head begins


def start(
    file: GGUFFile, card: HeadCard, output: Floats, embed: Embed, passages: Sequence[Passage], seed: int
) -> Start:
    """Fit a head to examples as far as that has a closed form; ``output`` and ``embed`` as for ``Trainer``.

    Memory: 16 bytes for each pair of inputs, of which there are (taps + 1) n_embd, and a tenth of a gigabyte.
    """
    rng = np.random.default_rng(seed)
    weights = {name: _cold(name, shape, rng) for name, shape in card.shapes().items()}
    if (block := _last_block(file, card)) is not None:
        weights |= block
    weights["output_norm.weight"] = norm = _whole(file, "output_norm.weight")
    examples = Examples(card, embed, norm, passages)
    n = card.n_embd
    sizes = {"head.fc.weight": examples.sizes[:-n], "head.embed.weight": examples.sizes[-n:]}
    if card.kind == "eagle3":
        sizes = {"fc.weight": examples.sizes[: len(card.taps) * n]}
        weights |= _fitted_eagle3(card, examples, weights)
    else:
        weights |= _fitted(card, examples)
    weights["output_norm.weight"] = norm * _sharpness(card, weights, embed, passages[-8:], output)
    return Start(weights, sizes)


def _fitted(card: HeadCard, examples: Examples) -> dict[str, Floats]:
    """fc, W, b and C."""
    n, n_in = card.n_embd, len(examples.sizes) + 1
    gram = np.zeros((n_in, n_in))
    cross = np.zeros((n_in, 3 * n))
    rows = 0
    for x, u, after, u_after in groups_of(examples, ROWS_AT_ONCE):
        x = np.concatenate([x, np.ones((len(x), 1), np.float32)], axis=1)
        gram += x.T @ x
        cross += x.T @ np.concatenate([u, u_after, after], axis=1)
        rows += len(x)
        if rows > ROWS_PER_INPUT * n_in:
            break
    ridge = np.full(n_in, RIDGE)
    ridge[-1] = 1e-3
    found = np.linalg.solve(gram + np.diag(ridge), cross[:, :n])  # [n_in, n]
    embed, bias = found[-1 - n : -1], found[-1]
    # What a row guesses, x · found, leads to the next state but for what its token adds.
    guess_gram = found.T @ gram @ found
    left = cross[:, n : 2 * n] - cross[:, 2 * n :] @ embed - np.outer(gram[:, -1], bias)
    guess_gram[np.diag_indices(n)] += 0.01 * np.trace(guess_gram) / n + 1e-3
    fitted = {
        "head.fc.weight": found[: -1 - n].T / examples.sizes[:-n],
        "head.embed.weight": embed.T / examples.sizes[-n:],
        "head.embed.bias": bias,
        "head.chain.weight": np.linalg.solve(guess_gram, found.T @ left).T,
    }
    return {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in fitted.items()}


def _sharpness(
    card: HeadCard, weights: dict[str, Floats], embed: Embed, passages: Sequence[Passage], output: Floats
) -> np.float32:
    """Factor of its last norm with which first guesses on the passages fitted to last are as sure as they should be."""
    found = np.zeros(len(_SHARPNESS))
    for passage in passages:
        places = np.arange(first_row(passage), len(passage) - 1)[: _JUDGED // len(passages)]
        states = passage.states[places].reshape(len(places), -1).astype(np.float32)
        token = embed(passage.tokens[places + 1])
        if card.kind == "eagle3":
            rows = eagle3_guesses(card, weights, states, token)
        else:
            rows = states @ weights["head.fc.weight"].T + weights["head.embed.bias"]
            rows += token @ weights["head.embed.weight"].T
        logits = (rows / lengths_of(rows)[:, None] * weights["output_norm.weight"]) @ output.T
        ids = passage.top_ids[places + 1]
        at = np.searchsorted(card.token_map, ids).clip(max=card.n_out - 1)
        probs = np.exp(passage.top_logprobs[places + 1].astype(np.float32)) * (card.token_map[at] == ids)
        for i, factor in enumerate(_SHARPNESS):
            scaled = factor * logits
            highest = scaled.max(1, keepdims=True)
            logs = scaled - highest - np.log(np.exp(scaled - highest).sum(1, keepdims=True))
            found[i] -= (probs * np.take_along_axis(logs, at, 1)).sum()
    return np.float32(_SHARPNESS[found.argmin()])


def _cold(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
    if "norm" in name:
        return np.ones(shape, np.float32)
    # What is added to the rows begins with nothing.
    if name.endswith((".bias", "attn_output.weight", "ffn_down.weight", "fc.weight")):
        return np.zeros(shape, np.float32)
    return (rng.standard_normal(shape) * _COLD).astype(np.float32)


def _last_block(file: GGUFFile, card: HeadCard) -> dict[str, Floats] | None:
    """The target's last block under a head's names, adding nothing; None if it is of another kind."""
    prefix = f"blk.{card.target.n_layers - 1}."
    names = [name.removeprefix(prefix) for name in file.tensors if name.startswith(prefix)]
    if card.kind == "eagle3":  # whose attention reads twice as much
        names = [name for name in names if name.startswith("ffn_")]
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
    for name in {"blk.0.attn_output.weight", "blk.0.ffn_down.weight"} & block.keys():
        block[name][:] = 0
    if apart:
        for part in "qk":
            for name in {f"blk.0.attn_{part}.weight", f"blk.0.attn_{part}.bias"} & block.keys():
                block[name] = neighbours(block[name], card.d_head)
    return _narrowed(block, card)


def neighbours(rows: Floats, d_head: int) -> Floats:
    """Rows of queries or keys whose pairs of channels stand half a head apart, with pairs side by side."""
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


# -- the same of an EAGLE-3 head, whose layout has no place for it -----------------------------------------------------
#
# With e the embedding of a token and g a row's state, each divided by its root mean square, and u as above,
#
#     g_p = fc · s_p ≈ u_p,    g_p + B · (e_(p+1), g_p) ≈ u_(p+1),
#
# so that what comes out is fit to be the next g: its chain has no matrix of its own. Only the attention reads e. So it
# begins with heads that look at their own row alone, whose values and output matrix are B: their queries and keys are
# one random projection of the whitened row, which matches nothing as well as itself. The other heads begin at random
# and add nothing yet, nor does the MLP.

EAGLE3_D_HEAD = 128  # channels of a head, whatever the target's have: fewer tell rows apart worse
_FREE_HEADS = 2  # heads that may look at other rows from the beginning
_SURE = 30.0  # score of a head's own row; those of others lie about 0 [nats]
_LEAST = 0.05  # least share of the usual variance of a direction of the rows, so that none is amplified at will


def _eagle3_heads(n_embd: int) -> int:
    """Heads of the attention: as many as B takes, and the free ones."""
    return -(-n_embd // EAGLE3_D_HEAD) + _FREE_HEADS


def _fitted_eagle3(card: HeadCard, examples: Examples, cold: dict[str, Floats]) -> dict[str, Floats]:
    """fc, and the attention's matrices.

    Args:
        examples: whose states are the taps' and then the last one.
        cold: all its matrices as they begin without examples.
    """
    n, n_taps = card.n_embd, len(card.taps) * card.n_embd
    gram, cross = np.zeros((n_taps, n_taps)), np.zeros((n_taps, n))
    for x, now, *_ in _eagle3_rows(examples, n_taps, n):
        gram += x.T @ x
        cross += x.T @ now
    fc = np.linalg.solve(gram + RIDGE * np.eye(n_taps), cross)  # [n_taps, n]
    gram, cross = np.zeros((2 * n, 2 * n)), np.zeros((2 * n, n))

    def add(state: Floats, token: Floats, wanted: Floats, weight: float) -> None:
        read = np.concatenate([_normed(token), _normed(state)], axis=1)
        nonlocal gram, cross
        gram += weight * read.T @ read
        cross += weight * read.T @ (wanted - state)

    def solved() -> Floats:
        found: Floats = np.linalg.solve(gram + RIDGE * np.eye(2 * n), cross)
        return found

    for x, _, token, u, *_ in _eagle3_rows(examples, n_taps, n):
        add(x @ fc, token, u, 1.0)
    guess = solved()
    for x, _, token, _, after, u_after in _eagle3_rows(examples, n_taps, n):
        state = x @ fc
        state = state + np.concatenate([_normed(token), _normed(state)], axis=1) @ guess
        add(state, after, u_after, 0.5)
    parts = [(part, cold[f"blk.0.attn_{part}.weight"].copy()) for part in ("q", "k", "v", "output")]
    weights = {f"blk.0.attn_{part}.weight": matrix for part, matrix in parts}
    _fill(card, [matrix for _, matrix in parts], solved().T, gram)
    return weights | {"fc.weight": np.ascontiguousarray(fc.T / examples.sizes[:n_taps], dtype=np.float32)}


def _fill(card: HeadCard, matrices: list[Floats], linear: Floats, gram: npt.NDArray[np.float64]) -> None:
    """Make heads that look at their own row a ``linear`` map of it [n_embd, 2 n_embd]; ``gram`` is the sum of the
    products of rows with themselves [2 n_embd, 2 n_embd]."""
    queries, keys, values, outputs = matrices
    n, d, own = card.n_embd, card.d_head, _own(card)
    variances, directions = np.linalg.eigh(gram)
    whitening = directions / np.sqrt(np.maximum(variances / variances.mean(), _LEAST))
    # A row's projection is then about as long as it has channels.
    random = np.random.default_rng(0).standard_normal((own, 2 * n)) / np.sqrt(2 * n)
    queries[:own] = keys[:own] = np.sqrt(_SURE / np.sqrt(d)) * random @ whitening.T
    values[:own] = 0
    values[:n], outputs[:, :n] = linear, np.eye(n)


def _own(card: HeadCard) -> int:
    return (card.n_head - _FREE_HEADS) * card.d_head


def eagle3_guesses(card: HeadCard, weights: dict[str, Floats], states: Floats, token: Floats) -> Floats:
    """Rows before the last norm, while only the fitted heads add to them [n, n_embd]."""
    own = _own(card)
    state: Floats = states[:, : len(card.taps) * card.n_embd] @ weights["fc.weight"].T
    read = np.concatenate([_normed(token), _normed(state)], axis=1) @ weights["blk.0.attn_v.weight"][:own].T
    return state + read @ weights["blk.0.attn_output.weight"][:, :own].T


def _eagle3_rows(examples: Examples, n_taps: int, n: int) -> Iterator[list[Floats]]:
    """Tapped states in their usual sizes, u, the token's embedding, the next u; the next token's, and the u after."""
    rows = 0
    for x, u, after, u_after in groups_of(examples, ROWS_AT_ONCE):
        now = x[:, n_taps : n_taps + n] * examples.sizes[n_taps : n_taps + n] * examples.weight
        yield [x[:, :n_taps], now, x[:, -n:], u, after, u_after]
        rows += len(x)
        if rows > ROWS_PER_INPUT * n_taps:
            break


def _normed(rows: Floats) -> Floats:
    normed: Floats = rows / (lengths_of(rows)[:, None] + 1e-9)
    return normed
