"""The check that an engine computes a file rightly: wrong kernels never reach an answer."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec import LLM, EngineMismatch, SamplingParams, backends
from localspec.backends import repack, trial, trust
from localspec.backends.base import Context, ContextState, Forward, Model, Piece
from localspec.backends.llama import ggml as ggml_module
from localspec.backends.llama import ik_llama
from localspec.backends.llama.ik_llama import IkLlamaBinding
from localspec.backends.llama.model import LlamaContext, LlamaSequences
from localspec.backends.llama.rollback import LeafSequences
from localspec.backends.reference import ReferenceContext
from localspec.controllers.calibration import curve_key
from localspec.errors import Cancelled, EngineError, LocalspecError, UnsupportedModel, UsageError
from localspec.model_files.gguf import GGUFFile, fingerprint
from localspec.system.steps import exhaust
from tests.conftest import Backend, TinyFiles, open_backend
from tests.support import ggufs
from tests.support.gguf_vocabs import vocab_metadata
from tests.support.program import apart


@pytest.fixture
def ik() -> None:
    open_backend("ik-llama")


@pytest.fixture
def model(tiny: TinyFiles) -> Iterator[Model]:
    """On one engine: what finds a defect is the same on all."""
    with open_backend("llama-cpp").load(tiny.bpe, n_threads=1) as model:
        yield model


Patch = Callable[[pytest.MonkeyPatch], None]


def wrong_rows(owner: Any, name: str, wrong: Callable[[Any, Any, Any], Any]) -> Patch:
    """A defect: what a method returns is made wrong, by (the object, its first argument, what it returned)."""

    def patched(patch: pytest.MonkeyPatch) -> None:
        method = getattr(owner, name)

        def defective(self: Any, *arguments: Any) -> Any:
            return wrong(self, arguments[0], method(self, *arguments))

        patch.setattr(owner, name, defective)

    return patched


def rolled(forward: Forward, axis: int = 1) -> Forward:
    return Forward(np.roll(forward.logits, 7, axis=axis))


def wrong_width(width: int, *, branching: bool = False) -> Patch:
    """In passes of this width, or in those of contexts that branch."""

    def wrong(context: Context, tokens: Any, found: Forward) -> Forward:
        return rolled(found) if len(tokens) == width and context.can_branch >= branching else found

    return wrong_rows(LlamaContext, "decode", wrong)


def test_a_doubt_is_settled_by_more_passes(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    wrong_rows(LlamaContext, "decode", lambda _, tokens, found: (passes.append(len(tokens)), found)[1])(monkeypatch)
    assert trust.check_model(model).holds
    few = len(passes)
    monkeypatch.setattr(trust, "DOUBTFUL_KL", -1.0)
    assert trust.check_model(model).holds
    assert few < 25
    assert len(passes) > 2 * few + 20


def swapped(batch: Any, pieces: Any, found: Any) -> Any:
    return found[::-1] if len({len(piece.tokens) for piece in pieces}) == 1 else found


def wrong_pieces(wrong: Callable[[Any], bool]) -> Patch:
    return wrong_rows(
        LlamaSequences, "decode", lambda _, pieces, found: [rolled(each) for each in found] if wrong(pieces) else found
    )


def a_prefix_too_short(patch: pytest.MonkeyPatch) -> None:
    """The last of its tokens are some that the other sequence does not hold."""
    copy = LlamaSequences.copy_prefix

    def short(self: LlamaSequences, source: int, target: int, n: int) -> None:
        copy(self, source, target, n - 8)
        self[target].decode([7] * 8, "none")

    patch.setattr(LlamaSequences, "copy_prefix", short)


def tokens_taken_back_that_stay(patch: pytest.MonkeyPatch) -> None:
    """Rejected draft tokens are still seen, by the ones that come in their place and after: as if moved to the
    front."""
    truncate = LlamaSequences.truncate

    def kept(self: LlamaSequences, sequence: int, n: int) -> None:
        tokens = self[sequence].tokens
        again = [*tokens[n:], *tokens[: n - len(tokens[n:])]] if n and len(tokens) > n else tokens[:n]
        truncate(self, sequence, 0)
        if again:
            self[sequence].decode(again, "none")

    patch.setattr(LlamaSequences, "truncate", kept)


def another_branch_is_kept(patch: pytest.MonkeyPatch) -> None:
    """One that is as long: the text is said to go on as it does not."""
    keep = LeafSequences.keep
    patch.setattr(LeafSequences, "keep", lambda self, path, n: keep(self, list(range(len(path))), n))


def other_tokens_are_restored(patch: pytest.MonkeyPatch) -> None:
    restore = LlamaContext.import_state

    def wrong(self: LlamaContext, state: ContextState) -> None:
        restore(self, state)
        self.truncate(self.n_past - 3)
        self.decode([5, 6, 7], "none")
        self.tokens = list(state.tokens)

    patch.setattr(LlamaContext, "import_state", wrong)


BRANCHES_SWAPPED = wrong_rows(LlamaContext, "decode_tree", lambda _, tokens, found: Forward(found.logits[::-1]))
OTHER_TOKENS = wrong_rows(
    LlamaContext, "decode", lambda _, tokens, found: rolled(found, 0) if len(tokens) > 8 else found
)

DEFECTS: dict[str, list[Patch]] = {
    # Kernels are chosen by width, so each that the check looks at is looked at for itself.
    "check_model": [*map(wrong_width, [1, 2, 3, 4, 5, 6, 7, 8, 40]), OTHER_TOKENS],
    "check_batch": [
        wrong_rows(LlamaSequences, "decode", swapped),
        wrong_pieces(lambda pieces: len(pieces) == 2),
        wrong_pieces(lambda pieces: any(len(piece.tokens) == 5 for piece in pieces)),
        wrong_pieces(lambda pieces: sum(len(piece.tokens) for piece in pieces) >= 32),
        a_prefix_too_short,
        tokens_taken_back_that_stay,
    ],
    "check_branches": [
        BRANCHES_SWAPPED,
        another_branch_is_kept,
        *(wrong_width(n, branching=True) for n in (1, 5, 33)),
    ],
    "check_restored": [other_tokens_are_restored],
}


@pytest.mark.parametrize(("check", "defect"), [(check, each) for check, found in DEFECTS.items() for each in found])
def test_defects_are_found(check: str, defect: Patch, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    defect(monkeypatch)
    assert getattr(trust, check)(model).mean_kl > (
        trust.MAX_MEAN_KL if check in ("check_model", "check_batch") else trust.MAX_KL
    )


def test_sound_engines_pass(fast_backend: Backend, tiny: TinyFiles) -> None:
    with fast_backend.load(tiny.bpe, n_threads=1) as model:
        assert trust.check_model(model).holds
        assert trust.check_batch(model).mean_kl < 0.03
        assert trust.check_branches(model).mean_kl < trust.MAX_KL / 3
        assert trust.check_restored(model).mean_kl < 1e-6
        assert trust.check_restored(model, "several").mean_kl < 1e-3


def test_checks_open_one_context_at_a_time_and_look_at_no_row_of_a_closed_one(
    reference: Backend, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds room for logits, of which a GPU that is nearly full has little."""
    decode, close = ReferenceContext.decode, ReferenceContext.close
    rows, opened = list[Any](), list[Any]()

    def noting(context: ReferenceContext, *given: Any) -> Forward:
        forward = decode(context, *given)
        rows.append(forward.logits)
        return forward

    def spoiling(context: ReferenceContext) -> None:
        for each in rows:
            each[:] = np.nan
        close(context)

    def alone(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*given: Any, **options: Any) -> Any:
            assert all(each.closed for each in opened)
            opened.append(make(*given, **options))
            return opened[-1]

        return made

    monkeypatch.setattr(ReferenceContext, "decode", noting)
    monkeypatch.setattr(ReferenceContext, "close", spoiling)
    with reference.load(tiny.quick.target) as model:
        for name in ("new_batch", "new_context"):
            monkeypatch.setattr(model, name, alone(getattr(model, name)))
        for check in (trust.check_model, trust.check_batch):
            assert check(model).mean_kl < 1e-6


def test_a_file_is_checked_once_and_an_engine_that_fails_is_asked_again(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object) -> trust.Agreement:
        raise EngineError("not enough memory")

    with monkeypatch.context() as patch:
        patch.setattr(trust, "check_branches", fails)
        assert trust.why_no_branches(model) == "not enough memory"
    said: list[str] = []
    for _ in range(2):
        trust.ensure_batches(model)
        assert trust.why_no_branches(model, say=said.append) is None
        assert trust.why_not_restored(model) is None
        for check in ("check_batch", "check_branches", "check_restored"):
            monkeypatch.setattr(trust, check, None)
    assert len(said) == 1


def test_a_verdict_against_it_stays(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        wrong_rows(LlamaSequences, "decode", swapped)(patch)
        BRANCHES_SWAPPED(patch)
        other_tokens_are_restored(patch)
        with pytest.raises(EngineMismatch, match=r"batched conversations of .* \(KL .*; answer one at a time"):
            trust.ensure_batches(model)
        found = [trust.why_no_branches(model), trust.why_not_restored(model)]
    with pytest.raises(EngineMismatch):
        trust.ensure_batches(model)
    assert found == [trust.why_no_branches(model), trust.why_not_restored(model)]
    assert "gives wrong results for branching drafts" in str(found[0])
    assert "does not go on from a saved memory" in str(found[1])


def test_where_all_is_computed_alike_no_check_is_needed(
    reference: Backend, tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "check_batch", None)
    monkeypatch.setattr(trust, "check_branches", None)
    with reference.load(tiny.quick.target) as model:
        trust.ensure_batches(model)
        assert trust.why_no_branches(model) is None
    with open_backend("llama-cpp").load(tiny.hybrid, n_threads=1) as model:
        trust.ensure_batches(model)
        assert "a state of all that was read" in str(trust.why_no_branches(model))


@pytest.mark.real
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "gemma3-270m"])
@pytest.mark.parametrize("engine", ["llama-cpp", "ik-llama"])
def test_real_models_are_right_side_by_side_and_branching(
    engine: str, name: str, real_model: Callable[[str], Path]
) -> None:
    with open_backend(engine).load(real_model(name)) as model:
        assert trust.check_batch(model).mean_kl < 0.1
        assert trust.check_branches(model).mean_kl < trust.MAX_KL


@pytest.mark.real
def test_flash_attention_of_ik_llama_is_found_out(
    real_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves out cells by what the last row alone sees; with heads as narrow as the tiny files' it does not."""
    options = IkLlamaBinding.set_context_options

    def with_flash_attention(self: Any, params: Any, n_sequences: int, branches: bool = False) -> None:
        options(self, params, n_sequences, branches)
        params.flash_attn = True

    monkeypatch.setattr(IkLlamaBinding, "set_context_options", with_flash_attention)
    with open_backend("ik-llama").load(real_model("qwen2.5-coder-0.5b")) as model:
        assert trust.check_branches(model).mean_kl > 10 * trust.MAX_KL


# What is done about a wrong one.


@pytest.mark.usefixtures("ik")
def test_a_file_that_ik_llama_computes_wrongly_is_repacked_once(
    tiny: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(repack, "near_exact_copy", lambda *args: None)
        with pytest.raises(EngineMismatch, match="gives wrong results"):
            backends.load(tiny.trap, "ik-llama")
    with ik_llama.load(tiny.trap) as wrong:
        assert not trust.check_model(wrong).holds
    said: list[str] = []
    warned: list[str] = []
    with backends.load(tiny.trap, "ik-llama", say=said.append, warn=warned.append) as model:
        assert model.path != tiny.trap
        assert trust.check_model(model).holds
        repacked = model.path
    assert any("repacking" in line for line in said)
    assert warned == []  # doctor says it
    assert repack.why_copied(tiny.trap, repacked) == "Q4_1"
    assert repack.why_copied(tiny.trap, tiny.trap) is None
    with GGUFFile(repacked) as copy, GGUFFile(tiny.trap) as original:
        assert copy.metadata[repack.MARK] == fingerprint(tiny.trap)
        assert set(copy.tensors) == set(original.tensors)
        for key, value in original.metadata.items():
            copied = copy.metadata[key]
            assert value == copied if isinstance(value, str | int | float) else list(value) == list(copied), key
        exhaust(repack.writing_copy(copy, tmp_path / "twice.gguf", {}, {repack.MARK: "second"}))
    with GGUFFile(tmp_path / "twice.gguf") as file:
        assert file.metadata[repack.MARK] == "second"
    stamp = repacked.stat().st_mtime_ns
    said.clear()
    with backends.load(tiny.trap, "ik-llama", say=said.append) as again:
        assert again.path == repacked
    assert repacked.stat().st_mtime_ns == stamp
    assert not any("checking" in line or "repacking" in line for line in said)


@pytest.mark.usefixtures("ik")
def test_auto_never_answers_with_wrong_kernels(tiny: TinyFiles) -> None:
    with backends.load(tiny.trap, "llama-cpp") as right, backends.load(tiny.trap, "ik-llama") as copy:
        assert right.path == tiny.trap, "the engine that is right is not blamed for the other"
        assert exhaust(trust.comparing_models(right, copy)).mean_kl < 0.01
    with LLM(tiny.trap, draft=None, n_ctx=256) as llm, backends.load(tiny.trap, "reference") as truth:
        text = "the quick brown fox jumps over the lazy dog " * 3
        reply = llm.generate(text, SamplingParams(max_tokens=1))
        with truth.new_context(256) as context:
            row = context.decode(truth.tokenize(text, add_special=True), "last").logits[0]
        assert row[reply.token_ids[0]] >= row.max() - 0.5


def test_the_verdict_is_remembered_by_engine_and_file(
    fast_backend: Any, tiny: TinyFiles, isolated_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[str] = []
    original = trust.check_model
    monkeypatch.setattr(trust, "check_model", lambda model: (checks.append(model.engine), original(model))[1])
    for _ in range(2):
        with backends.load(tiny.bpe, fast_backend.name) as model:
            engine = model.engine
    assert len(checks) == 1
    (stored,) = (json.loads(path.read_text()) for path in (isolated_home / "trust").iterdir())
    assert stored["value"]["holds"] is True
    assert stored["key"]["engine"] == curve_key(model, "f16")["engine"] == engine  # what is known is of one build
    # A damaged entry is a missing one.
    next((isolated_home / "trust").iterdir()).write_text("{")
    backends.load(tiny.bpe, fast_backend.name).close()
    assert len(checks) == 2


def test_builds_are_told_apart_by_any_of_their_libraries(tmp_path: Path) -> None:
    """And one for another CPU is known before it computes."""
    (tmp_path / "libllama.so").write_bytes(b"interface")
    (tmp_path / "libggml.so").write_bytes(bytes(1 << 20))
    (tmp_path / "readme").write_text("not a library")
    first = ggml_module.digest(tmp_path)
    (tmp_path / "readme").write_text("changed")
    assert ggml_module.digest(tmp_path) == first
    (tmp_path / "libggml.so").write_bytes(bytes(1 << 19) + b"k" * (1 << 19))
    assert ggml_module.digest(tmp_path) != first
    assert len(first) == 8
    assert ggml_module.foreign_features(["AVX2", "AVX-512", "AVX512-VNNI"], ["AVX2"]) == ["AVX-512", "AVX512-VNNI"]
    assert ggml_module.foreign_features(["AVX2", "AVX-512"], ["AVX2", "AVX-512"]) == []
    assert ggml_module.foreign_features(["AVX2", "AVX-512"], []) == []  # it is not told what this CPU has


def test_fingerprints_differ_where_files_do_and_stay(tiny: TinyFiles, tmp_path: Path) -> None:
    """Calibrations, verdicts and saved conversations are kept by them; of a model in parts they are of all."""
    data = bytearray(tiny.bpe.read_bytes())
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(data)
    assert fingerprint(copy) == fingerprint(tiny.bpe)
    data[-1] ^= 1
    copy.write_bytes(data)
    assert fingerprint(copy) != fingerprint(tiny.bpe)
    copy.write_bytes(bytes(range(256)) * 20)
    assert fingerprint(copy) == "b833fbe216957019a7d244b4edfa095c"
    (tmp_path / "other").mkdir()
    parts = ggufs.write_in_parts(tmp_path)
    others = ggufs.write_in_parts(tmp_path / "other", seed=5)
    assert parts[0].read_bytes() == others[0].read_bytes()
    prints = {fingerprint(each[0]) for each in (parts, others)}
    parts[1].unlink()
    assert len({*prints, fingerprint(parts[0])}) == 3


@pytest.mark.usefixtures("ik")
def test_copies_of_a_model_in_parts_are_one_file_each(tmp_path: Path) -> None:
    """The repacked copy of one that ik-llama computes wrongly, and the lighter copy of a draft."""
    shape = ggufs.Shape(n_embd=96, n_head=3, n_head_kv=1)
    parts = ggufs.write_in_parts(tmp_path, shape=shape, tensor_type="Q4_1", n_parts=3)
    for name in ("ik-llama", "llama-cpp", "reference"):
        with open_backend(name).load(parts[0]) as model, model.new_context(16) as context:
            assert model.size_bytes == sum(path.stat().st_size for path in parts)
            assert len(context.decode([1, 2, 3])) == 3
    with backends.load(parts[0], "ik-llama") as model, GGUFFile(parts[0]) as original, GGUFFile(model.path) as copy:
        assert model.path != parts[0]
        assert set(copy.tensors) == set(original.tensors)
        assert not [key for key in copy.metadata if key.startswith("split.")]
    parts = ggufs.write_in_parts(tmp_path, tensor_type="Q8_0")
    light = repack.lighter_copy(parts[0], fingerprint(parts[0]), lambda line: None)
    with backends.load(light, "ik-llama", check=False) as model:
        assert model.size_bytes < sum(path.stat().st_size for path in parts)


# Files that would end the process.

AUTO = """
import sys
if "alone" in sys.argv:
    sys.modules["llama_cpp"] = None  # as if it were not installed
from localspec import LLM, LocalspecError, SamplingParams
try:
    with LLM(sys.argv[1], draft=None, backend=sys.argv[2], n_threads=1, n_ctx=128) as llm:
        print(llm.backend_name, len(llm.generate([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True)).token_ids))
except LocalspecError as error:
    print(type(error).__name__, error)
"""


MANY = """
import sys
from pathlib import Path
from localspec.backends import load
from localspec.errors import EngineError
model, contexts = load(Path(sys.argv[1]), "ik-llama"), []
try:
    while True:
        contexts.append(model.new_context(8))
except EngineError as error:
    print(error)
contexts[0].decode([5])
for context in contexts:
    context.close()
with model.new_context(8) as context:
    print(len(contexts) > 8, context.decode([5]).logits.shape)
"""


@pytest.mark.usefixtures("ik")
def test_more_contexts_than_the_engine_can_hold_are_refused_in_one_line(tiny: TinyFiles) -> None:
    """It would end the process: there are 64 places in its library, whatever the memory."""
    refused, then = apart(MANY, tiny.bpe).splitlines()
    assert "ik-llama can hold no more models and contexts in one process" in refused
    assert then.startswith("True (1, ")


@pytest.mark.usefixtures("ik")
def test_no_engine_takes_the_process_with_it(tiny: TinyFiles) -> None:
    """ik-llama aborted it over a Mamba; alone it refuses it, and beside another it leaves it to that."""
    said = apart(AUTO, tiny.recurrent, "auto", "alone")
    assert said.startswith("UnsupportedModel tiny-recurrent.gguf: ik-llama 0.1.5 does not compute this 'mamba' model")
    assert "\n" not in said
    open_backend("llama-cpp")
    assert apart(AUTO, tiny.recurrent, "auto") == "llama-cpp 4"


@pytest.mark.usefixtures("ik")
def test_a_file_is_tried_once_and_only_if_it_is_of_an_unfamiliar_kind(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with several sequences only when they are asked for. What dies there is refused here; a child that was killed
    from outside, or cancelled, says nothing of the file."""
    tried: list[tuple[str, str]] = []
    run = trial.run_child

    def counted(code: str, arguments: Any, tick: Any) -> int:
        tried.append((Path(arguments[0]).name, arguments[-1]))
        return run(code, arguments, tick)

    with monkeypatch.context() as patch:
        patch.setattr(trial, "run_child", lambda *_: -int(signal.SIGTERM))
        with pytest.raises(UnsupportedModel):
            ik_llama.load(tiny.hybrid)
    with monkeypatch.context() as patch:
        patch.setattr(trial, "_POLL_S", 0.0)
        with pytest.raises(Cancelled):
            ik_llama.load(tiny.hybrid, progress=lambda fraction: False)
    monkeypatch.setattr(trial, "run_child", counted)
    for _ in range(2):
        ik_llama.load(tiny.bpe).close()
        ik_llama.load(tiny.hybrid).close()
        with pytest.raises(UnsupportedModel, match="does not compute this 'mamba' model"):
            ik_llama.load(tiny.recurrent)
        with ik_llama.load(tiny.sliding, n_threads=1) as model, model.new_batch(2, 64) as batch:
            batch.decode([Piece(0, [7, 8]), Piece(1, [7])])
    names = [(each.name, "one") for each in (tiny.hybrid, tiny.recurrent, tiny.sliding)]
    assert tried == [*names, (tiny.sliding.name, "several")]
    monkeypatch.setattr(trial, "fingerprint", lambda path: "another file")
    monkeypatch.setattr(trial, "run_child", lambda code, arguments, tick: -6 if arguments[-1] == "several" else 0)
    with ik_llama.load(tiny.sliding, n_threads=1) as model, pytest.raises(UnsupportedModel, match="several sequences"):
        model.new_batch(2, 64)


@pytest.mark.usefixtures("ik")
def test_what_no_engine_knows_is_one_clear_error(
    tiny: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab = ggufs.bpe_vocab()
    weights = {"token_embd.weight": np.zeros((len(vocab), 32), np.float32)}
    path = ggufs.write_gguf(tmp_path / "odd.gguf", "nonsense", vocab_metadata(vocab), weights)
    with pytest.raises(LocalspecError, match=r"odd\.gguf.*'nonsense'") as caught:
        backends.load(path)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(backends, "candidates", lambda n: ["reference", "mlx"])
    with pytest.raises(UnsupportedModel, match=r"^no engine here can run odd.gguf: .* computes 'llama' only; .*mlx"):
        backends.load(path)
    monkeypatch.setattr(backends, "candidates", lambda n: ["reference", "llama-cpp"])
    remarks: list[str] = []
    with backends.load(tiny.recurrent, warn=remarks.append) as model:
        assert model.backend == "llama-cpp"
    assert "'mamba'" in remarks[0]
    assert "trying llama-cpp" in remarks[0]


def test_heads_that_do_not_divide_into_the_blocks_of_a_quantised_cache(fast_backend: Backend, tmp_path: Path) -> None:
    path = ggufs.write_llama(tmp_path / "odd.gguf", ggufs.Shape(n_embd=96, n_head=4, n_head_kv=2))
    for kv_type in ("q8_0", "q4_0"):
        with pytest.raises(UsageError, match=f"--kv-cache {kv_type} needs .* multiples of 32; .* 24 wide"):
            fast_backend.load(path, kv_type=kv_type)
    with fast_backend.load(path) as model, model.new_context(16) as context:
        context.decode([1, 2, 3])
