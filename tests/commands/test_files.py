"""The commands on model files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from localspec.commands import files
from localspec.commands.cli import parse
from localspec.commands.files import inspect_command, list_command, pull_command, rm_command
from localspec.errors import DownloadError, ModelFileError, NotGGUF, UnknownModel
from localspec.heads.card import CurvePoint, Training
from localspec.heads.file import engine_folder, heads_folder
from localspec.heads.listing import inspect
from localspec.model_files.catalog import Catalog, Entry, part_names
from localspec.model_files.gguf import GGUFFile
from localspec.model_files.kv_memory import kv_shape
from localspec.model_files.sources import parts_folder
from localspec.system.files import home, models_dir
from localspec.system.machine import SystemMemory
from tests.conftest import TinyFiles
from tests.model_files.test_catalog import put
from tests.support import ggufs
from tests.support.heads import write_random_head
from tests.support.standin import Server

CATALOG = Catalog.load()
SMOL = CATALOG["smollm2-135m"]
Out = pytest.CaptureFixture[str]


# -- list -------------------------------------------------------------------------------------------------------------


def test_list_as_json(capsys: Out) -> None:
    put(SMOL)
    other = models_dir() / "hf/acme/tiny/tiny.gguf"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"12345")
    assert list_command(as_json=True) == 0
    models = {model["name"]: model for model in json.loads(capsys.readouterr().out)["models"]}
    assert list(models) == [*CATALOG, "hf:acme/tiny/tiny.gguf"]
    smol = models["smollm2-135m"]
    assert (smol["path"], smol["bytes"], smol["present"]) == (str(SMOL.path), SMOL.bytes, True)
    assert models["gemma3-270m"]["present"] is False
    assert models["qwen2.5-coder-1.5b"]["draft"] == ["qwen2.5-coder-0.5b"]
    assert models["hf:acme/tiny/tiny.gguf"] | {"path": "", "note": ""} == {
        "name": "hf:acme/tiny/tiny.gguf", "path": "", "bytes": 5, "present": True, "checked": False,
        "bytes_exact": True, "sha256": None,
        "license": "unknown", "draft": [], "heads": [], "sources": ["hf"], "note": "",
    }  # fmt: skip


def on_memory(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    monkeypatch.setattr(files, "read_memory", lambda: SystemMemory(n_bytes, n_bytes))


def listed(capsys: Out, **options: bool) -> dict[str, str]:
    """The lines by their first word."""
    assert list_command(**options) == 0
    return {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}


def test_list_shows_what_is_here_alone(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    on_memory(monkeypatch, 8 << 30)
    assert list_command() == 0
    assert "no model is here yet: localspec pull" in capsys.readouterr().out
    put(SMOL)
    other = models_dir() / "hf/acme/tiny/tiny.gguf"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"12345")
    lines = listed(capsys)
    assert {*CATALOG, "hf:acme/tiny/tiny.gguf"} & set(lines) == {"smollm2-135m", "hf:acme/tiny/tiny.gguf"}
    assert "98.4 MB" in lines["smollm2-135m"]
    assert " fits " in lines["smollm2-135m"]
    assert f"{len(CATALOG) - 1} more can be fetched: localspec list --all" in "\n".join(lines.values())


def test_list_of_everything(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    on_memory(monkeypatch, 4 << 30)
    put(SMOL)
    lines = listed(capsys, everything=True)
    assert set(CATALOG) <= set(lines)
    assert "~4.68 GB" in lines["qwen2.5-coder-7b"]
    at = lines["NAME"].index("HERE")
    assert {name for name in CATALOG if lines[name][at : at + 3] == "yes"} == {"smollm2-135m"}
    at = lines["NAME"].index("FITS")
    assert lines["qwen2.5-coder-7b"][at:].startswith("too big")
    assert lines["qwen2.5-coder-1.5b"][at:].startswith("fits")
    order = list(lines)
    for entry in CATALOG.values():
        for head in entry.heads[:1]:
            assert lines[head].startswith("  ")
            models = [name for name in order[: order.index(head)] if not lines[name].startswith("  ")]
            assert head in CATALOG[models[-1]].heads


@pytest.mark.parametrize("everything", [False, True])
def test_list_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: Out, everything: bool) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for entry in CATALOG.values():
        if entry.sha256:
            put(entry)
    assert list_command(everything=everything) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("folder:")) <= 80


# -- rm ---------------------------------------------------------------------------------------------------------------


def test_rm_removes_the_model_its_pieces_and_its_repacked_copies(capsys: Out) -> None:
    path = put(SMOL)
    piece = parts_folder(SMOL) / "wheels" / "part.whl"
    piece.parent.mkdir(parents=True)
    piece.write_bytes(b"x" * 1000)
    copy = home() / "repacked" / f"{path.stem}.0123456789ab.q8_0.gguf"
    copy.parent.mkdir()
    copy.write_bytes(b"x")
    unrelated = put(CATALOG["gemma3-270m"])
    assert rm_command(["smollm2-135m"]) == 0
    assert "removed smollm2-135m (98.4 MB)" in capsys.readouterr().out
    assert not path.exists()
    assert not piece.exists()
    assert not copy.exists()
    assert unrelated.exists()
    with pytest.raises(ModelFileError, match="not on this disk"):
        rm_command(["smollm2-135m"])


def test_rm_checks_all_names_first() -> None:
    path = put(SMOL)
    with pytest.raises(UnknownModel):
        rm_command(["smollm2-135m", "xyzzy"])
    assert path.exists()


def test_rm_leaves_a_model_alone_that_is_being_fetched() -> None:
    folder = parts_folder(SMOL)
    folder.mkdir(parents=True)
    with FileLock(folder.with_name(folder.name + ".lock")), pytest.raises(ModelFileError, match="another process"):
        rm_command(["smollm2-135m"])


# -- pull -------------------------------------------------------------------------------------------------------------


def test_pull_prints_the_path_and_names_the_draft(capsys: Out) -> None:
    target = CATALOG["qwen2.5-coder-1.5b"]
    put(target)
    assert pull_command(["qwen2.5-coder-1.5b"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{target.path}\n"
    assert "localspec pull qwen2.5-coder-0.5b (491 MB)" in err
    put(CATALOG["qwen2.5-coder-0.5b"])
    pull_command(["qwen2.5-coder-1.5b"])
    assert capsys.readouterr().err == ""


def test_pull_finds_a_model_by_a_part_of_its_name(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    put(SMOL)
    assert pull_command(["LM2-135"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{SMOL.path}\n"
    assert "LM2-135 is smollm2-135m (98.4 MB)" in err
    with pytest.raises(UnknownModel, match=r"'coder' in their names: qwen2\.5-coder-1\.5b, qwen2\.5-coder-0\.5b, "):
        pull_command(["coder"])
    assert Catalog.load().find("qwen2.5-coder-1.5b").name == "qwen2.5-coder-1.5b"  # though a part of others, perhaps
    for odd in ("", "xyzzy", "/"):
        with pytest.raises(UnknownModel):
            pull_command([odd])


def test_pull_checks_all_names_first() -> None:
    with pytest.raises(UnknownModel, match="did you mean smollm2-135m"):
        pull_command(["gemma3-270m", "smolm2-135m"])


def test_pull_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    def interrupted(entry: Entry, **options: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("localspec.model_files.sources.pull", interrupted)
    assert pull_command(["smollm2-135m"]) == 130
    err = capsys.readouterr().err
    assert "localspec pull smollm2-135m goes on from there" in err
    assert err.count("\n") == 1


def test_progress_without_a_terminal_is_a_line_every_tenth(capsys: Out) -> None:
    with files._PullProgress() as report:
        report.watch("asking", 0, 0)
        for done in range(0, 1001, 5):
            report.watch("downloading x", done * 1000, 1_000_000)
        report.say("a remark")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "asking"
    assert lines[-1] == "a remark"
    assert [line.split(",")[0] for line in lines[1:-1]] == [f"downloading x: {i} %" for i in range(0, 101, 10)]


class Clock:
    """A time that a test moves [s]."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_progress_of_a_slow_download_is_a_line_a_minute_with_the_speed_of_late(capsys: Out) -> None:
    clock = Clock()
    with files._PullProgress(clock) as report:
        for second in range(3601):
            clock.now = float(second)
            # 100 kB/s in the first half hour, a tenth of that afterwards.
            done = 100_000 * min(second, 1800) + 10_000 * max(0, second - 1800)
            report.watch("downloading x", done, 1_000_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 61
    assert lines[1] == "downloading x: 0 %, 6 MB of 1 GB, 100 kB/s, 2 h 46 min left"
    assert lines[-1] == "downloading x: 19 %, 198 MB of 1 GB, 10 kB/s, 22 h 17 min left"


def test_progress_on_a_narrow_terminal_keeps_the_figures(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    clock = Clock()
    with files._PullProgress(clock) as report:
        for second in (0, 10):
            clock.now = float(second)
            report._next = 0.0  # every update is shown
            report.watch("downloading qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", second * 1_000_000, 20_000_000)
    line = capsys.readouterr().err.split("\r\x1b[K")[-2]
    assert line == "downloading qwen2.…: 10 MB of 20 MB, 1 MB/s, 10 s left 50%"
    assert len(line) < 60


def test_progress_on_a_terminal_is_a_line_that_goes_away(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with files._PullProgress() as report:
        report.watch("downloading x", 500_000, 1_000_000)
        report.say("a remark [not markup]")
        report.watch("putting x together", 0, 0)
    lines = capsys.readouterr().err.split("\r\x1b[K")
    assert lines[1:] == ["downloading x: 500 kB of 1 MB 50%", "a remark [not markup]\n", "putting x together", ""]


# -- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect(tiny: TinyFiles, capsys: Out) -> None:
    assert inspect_command(str(tiny.bpe)) == 0
    out = capsys.readouterr().out
    for words in ("tiny llama (llama)", "Q8_0", "384 tokens (gpt2, gpt-2)", "2,048 tokens", "ChatML", "<|im_end|>"):
        assert words in out
    assert inspect_command(str(tiny.bpe), as_json=True) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["architecture"] == "llama"
    assert facts["bytes"] == tiny.bpe.stat().st_size
    assert facts["cannot_generate_text"] is None
    assert facts["vocabulary"]["n_tokens"] == 384
    assert facts["chat_template"]["format"] == "ChatML"
    assert set(facts["bytes_by_tensor_type"]) == {"F32", "Q8_0"}
    # 2 layers, 2 heads for keys and values of 32 each, 2 bytes
    assert facts["memory"]["kv_bytes_per_token"] == 2 * 2 * (32 + 32) * 2
    assert facts["memory"]["contexts"] == [
        {"n_ctx": 2048, "kv_bytes": 2048 * 512, "kv_bytes_window_only": 2048 * 512,
         "total_bytes": 2048 * 512 + facts["bytes"]}
    ]  # fmt: skip


def test_inspect_by_name_and_what_cannot_be_inspected(tmp_path: Path, tiny: TinyFiles) -> None:
    with pytest.raises(ModelFileError, match="localspec pull"):
        inspect_command("smollm2-135m")
    with pytest.raises(UnknownModel):
        inspect_command(str(tmp_path / "none.gguf"))
    put(SMOL)  # zeros
    with pytest.raises(NotGGUF):
        inspect_command("smollm2-135m")


def test_inspect_tells_why_a_file_cannot_generate(tiny: TinyFiles, capsys: Out) -> None:
    assert inspect_command(str(tiny.embedding)) == 0
    assert "embedding model" in capsys.readouterr().out
    assert inspect_command(str(tiny.tokenizer_only)) == 0
    assert "no weights" in capsys.readouterr().out


def test_what_a_file_says_cannot_steer_the_terminal(tmp_path: Path, capsys: Out) -> None:
    path = ggufs.write_llama(tmp_path / "evil.gguf", extra={"general.license": "\x1b[2J\x07\nfree"})
    inspect_command(str(path))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x07" not in out


def kv(path: Path) -> tuple[int, int, int]:
    with GGUFFile(path) as file:
        shape = kv_shape(file)
    return shape.bytes(1000), shape.bytes(1000, only_window=True), sum(shape.windowed)


def test_cache_memory_of_windows_and_states(tiny: TinyFiles) -> None:
    full, windowed, n_windowed = kv(tiny.sliding)
    with GGUFFile(tiny.sliding) as file:
        n_layer = file.field("block_count")
        per_layer = file.field("attention.head_count_kv") * 2 * file.field("attention.key_length") * 2
    assert full == n_layer * per_layer * 1000
    assert n_windowed > 0
    assert windowed == per_layer * ((n_layer - n_windowed) * 1000 + n_windowed * (32 + 256))
    with GGUFFile(tiny.recurrent) as file:
        shape = kv_shape(file)
    assert shape.recurrent
    assert shape.bytes(1000) == 0


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "per_token", "windowed"),
    [("smollm2-135m", 30 * 3 * 64 * 2 * 2, 0), ("qwen2.5-coder-1.5b", 28 * 2 * 128 * 2 * 2, 0),
     ("gemma3-270m", 18 * 1 * 256 * 2 * 2, 15)],
)  # fmt: skip
def test_cache_memory_of_real_models(
    real_model: Callable[[str], Path], name: str, per_token: int, windowed: int
) -> None:
    facts = inspect(real_model(name))
    assert facts["memory"]["kv_bytes_per_token"] == per_token
    assert facts["memory"]["windowed_layers"] == windowed
    assert facts["cannot_generate_text"] is None


def test_nothing_heavy_is_imported() -> None:
    """The command line imports this module before it knows what is asked."""
    heavy = ("numpy", "rich", "huggingface_hub", "gguf")
    modules = "localspec.commands.files, localspec.commands.cli"
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- heads ------------------------------------------------------------------------------------------------------------


TRAINING = Training(
    command="localspec distill smollm2-135m --minutes 3",
    seed=7,
    data_tokens=6300,
    tokens_seen=20_000,
    minutes=3.5,
    machine="a CPU\x1b[31m with 2 cores",
    versions={"localspec": "0.1.0", "numpy": "2.4"},
    curve=tuple(CurvePoint(1000 * i, i / 2, {"code": (i / 100, i / 200), "chat": (0.3,)}) for i in range(1, 31)),
    acceptance={"code": (0.52, 0.25), "chat": (0.3, 0.1)},
)


@pytest.fixture
def head(tiny: TinyFiles) -> Path:
    """A head where trained ones are kept."""
    heads_folder().mkdir(parents=True)
    return write_random_head(tiny.pair.target, heads_folder() / "tiny.gguf", n_out=100, training=TRAINING)


def test_inspect_prints_the_card_of_a_head(head: Path, capsys: Out) -> None:
    assert inspect_command(str(head)) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert "head for      tiny llama (llama, 4 layers of 128 channels)" in lines
    assert "made by       localspec distill smollm2-135m --minutes 3" in lines
    assert "training      6,300 tokens of data, 20,000 seen, 4 minutes" in lines
    assert "\x1b" not in printed
    assert any(line.split() == ["code", "0.52", "0.25"] for line in lines)
    # Twelve points at most, the last one among them, under their categories.
    head_of_curve = next(i for i, line in enumerate(lines) if line.startswith("curve"))
    assert lines[head_of_curve].split() == ["curve", "tokens", "seen", "minutes", "code", "chat"]
    points = [line.split() for line in lines[head_of_curve + 1 :] if line.split()[0].endswith(",000")]
    assert points[-1] == ["30,000", "15", "0.30", "0.30"]
    assert 6 <= len(points) <= 12


def test_inspect_of_a_head_as_json_has_all_of_it(head: Path, capsys: Out) -> None:
    assert inspect_command(str(head), as_json=True) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["head"]["kind"] == "chained"
    assert facts["head"]["n_out"] == 100
    assert len(facts["head"]["training"]["curve"]) == 30
    assert facts["head"]["training"]["acceptance"] == {"code": [0.52, 0.25], "chat": [0.3, 0.1]}
    assert "memory" not in facts


def test_inspect_of_a_head_that_nobody_trained(tiny: TinyFiles, tmp_path: Path, capsys: Out) -> None:
    untold = write_random_head(tiny.pair.target, tmp_path / "head.gguf", "medusa", training=Training())
    assert inspect_command(str(untold)) == 0
    assert "training      none" in capsys.readouterr().out


def test_list_shows_heads_and_says_which_are_damaged(head: Path, capsys: Out) -> None:
    damaged = head.with_name("damaged.gguf")
    damaged.write_bytes(head.read_bytes()[:3000])
    assert list_command() == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert [damaged.name, "kB damaged"] in [[line[0], " ".join(line[-2:])] for line in lines]
    assert [head.name, "tiny llama"] in [[line[0], " ".join(line[-2:])] for line in lines]
    assert list_command(as_json=True) == 0
    heads = {entry["path"]: entry for entry in json.loads(capsys.readouterr().out)["heads"]}
    assert (heads[str(head)]["kind"], heads[str(head)]["target"]) == ("chained", "tiny llama")
    assert "cut short" in heads[str(damaged)]["error"]


def test_list_shows_a_head_under_its_model(head: Path, tiny: TinyFiles, capsys: Out) -> None:
    target = models_dir() / "hf/acme/tiny/target.gguf"
    target.parent.mkdir(parents=True)
    shutil.copy(tiny.pair.target, target)
    put(SMOL)
    assert list_command() == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("hf:acme/tiny/target.gguf"))
    assert lines[at + 1].startswith(f"  {head.name}")
    assert "head, chained" in lines[at + 1]
    assert not any("HEAD OF ANOTHER MODEL" in line for line in lines)


def test_rm_removes_what_was_made_of_heads_for_a_model(capsys: Out) -> None:
    path = put(SMOL)
    made = engine_folder() / f"{path.stem}.0123456789.gguf"
    made.parent.mkdir(parents=True)
    made.write_bytes(b"x")
    assert rm_command(["smollm2-135m"]) == 0
    assert not made.exists()


# -- pull --check -----------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A hub on this machine that has nothing yet."""
    server = Server()
    monkeypatch.delenv("LOCALSPEC_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    yield server
    server.close()


def offer(hub: Server, entry: Entry, n_bytes: int | None = None, digest: str | None = None) -> None:
    """Let a hub have an entry's files, by what it says of them."""
    place, n_bytes = entry.sources[0], entry.bytes if n_bytes is None else n_bytes
    for name in part_names(place.get("file", entry.file)):
        path = f"/{place['repo']}/resolve/main/{name}"
        hub.files[path], hub.sizes[path] = b"", n_bytes // len(entry.files)
        hub.digests[path] = digest or entry.sha256 or "ab" * 32


def test_check_says_of_every_entry_whether_the_hub_still_has_it(hub: Server, capsys: Out) -> None:
    for entry in CATALOG.values():
        offer(hub, entry)
    assert pull_check() == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(lines) == list(CATALOG)
    assert lines["smollm2-135m"] == "holds: 98.4 MB, the file that was checked"
    assert lines["qwen2.5-coder-7b"] == "holds: 4.68 GB; never fetched by us"
    assert {method for method, _, _ in hub.requests} == {"HEAD"}
    assert not models_dir().exists()


def test_check_names_what_does_not_hold(hub: Server, capsys: Out) -> None:
    names = ["smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-7b", "qwen3-4b", "qwen3-8b"]
    offer(hub, CATALOG["smollm2-135m"], digest="cd" * 32)
    offer(hub, CATALOG["qwen2.5-coder-0.5b"], n_bytes=7)
    offer(hub, CATALOG["qwen2.5-coder-7b"], n_bytes=5_000_000_000)
    offer(hub, CATALOG["qwen3-4b"], n_bytes=2_500_000_000)
    assert pull_check(*names) == 1
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert "it is not the file that was checked" in lines["smollm2-135m"]
    assert "it has 7 bytes" in lines["qwen2.5-coder-0.5b"]
    assert "the hub has 5,000,000,000 bytes, the catalogue about 4,683,073,536" in lines["qwen2.5-coder-7b"]
    assert lines["qwen3-4b"].startswith("holds: 2.5 GB")
    assert lines["qwen3-8b"].startswith("does not hold: ")


def test_a_hub_that_does_not_answer_is_asked_once(hub: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.close()
    with pytest.raises(DownloadError, match="the hub cannot be reached"):
        pull_check()
    monkeypatch.setenv("LOCALSPEC_OFFLINE", "1")
    with pytest.raises(DownloadError, match="LOCALSPEC_OFFLINE is set"):
        pull_check()


def pull_check(*names: str) -> int:
    run = parse(["pull", "--check", *names])
    assert callable(run)
    return run()
