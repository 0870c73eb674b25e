"""Heads at work: on every engine what NumPy makes of the formulas, with the target's own rows, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from localspec import backends
from localspec.backends import reference, repack
from localspec.errors import EngineMismatch, ModelFileError, UnsupportedModel, UsageError
from localspec.heads import assembly as assembly_module
from localspec.heads import sources as sources_module
from localspec.heads import trained as trained_module
from localspec.heads.assembly import engine_file
from localspec.heads.file import engine_folder, heads_folder, read_card, write_head
from localspec.heads.products import GgmlProducts, Products, products
from localspec.heads.sources import exit_head
from localspec.heads.trained import STATE, Head, heads_for, load_head, target_facts
from localspec.model_files.gguf import GGUFFile, fingerprint, tensor_rows
from localspec.model_files.vocab import Vocab
from localspec.system.steps import exhaust
from tests.conftest import REAL_MODELS, Backend, TinyFiles, open_backend
from tests.support import ggufs
from tests.support.heads import write_random_head

Floats = npt.NDArray[np.float64]

NOISE = {"mlx": 1e-4, "llama-cpp": 0.3, "ik-llama": 0.3}
"""Largest difference of a logit, whose standard deviation is 3, and of a state: the last two round rows to 8 bits,
those that a head's own matrices make among them, and keys and values to float16."""

OF_ROWS = {"mlx": 1e-4, "llama-cpp": 0.15, "ik-llama": 0.15}
"""The same of what a head's own matrices make, of a deviation of 1 to 2: beside the last two, in 8 bits."""


def tensors(path: Path) -> dict[str, Floats]:
    """All weights of a file by the ``gguf`` package's own reader, in float64."""
    read = gguf.GGUFReader(path).tensors
    return {each.name: np.float64(gguf.quants.dequantize(each.data, each.tensor_type)) for each in read}


def embedded(head: Path, target: Path, tokens: list[int]) -> Floats:
    """The shares of tokens in a head's rows, by the formula at the top of ``heads.trained``."""
    weights = tensors(head)
    return tensors(target)["token_embd.weight"][tokens] @ weights["head.embed.weight"].T + weights["head.embed.bias"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied, F32."""
    return ggufs.correlated_pair(tmp_path_factory.mktemp("target")).target


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a width that fills no blocks of quantised types: the matrices of its heads are halves."""
    shape = ggufs.Shape(n_embd=48, n_head=3, n_head_kv=1)
    return ggufs.write_llama(tmp_path_factory.mktemp("narrow") / "narrow.gguf", shape)


Open = Callable[..., Head]


def assemble(head: Path, target: Path, fingerprint: str = "0" * 32) -> Path:
    place = engine_file(head, target, fingerprint)
    assembly_module.assemble(place, head, target)
    return place


@pytest.fixture
def load(backend: Backend) -> Iterator[Open]:
    with ExitStack() as stack:
        yield lambda path, target: stack.enter_context(load_head(path, target, backend.name, n_threads=1))


def states(n: int, width: int = 128, seed: int = 1) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((n, width)).astype(np.float32)


@pytest.mark.parametrize(
    ("taps", "type_name", "width"),
    [
        (("norm",), "F32", 128),
        (("layer:0", "layer:2", "norm"), "F32", 128),
        (("norm",), "Q8_0", 128),
        (("norm",), "Q8_0", 48),
    ],
)
def test_a_chained_head_is_what_the_reference_backend_makes_of_it(
    load: Open,
    backend: Backend,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    taps: tuple[str, ...],
    type_name: str,
    width: int,
) -> None:
    """Which itself makes of it what the network does that is trained (``test_trainer.py``)."""
    if backend.name == "reference":
        pytest.skip("the other engines are compared with it")
    target = request.getfixturevalue("target" if width == 128 else "narrow")
    path = write_random_head(target, tmp_path / "head.gguf", taps=taps, n_out=100, type_name=type_name)
    tapped, tokens = states(6, width * len(taps)), [5, 80, 3, 3, 200, 41]

    def computed(head: Head) -> list[Any]:
        """Rows; logits and states of them one by one, together, and of one that is chained."""
        with head.new_context(32) as context:
            rows, logits, hidden = head.true_rows(context, tapped, tokens), list[Any](), list[Any]()
            for first, end in ((0, 1), (1, 6), (6, 7)):
                if first == 6:
                    rows = np.concatenate([rows, head.chained_rows(hidden[-1][-1:], [17])])
                forward = context.decode_floats(rows[first:end], [*tokens, 17][first:end])
                logits.append(forward.logits.copy())
                hidden.append(forward.hidden[STATE].copy())
        return [rows[:6], np.concatenate(logits), np.concatenate(hidden)]

    with load_head(path, target, "reference") as exact:
        wanted, noise = computed(exact), NOISE[backend.name]
    for found, expected, most in zip(
        computed(load(path, target)), wanted, (OF_ROWS[backend.name], noise, noise), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=most)


@pytest.mark.real
@pytest.mark.parametrize("name", sorted(REAL_MODELS))
def test_a_head_that_adds_nothing_says_what_a_real_model_says(
    real_model: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """It multiplies the target's own state by the target's own output rows; on several engines, for which its file is
    made once. MLX takes a minute for more than SmolLM2."""
    path = real_model(name)
    head_path = write_random_head(path, tmp_path / "head.gguf", n_out=256, steps=1)
    card = read_card(head_path)
    weights = {part: np.full(shape, "norm" in part, dtype=np.float32) for part, shape in card.shapes().items()}
    write_head(head_path, card, weights | {"head.fc.weight": np.eye(card.n_embd, dtype=np.float32)})
    for engine in ("llama-cpp", "ik-llama", "mlx") if name == "smollm2-135m" else ("llama-cpp", "ik-llama"):
        open_backend(engine)
        with (
            load_head(head_path, path, engine, n_threads=1) as head,
            backends.load(path, engine, n_threads=1) as model,
            model.new_context(32, hidden=("norm",)) as context,
            head.new_context(16) as own,
        ):
            forward = context.decode(list(range(5, 21)))
            wanted = forward.logits[:, head.token_map].copy()
            rows = head.true_rows(own, forward.hidden["norm"], [0] * len(wanted))
            found = own.decode_floats(rows, range(len(rows))).logits * np.sqrt(np.mean(rows**2, axis=1, keepdims=True))
        # Rounding the rows to 4 bits is most of what differs.
        assert np.corrcoef(found.ravel(), wanted.ravel())[0, 1] > 0.98


# What is put together.


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, vocab = tmp_path_factory.mktemp("targets"), ggufs.bpe_vocab(300)
    files = {"gemma3": ggufs.write_sliding_window(folder / "gemma3.gguf")}
    for type_name, tied in (("F32", True), ("F16", False), ("BF16", True), ("Q8_0", False), ("Q4_1", True)):
        path, shape = folder / f"{type_name}.gguf", ggufs.Shape(n_embd=64, tied=tied)
        files[f"{type_name}, tied: {tied}"] = ggufs.write_llama(path, shape, vocab, tensor_type=type_name)
    return files


def test_output_rows_and_embeddings_are_the_targets_and_matrices_the_heads(
    tmp_path: Path, targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localspec.heads.file._PIECE", 1000)  # several pieces
    for name, model in targets.items():
        type_name = "F32" if name.startswith("F") else "Q8_0"
        path = write_random_head(model, tmp_path / "head.gguf", n_out=100, type_name=type_name)
        place = assemble(path, model)
        made, raw, own = tensors(place), *({t.name: t for t in gguf.GGUFReader(each).tensors} for each in (place, path))
        for matrix in ("blk.0.attn_q.weight", "blk.0.ffn_down.weight"):
            assert raw[matrix].tensor_type.name == own[matrix].tensor_type.name == type_name
            assert raw[matrix].data.tobytes() == own[matrix].data.tobytes()
        theirs, number = tensors(model), gguf.GGMLQuantizationType.Q4_0
        rows = np.float32(theirs.get("output.weight", theirs["token_embd.weight"])[read_card(path).token_map])
        wanted = gguf.quants.dequantize(gguf.quants.quantize(rows, number), number)
        np.testing.assert_array_equal(made["token_embd.weight"], wanted, err_msg=name)
        with load_head(path, model, "reference") as head:
            for tokens in ([7, 7, 299], [0], []):
                wanted = embedded(path, model, tokens)
                np.testing.assert_allclose(head.embed(tokens), wanted, rtol=1e-4, atol=1e-5, err_msg=name)


def test_it_is_made_once_and_again_when_it_is_gone(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A break leaves nothing behind, and only the last ones made are kept."""

    def broken_off(*given: Any) -> Any:
        raise KeyboardInterrupt

    path = write_random_head(target, tmp_path / "head.gguf", n_out=50)
    with monkeypatch.context() as patch:
        patch.setattr(assembly_module, "as_type", broken_off)
        with pytest.raises(KeyboardInterrupt):
            assemble(path, target)
    assert list(engine_folder().iterdir()) == []
    place = assemble(path, target, "a" * 32)
    before, inode = place.read_bytes(), place.stat().st_ino
    assert assemble(path, target, "a" * 32).stat().st_ino == inode
    place.unlink()
    monkeypatch.setattr(assembly_module, "_MOST_KEPT", 2)
    places = [assemble(path, target, name * 32) for name in "bca"]
    assert [each.exists() for each in places] == [False, True, True]
    assert place.read_bytes() == before
    write_random_head(target, path, n_out=50, seed=1)
    assert len({*places, engine_file(path, target, "a" * 32)}) == 4


def test_embeddings_are_right_however_few_are_kept(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_random_head(target, tmp_path / "head.gguf")
    with load_head(path, target, "reference") as head:
        plain = head.embed(range(50))
    monkeypatch.setattr(trained_module, "_CACHED_BYTES", 5 * 4 * 128)
    with load_head(path, target, "reference") as head:
        for tokens in ([3, 1, 3, 9, 30, 2, 1, 40, 3], range(50)):
            np.testing.assert_allclose(head.embed(tokens), plain[list(tokens)], rtol=1e-4, atol=1e-6)
        for tokens in ([-1], [head.card.target.n_vocab]):
            with pytest.raises(UsageError, match=r"token ids must lie in 0\.\."):
                head.embed(tokens)


# The target's own last norm and output rows, behind some of its layers.


def test_what_leaves_early_meets_the_targets_own_norm_and_output_matrix(tiny: TinyFiles) -> None:
    """So a state that goes all the way gives the target's own logits, as exactly as output rows of 4 bits can."""
    target = tiny.pair.target
    facts = target_facts(target)
    head_file = exit_head(target, facts, 2)
    written = head_file.stat().st_mtime_ns
    assert exit_head(target, facts, 1) != exit_head(target, facts, 2) == head_file
    assert head_file.stat().st_mtime_ns == written
    with GGUFFile(target) as file, GGUFFile(head_file) as made:
        name = "output_norm.weight"
        assert np.array_equal(tensor_rows(made, name, [0]), tensor_rows(file, name, [0]))
    with load_head(head_file, target, "reference") as head, reference.load(target) as model:
        assert (head.kind, head.taps) == ("exit", ("layer:1",))
        last = f"layer:{model.n_layers - 1}"
        forward = model.new_context(32, hidden=(last,)).decode([5, 6, 7, 80])
        found = head.new_context(32).decode_floats(forward.hidden[last], range(4)).logits
        expected = forward.logits[:, head.token_map]
        assert np.sqrt(np.mean((found - expected) ** 2)) < 0.12 * expected.std()


def test_it_can_guess_the_first_tokens_and_those_that_end_an_answer(
    tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources_module, "N_OUT", 50)
    target = tiny.pair.target
    with GGUFFile(target) as file:
        ends = Vocab.from_gguf(file).eog
    card = read_card(exit_head(target, target_facts(target), 1))
    assert card.token_map.tolist() == sorted({*range(50), *ends})


def test_a_norm_that_heads_do_not_have(tmp_path: Path) -> None:
    shape = ggufs.Shape(n_layer=2)
    weights = ggufs.llama_weights(shape, len(ggufs.spm_vocab()))
    weights["output_norm.bias"] = np.zeros(shape.n_embd, np.float32)
    target = ggufs.write_llama(tmp_path / "layer-norm.gguf", shape, weights=weights)
    with pytest.raises(UnsupportedModel, match=r"layer-norm\.gguf cannot be left early: its last norm"):
        exit_head(target, target_facts(target), 1)


# Which head for which target.


def test_a_head_for_another_model_is_refused_and_for_a_similar_one_remarked_on(
    tiny: TinyFiles, target: Path, tmp_path: Path
) -> None:
    path = write_random_head(target, tmp_path / "head.gguf")
    with pytest.raises(UsageError, match=r"head\.gguf does not fit: it is for tiny llama"):
        load_head(path, tiny.quick.target, "reference")
    similar = ggufs.correlated_pair(tmp_path, seed=9).target
    remarks: list[str] = []
    with load_head(path, similar, "reference", warn=remarks.append) as head:
        np.testing.assert_allclose(head.embed([7]), embedded(path, similar, [7]), rtol=1e-4, atol=1e-5)
    assert len(remarks) == 1
    assert "another file" in remarks[0]
    copy = tmp_path / "copy.gguf"  # repacked, and still that target
    with GGUFFile(target) as file:
        exhaust(repack.writing_copy(file, copy, {"output.weight": "Q8_0"}, {repack.MARK: fingerprint(target)}))
    load_head(path, copy, "reference", warn=remarks.append).close()
    assert len(remarks) == 1


def test_heads_are_found_exact_ones_first_and_damaged_ones_left_out(
    tiny: TinyFiles, target: Path, tmp_path: Path
) -> None:
    assert heads_for(target) == []
    heads_folder().mkdir(parents=True)
    similar = ggufs.correlated_pair(tmp_path, seed=9).target
    exact = write_random_head(target, heads_folder() / "z.gguf")
    other = write_random_head(similar, heads_folder() / "a.gguf")
    write_random_head(tiny.quick.target, heads_folder() / "b.gguf")
    (heads_folder() / "damaged.gguf").write_bytes(exact.read_bytes()[:5000])
    assemble(exact, target, "a" * 32)  # what is made for engines is no head file
    assert heads_for(target) == [exact, other]
    assert heads_for(similar) == [other, exact]


def test_a_target_is_read_once_until_it_is_another(
    tiny: TinyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    monkeypatch.setattr(trained_module, "fingerprint", lambda path: read.append(path) or fingerprint(path))
    path = tmp_path / "model.gguf"
    with pytest.raises(ModelFileError):
        target_facts(path)
    path.write_bytes(tiny.pair.target.read_bytes())
    write_random_head(path, tmp_path / "head.gguf")
    first = target_facts(path)
    load_head(tmp_path / "head.gguf", path, "reference").close()
    assert (heads_for(path), read) == ([], [path])
    path.write_bytes(tiny.quick.target.read_bytes())
    assert target_facts(path).fingerprint == fingerprint(path) != first.fingerprint
    assert len(read) == 2


def test_nobody_chats_with_a_head(target: Path, tmp_path: Path) -> None:
    path = write_random_head(target, tmp_path / "head.gguf")
    with (
        load_head(path, target, "reference") as head,
        pytest.raises(UsageError, match="is a draft head and cannot tokenize text"),
    ):
        head.model.tokenize("text")
    with pytest.raises(UnsupportedModel, match="a head that drafts for another model"):
        backends.load(path, "reference")
    with pytest.raises(UnsupportedModel, match="has no vocabulary"):
        backends.load(assemble(path, target, "a" * 32), "reference")


def test_a_head_of_numbers_that_are_none_is_refused(target: Path, tmp_path: Path) -> None:
    path = write_random_head(target, tmp_path / "head.gguf", type_name="F32")
    data = bytearray(path.read_bytes())
    fc = next(each for each in gguf.GGUFReader(path).tensors if each.name == "head.fc.weight")
    data[fc.data_offset : fc.data_offset + 4] = np.float32(np.nan).tobytes()
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=r"head\.fc\.weight holds numbers that are not finite"):
        load_head(path, target, "reference")


def test_an_engine_that_is_wrong_about_a_head_does_not_load_it(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_backend("llama-cpp")
    path, said = write_random_head(target, tmp_path / "head.gguf"), list[str]()
    monkeypatch.setattr(trained_module, "_disagreement", lambda head: 1.0)
    closed, close = list[Head](), Head.close
    monkeypatch.setattr(Head, "close", lambda head: (closed.append(head), close(head)))
    for _ in range(2):
        with pytest.raises(EngineMismatch, match=r"head\.gguf row by row and in one pass: KL 1 nats"):
            load_head(path, target, "llama-cpp", n_threads=1, say=said.append)
    assert sum("checking" in line for line in said) == 1  # what was found is known
    assert len(closed) == 2  # with its matrices in ggml's memory, and the target's file


def test_where_ggml_is_wrong_or_not_to_be_had_numpy_multiplies(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(context: Any, weights: Any, rows: Any) -> Any:
        return original(context, weights, rows * 0.5)

    with open_backend("reference").load(target) as model:
        assert type(products(model, [states(32, 64)])) is Products
    for engine in ("llama-cpp", "ik-llama"):
        with open_backend(engine).load(target) as model:
            assert isinstance(products(model, [states(32, 64), states(64, 32)]), GgmlProducts)
    with open_backend("ik-llama").load(target) as model:
        assert type(products(model, [states(32, 33)])) is Products  # no whole blocks
        original = GgmlProducts.__call__
        with monkeypatch.context() as patch:
            patch.setattr(GgmlProducts, "__call__", swapped)
            assert type(products(model, [states(32, 64)])) is Products
        monkeypatch.setattr(model.binding.tensors, "library", object())
        assert type(products(model, [states(32, 64)])) is Products
