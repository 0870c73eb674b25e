"""EAGLE-3 heads in files of llama.cpp's layout (Li et al. 2025, arXiv:2503.01840), and their layer in NumPy and
float64.

One layer reads, side by side, the embedding of a token and a state made of three states of the target by the matrix
``fc``. It may guess only some of the target's tokens, those in ``d2t``, and borrow the target's embeddings and output
matrix.
"""

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
from localspec.errors import UnsupportedModel, shown
from localspec.heads.base import HeadContext
from localspec.heads.card import block_shapes
from localspec.heads.file import output_rows
from localspec.heads.kinds.base import LLAMA_CPP, OWN_TENSORS, PublishedHead, layers_read, token_map
from localspec.model_files.gguf import GGUFFile, attention_sizes, check_shapes, damaged, whole
from localspec.model_files.vocab import Vocab

N_TAPS = 3


def read(file: GGUFFile) -> PublishedHead:
    """The header of an open EAGLE-3 file.

    Raises:
        UnsupportedModel: the engine cannot compute it.
        ModelFileError: it is damaged.
    """
    name = file.path.name
    if whole(file, "block_count") != 1:
        raise UnsupportedModel(f"{name} is an EAGLE-3 head with several layers, which llama.cpp does not support")
    layers = layers_read(file)
    if len(layers) != N_TAPS:
        raise damaged(file, f"eagle3.target_layers is {shown(layers)}")
    n, n_target = whole(file, "embedding_length"), whole(file, "target_hidden_size")
    n_ff, (n_head, n_head_kv, d_head) = whole(file, "feed_forward_length"), attention_sizes(file, n)
    has_tokens = "tokenizer.ggml.tokens" in file.metadata
    vocab = Vocab.from_gguf(file) if has_tokens else None
    n_vocab = vocab.n_tokens if vocab is not None else whole(file, "vocab_size")
    ids = token_map(file, n_vocab)
    borrows = [what for what, tensor in OWN_TENSORS.items() if tensor not in file.tensors]
    if "output" in borrows and "d2t" in file.tensors:
        raise damaged(file, "it has a token map but no output matrix")
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (n, N_TAPS * n_target),
        "output_norm.weight": (n,),
        "output.weight": (len(ids), n),
        "token_embd.weight": (n_vocab, n),
        "blk.0.attn_norm_2.weight": (n,),
    }
    shapes |= block_shapes("blk.0", n, n_head * d_head, n_head_kv * d_head, n_ff, 2 * n)
    if file.field("norm_before_fc", False):
        shapes["enc.output_norm.weight"] = (N_TAPS * n_target,)
    check_shapes(file, shapes, optional=tuple(OWN_TENSORS.values()))
    return PublishedHead(
        kind="eagle3",
        title="EAGLE-3",
        engines=LLAMA_CPP
        | {"mlx": "localspec.heads.kinds.mlx:load_eagle3", "reference": f"{__name__}:ReferenceHeadModel"},
        path=file.path,
        taps=tuple(f"layer:{layer - 1}" for layer in layers),  # what goes into a layer came out of the last
        n_target=n_target,
        n_embd=n,
        n_vocab=n_vocab,
        ids=np.sort(ids),
        fuses=True,
        borrows=tuple(borrows),
        vocab=vocab,
    )


# EAGLE-3 heads in NumPy and float64: as the reference backend, their logits do not depend on the width of a pass.


class ReferenceHeadModel(ReferenceModel):
    """The weights of a head in float64, and those that it borrows of a target on this backend.

    Raises:
        UnsupportedModel: it borrows from a target elsewhere.
    """

    def __init__(self, head: PublishedHead, target: Model, n_threads: int, n_gpu_layers: int | None) -> None:
        if head.borrows and not isinstance(target, ReferenceModel):
            raise head.misplaced(NAME, target)
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
        self.hparams = Hyperparameters.read(file)

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
                output = read_tensor(lender, output_rows(lender), (None, n))
        else:
            output = read("output.weight", None, n)
        if "d2t" in file.tensors:
            output = output[np.argsort(file.tensor_bytes("d2t").view("<i8"))]
        self._output_norm = read("output_norm.weight", n)
        self._output = output[: self.n_vocab] * self._output_norm
        has_factors = "rope_freqs.weight" in file.tensors
        self._rope_factors = read("rope_freqs.weight", self.hparams.d_head // 2) if has_factors else None

    def _new_context(self, n_ctx: int, hidden: tuple[str, ...]) -> ReferenceHeadContext:
        return ReferenceHeadContext(self, n_ctx, hidden)


class ReferenceHeadContext(HeadContext, ReferenceContext):
    model: ReferenceHeadModel

    def fuse(self, states: FloatArray) -> FloatArray:
        rows = [row.astype(np.float64) for row in states]
        if self.model.normalises_first:
            rows = [self._normalised(row) for row in rows]
        return np.array([self.model.fc.dot(row) for row in rows], dtype=np.float32)

    def _decode_floats(self, rows: FloatArray, tokens: Sequence[int], logits: Wanted) -> Forward:
        self._check_tokens(tokens)
        # A row as ``_pass`` takes it: the token's embedding, and the state.
        return self._pass(np.concatenate([self.model.embedding[list(tokens)], rows], axis=1), logits)

    def _entry(self, x: Array) -> tuple[Array, Array]:
        embedding, state = x.reshape(2, -1)
        norm = self._normalised(state)
        both = np.concatenate([self._normalised(embedding), norm])
        return both, norm * self.model.state_norm if self.model.goes_on_from_norm else state
