"""The network that is trained: a head as its card defines it, over the packed rows of many passages, in JAX.

At run time a chained head reads the target's true states up to some place, then its own. Training imitates that
("training-time test": Li et al. 2025, EAGLE-3, arXiv:2503.01840): the row of step k that began at place p sees the true
rows up to p and its own chain's rows, and no other chain's.

The loss is the cross entropy against the target's own distribution, -Σ p(x) log q(x) over the kept x: the likeliest ids
that the shards keep and the trimmed vocabulary has. A class for the rest would train the head to spread probability
over tokens that are never its best guess. log q is taken over those tokens and a sample of the others;
each of these stands for several in the sum (Jean et al. 2015, arXiv:1412.2007).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from localspec.heads.card import HeadCard
from localspec.heads.training.lessons import NOWHERE, Batch

Weights = dict[str, jax.Array]  # by the names and shapes of HeadCard.shapes

# Weight of each further step in the loss, as in Medusa and EAGLE-3: it counts only if those before it were right
STEP_WEIGHT = 0.8


class HeadNetwork:
    """A head's mathematics, compiled for one size of batches.

    Args:
        card: kind and sizes.
        output: the target's output rows for ``card.token_map`` [n_out, n_embd]; they are not trained.
        half: multiply in bfloat16, sums and weights staying float32; see ``half_is_faster``.
    """

    def __init__(self, card: HeadCard, output: npt.NDArray[np.float32], *, half: bool = False) -> None:
        self.card = card
        self.multiply: Callable[[jax.Array, jax.Array], jax.Array] = _multiply_half if half else _multiply
        # An argument of the compiled functions: a constant would be copied into each.
        self.output = jnp.asarray(output, jnp.bfloat16 if half else jnp.float32)
        pairs = np.arange(0, card.d_head, 2) / max(card.d_head, 1)
        self._frequency = (card.rope_base**-pairs).astype(np.float32)
        sizes = (card.n_head, card.n_head_kv, card.d_head, card.rope_base, card.norm_eps)
        self._compiled_for = (card.steps, *sizes, half)

    # Networks that differ in their weights only are compiled once.

    def __hash__(self) -> int:
        return hash(self._compiled_for)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeadNetwork) and self._compiled_for == other._compiled_for

    def gradients(self, weights: Weights, sums: Weights, batch: Batch) -> Weights:
        """Add a batch's gradients to ``sums``, which are consumed; returns before they are computed."""
        found: Weights = _gradients(self, weights, sums, self.output, batch)
        return found

    def guesses(self, weights: Weights, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """The best guess of every step at the batch's starts, and what the target would say there.

        Returns:
            Two int32 [steps, n_starts]: rows of the trimmed output matrix, the second with ``OUTSIDE`` and ``NOWHERE``.
        """
        guessed, true = _guesses(self, weights, self.output, batch)
        return guessed, true

    def loss(self, weights: Weights, output: jax.Array, batch: Batch) -> jax.Array:
        """What is minimised, a number."""
        total, rows_out = jnp.float32(0), output[batch.candidates]
        for step, guess in enumerate(self.steps(weights, batch)):
            rows, real = _places(batch, step)
            logits = self.multiply(guess, rows_out) + batch.log_weights
            probs = batch.probs[rows] * real[:, None]
            weight = probs.sum(-1)
            chosen = jnp.take_along_axis(logits, batch.ids[rows], axis=1)
            loss = (weight * jax.nn.logsumexp(logits, axis=-1)).sum() - (probs * chosen).sum()
            total += STEP_WEIGHT**step * loss / len(rows)
        return total

    def steps(self, weights: Weights, batch: Batch) -> list[jax.Array]:
        """What the output rows multiply, step by step: [n_lessons, n_embd] for the first, [n_starts, n_embd] after."""
        embedded = self.multiply(batch.embeddings, weights["head.embed.weight"]) + weights["head.embed.bias"]
        z = self.multiply(batch.states.astype(jnp.float32), weights["head.fc.weight"]) + embedded
        normed = self._norm(z, weights["blk.0.attn_norm.weight"])
        keys, values = self._keys_values(weights, normed, batch.position)
        queries = self._queries(weights, normed[batch.lessons], batch.position[batch.lessons])
        n = jnp.arange(len(batch.passage))
        seen = (batch.passage[batch.lessons][:, None] == batch.passage) & (n <= batch.lessons[:, None])
        scores = jnp.where(seen, jnp.einsum("mgrd,ngd->grmn", queries, keys), -jnp.inf)
        attended = jnp.einsum("grmn,ngd->mgrd", jax.nn.softmax(scores, axis=-1), values)
        states = [self._rest_of_block(weights, z[batch.lessons], attended)]

        first = batch.lessons[batch.starts]
        seen = seen[batch.starts]
        state, own_keys, own_values = states[0][batch.starts], list[jax.Array](), list[jax.Array]()
        for step in range(1, self.card.steps):
            z = self.multiply(state, weights["head.chain.weight"]) + embedded[_places(batch, step)[0]]
            normed, position = self._norm(z, weights["blk.0.attn_norm.weight"]), batch.position[first] + step
            key, value = self._keys_values(weights, normed, position)
            own_keys.append(key)
            own_values.append(value)
            queries = self._queries(weights, normed, position)
            true = jnp.where(seen, jnp.einsum("mgrd,ngd->grmn", queries, keys), -jnp.inf)
            own = jnp.einsum("mgrd,kmgd->grmk", queries, jnp.stack(own_keys))
            shares = jax.nn.softmax(jnp.concatenate([true, own], axis=-1), axis=-1)
            attended = jnp.einsum("grmn,ngd->mgrd", shares[..., : len(n)], values)
            attended += jnp.einsum("grmk,kmgd->mgrd", shares[..., len(n) :], jnp.stack(own_values))
            state = self._rest_of_block(weights, z, attended)
            states.append(state)
        return [self._norm(state, weights["output_norm.weight"]) for state in states]

    def _queries(self, weights: Weights, normed: jax.Array, position: jax.Array) -> jax.Array:
        """[n, n_head_kv, n_head / n_head_kv, d_head], scaled."""
        heads = self._heads(weights, "q", normed)
        turned = self._rotate(heads, position) * self.card.d_head**-0.5
        return turned.reshape(len(normed), self.card.n_head_kv, -1, self.card.d_head)

    def _keys_values(self, weights: Weights, normed: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Each [n, n_head_kv, d_head]."""
        return self._rotate(self._heads(weights, "k", normed), position), self._heads(weights, "v", normed)

    def _heads(self, weights: Weights, part: str, normed: jax.Array) -> jax.Array:
        return self.multiply(normed, weights[f"blk.0.attn_{part}.weight"]).reshape(len(normed), -1, self.card.d_head)

    def _rotate(self, heads: jax.Array, position: jax.Array) -> jax.Array:
        """llama's rotary embedding: pairs of neighbouring channels turn together."""
        angle = position[:, None].astype(jnp.float32) * self._frequency
        cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
        even, odd = heads[..., ::2], heads[..., 1::2]
        return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(heads.shape)

    def _rest_of_block(self, weights: Weights, z: jax.Array, attended: jax.Array) -> jax.Array:
        z = z + self.multiply(attended.reshape(len(z), -1), weights["blk.0.attn_output.weight"])
        normed = self._norm(z, weights["blk.0.ffn_norm.weight"])
        gate = jax.nn.silu(self.multiply(normed, weights["blk.0.ffn_gate.weight"]))
        return z + self.multiply(
            gate * self.multiply(normed, weights["blk.0.ffn_up.weight"]), weights["blk.0.ffn_down.weight"]
        )

    def _norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + self.card.norm_eps) * weight


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _gradients(network: HeadNetwork, weights: Weights, sums: Weights, output: jax.Array, batch: Batch) -> Weights:
    gradients = jax.grad(network.loss)(weights, output, batch)
    return {name: sums[name] + gradient for name, gradient in gradients.items()}


@partial(jax.jit, static_argnums=0)
def _guesses(network: HeadNetwork, weights: Weights, output: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    guessed, true = [], []
    for step, states in enumerate(network.steps(weights, batch)):
        rows, real = _places(batch, step)
        best = network.multiply(states, output).argmax(-1)
        answer = jnp.where(real, batch.best[rows], NOWHERE)
        guessed.append(best if step else best[batch.starts])
        true.append(answer if step else answer[batch.starts])
    return jnp.stack(guessed), jnp.stack(true)


def _places(batch: Batch, step: int) -> tuple[jax.Array, jax.Array]:
    """The true row that a step's guess is compared with, and whether it lies in the same passage."""
    if step == 0:
        return batch.lessons, batch.passage[batch.lessons] >= 0
    first = batch.lessons[batch.starts]
    rows = jnp.minimum(first + step, len(batch.passage) - 1)
    return rows, (batch.passage[rows] == batch.passage[first]) & (batch.passage[first] >= 0) & (rows == first + step)


def _multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x @ weight.T


def _half_product(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    dimensions = (((contracted[0],), (contracted[1],)), ((), ()))
    return jax.lax.dot_general(
        a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), dimensions, preferred_element_type=jnp.float32
    )


def _forward_half(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    x, weight = x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
    return _half_product(x, weight, (1, 1)), (x, weight)


def _backward_half(kept: tuple[jax.Array, jax.Array], above: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = kept
    return _half_product(above, weight, (1, 0)), _half_product(above, x, (0, 0))


# x · weightᵀ, both rounded to bfloat16. JAX's own gradient of it would multiply in float32.
_multiply_half = jax.custom_vjp(lambda x, weight: _half_product(x, weight, (1, 1)))

_multiply_half.defvjp(_forward_half, _backward_half)
