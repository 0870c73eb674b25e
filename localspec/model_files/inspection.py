"""What a model file says of itself, from its header alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from localspec.errors import ModelFileError, UnsupportedModel, is_whole
from localspec.model_files import nextn
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.kv_memory import kv_shape
from localspec.model_files.vocab import Vocab

CONTEXTS = (2048, 8192, 32768, 131072)  # Context sizes [tokens] for which the memory is listed

_TEMPLATES = (
    ("<|im_start|>", "ChatML"),
    ("<|start_header_id|>", "Llama 3"),
    ("<start_of_turn>", "Gemma"),
    ("<|turn>", "Gemma 4"),
    ("<|channel|>", "Harmony"),
    ("[INST]", "Mistral"),
    ("<|start_of_role|>", "Granite"),
    ("<|assistant|>", "Phi/Zephyr"),
)


def file_facts(gguf: GGUFFile) -> dict[str, Any]:
    """Facts of any GGUF, ready for JSON."""
    return {
        "path": str(gguf.path),
        "name": gguf.name,
        "architecture": gguf.architecture,
        "license": str(gguf.metadata.get("general.license", "")) or None,
        "quantization": gguf.quantization,
        "bytes": gguf.n_bytes,
        "files": 1 + len(gguf.shards),
        "gguf_version": gguf.version,
        "n_params": gguf.n_params,
        "n_tensors": len(gguf.tensors),
        "bytes_by_tensor_type": gguf.bytes_by_type,
        "cannot_generate_text": _reason(gguf, GGUFFile.check_generates_text),
    }


def model_facts(gguf: GGUFFile) -> dict[str, Any]:
    """Further facts of a model, ready for JSON."""
    n_mtp = nextn.n_layers(gguf)
    return {
        "context_length": gguf.n_ctx_train or None,
        "n_layers": _number(gguf.field("block_count")),
        "embedding_length": _number(gguf.field("embedding_length")),
        "vocabulary": _vocabulary(gguf),
        "chat_template": _template(gguf),
        "memory": _memory(gguf),
        # The layers for multi-token prediction, and why they cannot be drafted with, if they cannot
        "mtp": {"layers": n_mtp, "unusable": _reason(gguf, nextn.check)} if n_mtp else None,
    }


def _reason(gguf: GGUFFile, check: Callable[[GGUFFile], object]) -> str | None:
    """What a check has against a file; None: nothing."""
    try:
        check(gguf)
    except ModelFileError as error:
        return str(error)
    return None


def _number(value: Any) -> int | None:
    return int(value) if is_whole(value) else None


def _vocabulary(gguf: GGUFFile) -> dict[str, Any] | None:
    try:
        vocab = Vocab.from_gguf(gguf)
    except UnsupportedModel:
        return None
    named = {name: getattr(vocab, name) for name in ("bos", "eos", "eot", "unk", "pad")}
    return {
        "kind": vocab.kind,
        "pre": vocab.pre or None,
        "n_tokens": vocab.n_tokens,
        "special": {k: None if i is None else {"id": i, "text": vocab.token_text(i)} for k, i in named.items()},
        "ends_generation": [{"id": i, "text": vocab.token_text(i)} for i in sorted(vocab.eog)],
        "add_bos": vocab.add_bos,
        "fingerprint": vocab.fingerprint,
    }


def _template(gguf: GGUFFile) -> dict[str, Any] | None:
    text = gguf.metadata.get("tokenizer.chat_template")
    if not isinstance(text, str):
        return None
    return {
        "format": next((name for mark, name in _TEMPLATES if mark in text), "unknown"),
        "characters": len(text),
        "tools": "tools" in text,
        "thinking": "think" in text,
        "system": "system" in text,
    }


def _memory(gguf: GGUFFile) -> dict[str, Any]:
    shape = kv_shape(gguf)
    known = gguf.n_ctx_train or CONTEXTS[0]
    return {
        "weights_bytes": gguf.n_bytes,
        "kv_type": "f16",
        "kv_bytes_per_token": shape.bytes(1),
        "sliding_window": shape.window or None,
        "windowed_layers": sum(shape.windowed),
        "recurrent": shape.recurrent,
        "contexts": [
            {
                "n_ctx": n,
                "kv_bytes": shape.bytes(n),
                "kv_bytes_window_only": shape.bytes(n, only_window=True),
                "total_bytes": gguf.n_bytes + shape.bytes(n),
            }
            for n in (*(n for n in CONTEXTS if n < known), known)
        ],
    }
