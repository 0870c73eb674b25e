"""The commands on model files."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from filelock import FileLock

from localspec.commands import files
from localspec.heads.card import CurvePoint, Training
from localspec.heads.file import engine_folder, heads_folder
from localspec.model_files.catalog import Catalog, Entry, part_names
from localspec.model_files.sources import parts_folder
from localspec.system.files import home, models_dir
from localspec.system.machine import SystemMemory
from tests.conftest import TinyFiles
from tests.model_files.test_catalog import put
from tests.support import ggufs
from tests.support.heads import write_random_head
from tests.support.program import Stream, assert_one_line, localspec
from tests.support.standin import Server

CATALOG = Catalog.load()
SMOL = CATALOG["smollm2-135m"]
Out = pytest.CaptureFixture[str]


def out(*arguments: str | Path) -> str:
    result = localspec(*arguments)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


def someones(name: str, data: bytes) -> Path:
    path = models_dir() / "hf/acme/tiny" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    return path


def test_list_as_json() -> None:
    put(SMOL)
    someones("tiny.gguf", b"12345")
    models = {model["name"]: model for model in json.loads(out("list", "--json"))["models"]}
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


def listed(*options: str) -> dict[str, str]:
    return {line.split()[0]: line for line in out("list", *options).splitlines() if line}


def test_list_shows_what_is_here_and_all_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no model is here yet: localspec pull" in out("list")
    monkeypatch.setattr(files, "read_memory", lambda: SystemMemory(4 << 30, 4 << 30))
    put(SMOL)
    someones("tiny.gguf", b"12345")
    lines = listed()
    assert {*CATALOG, "hf:acme/tiny/tiny.gguf"} & set(lines) == {"smollm2-135m", "hf:acme/tiny/tiny.gguf"}
    assert re.search("98.4 MB +fits ", lines["smollm2-135m"])
    assert f"{len(CATALOG) - 1} more can be fetched: localspec list --all" in "\n".join(lines.values())
    lines = listed("--all")
    assert set(CATALOG) <= set(lines)
    here, fits = (lines["NAME"].index(title) for title in ("HERE", "FITS"))
    assert {name for name in CATALOG if lines[name][here : here + 3] == "yes"} == {"smollm2-135m"}
    assert re.search("~4.68 GB +too big", lines["qwen2.5-coder-7b"])
    assert lines["qwen2.5-coder-1.5b"][fits:].startswith("fits")
    order = list(lines)
    assert order[1] == "smollm2-135m", "what is here is first"
    for entry in CATALOG.values():
        for head in entry.heads[:1]:
            assert lines[head].startswith("  ")
            models = [name for name in order[: order.index(head)] if not lines[name].startswith("  ")]
            assert head in CATALOG[models[-1]].heads
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(Stream, "isatty", lambda self: True)
    assert max(len(line) for line in out("list", "--all").splitlines() if not line.startswith("folder:")) <= 80


def test_rm_removes_the_model_its_pieces_and_what_was_made_of_it() -> None:
    path, unrelated = put(SMOL), put(CATALOG["gemma3-270m"])
    made = [
        parts_folder(SMOL) / "wheels" / "part.whl",
        home() / "repacked" / f"{path.stem}.0123456789ab.q8_0.gguf",
        engine_folder() / f"{path.stem}.0123456789.gguf",
    ]
    for each in made:
        each.parent.mkdir(parents=True)
        each.write_bytes(b"x" * 1000)
    assert_one_line(localspec("rm", "smollm2-135m", "xyzzy"), 2, "xyzzy")  # all names are checked first
    assert path.exists()
    assert "removed smollm2-135m (98.4 MB)" in out("rm", "smollm2-135m")
    assert [each for each in (path, *made, unrelated) if each.exists()] == [unrelated]
    assert_one_line(localspec("rm", "smollm2-135m"), 1, "not on this disk")


def test_rm_leaves_a_model_alone_that_is_being_fetched() -> None:
    folder = parts_folder(SMOL)
    folder.mkdir(parents=True)
    with FileLock(folder.with_name(folder.name + ".lock")):
        assert_one_line(localspec("rm", "smollm2-135m"), 1, "another process")


def test_pull_finds_a_model_by_a_part_of_its_name_prints_its_path_and_names_its_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, draft = CATALOG["qwen2.5-coder-1.5b"], CATALOG["qwen2.5-coder-0.5b"]
    put(target)
    result = localspec("pull", "Coder-1.5")
    assert result.stdout.decode() == f"{target.path}\n"
    assert b"Coder-1.5 is qwen2.5-coder-1.5b (1.12 GB)" in result.stderr
    assert b"localspec pull qwen2.5-coder-0.5b (491 MB)" in result.stderr
    put(draft)
    assert localspec("pull", target.name).stderr == b""
    many = "'coder' in their names: qwen2.5-coder-1.5b, qwen2.5-coder-0.5b, "
    for names, said in (("coder", many), ("xyzzy", ""), ("/", ""), ("gemma3-270m smolm2-135m", "did you mean smoll")):
        assert_one_line(localspec("pull", *names.split()), 2, said)
    assert localspec("pull", "").returncode == 2
    monkeypatch.setattr("localspec.model_files.sources.pull", Mock(side_effect=KeyboardInterrupt))
    result = localspec("pull", "smollm2-135m")
    assert (result.returncode, result.stderr.count(b"\n")) == (130, 1)
    assert b"localspec pull smollm2-135m goes on from there" in result.stderr


def test_progress_without_a_terminal_is_a_line_every_tenth_or_minute_with_the_speed_of_late(capsys: Out) -> None:
    now = [0.0]
    with files.PullProgress(lambda: now[0]) as report:
        report.watch("asking", 0, 0)
        for done in range(0, 1001, 5):
            report.watch("downloading y", done * 1000, 1_000_000)
        report.say("a remark")
        for second in range(3601):
            now[0] = float(second)
            # 100 kB/s in the first half hour, a tenth of that afterwards.
            done = 100_000 * min(second, 1800) + 10_000 * max(0, second - 1800)
            report.watch("downloading x", done, 1_000_000_000)
    said = capsys.readouterr().err.splitlines()
    assert (said[0], said[12]) == ("asking", "a remark")
    assert [line.split(",")[0] for line in said[1:12]] == [f"downloading y: {i} %" for i in range(0, 101, 10)]
    lines = said[13:]
    assert len(lines) == 61
    assert lines[1] == "downloading x: 0 %, 6 MB of 1 GB, 100 kB/s, 2 h 46 min left"
    assert lines[-1] == "downloading x: 19 %, 198 MB of 1 GB, 10 kB/s, 22 h 17 min left"


def test_progress_on_a_terminal_is_a_line_that_goes_away(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")  # the figures are kept
    monkeypatch.setattr("localspec.system.terminal.INTERVAL", 0.0)  # every update is shown
    now = [0.0]
    with files.PullProgress(lambda: now[0]) as report:
        for second in (0, 5, 10):
            now[0] = float(second)
            report.watch("downloading qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", second * 1_000_000, 20_000_000)
        report.say("a remark [not markup]")
        report.watch("putting x together", 0, 0)
    *_, half, remark, putting, end = capsys.readouterr().err.split("\r\x1b[K")
    assert (half, len(half) < 60) == ("downloading qwen2.…: 10 MB of 20 MB, 1 MB/s, 10 s left 50%", True)
    assert (remark, putting, end) == ("a remark [not markup]\n", "putting x together", "")


def test_inspect(tiny: TinyFiles) -> None:
    shown = out("inspect", tiny.bpe)
    for words in ("tiny llama (llama)", "Q8_0", "384 tokens (gpt2, gpt-2)", "2,048 tokens", "ChatML", "<|im_end|>"):
        assert words in shown
    facts = json.loads(out("inspect", tiny.bpe, "--json"))
    assert (facts["architecture"], facts["bytes"]) == ("llama", tiny.bpe.stat().st_size)
    assert (facts["cannot_generate_text"], facts["vocabulary"]["n_tokens"]) == (None, 384)
    assert set(facts["bytes_by_tensor_type"]) == {"F32", "Q8_0"}


def test_inspect_says_what_a_context_takes(tiny: TinyFiles) -> None:
    """Keys and values of one or two heads a layer, 32 numbers of 2 bytes each; some look at a window of 32 tokens."""
    for path, per_layer, n, n_windowed in ((tiny.bpe, 256, 2, 0), (tiny.sliding, 128, 6, 5), (tiny.recurrent, 0, 0, 0)):
        facts = json.loads(out("inspect", path, "--json"))
        memory, (at,) = facts["memory"], facts["memory"]["contexts"]
        assert (memory["recurrent"], memory["windowed_layers"]) == (path == tiny.recurrent, n_windowed)
        assert (memory["kv_bytes_per_token"], at["kv_bytes"]) == (n * per_layer, at["n_ctx"] * n * per_layer)
        assert at["kv_bytes"] - at["kv_bytes_window_only"] == n_windowed * per_layer * (at["n_ctx"] - 32 - 256)
        assert at["total_bytes"] == at["kv_bytes"] + facts["bytes"]


def test_what_cannot_be_inspected_or_answer(tmp_path: Path, tiny: TinyFiles) -> None:
    assert_one_line(localspec("inspect", "smollm2-135m"), 1, "localspec pull")
    assert_one_line(localspec("inspect", tmp_path / "none.gguf"), 2, "none.gguf")
    put(SMOL)  # zeros
    assert_one_line(localspec("inspect", "smollm2-135m"), 1, SMOL.path.name)
    evil = ggufs.write_llama(tmp_path / "evil.gguf", extra={"general.license": "\x1b[2J\x07\nfree"})
    assert not set(out("inspect", evil)) & {"\x1b", "\x07"}
    for path, said in ((tiny.embedding, "embedding model"), (tiny.tokenizer_only, "no weights")):
        assert said in out("inspect", path)


CURVE = tuple(CurvePoint(1000 * i, i / 2, {"code": (i / 100, i / 200), "chat": (0.3,)}) for i in range(1, 31))
ACCEPTANCE = {"code": (0.52, 0.25), "chat": (0.3, 0.1)}
COMMAND = "localspec distill smollm2-135m --minutes 3"
TRAINING = Training(COMMAND, 7, 6300, 20_000, 3.5, "a CPU\x1b[31m", {"localspec": "0.1.0"}, CURVE, ACCEPTANCE)


@pytest.fixture
def head(tiny: TinyFiles) -> Path:
    heads_folder().mkdir(parents=True)
    return write_random_head(tiny.pair.target, heads_folder() / "tiny.gguf", n_out=100, training=TRAINING)


def test_inspect_prints_the_card_of_a_head(head: Path, tiny: TinyFiles, tmp_path: Path) -> None:
    printed = out("inspect", head)
    lines = printed.splitlines()
    assert {f"made by       {COMMAND}", "training      6,300 tokens of data, 20,000 seen, 4 minutes"} <= set(lines)
    assert "\x1b" not in printed
    assert any(line.split() == ["code", "0.52", "0.25"] for line in lines)
    # Twelve points at most, the last one among them, under their categories.
    head_of_curve = next(i for i, line in enumerate(lines) if line.startswith("curve"))
    assert lines[head_of_curve].split() == ["curve", "tokens", "seen", "minutes", "code", "chat"]
    points = [line.split() for line in lines[head_of_curve + 1 :] if line.split()[0].endswith(",000")]
    assert points[-1] == ["30,000", "15", "0.30", "0.30"]
    assert 6 <= len(points) <= 12
    facts = json.loads(out("inspect", head, "--json"))
    training = facts["head"]["training"]
    assert (facts["head"]["kind"], facts["head"]["n_out"], len(training["curve"])) == ("chained", 100, 30)
    assert training["acceptance"] == {"code": [0.52, 0.25], "chat": [0.3, 0.1]}
    untold = write_random_head(tiny.pair.target, tmp_path / "head.gguf", training=Training())
    assert "training      none" in out("inspect", untold)


def test_list_shows_heads_and_says_which_are_damaged(head: Path, tiny: TinyFiles) -> None:
    damaged = head.with_name("damaged.gguf")
    damaged.write_bytes(head.read_bytes()[:3000])
    lines = {(line.split()[0], " ".join(line.split()[-2:])) for line in out("list").splitlines() if line}
    assert {(damaged.name, "kB damaged"), (head.name, "tiny llama")} <= lines
    heads = {entry["path"]: entry for entry in json.loads(out("list", "--json"))["heads"]}
    assert (heads[str(head)]["kind"], heads[str(head)]["target"]) == ("chained", "tiny llama")
    assert "cut short" in heads[str(damaged)]["error"]
    damaged.unlink()
    someones("target.gguf", tiny.pair.target.read_bytes())
    put(SMOL)
    shown = out("list")
    assert re.search(rf"^hf:acme/tiny/target\.gguf.*\n  {re.escape(head.name)}.*head, chained$", shown, re.MULTILINE)
    assert "HEAD OF ANOTHER MODEL" not in shown


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    monkeypatch.delenv("LOCALSPEC_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    yield server
    server.close()


def offer(hub: Server, entry: Entry, n_bytes: int | None = None, digest: str | None = None) -> None:
    place, n_bytes = entry.sources[0], entry.bytes if n_bytes is None else n_bytes
    for name in part_names(place.get("file", entry.file)):
        path = f"/{place['repo']}/resolve/main/{name}"
        hub.files[path], hub.sizes[path] = b"", n_bytes // len(entry.files)
        hub.digests[path] = digest or entry.sha256 or "ab" * 32


def checked(*names: str) -> tuple[int, dict[str, str]]:
    """Exit status, and what is said of each entry."""
    result = localspec("pull", "--check", *names)
    return result.returncode, dict(line.split(maxsplit=1) for line in result.stdout.decode().splitlines())


def test_check_says_of_every_entry_whether_the_hub_still_has_it(hub: Server) -> None:
    for entry in CATALOG.values():
        offer(hub, entry)
    status, lines = checked()
    assert (status, list(lines)) == (0, list(CATALOG))
    assert lines["smollm2-135m"] == "holds: 98.4 MB, the file that was checked"
    assert lines["qwen2.5-coder-7b"] == "holds: 4.68 GB; never fetched by us"
    assert {method for method, _, _ in hub.requests} == {"HEAD"}
    assert not models_dir().exists()
    offer(hub, CATALOG["smollm2-135m"], digest="cd" * 32)
    offer(hub, CATALOG["qwen2.5-coder-0.5b"], n_bytes=7)
    offer(hub, CATALOG["qwen2.5-coder-7b"], n_bytes=5_000_000_000)
    offer(hub, CATALOG["qwen3-4b"], n_bytes=2_500_000_000)
    hub.files = {path: data for path, data in hub.files.items() if CATALOG["qwen3-8b"].sources[0]["repo"] not in path}
    expected = {
        "smollm2-135m": "it is not the file that was checked",
        "qwen2.5-coder-0.5b": "it has 7 bytes",
        "qwen2.5-coder-7b": "the hub has 5,000,000,000 bytes, the catalogue about 4,683,073,536",
        "qwen3-4b": "holds: 2.5 GB",
        "qwen3-8b": "does not hold: ",
    }
    status, lines = checked(*expected)
    assert status == 1
    assert {name: words in lines[name] for name, words in expected.items()} == dict.fromkeys(expected, True)


def test_a_hub_that_does_not_answer_is_asked_once(hub: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.close()
    assert_one_line(localspec("pull", "--check"), 1, "the hub cannot be reached")
    monkeypatch.setenv("LOCALSPEC_OFFLINE", "1")
    assert_one_line(localspec("pull", "--check"), 1, "LOCALSPEC_OFFLINE is set")
