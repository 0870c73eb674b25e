"""Heads on MLX, beyond the contract of every backend (``test_heads``): biases, every type and width, float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from localspec import LLM, SamplingParams  # noqa: E402
from localspec.backends.base import FloatArray  # noqa: E402
from localspec.backends.mlx.network import default_dtype  # noqa: E402
from localspec.heads.trained import STATE, Head, load_head  # noqa: E402
from localspec.model_files.gguf import GGUFFile  # noqa: E402
from tests.backends.mlx.test_mlx_backend import replay  # noqa: E402
from tests.conftest import TinyFiles, open_backend  # noqa: E402
from tests.support import ggufs  # noqa: E402
from tests.support.heads import write_random_head  # noqa: E402

NOISE = 1e-4
"""Largest difference that float32 explains, as a share of the largest number."""


@pytest.fixture(scope="module", params=[128, 48])
def target(request: pytest.FixtureRequest, tiny: TinyFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A width that fills the blocks of quantised types, and one that does not: its matrices are halves."""
    if request.param == 128:
        return tiny.spm
    shape = ggufs.Shape(n_embd=48, n_head=3, n_head_kv=1)
    return ggufs.write_llama(tmp_path_factory.mktemp("narrow") / "narrow.gguf", shape)


def chain(head: Head, rows: FloatArray) -> dict[str, FloatArray]:
    """Logits and states: of several rows, of one by one in the place of the last of those, then of its own states."""
    wanted: dict[str, list[FloatArray]] = {"logits": [], STATE: []}
    with head.model.new_context(64, hidden=(STATE,)) as context:
        passes = [rows[:1], rows[1:9], rows[9:10], rows[10:11]]
        for fed in passes:
            names = range(10**6, 10**6 + len(fed))  # the target's tokens, of which the head's model knows a few
            forward = context.decode_floats(fed, names)
            wanted["logits"].append(forward.logits.copy())
            wanted[STATE].append(forward.hidden[STATE])
            if len(fed) > 1:
                context.truncate(5)
        for _ in range(3):
            forward = context.decode_floats(wanted[STATE][-1][-1:] + rows[11:12], [7], "last")
            wanted["logits"].append(forward.logits.copy())
            wanted[STATE].append(forward.hidden[STATE])
    return {name: np.concatenate(found) for name, found in wanted.items()}


@pytest.mark.parametrize("type_name", [None, "Q4_0", "F32"])
def test_a_head_is_what_the_reference_computes(target: Path, type_name: str | None, tmp_path: Path) -> None:
    path = write_random_head(target, tmp_path / "a.head", n_out=200, type_name=type_name, biases=True)
    found = {}
    for engine in ("mlx", "reference"):
        open_backend(engine)
        with load_head(path, target, engine) as head:
            rows = np.random.default_rng(0).standard_normal((12, head.card.n_embd)).astype(np.float32)
            found[engine] = chain(head, rows)
    for name, exact in found["reference"].items():
        assert np.abs(found["mlx"][name] - exact).max() < NOISE * np.abs(exact).max(), name


def test_rows_from_outside_are_computed_in_float32(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load_head(write_random_head(target, tmp_path / "a.head", "chained"), target, "mlx") as head:
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
        with GGUFFile(head.model.path) as file, GGUFFile(target) as usual:
            assert (default_dtype(file), default_dtype(usual)) == (mx.float32, mx.float16)


@pytest.mark.parametrize("draft", ["head", "early-exit"])
def test_much_of_its_draft_is_right_and_the_text_is_the_targets(draft: str, tiny: TinyFiles, tmp_path: Path) -> None:
    path, prompt = tiny.pair.target, "the rain in the and of"
    name = (
        f"head:{write_random_head(path, tmp_path / 'a.head', taps=('layer:0', 'norm'))}" if draft == "head" else draft
    )
    with LLM(path, draft=name, backend="mlx", n_ctx=256, draft_length=3) as llm:
        reply = llm.generate(prompt, SamplingParams(max_tokens=60, ignore_eos=True))
        tokens = llm.tokenize(prompt, add_special=True)
    # by chance, one of hundreds would be right
    assert 8 < reply.stats.num_accepted_tokens < reply.stats.num_draft_tokens - 10
    assert replay("mlx", path, tokens, reply.token_ids).max() < 0.05, "an emitted token is not the target's"
