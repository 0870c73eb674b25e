"""A small transformer in NumPy and float64, whose logits do not depend on how many tokens share a pass.

Fast engines round differently when they decode eight tokens at once instead of one. Here each token goes through the
same operations on the same shapes whatever the width of the pass, so that losslessness can be asserted with ``==``.

It is public in the way a mock transport is: load a tiny GGUF with it (``LLM(path, backend="reference")``) and test an
application against real rounds, without compiling or downloading anything. It reads files of the llama architecture in
every quantisation that the ``gguf`` package can unpack, and keeps 8 bytes a weight. A model of 2 layers and 128
channels decodes thousands of tokens per second, one of 135M parameters about ten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from localspec.backends.base import (
    NORM,
    Capabilities,
    Context,
    ContextState,
    FloatArray,
    Forward,
    Model,
    Progress,
    Wanted,
    layer_name,
    n_wanted,
)
from localspec.backends.soundness import check_hyperparameters
from localspec.backends.tokenizer import PythonByteLevel, Tokenizer
from localspec.errors import EngineError, UnsupportedModel, UsageError, is_number, shown
from localspec.model_files.gguf import GGUFFile, attention_sizes, damaged, whole

Array = npt.NDArray[np.float64]

BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The sizes of a llama-architecture model, or of a head's layer, from the metadata of its file."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    d_head: int
    rope_base: float
    rope_scale: float
    norm_eps: float

    @classmethod
    def read(cls, file: GGUFFile) -> Hyperparameters:
        """Read them; ModelFileError where they cannot be, UnsupportedModel for a variant that is not computed here."""
        check_hyperparameters(file)

        def real(key: str, default: float | None = None) -> float:
            value = file.field(key, default)
            if not is_number(value):
                raise damaged(file, f"{file.architecture}.{key} is {shown(value)}")
            return float(value)

        scaling, factor = file.field("rope.scaling.type", "none"), real("rope.scaling.factor", 1.0)
        head_counts = (file.field(f"attention.{name}") for name in ("head_count", "head_count_kv"))
        for what, unsupported in (
            ("a mixture of experts", real("expert_count", 0)),
            ("layers of different widths", any(isinstance(each, np.ndarray) for each in head_counts)),
            (f"rope scaling {shown(scaling)}", not isinstance(scaling, str) or scaling not in ("none", "linear")),
            (f"a rope scaled by {factor:g}", factor <= 0),
        ):
            if unsupported:
                raise UnsupportedModel(f"the reference backend does not compute {what}; use another --backend")
        n_embd = whole(file, "embedding_length")
        n_head, n_head_kv, d_head = attention_sizes(file, n_embd)
        if file.field("rope.dimension_count", d_head) != d_head:
            raise UnsupportedModel(
                "the reference backend does not compute a rotation of some channels only; use another --backend"
            )
        return cls(
            n_layer=whole(file, "block_count"),
            n_embd=n_embd,
            n_head=n_head,
            n_head_kv=n_head_kv,
            d_head=d_head,
            rope_base=real("rope.freq_base", 10000.0),
            rope_scale=factor if scaling == "linear" else 1.0,
            norm_eps=real("attention.layer_norm_rms_epsilon"),
        )


@dataclass(frozen=True, slots=True)
class Layer:
    """One block. The weights of the norms are folded into the matrices that follow them."""

    qkv: Array  # [(n_head + 2 n_head_kv) * d_head, n_embd]; [..., 2 n_embd] where rows are wider than states
    qkv_bias: Array | None  # [(n_head + 2 n_head_kv) * d_head]
    attn_output: Array  # [n_embd, n_head * d_head]
    gate_up: Array  # [2 n_ff, n_embd]
    down: Array  # [n_embd, n_ff]

    @classmethod
    def read(
        cls, i: int, h: Hyperparameters, attn_norm: Array, tensors: Collection[str], read: Callable[..., Array]
    ) -> Layer:
        """Block i of a file with these ``tensors``; ``read``: a tensor's name, shape -> values, as ``read_tensor``."""
        n_q, n_kv = h.n_head * h.d_head, h.n_head_kv * h.d_head
        parts = list(zip("qkv", (n_q, n_kv, n_kv), strict=True))
        qkv = [read(f"blk.{i}.attn_{part}.weight", n, len(attn_norm)) for part, n in parts]
        biases = [
            read(name, n) if (name := f"blk.{i}.attn_{part}.bias") in tensors else np.zeros(n) for part, n in parts
        ]
        ffn_norm = read(f"blk.{i}.ffn_norm.weight", h.n_embd)
        gate = read(f"blk.{i}.ffn_gate.weight", None, h.n_embd)
        return cls(
            qkv=np.concatenate(qkv) * attn_norm,
            qkv_bias=np.concatenate(biases) if any(bias.any() for bias in biases) else None,
            attn_output=read(f"blk.{i}.attn_output.weight", h.n_embd, n_q),
            gate_up=np.concatenate([gate, read(f"blk.{i}.ffn_up.weight", len(gate), h.n_embd)]) * ffn_norm,
            down=read(f"blk.{i}.ffn_down.weight", h.n_embd, len(gate)),
        )


def read_tensor(file: GGUFFile, name: str, shape: Sequence[int | None]) -> Array:
    """A tensor in float64, rows first; UnsupportedModel where its shape is not the one given, None being any size."""
    tensor = file.tensors.get(name)
    if tensor is None:
        raise UnsupportedModel(f"{file.path.name} lacks the tensor {name}")
    found = tensor.shape[::-1]
    if len(found) != len(shape) or any(want not in (None, have) for want, have in zip(shape, found, strict=True)):
        expected = ", ".join("any" if want is None else str(want) for want in shape)
        raise UnsupportedModel(f"{file.path.name}: {name} is {list(found)} where the header says [{expected}]")
    try:
        rows = file.tensor_bytes(name).reshape(*tensor.shape[:0:-1], -1)
        values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(tensor.ggml_type))
    except (NotImplementedError, ValueError):
        raise UnsupportedModel(
            f"{file.path.name}: the gguf package cannot unpack {tensor.type_name} ({name}); use another --backend"
        ) from None
    return np.asarray(values, dtype=np.float64)


NAME = "reference"


class ReferenceModel(Model):
    """Weights in float64."""

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        with GGUFFile(path) as file:
            self._read_header(file)
            if file.architecture != "llama":
                raise UnsupportedModel(
                    f"{path.name} has the architecture {file.architecture!r}; the reference backend "
                    "computes 'llama' only"
                )
            self.backend = NAME
            self.engine = f"{NAME} numpy {np.__version__}"
            self.capabilities = Capabilities(
                batch_invariant=True, saves_state=True, hidden=True, float_rows=True, first_layers=True, trees=True
            )
            self.n_threads = 1
            self.hparams = Hyperparameters.read(file)
            self._tokenizer = Tokenizer(file, self.vocab, PythonByteLevel)
            self._load(file, progress)

    def _load(self, file: GGUFFile, progress: Progress | None) -> None:
        n_read = 0

        def read(name: str, *shape: int | None) -> Array:
            nonlocal n_read
            n_read += 1
            if progress is not None and not progress(min(1.0, n_read / len(file.tensors))):
                raise EngineError(f"loading {file.path.name} was cancelled")
            return read_tensor(file, name, shape)

        for name in file.tensors:
            if name.endswith(".bias") and not name.endswith(BIASES):
                raise UnsupportedModel(
                    f"{file.path.name}: the reference backend does not compute {name}; use another --backend"
                )
        h = self.hparams
        self._layers = [
            Layer.read(i, h, read(f"blk.{i}.attn_norm.weight", h.n_embd), file.tensors, read) for i in range(h.n_layer)
        ]
        embedding = file.tensors.get("token_embd.weight")
        n_rows = max(self.vocab.n_tokens, embedding.shape[-1] if embedding is not None else 0)  # padding may follow
        self.embedding = read("token_embd.weight", n_rows, h.n_embd)
        output = read("output.weight", n_rows, h.n_embd) if "output.weight" in file.tensors else self.embedding
        self._output_norm = read("output_norm.weight", h.n_embd)
        self._output = output * self._output_norm
        self._rope_factors = read("rope_freqs.weight", h.d_head // 2) if "rope_freqs.weight" in file.tensors else None
        self.n_vocab = len(self._output)
        if progress is not None:
            progress(1.0)

    def rotations(self, n_ctx: int) -> npt.NDArray[np.complex128]:
        """The rotary embedding as complex factors [n_ctx, d_head / 2], one for each pair of neighbouring channels."""
        h = self.hparams
        frequency = h.rope_base ** (-np.arange(0, h.d_head, 2) / h.d_head) / h.rope_scale
        if self._rope_factors is not None:
            frequency = frequency / self._rope_factors
        rotations: npt.NDArray[np.complex128] = np.exp(1j * np.arange(n_ctx)[:, None] * frequency)
        return rotations

    def _new_context(self, n_ctx: int, hidden: tuple[str, ...]) -> ReferenceContext:
        return ReferenceContext(self, n_ctx, hidden)

    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special, parse_special)

    def _close(self) -> None:
        pass


class ReferenceContext(Context):
    """One sequence's keys and values. Truncating costs nothing: rows past ``n_past`` are never read."""

    model: ReferenceModel

    def __init__(self, model: ReferenceModel, n_ctx: int, hidden: tuple[str, ...]) -> None:
        super().__init__(model, n_ctx, hidden)
        h = model.hparams
        try:
            # Of each layer and head [n_layer, n_head_kv, n_ctx, d_head].
            self._rows = {name: np.zeros((h.n_layer, h.n_head_kv, n_ctx, h.d_head)) for name in ("keys", "values")}
            self._rotations = model.rotations(n_ctx)
        except MemoryError:
            raise EngineError(f"not enough memory for a context of {n_ctx} tokens; use a smaller --ctx") from None

    def _decode(self, tokens: Sequence[int], logits: Wanted) -> Forward:
        return self._pass(self.model.embedding[list(tokens)], logits)

    def _decode_floats(self, rows: FloatArray, tokens: Sequence[int], logits: Wanted) -> Forward:
        return self._pass(rows.astype(np.float64), logits)

    def _decode_first_layers(self, tokens: Sequence[int], n_layers: int) -> Forward:
        return self._pass(self.model.embedding[list(tokens)], "none", n_layers)

    def _decode_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Forward:
        return self._pass(self.model.embedding[list(tokens)], "all", parents=parents)

    def _keep(self, path: Sequence[int]) -> None:
        cells = [self.n_past + at for at in path]
        for rows in self._rows.values():
            rows[:, :, self.n_past : self.n_past + len(cells)] = rows[:, :, cells]

    def _pass(
        self, rows: Array, logits: Wanted, n_layers: int | None = None, parents: Sequence[int] | None = None
    ) -> Forward:
        """Take rows [n, n_embd] through the first ``n_layers``, or all and the output matrix.

        ``parents``: which of the rows each follows, -1 being the memory; None is the one before.
        """
        model, n_all = self.model, self.model.n_layers
        first = len(rows) - n_wanted(logits, len(rows))
        found: FloatArray = np.empty((len(rows) - first, model.n_vocab), dtype=np.float32)
        whole = [layer_name(i) for i in range(n_layers or n_all - 1)] if self.hidden else []
        states: dict[str, list[Array]] = {name: [] for name in self.hidden if not n_layers or name in whole}
        # One by one: a matrix product over several tokens would round differently from one over a single token.
        seen: list[list[int]] = []  # by each row of a tree: the memory, and the rows on its path
        for i, row in enumerate(rows):
            cells: list[int] | None = None
            if parents is not None:
                before = seen[parents[i]] if parents[i] >= 0 else list(range(self.n_past))
                cells = [*before, self.n_past + i]
                seen.append(cells)
            after = self._step(row, self.n_past + i, n_layers or n_all, cells)
            taps = dict(zip(whole, after, strict=False)) if states else {}
            if i >= first:
                norm = self._normalised(after[-1])
                found[i - first] = model._output.dot(norm)
                taps |= {layer_name(n_all - 1): after[-1], NORM: norm * model._output_norm} if states else {}
            for name in states.keys() & taps.keys():
                states[name].append(taps[name])
        width = model.n_embd
        return Forward(found, {k: np.array(v, dtype=np.float32).reshape(-1, width) for k, v in states.items()})

    def _step(self, x: Array, cell: int, n_layers: int, seen: Sequence[int] | None = None) -> list[Array]:
        """Take a row [n_embd] through the first layers; returns the states after each [n_embd].

        Its keys and values go to ``cell``; ``seen`` are the cells that it sees, its own the last, None all up to there.
        """
        h = self.model.hparams
        n_q, n_kv, group = h.n_head * h.d_head, h.n_head_kv * h.d_head, h.n_head // h.n_head_kv
        position = cell if seen is None else len(seen) - 1
        rotation, scale = self._rotations[position], 1.0 / math.sqrt(h.d_head)
        visible = slice(position + 1) if seen is None else np.array(seen)
        after: list[Array] = []
        for layer, keys, values in zip(self.model._layers[:n_layers], *self._rows.values(), strict=False):
            read, x = self._entry(x)
            qkv = layer.qkv.dot(read)
            if layer.qkv_bias is not None:
                qkv = qkv + layer.qkv_bias
            rotated = qkv[: n_q + n_kv].view(np.complex128).reshape(-1, h.d_head // 2) * rotation
            heads = rotated.view(np.float64)  # [n_head + n_head_kv, d_head]
            keys[:, cell] = heads[h.n_head :]
            values[:, cell] = qkv[n_q + n_kv :].reshape(h.n_head_kv, h.d_head)
            attended = np.empty((h.n_head_kv, group, h.d_head))
            for head in range(h.n_head_kv):
                queries = heads[head * group : (head + 1) * group]
                scores = queries.dot(keys[head, visible].T)  # [group, position + 1]
                weights = np.exp((scores - scores.max(axis=1, keepdims=True)) * scale)
                attended[head] = weights.dot(values[head, visible]) / weights.sum(axis=1, keepdims=True)
            x = x + layer.attn_output.dot(attended.reshape(-1))
            gate_up = layer.gate_up.dot(self._normalised(x))
            gate, up = gate_up[: len(gate_up) // 2], gate_up[len(gate_up) // 2 :]
            # silu(z) = z * sigmoid(z); by tanh, which cannot overflow.
            x = x + layer.down.dot(gate * (0.5 + 0.5 * np.tanh(0.5 * gate)) * up)
            after.append(x)
        return after

    def _entry(self, x: Array) -> tuple[Array, Array]:
        """What attention reads of a layer's input, and what its result is added to; a subclass has wider inputs."""
        return self._normalised(x), x

    def _normalised(self, x: Array) -> Array:
        norm: Array = x * (1.0 / math.sqrt(float(x.dot(x)) / len(x) + self.model.hparams.norm_eps))
        return norm

    def _truncate(self, n: int) -> None:
        pass

    def _export(self) -> dict[str, Array]:
        return {name: rows[:, :, : self.n_past].copy() for name, rows in self._rows.items()}

    def _state_bytes(self) -> int:
        return sum(rows[:, :, : self.n_past].nbytes for rows in self._rows.values())

    def _import(self, state: ContextState) -> None:
        n = len(state.tokens)
        for name, rows in self._rows.items():
            saved = state.arrays.get(name)
            if saved is None or saved.shape != rows[:, :, :n].shape or saved.dtype != rows.dtype:
                raise EngineError(f"the saved state does not fit {self.model.path.name}")
            rows[:, :, :n] = saved

    def _close(self) -> None:
        self._rows = {}


def load(
    path: Path | str,
    *,
    n_threads: int | None = None,
    n_gpu_layers: int | None = None,
    kv_type: str = "f16",
    progress: Progress | None = None,
) -> ReferenceModel:
    """Load a llama-architecture GGUF; keys and values are float64 whatever ``kv_type``. See ``registry``."""
    if n_gpu_layers:
        raise UsageError("the reference backend runs on the CPU only; use --backend llama-cpp for --gpu-layers")
    return ReferenceModel(Path(path), progress)
