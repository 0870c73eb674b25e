"""Layers for multi-token prediction as heads, in a model's own file or a second one; see ``model_files.nextn``.

Of Gemma 4 they are a file of some layers that attend to the keys and values of their target's last ones.
"""

from __future__ import annotations

import numpy as np

from localspec.backends.base import NEXTN
from localspec.heads.kinds.base import LLAMA_CPP, MEMORY, PublishedHead
from localspec.model_files.gguf import GGUFFile, whole
from localspec.model_files.nextn import ASSISTANT, check, check_assistant, is_alone
from localspec.model_files.vocab import Vocab

# Those whose graph drops rows without logits before their states are taken, as models/qwen3next.cpp does: to read the
# states of such rows ends the process
_STATES_NEED_LOGITS = frozenset({"qwen3next"})


def read(file: GGUFFile) -> PublishedHead:
    """What an open file says of its layer for multi-token prediction, be it with the model or alone.

    Raises:
        UnsupportedModel: it has none, several, or one of another layout.
        ModelFileError: it is damaged.
    """
    if file.architecture == ASSISTANT:
        return _read_assistant(file)
    layer = check(file)
    n, n_vocab, alone = whole(file, "embedding_length"), file.tensors["token_embd.weight"].shape[-1], is_alone(file)
    return PublishedHead(
        kind="mtp",
        title="MTP",
        engines=LLAMA_CPP if alone else LLAMA_CPP | {"mlx": "localspec.heads.kinds.mlx:load_mtp"},
        path=file.path,
        taps=(NEXTN,),
        n_target=n,
        n_embd=n,
        n_vocab=n_vocab,
        ids=np.arange(n_vocab),
        in_target=not alone,
        states_need_logits=file.architecture in _STATES_NEED_LOGITS,
        has_zeroth=True,
        vocab=Vocab.from_gguf(file) if alone else None,
        of_model=(file.architecture, layer),
    )


def _read_assistant(file: GGUFFile) -> PublishedHead:
    vocab = Vocab.from_gguf(file)
    reads = check_assistant(file, vocab.n_tokens)
    n_target = whole(file, "embedding_length_out")
    return PublishedHead(
        kind="mtp",
        title="Gemma 4 assistant",
        engines=LLAMA_CPP,
        path=file.path,
        taps=(NEXTN,),
        n_target=n_target,
        n_embd=n_target,
        n_vocab=vocab.n_tokens,
        ids=np.arange(vocab.n_tokens),
        states_need_logits=True,
        borrows=("embeddings", MEMORY),
        vocab=vocab,
        reads=reads,
    )
