"""EAGLE-3 heads in NumPy and float64: as the reference backend, their logits do not depend on the width of a pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localspec.backends.base import Capabilities, FloatArray, Forward, Model, Wanted
from localspec.backends.reference import (
    NAME,
    Array,
    Hyperparameters,
    Layer,
    ReferenceContext,
    ReferenceModel,
    read_tensor,
)
from localspec.errors import EngineError, UnsupportedModel
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.head_kinds.base import PublishedHead
from localspec.model_files.vocab import Vocab


class ReferenceHeadModel(ReferenceModel):
    """The weights of a head in float64.

    Args:
        head: its header.
        target: what it drafts for, on this backend where the head borrows from it.

    Raises:
        UnsupportedModel: it is not computed here, or borrows from a target elsewhere.
    """

    def __init__(self, head: PublishedHead, target: Model) -> None:
        if head.kind != "eagle3":
            raise UnsupportedModel(f"{head.path.name}: of published heads the reference backend computes EAGLE-3's")
        if head.borrows and not isinstance(target, ReferenceModel):
            what = " and ".join(head.borrows)
            raise UnsupportedModel(
                f"{head.path.name} takes its {what} from its target, which has to be on reference for that and is on "
                f"{target.backend}"
            )
        self.head, self.path, self.architecture, self.chat_template = head, head.path, head.kind, None
        self.backend, self.engine = NAME, f"{NAME} numpy {np.__version__}"
        self.capabilities = Capabilities(batch_invariant=True, hidden=True, float_rows=True)
        self.vocab, self.n_embd, self.n_layers, self.n_threads = Vocab.none(), head.n_embd, 1, 1
        self.n_vocab = len(head.ids)
        with GGUFFile(head.path) as file:
            self._read_weights(file, target)

    def _read_weights(self, file: GGUFFile, target: Model) -> None:
        head, n = self.head, self.head.n_embd
        self.size_bytes, self.n_ctx_train = file.n_bytes, file.n_ctx_train
        self.hparams = Hyperparameters.from_metadata(file.metadata, file.architecture)

        def read(name: str, *shape: int | None) -> Array:
            return read_tensor(file, name, shape)

        self.state_norm = read("blk.0.attn_norm_2.weight", n)
        norms = np.concatenate([read("blk.0.attn_norm.weight", n), self.state_norm])
        self._layers = [Layer.read(0, self.hparams, norms, file.tensors, read)]
        self.fc = read("fc.weight", n, len(head.taps) * head.n_target)
        self.normalises_first = bool(file.field("norm_before_fc", False))
        if self.normalises_first:
            self.fc = self.fc * read("enc.output_norm.weight", self.fc.shape[1])
        self.goes_on_from_norm = bool(file.field("norm_before_residual", False))
        if "embeddings" in head.borrows:
            assert isinstance(target, ReferenceModel)
            self.embedding = target.embedding
        else:
            self.embedding = read("token_embd.weight", None, n)
        if "output" in head.borrows:
            with GGUFFile(target.path) as lender:
                name = "output.weight" if "output.weight" in lender.tensors else "token_embd.weight"
                output = read_tensor(lender, name, (None, n))
        else:
            output = read("output.weight", None, n)
        if "d2t" in file.tensors:
            output = output[np.argsort(file.tensor_bytes("d2t").view("<i8"))]
        self._output_norm = read("output_norm.weight", n)
        self._output = output[: self.n_vocab] * self._output_norm
        has_factors = "rope_freqs.weight" in file.tensors
        self._rope_factors = read("rope_freqs.weight", self.hparams.d_head // 2) if has_factors else None

    def _new_context(self, n_ctx: int, n_threads: int, hidden: tuple[str, ...]) -> ReferenceHeadContext:
        return ReferenceHeadContext(self, n_ctx, hidden)


class ReferenceHeadContext(ReferenceContext):
    """What a head remembers. ``decode_floats`` takes states as rows, and the tokens' real ids."""

    model: ReferenceHeadModel

    def fuse(self, states: FloatArray) -> FloatArray:
        """See ``published_heads.FusingContext``."""
        rows = [row.astype(np.float64) for row in states]
        if self.model.normalises_first:
            rows = [self._normalised(row) for row in rows]
        return np.array([self.model.fc.dot(row) for row in rows], dtype=np.float32)

    def _decode_floats(self, rows: FloatArray, tokens: Sequence[int], logits: Wanted) -> Forward:
        if max(tokens) >= self.model.head.n_vocab:
            raise EngineError(f"{self.model.path.name} has no token {max(tokens)}")
        # A row as ``_pass`` takes it: the token's embedding, and the state.
        return self._pass(np.concatenate([self.model.embedding[list(tokens)], rows], axis=1), logits)

    def _decode(self, tokens: Sequence[int], logits: Wanted) -> Forward:
        raise EngineError(f"{self.model.path.name} is a draft head and cannot tokenize text")

    def _attention_input(self, x: Array) -> Array:
        embedding, state = x.reshape(2, -1)
        return np.concatenate([self._normalised(embedding), self._normalised(state)])

    def _residual(self, x: Array) -> Array:
        state = x[len(x) // 2 :]
        return self._normalised(state) * self.model.state_norm if self.model.goes_on_from_norm else state


def load_head_model(head: PublishedHead, target: Model, n_threads: int, n_gpu_layers: int | None) -> ReferenceHeadModel:
    """See ``published_heads.LoadHeadModel``; it runs on one thread of the CPU."""
    return ReferenceHeadModel(head, target)
