"""Where training begins: a head that is its target's last block, as far as that block is a llama block."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from localspec.errors import UnsupportedModel
from localspec.model_files.gguf_file import GGUFFile
from localspec.model_files.head_card import HeadCard, Kind, TargetFacts
from localspec.model_files.tensor_rows import n_rows, tensor_rows

Floats = npt.NDArray[np.float32]

_PAIRS_APART = {"llama": False, "qwen2": True}
"""Architectures whose blocks a head can begin with -> whether their rotary embedding turns channels i and i + d/2 of a
head together (as GPT-NeoX did) and not neighbours."""

_BLOCK = re.compile(r"(attn_norm|attn_output|ffn_norm|ffn_gate|ffn_up|ffn_down)\.weight|attn_[qkv]\.(weight|bias)")

_WHOLE = 32
"""Engines need an MLP of whole blocks of this many channels."""

_COLD = 0.02
"""Standard deviation of a matrix that begins at random, as GPT-2's and llama's did."""


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


def starting_weights(file: GGUFFile, card: HeadCard, states: Floats, seed: int) -> dict[str, Floats]:
    """Weights to begin with, by the names of ``HeadCard.shapes``.

    Args:
        file: the target.
        card: the head.
        states: some states of the target [n, n_taps, n_embd]: they say how long states are, and which channels of
            the MLP matter most where it is to be narrower.
        seed: of what begins at random.
    """
    rng = np.random.default_rng(seed)
    weights = {name: _cold(name, shape, rng) for name, shape in card.shapes().items()}
    if card.kind == "medusa":
        return weights
    weights["output_norm.weight"] = _whole(file, "output_norm.weight")
    tap, n_embd = _nearest_tap(card), card.n_embd
    weights["head.fc.weight"][:, tap * n_embd : (tap + 1) * n_embd] = np.eye(n_embd, dtype=np.float32)
    state = states[:, tap]
    sample = np.linspace(0, card.target.n_vocab - 1, 1024).astype(np.int32)
    weights["head.embed_scale"] *= (
        EMBEDDING_SHARE * _size(state) / _size(tensor_rows(file, "token_embd.weight", sample))
    )
    if (block := _last_block(file, card)) is not None:
        weights |= _narrowed(block, card, state)
    return weights


EMBEDDING_SHARE = 0.1
"""How long the next token's embedding begins, against the state that it is added to. On Qwen2.5-Coder 1.5B the loss
begins at 11.7 nats with 0.15, at 17 with 0.6, at 33 with 2; after 19,000 lessons 0.1 has come to 6.4, 0.5 to 8.4."""


def _size(rows: Floats) -> np.float32:
    """The usual root mean square of a row: the first tokens of texts have states forty times as long as others."""
    return np.float32(np.median(np.sqrt((rows**2).mean(-1))))


def _cold(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
    if name.endswith("norm.weight") or name == "head.embed_scale":
        return np.ones(shape, np.float32)
    # What is added to the state begins with nothing, and so does what reads states besides the nearest.
    if name.endswith((".bias", "attn_output.weight", "ffn_down.weight", "fc.weight")) or re.fullmatch(
        r"head\.\d+\.weight", name
    ):
        return np.zeros(shape, np.float32)
    return (rng.standard_normal(shape) * _COLD).astype(np.float32)


def _nearest_tap(card: HeadCard) -> int:
    """Which of the taps is nearest to what the target's last block reads."""

    def distance(tap: str) -> float:
        return 0.5 if tap == "norm" else abs(int(tap.removeprefix("layer:")) - (card.target.n_layers - 2))

    return min(range(len(card.taps)), key=lambda i: distance(card.taps[i]))


def _last_block(file: GGUFFile, card: HeadCard) -> dict[str, Floats] | None:
    """The target's last block under a head's names, its rotary embedding turned into llama's; None if it is of another
    kind."""
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
    if apart:
        for part in "qk":
            for name in {f"blk.0.attn_{part}.weight", f"blk.0.attn_{part}.bias"} & block.keys():
                block[name] = neighbours(block[name], card.d_head)
    return block


def neighbours(rows: Floats, d_head: int) -> Floats:
    """Rows of queries or keys in which pairs of channels stand half a head apart, so that they stand side by side."""
    halves = rows.reshape(-1, 2, d_head // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _narrowed(block: dict[str, Floats], card: HeadCard, states: Floats) -> dict[str, Floats]:
    """The block with the ``d_ff`` channels of its MLP that add most to the stream: mean activation times length of the
    column that it is multiplied by."""
    gate, up, down = (block[f"blk.0.ffn_{part}.weight"] for part in ("gate", "up", "down"))
    if len(gate) > card.d_ff:
        normed = states / np.sqrt((states**2).mean(-1, keepdims=True) + card.norm_eps) * block["blk.0.ffn_norm.weight"]
        gated = normed @ gate.T
        active = np.abs(gated / (1 + np.exp(-gated)) * (normed @ up.T)).mean(0)
        kept = np.sort(np.argsort(-active * np.linalg.norm(down, axis=0))[: card.d_ff])
        block |= {"blk.0.ffn_gate.weight": gate[kept], "blk.0.ffn_up.weight": up[kept]}
        block["blk.0.ffn_down.weight"] = down[:, kept]
    return {name: np.ascontiguousarray(values) for name, values in block.items()}


def _whole(file: GGUFFile, name: str) -> Floats:
    rows = tensor_rows(file, name, slice(0, n_rows(file, name)))
    return rows if len(file.tensors[name].shape) > 1 else rows[0]
