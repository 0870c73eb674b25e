"""What training starts from: the card of the head to be made, and an earlier head's weights or a linear head fitted in
closed form, whose block adds nothing yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from localspec.errors import LocalspecError, UnsupportedModel, UsageError
from localspec.heads.card import HeadCard, TargetFacts
from localspec.heads.file import check_head, head_weights, read_card
from localspec.heads.trained import heads_for
from localspec.heads.training.lessons import Embed, first_lesson
from localspec.heads.training.run_folder import Recipe, taps_of
from localspec.heads.training.shards import Passage
from localspec.model_files.gguf import GGUFFile, tensor_rows

Floats = npt.NDArray[np.float32]

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
    return HeadCard(
        kind="chained",
        taps=taps_of(target.n_layers),
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
    if named == NO_HEAD:
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
    if card.target.fingerprint != wanted.target.fingerprint:
        return f"it was made for another file, {card.target.name}"
    if (card.taps, card.steps, card.shapes()) != (wanted.taps, wanted.steps, wanted.shapes()):
        return "its kind, its sizes, or the states that it reads, are others than those of the head to be made"
    return None


def going_on(path: Path, card: HeadCard, embed: Embed, passages: Sequence[Passage]) -> Start:
    """The weights of an earlier head; its training data is not needed."""
    with GGUFFile(path) as file:
        check_head(file)
        weights = {name: head_weights(file, name) for name in file.tensors}
    return Start(weights, _sizes(card, embed, passages))


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

_PROMPT_ROWS = 64  # rows of a prompt that are fitted to besides those of the answer
_OUTLIER = 4.0  # the first tokens of texts have states forty times as long as others; they are no examples


def start(file: GGUFFile, card: HeadCard, embed: Embed, passages: Sequence[Passage], seed: int) -> Start:
    """Fit a head to examples as far as that has a closed form; ``embed`` as for ``Trainer``.

    Memory: 16 bytes for each pair of the (taps + 1) n_embd inputs, and a tenth of a gigabyte.
    """
    rng, sizes = np.random.default_rng(seed), _sizes(card, embed, passages)
    norm = tensor_rows(file, "output_norm.weight", slice(0, 1))[0]
    weights = {name: _cold(name, shape, rng) for name, shape in card.shapes().items()}
    return Start(weights | _fitted(card, norm, sizes, embed, passages) | {"output_norm.weight": norm}, sizes)


def _sizes(card: HeadCard, embed: Embed, passages: Sequence[Passage]) -> dict[str, Floats]:
    """The usual size of each input, of the states side by side and of an embedding; see ``Start``."""
    states = np.median(np.abs(_some_states(passages)), axis=0)
    floor = 0.05 * np.median(states, axis=1, keepdims=True) + 1e-6
    tokens = np.concatenate([passage.tokens for passage in passages[:32]])[:2048]
    embedded = np.full(card.n_embd, np.median(np.abs(embed(tokens))) + 1e-6)
    found = {"head.fc.weight": np.maximum(states, floor).ravel(), "head.embed.weight": embedded}
    return {name: (1.5 * size).astype(np.float32) for name, size in found.items()}


def _some_states(passages: Sequence[Passage]) -> Floats:
    return np.concatenate([each.states[_first_row(each) :][:256] for each in passages[:32]]).astype(np.float32)


def _first_row(passage: Passage) -> int:
    return max(1, min(first_lesson(passage), len(passage) - 1) - _PROMPT_ROWS)


def _lengths(states: Floats) -> Floats:
    lengths: Floats = np.sqrt(np.mean(states**2, axis=-1))
    return lengths


def _fitted(
    card: HeadCard, norm: Floats, sizes: dict[str, Floats], embed: Embed, passages: Sequence[Passage]
) -> dict[str, Floats]:
    """fc, W, b and C; ``norm`` is the weight of the target's last norm, whose output is the last tap."""
    n, of_states, of_embedding = card.n_embd, sizes["head.fc.weight"], sizes["head.embed.weight"]
    # A channel that the last norm takes away cannot be told.
    kept = np.abs(norm) > 1e-3 * np.median(np.abs(norm))
    weight = np.where(kept, 1 / np.where(kept, norm, 1), 0).astype(np.float32)  # last states times this are u
    longest = _OUTLIER * np.median(_lengths(_some_states(passages)), axis=0)
    n_in = len(of_states) + n + 1
    gram, cross, n_rows = np.zeros((n_in, n_in)), np.zeros((n_in, 3 * n)), 0
    for passage in passages:
        first, last = _first_row(passage), len(passage) - 2
        if last <= first or n_rows > ROWS_PER_INPUT * n_in:
            continue
        states = passage.states[first : last + 2].astype(np.float32)
        tokens = embed(passage.tokens[first + 1 : last + 2]) / of_embedding
        is_usual = np.all(_lengths(states) < longest, axis=1)
        usual = is_usual[:-2] & is_usual[1:-1] & is_usual[2:]
        u = states[1:, -1] * weight
        inputs = states[:-2].reshape(last - first, -1) / of_states
        x = np.concatenate([inputs, tokens[:-1], np.ones((last - first, 1), np.float32)], axis=1)[usual]
        gram += x.T @ x
        cross += x.T @ np.concatenate([u[:-1], u[1:], tokens[1:]], axis=1)[usual]
        n_rows += len(x)
    ridge = np.full(n_in, RIDGE)
    ridge[-1] = 1e-3
    found = np.linalg.solve(gram + np.diag(ridge), cross[:, :n])  # [n_in, n]
    of_token, bias = found[-1 - n : -1], found[-1]
    # What a row guesses, x · found, leads to the next state but for what its token adds.
    guess_gram = found.T @ gram @ found
    left = cross[:, n : 2 * n] - cross[:, 2 * n :] @ of_token - np.outer(gram[:, -1], bias)
    guess_gram[np.diag_indices(n)] += 0.01 * np.trace(guess_gram) / n + 1e-3
    fitted = {
        "head.fc.weight": found[: -1 - n].T / of_states,
        "head.embed.weight": of_token.T / of_embedding,
        "head.embed.bias": bias,
        "head.chain.weight": np.linalg.solve(guess_gram, found.T @ left).T,
    }
    return {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in fitted.items()}


def _cold(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
    if "norm" in name:
        return np.ones(shape, np.float32)
    # What is added to the rows begins with nothing.
    if name.endswith((".bias", "attn_output.weight", "ffn_down.weight", "fc.weight")):
        return np.zeros(shape, np.float32)
    return (rng.standard_normal(shape) * _COLD).astype(np.float32)
