"""GGUF headers: read right, quickly bounded, and never trusted."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from localspec.errors import ModelFileError, NotGGUF, UnsupportedModel
from localspec.model_files.catalog import part_names
from localspec.model_files.gguf import TENSOR_TYPES, GGUFFile, model_bytes, model_files
from tests.conftest import TinyFiles
from tests.support import ggufs


@pytest.mark.parametrize("name", ["spm", "bpe", "sliding", "recurrent", "micro"])
def test_reads_what_the_reference_reader_reads(tiny: TinyFiles, name: str) -> None:
    path = getattr(tiny, name)
    theirs = gguf.GGUFReader(path)
    with GGUFFile(path) as ours:
        assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
        for tensor in theirs.tensors:
            info = ours.tensors[tensor.name]
            assert info.shape == tuple(tensor.shape)
            assert info.type_name == tensor.tensor_type.name
            assert (info.offset, info.n_bytes) == (tensor.data_offset, tensor.n_bytes)
            data = ours.tensor_bytes(tensor.name)
            assert np.array_equal(data, tensor.data.reshape(-1).view(np.uint8))
        for key, value in ours.metadata.items():
            expected = theirs.fields[key].contents()
            assert list(value) == expected if isinstance(expected, list) else value == expected
        assert {key for key in theirs.fields if not key.startswith("GGUF.")} == set(ours.metadata)
        ours.check_generates_text()
    ours.close()  # a second time
    assert data.sum() > 0  # a view keeps the map alive
    with pytest.raises(ModelFileError, match="closed"):
        ours.tensor_bytes(theirs.tensors[0].name)


def test_the_table_of_tensor_types_agrees_with_the_gguf_package() -> None:
    for kind, (block, n_bytes) in gguf.constants.GGML_QUANT_SIZES.items():
        if kind.name != "Q8_1":  # the package counts two floats where ggml has two halves; no file holds this type
            assert TENSOR_TYPES[int(kind)] == (kind.name, block, n_bytes)


def header(n_tensors: int = 0, n_keys: int = 0, version: int = 3, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys) + rest


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


HUGE = 1 << 60


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"GGUF", "cut short"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(64), "big-endian"),
        (header(version=1, rest=bytes(64)), "version 1"),
        (header(n_keys=HUGE, rest=bytes(64)), "claims"),
        (header(n_tensors=HUGE, rest=bytes(64)), "claims"),
        (header(n_keys=1, rest=struct.pack("<Q", HUGE) + bytes(64)), "beyond its end"),
        (header(n_keys=1, rest=key("a", 9, struct.pack("<IQ", 8, HUGE)) + bytes(64)), "list of"),
        (header(n_keys=1, rest=key("a", 9, struct.pack("<IQ", 4, HUGE)) + bytes(64)), "list of"),
        (header(n_keys=1, rest=key("a", 9, struct.pack("<IQQ", 8, 1, 100)) + bytes(16)), "beyond its end"),
        (header(n_keys=1, rest=key("a", 9, struct.pack("<IQQ", 8, 1, 2**64 - 1)) + bytes(16)), "beyond its end"),
        (header(n_keys=1, rest=key("a", 9, struct.pack("<IQ", 9, 1)) + bytes(64)), "unknown type"),
        (header(n_keys=1, rest=key("a", 77, bytes(64))), "unknown type"),
        (header(n_keys=2, rest=key("a", 4, bytes(4)) * 2), "occurs twice"),
        (header(n_keys=1, rest=key("general.alignment", 4, bytes(4))), "alignment"),
        (header(n_keys=1, rest=key("general.alignment", 8, struct.pack("<Q", 1) + b"x")), "damaged"),
        (header(n_keys=1, rest=key("general.alignment", 5, bytes([32, 0, 0, 0]))), "alignment is not a 32-bit number"),
    ],
)
def test_what_is_not_a_model_is_refused_in_one_line(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(NotGGUF, match=words) as caught:
        GGUFFile(path)
    assert "\n" not in str(caught.value)
    assert "bad.gguf" in str(caught.value)


def test_a_cut_file_is_refused_wherever_it_is_cut(tiny: TinyFiles, tmp_path: Path) -> None:
    whole = tiny.micro.read_bytes()
    with GGUFFile(tiny.micro) as file:
        data_ends = max(tensor.offset + tensor.n_bytes for tensor in file.tensors.values())
    path = tmp_path / "cut.gguf"
    for size in (*range(0, data_ends, 101), data_ends - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(NotGGUF):
            GGUFFile(path)
    path.write_bytes(whole[: data_ends - 123])
    with pytest.raises(NotGGUF, match=rf"123 of {data_ends:,} bytes are missing"):
        GGUFFile(path)
    with pytest.raises(ModelFileError, match="directory"):
        GGUFFile(tmp_path)
    unknown, at = bytearray(whole[:data_ends]), whole.index(b"output_norm.weight") + len("output_norm.weight")
    struct.pack_into("<I", unknown, at + 4 + 8 * struct.unpack_from("<I", unknown, at)[0], 139)
    path.write_bytes(unknown)  # a type of some fork is shown and not refused
    with GGUFFile(path) as file:
        assert file.tensors["output_norm.weight"].type_name == "type 139"
        assert file.tensors["output_norm.weight"].n_bytes > 0


def write(path: Path, architecture: str, metadata: dict[str, object]) -> Path:
    weights = {"token_embd.weight": np.zeros((8, 32), dtype=np.float32)}
    vocab = ggufs.vocab_metadata(ggufs.micro_vocab())
    return ggufs.write_gguf(path, architecture, {**vocab, **metadata}, weights)


@pytest.mark.parametrize(
    ("architecture", "metadata", "words"),
    [
        ("nomic-bert", {}, "embedding model"),
        ("qwen3", {"qwen3.pooling_type": 3}, "embedding model"),
        ("gemma3", {"gemma3.attention.causal": False}, "embedding model"),
        ("t5encoder", {}, "encoder"),
        ("clip", {}, "image projector"),
        ("whisper", {}, "speech"),
        ("llama", {"general.type": "adapter"}, "LoRA"),
        ("llama", {"split.no": 1, "split.count": 3}, "part 2 of 3"),
        ("tokenizer_only", {}, "no weights"),
        ("embedding", {}, "embedding model"),
    ],
)
def test_models_that_cannot_continue_text_are_told_apart(
    tiny: TinyFiles, tmp_path: Path, architecture: str, metadata: dict[str, object], words: str
) -> None:
    path = getattr(tiny, architecture, None) or write(tmp_path / "m.gguf", architecture, metadata)
    with GGUFFile(path) as file, pytest.raises(UnsupportedModel, match=words):
        file.check_generates_text()


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    """A model in three parts."""
    return ggufs.write_in_parts(tmp_path, n_parts=3)


def test_a_model_in_parts_is_one_model(split: list[Path]) -> None:
    weights = ggufs.llama_weights(ggufs.Shape(), 384)
    with GGUFFile(split[0]) as file:
        file.check_generates_text()
        assert file.n_bytes == sum(path.stat().st_size for path in split)
        assert set(file.tensors) == set(weights)
        assert file.n_params == sum(weight.size for weight in weights.values())
        for name, weight in weights.items():
            assert np.array_equal(file.tensor_bytes(name).view(np.float32), weight.reshape(-1))


def test_a_missing_or_cut_part_is_named(split: list[Path]) -> None:
    assert part_names(split[0].name) == tuple(path.name for path in split)
    for alone in ("m.gguf", split[1].name, "m-00001-of-00001.gguf", "m-00001-of-00000.gguf"):
        assert part_names(alone) == (alone,)
    assert model_bytes(split[0]) == sum(path.stat().st_size for path in split)
    data = split[2].read_bytes()
    split[2].write_bytes(data[:-8])
    with pytest.raises(NotGGUF, match=split[2].name):
        GGUFFile(split[0])
    split[2].unlink()
    assert model_files(split[0]) == tuple(split[:2])
    with pytest.raises(ModelFileError, match=r"part 3 of 3 is missing"):
        GGUFFile(split[0])
    with GGUFFile(split[1]) as file, pytest.raises(UnsupportedModel, match="give the first part"):
        file.check_generates_text()


@pytest.mark.parametrize("n_parts", [2, 4])
def test_a_part_under_a_wrong_name_is_refused(tmp_path: Path, n_parts: int) -> None:
    """The first in the place of a later one, above all: it must not be asked for parts of its own, again and again."""
    parts = ggufs.write_in_parts(tmp_path, n_parts=n_parts)
    for wrong in {parts[0], parts[-2]}:
        kept = parts[-1].read_bytes()
        parts[-1].write_bytes(wrong.read_bytes())
        with pytest.raises(ModelFileError, match=f"{parts[-1].name} is not part {n_parts} of {n_parts}"):
            GGUFFile(parts[0])
        parts[-1].write_bytes(kept)
    GGUFFile(parts[0]).close()


def test_parts_that_do_not_make_one_model_are_refused(tmp_path: Path) -> None:
    tensor = {"a": np.zeros((2, 32), np.float32)}
    split = {"split.count": np.uint16(2), "split.no": np.uint16(0)}
    second = {"split.count": np.uint16(2), "split.no": np.uint16(1)}
    names = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    ggufs.write_gguf(names[0], "llama", split, tensor)
    ggufs.write_gguf(names[1], "llama", second, tensor)
    with pytest.raises(ModelFileError, match="'a', which an earlier part holds too"):
        GGUFFile(names[0])
    ggufs.write_gguf(names[0], "llama", split | {"split.tensors.count": np.int32(3)}, {"b": tensor["a"]})
    with pytest.raises(ModelFileError, match="hold 2 tensors instead of 3"):
        GGUFFile(names[0])
