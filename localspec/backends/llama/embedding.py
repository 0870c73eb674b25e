"""Embedding models: files that make one row of numbers of a text, computed by llama.cpp.

ik_llama.cpp takes such files too, and computes texts of four tokens wrongly.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from localspec.backends.base import FloatArray
from localspec.backends.llama import llama_cpp
from localspec.backends.soundness import check_sound
from localspec.errors import Closed, EngineError, PromptTooLong, UnsupportedModel, UsageError
from localspec.model_files.gguf import GGUFFile, StringArray
from localspec.model_files.vocab import Vocab
from localspec.system.machine import default_threads
from localspec.system.process import SharedLock

MAX_CTX = 2048  # default room [tokens]: a text is one pass, and memory grows with its square


def pooling_of(file: GGUFFile) -> int | None:
    """How the hidden states of a text become its embedding, by ggml's numbers: 1 their mean, 2 the first, 3 the last.

    None for a file that makes no embeddings, among them those that rank pairs of texts (4).
    """
    value = file.whole("pooling_type")
    return value if value in (1, 2, 3) else None


class EmbeddingModel:
    """A loaded embedding model. One text is computed at a time; calls from several threads wait for each other.

    Args:
        path: the GGUF file.
        n_ctx: longest text [tokens]; None is what the model was trained for, ``MAX_CTX`` at most.
        n_threads: CPU threads; None takes the physical cores.
        n_gpu_layers: layers on the GPU; None puts all there if the engine has a GPU.

    Raises:
        LocalspecError: it is no embedding model, was trained for shorter texts, or as ``registry`` says.
    """

    def __init__(
        self, path: Path, *, n_ctx: int | None = None, n_threads: int | None = None, n_gpu_layers: int | None = None
    ) -> None:
        self.path = path
        self._computing, self._in_use = threading.Lock(), SharedLock()
        self._model: int | None
        self._context: int
        self._binding = llama_cpp.binding()
        self.backend = self._binding.name
        with GGUFFile(path) as file:
            self._read_header(file, n_ctx)
            check_sound(file, self._vocab, self._binding.computes, self._binding.alignment)
        layers = (-1 if self._binding.gpu else 0) if n_gpu_layers is None else n_gpu_layers
        model = self._binding.load_model(path, layers, None)
        if not model:
            raise UnsupportedModel(f"{self.backend} could not load {path.name}; use --verbose for engine output")
        n_threads = n_threads or default_threads()
        fields = {"n_ctx": self.n_ctx, "n_batch": self.n_ctx, "n_ubatch": self.n_ctx}  # a text is one pass
        fields |= {"embeddings": True, "pooling_type": self._pooling}
        context = self._binding.new_context(model, n_threads, branches=False, **fields)
        if not context:
            self._binding.free_model(model)
            raise EngineError(f"not enough memory for texts of {self.n_ctx} tokens; use a smaller --ctx")
        self._model, self._context = model, context
        self._batch: Any = self._binding.lib.llama_batch_init(self.n_ctx, 0, 1)

    def _read_header(self, file: GGUFFile, n_ctx: int | None) -> None:
        pooling = pooling_of(file)
        if pooling is None:
            raise UnsupportedModel(f"{self.path.name} is no embedding model: it does not say how states are pooled")
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, StringArray) or not len(tokens):
            raise UnsupportedModel(f"{self.path.name} has no vocabulary")
        kind = str(file.metadata.get("tokenizer.ggml.model", ""))
        self._vocab = Vocab(tokens, np.empty(0, np.int32), kind)
        self._pooling = pooling
        self.n_embd = file.whole("embedding_length")
        if self.n_embd <= 0:
            raise UnsupportedModel(f"{self.path.name} does not say how many numbers an embedding has")
        if n_ctx is not None and n_ctx > file.n_ctx_train:
            raise UsageError(f"--ctx {n_ctx}: {self.path.name} was trained for texts of {file.n_ctx_train} tokens")
        self.n_ctx = n_ctx or min(file.n_ctx_train or MAX_CTX, MAX_CTX)

    @property
    def most_characters(self) -> int | None:
        """How many characters ``n_ctx`` tokens can stand for; None where a token may stand for any number."""
        return self.n_ctx * self._vocab.longest if self._vocab.kind in ("gpt2", "llama") else None

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a text, with those that the model wants around it."""
        with self._in_use.shared():
            return self._binding.tokenize(self._open(), text.encode(), True, False)

    def embed(self, tokens: Sequence[int]) -> FloatArray:
        """The embedding of a text, of length 1 [n_embd]; PromptTooLong, UsageError, EngineError or Closed without."""
        if not tokens:
            raise UsageError("there is nothing to embed")
        if len(tokens) > self.n_ctx:
            raise PromptTooLong(f"the text has {len(tokens)} tokens, and {self.n_ctx} fit")
        if not all(0 <= token < self._vocab.n_tokens for token in tokens):
            raise UsageError(f"a token id must be under {self._vocab.n_tokens}")
        with self._computing, self._in_use.shared():
            self._open()
            batch = self._batch
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            self._binding.clear(self._context)
            if self._binding.lib.llama_decode(self._context, batch):
                raise EngineError(f"{self.backend} could not compute this text")
            found = self._binding.api.llama_get_embeddings_seq(self._context, 0)
            if not found:
                raise EngineError(f"{self.backend} makes no embeddings with {self.path.name}")
            address = ctypes.cast(found, ctypes.POINTER(ctypes.c_float))
            row: FloatArray = np.ctypeslib.as_array(address, (self.n_embd,)).astype(np.float32)
        length = float(np.linalg.norm(row))
        if not np.isfinite(length) or not length:
            raise EngineError(f"{self.backend} computed no numbers for this text")
        return row / length

    def _open(self) -> int:
        if self._model is None:
            raise Closed("this model was closed")
        return self._model

    def close(self) -> None:
        with self._in_use.alone():
            if self._model is not None:
                self._binding.lib.llama_batch_free(self._batch)
                self._binding.free_context(self._context)
                self._binding.free_model(self._model)
                self._model = None
