"""Is this engine right about this file? Wrong kernels exist, and must never reach an answer.

Single-token passes and batched passes run different kernels over the same weights. At the first load of a file on an
engine, a fixed text goes through both, and through another installed engine; a defect is far outside the noise that
quantised activations cause (mean KL divergence under 0.03 nats on every healthy file measured, 2.1 on a broken one).
The verdict is remembered by engine version and the file's fingerprint. A file whose batches come out wrong is repacked,
once, into tensor types that come out right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from localspec.backends import repack
from localspec.backends.base import FloatArray, Model
from localspec.errors import EngineError, EngineMismatch, LocalspecError
from localspec.gguf_parts import model_files
from localspec.home import home
from localspec.ledger import Ledger

MAX_MEAN_KL = 0.15
"""Largest mean KL divergence [nats] between two computations of the same logits that counts as kernel noise."""

CHECK_TEXT = (
    "The harbour was quiet before dawn. Two boats lay at the pier, and a man with a lantern counted crates: "
    "fourteen of oranges, three of glass, one marked only with a number, 2718. "
    "def area(r):\n    return 3.14159 * r ** 2\n"
)

_FORMAT = 2

LoaderOf = Callable[[str], "Callable[..., Model] | None"]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How two computations of the same positions compare.

    Attributes:
        mean_kl: mean KL divergence over the positions, in nats.
        top1: share of positions with the same most probable token.
    """

    mean_kl: float
    top1: float

    @property
    def holds(self) -> bool:
        return self.mean_kl <= MAX_MEAN_KL


def agreement(a: FloatArray, b: FloatArray) -> Agreement:
    """Compare logits [n, n_vocab] of two computations, row by row."""
    total, same = 0.0, 0
    for x, y in zip(a, b, strict=True):
        log_p, log_q = _log_softmax(x), _log_softmax(y)
        total += float((np.exp(log_p) * (log_p - log_q)).sum())
        same += int(np.argmax(x) == np.argmax(y))
    return Agreement(max(0.0, total / len(a)) if np.isfinite(total) else float("inf"), same / len(a))


def _log_softmax(row: FloatArray) -> np.ndarray[Any, np.dtype[np.float64]]:
    shifted = row.astype(np.float64) - float(row.max())
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def check_model(model: Model, n_single: int = 20) -> Agreement:
    """Compare batched passes of a loaded model, wide and narrow, with its single-token passes."""
    tokens = _check_tokens(model, 64)
    n_single = min(n_single, len(tokens) - 1)
    with model.new_context(len(tokens) + 8) as context:
        wide = context.decode(tokens).logits[-n_single:].copy()
        context.truncate(len(tokens) - n_single)
        narrow = []
        for start in range(len(tokens) - n_single, len(tokens), 5):
            narrow.append(context.decode(tokens[start : min(start + 5, len(tokens))]).logits.copy())
        # The single-token passes get a memory that was written by single-token passes.
        context.truncate(0)
        single = [context.decode([token], "last").logits[0].copy() for token in tokens[: n_single + 1]]
        context.truncate(0)
        batched = context.decode(tokens[: n_single + 1]).logits.copy()
    wide_narrow = agreement(wide, np.concatenate(narrow))
    wide_single = agreement(batched, np.stack(single))
    return max(wide_narrow, wide_single, key=lambda found: found.mean_kl)


def compare_models(model: Model, other: Model) -> Agreement:
    """Compare one pass over the fixed text in two engines."""
    tokens = _check_tokens(model, 64)
    rows = []
    for each in (model, other):
        with each.new_context(len(tokens) + 8) as context:
            rows.append(context.decode(tokens).logits.copy())
    return agreement(rows[0], rows[1])


def _check_tokens(model: Model, n: int) -> list[int]:
    tokens = model.tokenize(CHECK_TEXT, add_special=True)
    return tokens[:n] if len(tokens) >= 8 else [i % model.n_vocab for i in range(1, n + 1)]


def fingerprint(path: Path) -> str:
    """A digest of a model's size, its header and 64 samples of its data; quick on any size. Of all parts it has."""
    files = model_files(path)
    if len(files) > 1:
        return hashlib.sha256("".join(map(_fingerprint, files)).encode()).hexdigest()[:32]
    return _fingerprint(path)


def _fingerprint(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        for i in range(64):
            file.seek(size * i // 64)
            digest.update(file.read(4096))
    return digest.hexdigest()[:32]


def load_checked(
    backend: str,
    path: Path,
    options: dict[str, Any],
    say: Callable[[str], None],
    warn: Callable[[str], None],
    loader_of: LoaderOf,
) -> Model:
    """Load a file, or a repacked copy of it that the engine computes rightly; see the module's docstring.

    Args:
        backend: the engine's name.
        path: the file.
        options: arguments of the engine's ``load``.
        say: takes what is being done, in a line.
        warn: takes remarks that a user should keep.
        loader_of: how another engine loads a file; None where it cannot be used here.

    Raises:
        EngineMismatch: the engine is wrong about the file and no repacked copy helps.
    """
    module = import_module(f"localspec.backends.{backend.replace('-', '_')}")
    ledger, source = Ledger(home() / "trust", _FORMAT), fingerprint(path)
    model: Model | None = None

    def key(digest: str) -> dict[str, str]:
        engine = module.binding().version if hasattr(module, "binding") else ""
        return {"engine": f"{backend} {engine}", "gpu layers": str(options.get("n_gpu_layers")), "file": digest}

    verdict = ledger.get(key(source))
    if verdict is None or verdict["holds"]:
        model = module.load(path, **options)
        assert model is not None
        if model.capabilities.batch_invariant:
            return model
    if model is not None and verdict is None:
        say(f"checking that {model.engine} computes {path.name} rightly (once per file)")
        verdict = _examine(model, path, options, loader_of)
        ledger.put(key(source), verdict)
    assert verdict is not None
    if verdict["holds"] and model is not None:
        return model
    if model is not None:
        model.close()
    for repacked in repack.copies(path, source, say):
        copy: Model = module.load(repacked, **options)
        digest = fingerprint(repacked)
        found = ledger.get(key(digest))
        if found is None:
            found = _examine(copy, path, options, loader_of)
            ledger.put(key(digest), found)
        if found["holds"]:
            warn(f"{copy.engine} computes {path.name} wrongly in batches ({verdict['why']}): using {repacked.name}")
            return copy
        copy.close()
        repacked.unlink(missing_ok=True)
    raise EngineMismatch(
        f"{backend} computes {path.name} wrongly ({verdict['why']}); use --backend llama-cpp "
        "(pip install 'localspec[llama-cpp]') or another quantisation of the model"
    )


def _examine(model: Model, path: Path, options: dict[str, Any], loader_of: LoaderOf) -> dict[str, Any]:
    own = check_model(model)
    if not own.holds:
        return {"holds": False, "why": f"its batches differ from its single tokens, KL {own.mean_kl:.2g} nats"}
    other = _another_engine(model, path, options, loader_of)
    if other is not None:
        try:
            across = compare_models(model, other)
            # An engine that contradicts itself on this file is no witness against another.
            if not across.holds and check_model(other).holds:
                return {"holds": False, "why": f"it differs from {other.engine}, KL {across.mean_kl:.2g} nats"}
        except EngineError:
            pass  # nor is one that fails on it, for want of memory say
        finally:
            other.close()
    return {"holds": True, "why": f"KL {own.mean_kl:.2g} nats"}


def _another_engine(model: Model, path: Path, options: dict[str, Any], loader_of: LoaderOf) -> Model | None:
    for name in ("llama-cpp", "ik-llama"):
        if name != model.backend and (loader := loader_of(name)) is not None:
            try:
                loaded = loader(path, **{**options, "n_gpu_layers": 0, "progress": None})
            except LocalspecError:
                continue
            if loaded.n_vocab == model.n_vocab:
                return loaded
            loaded.close()
    return None
