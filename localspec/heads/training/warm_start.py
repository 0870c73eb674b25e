"""Start of training: a linear head in closed form, whose block adds nothing yet.

With u_(p+1) the target's last state after token x_(p+1) before its weight, that is result_norm / weight, the rows

    z_p = fc · s_p + W · E[x_(p+1)] + b  ≈  u_(p+1)

are fitted by ridge regression (Hoerl and Kennard 1970) over the examples, and C in the same way, so that a chain
continues what was guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from localspec.errors import UnsupportedModel
from localspec.heads.card import HeadCard, TargetFacts
from localspec.heads.training import eagle3_start
from localspec.heads.training.lessons import (
    RIDGE,
    ROWS_AT_ONCE,
    ROWS_PER_INPUT,
    Embed,
    Examples,
    Floats,
    first_row,
    groups_of,
    lengths_of,
)
from localspec.heads.training.run_folder import Recipe
from localspec.heads.training.shards import Passage
from localspec.model_files.gguf import GGUFFile, n_rows, tensor_rows

# Architectures whose blocks a head can begin with -> whether their rotary embedding turns channels i and i + d/2 of a
# head together (as GPT-NeoX did) and not neighbours
_PAIRS_APART = {"llama": False, "qwen2": True}

_BLOCK = re.compile(r"(attn_norm|attn_output|ffn_norm|ffn_gate|ffn_up|ffn_down)\.weight|attn_[qkv]\.(weight|bias)")

_WHOLE = 32  # engines need an MLP of whole blocks of this many channels
_COLD = 0.02  # standard deviation of a matrix that begins at random, as GPT-2's and llama's did

_LONGEST_LICENSE = 200

_SHARPNESS = np.arange(0.1, 1.05, 0.1)
_JUDGED = 512  # examples kept apart to choose how sure the head begins


def new_card(file: GGUFFile, fingerprint: str, recipe: Recipe, token_map: npt.NDArray[np.int32]) -> HeadCard:
    """The card of an untrained head; its block has the heads of the target's, and its MLP at most its width.

    Its licence is the target's, whose answers it learns from.

    Raises:
        UnsupportedModel: the target does not say its sizes, or has too few layers.
    """
    target, license = TargetFacts.of(file, fingerprint), file.metadata.get("general.license")
    card = HeadCard(
        kind="medusa",
        taps=("norm",),
        token_map=token_map,
        steps=recipe.steps,
        target=target,
        license=license[:_LONGEST_LICENSE] if isinstance(license, str) else "",
    )
    if recipe.kind == "medusa":
        return card
    n_head = file.field("attention.head_count")
    n_head_kv = file.field("attention.head_count_kv", n_head)
    if not all(isinstance(n, int) and n > 0 for n in (n_head, n_head_kv)):
        raise UnsupportedModel(f"{file.path.name} does not say how many heads its layers have")
    n_ff = file.field("feed_forward_length", recipe.d_ff)
    d_ff = min(recipe.d_ff, n_ff) if isinstance(n_ff, int) else recipe.d_ff
    d_head = int(file.field("attention.key_length", target.n_embd // n_head))
    if recipe.kind == "eagle3":
        n_head = n_head_kv = eagle3_start.n_heads(target.n_embd)
        d_head = eagle3_start.D_HEAD
    return replace(
        card,
        kind=recipe.kind,
        taps=recipe.taps(target.n_layers),
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


def start(
    file: GGUFFile, card: HeadCard, output: Floats, embed: Embed, passages: Sequence[Passage], seed: int
) -> Start:
    """Fit a head to examples as far as that has a closed form; ``output`` and ``embed`` as for ``Trainer``.

    Memory: 16 bytes for each pair of inputs, of which there are (taps + 1) n_embd, and a tenth of a gigabyte.
    """
    rng = np.random.default_rng(seed)
    weights = {name: _cold(name, shape, rng) for name, shape in card.shapes().items()}
    if card.kind == "medusa":
        return Start(weights, {})
    if (block := _last_block(file, card)) is not None:
        weights |= block
    weights["output_norm.weight"] = norm = _whole(file, "output_norm.weight")
    examples = Examples(card, embed, norm, passages)
    n = card.n_embd
    sizes = {"head.fc.weight": examples.sizes[:-n], "head.embed.weight": examples.sizes[-n:]}
    if card.kind == "eagle3":
        sizes = {"fc.weight": examples.sizes[: len(card.taps) * n]}
        weights |= eagle3_start.fitted(card, examples, weights)
    elif "norm" in card.taps:
        weights |= _fitted(card, examples)
    if card.kind == "eagle3" or "norm" in card.taps:
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
    fitted = {
        "head.fc.weight": found[: -1 - n].T / examples.sizes[:-n],
        "head.embed.weight": embed.T / examples.sizes[-n:],
        "head.embed.bias": bias,
    }
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
    """Factor of its last norm with which first guesses on the passages fitted to last are as sure as they should be."""
    found = np.zeros(len(_SHARPNESS))
    for passage in passages:
        places = np.arange(first_row(passage), len(passage) - 1)[: _JUDGED // len(passages)]
        states = passage.states[places].reshape(len(places), -1).astype(np.float32)
        token = embed(passage.tokens[places + 1])
        if card.kind == "eagle3":
            rows = eagle3_start.guesses(card, weights, states, token)
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
    if name.endswith((".bias", "attn_output.weight", "ffn_down.weight", "fc.weight")) or re.fullmatch(
        r"head\.\d+\.weight", name
    ):
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
