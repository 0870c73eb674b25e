"""Fetching models: digests, resuming, killing, full disks, broken servers. Nothing here leaves this machine."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from localspec.errors import Cancelled, DigestMismatch, DownloadError, NotEnoughSpace
from localspec.model_files import catalog, sources
from localspec.model_files.catalog import Entry
from localspec.model_files.sources import hub as hub_module
from localspec.model_files.sources import parts_folder, pull
from localspec.model_files.sources.base import size_text
from localspec.model_files.sources.wheels import expand, find_wheel
from localspec.system.files import models_dir
from tests.support.standin import Server, serve_index, write_wheel
from tests.support.waiting import PATIENCE, wait_until

CONTENT = random.Random(1).randbytes(3_000_000)
FILE = "tiny.gguf"
URL = f"/acme/models/resolve/main/{FILE}"
HUB = {"kind": "hf", "repo": "acme/models"}
WHEELS = {"kind": "wheels", "packages": "Acme.model_part{1..3}==1.0", "member": "*/data/*.bin"}


def entry(*places: dict[str, str], digest: str | None = None) -> Entry:
    sha256 = hashlib.sha256(CONTENT).hexdigest() if digest is None else digest
    return Entry("tiny", FILE, bytes=len(CONTENT), sha256=sha256, sources=places)


def whole() -> bool:
    return (models_dir() / FILE).read_bytes() == CONTENT


def leftovers() -> list[str]:
    """Everything under the models folder that is not a lock."""
    return sorted(
        str(p.relative_to(models_dir())) for p in models_dir().rglob("*") if p.is_file() and p.suffix != ".lock"
    )


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCALSPEC_OFFLINE")
    for name in [name for name in os.environ if name.startswith(("PIP_", "HF_")) or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    server.files[URL] = CONTENT
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    yield server
    server.close()


def served(hub: Server) -> list[int]:
    return hub.served(URL)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The content in three wheels, found by pip through its own configuration."""
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    third = len(CONTENT) // 3
    parts = [CONTENT[:third], CONTENT[third : 2 * third], CONTENT[2 * third :]]
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return [
        write_wheel(folder, f"acme-model-part{i}", "1.0", f"acme_model_part{i}/data/part{i}.bin", part)
        for i, part in enumerate(parts, 1)
    ]


PULL = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.model_files.sources.test_sources import entry, HUB, WHEELS
from localspec.model_files.sources import pull
print(pull(entry({"hf": HUB, "wheels": WHEELS}[sys.argv[2]]), say=lambda line: print(line, flush=True)))
"""


def pull_elsewhere() -> subprocess.Popen[str]:
    """A pull in a process of its own."""
    root = str(Path(__file__).parents[3])
    return subprocess.Popen(
        [sys.executable, "-c", PULL, root, "hf"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root
    )


# -- the hub ----------------------------------------------------------------------------------------------------------


def test_hub(hub: Server) -> None:
    seen: list[tuple[str, int, int]] = []
    path = pull(entry(HUB), watch=lambda *step: seen.append(step))
    assert path == models_dir() / FILE
    assert whole()
    assert leftovers() == [FILE]
    downloads = [done for what, done, total in seen if what.startswith("downloading") and total == len(CONTENT)]
    assert downloads == sorted(downloads)
    assert downloads[-1] == len(CONTENT)
    hub.status = 500
    assert pull(entry(HUB)) == path  # present: nobody is asked
    hub.status = 0
    path.write_bytes(CONTENT[:100])
    assert not entry(HUB).present
    path.unlink()
    pull(entry(HUB, digest=""))  # the hub's own is trusted where none is known
    assert whole()
    path.unlink()
    hub.sizes[URL] = None  # the catalogue's is enough
    pull(entry(HUB))
    assert whole()


WRONG: list[tuple[dict[str, Any], str | None, type[Exception], str, int]] = [
    ({"digests": {URL: "ab" * 32}}, "", DigestMismatch, "wrong digest", 0),
    ({}, "cd" * 32, DigestMismatch, "changed on the hub", -1),
    ({"digests": {URL: ""}}, "", DownloadError, "no digest", -1),
    ({"sizes": {URL: None}}, "", DownloadError, "does not report the size", -1),
    ({"sizes": {URL: 10**15}}, None, DigestMismatch, "1,000,000,000,000,000 bytes, and .* checked 3,000,000", -1),
    ({"short": 1000}, None, DownloadError, "2,999,000 of the 3,000,000.*3 MB that arrived are kept", 2_999_000),
    ({"long": 1}, None, DigestMismatch, "more than the 3,000,000 bytes", 0),
    ({"long": 50_000_000}, "", DigestMismatch, "more than the 3,000,000 bytes", 0),
    ({"status": 404}, None, DownloadError, "no file|no repository", -1),
    ({"status": 403}, None, DownloadError, "403", -1),
    ({"status": 503}, None, DownloadError, "503", -1),
    ({"status": 401}, None, DownloadError, "no repository|401", -1),
]
"""What the hub does, the digest that is known, what a pull raises, and how many bytes of what came are good; -1: none
come."""


@pytest.mark.parametrize(("state", "digest", "error", "words", "kept"), WRONG)
def test_what_the_hub_does_wrong_is_a_line_and_over_when_it_is(
    hub: Server, state: dict[str, Any], digest: str | None, error: type[Exception], words: str, kept: int
) -> None:
    right, most = {name: copy(getattr(hub, name)) for name in state}, 0

    def watch(what: str, done: int, total: int) -> None:
        nonlocal most
        most = max(most, done)

    for name, value in state.items():
        setattr(hub, name, value)
    with pytest.raises(error, match=words) as caught:
        pull(entry(HUB, digest=digest), watch=watch)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)
    assert most <= len(CONTENT)
    assert bool(served(hub)) == (kept >= 0)
    assert leftovers() == [] or kept > 0
    for name, value in right.items():
        setattr(hub, name, value)
    pull(entry(HUB, digest=None if digest else digest))
    assert whole()
    assert served(hub)[-1] >= kept


def test_hub_broken_connection_resumes_within_one_pull(hub: Server) -> None:
    seen, before = list[str](), 0

    def watch(what: str, done: int, total: int) -> None:
        seen.append(what)
        if not hub.ranges and len(served(hub)) == before + 2:
            hub.drop_after = 0

    hub.drop_after = 1_200_000
    pull(entry(HUB), watch=watch)
    assert whole()
    assert sum(what.startswith("the connection broke") for what in seen) == len(served(hub)) - 1 > 0
    assert all(start >= 1_000_000 for start in served(hub)[1:])
    (models_dir() / FILE).unlink()
    hub.ranges, before = False, len(served(hub))
    pull(entry(HUB), watch=watch)  # which is read from the start again
    assert whole()
    assert len(served(hub)) > before + 1
    (models_dir() / FILE).unlink()
    folder = parts_folder(entry(HUB)) / "hub"
    folder.mkdir(parents=True)
    (folder / f"{entry(HUB).sha256[:12]}-{FILE}").write_bytes(CONTENT + b"more")  # no beginning of it
    pull(entry(HUB))
    assert whole()
    assert served(hub)[-1] == 0


def test_hub_connection_that_breaks_for_good_is_given_up(hub: Server) -> None:
    def watch(what: str, done: int, total: int) -> None:
        if done > 1_000_000:
            hub.status = 502

    hub.drop_after = 1_200_000
    with pytest.raises(DownloadError, match="502"):
        pull(entry(HUB), watch=watch)
    hub.status = hub.drop_after = 0
    pull(entry(HUB))
    assert whole()
    assert served(hub)[-1] >= 1_000_000


class Enough(Exception):
    pass


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("asking", Enough("!")),
        ("downloading", OSError(errno.ENOSPC, "!")),
        ("downloading", DownloadError("!")),
        ("checking", Cancelled("!")),
        ("putting", DownloadError("!")),
        ("putting", OSError(errno.ENOSPC, "!")),
    ],
)
def test_what_the_caller_raises_stops_the_pull_and_is_raised(
    hub: Server, wheels: list[Path], step: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    if step == "checking":
        hub.drop_after, hub.status = 1_200_000, 0
        with pytest.raises(Enough):
            pull(entry(HUB), watch=stopping_at("downloading", Enough(), after=1_000_000))
        hub.drop_after = 0
    monkeypatch.setenv("LOCALSPEC_SOURCE", "wheels" if step == "putting" else "hf")
    places = (HUB, WHEELS)
    said: list[str] = []
    before = len(served(hub))
    with pytest.raises(type(error)) as caught:
        pull(entry(*places), watch=stopping_at(step, error), say=said.append)
    assert caught.value is error
    assert said == []
    assert len(served(hub)) - before == (step == "downloading")
    assert not entry().present
    pull(entry(*places))
    assert whole()


def test_what_the_caller_raises_at_a_remark_is_raised(hub: Server, wheels: list[Path]) -> None:
    hub.status = 500
    with pytest.raises(Enough, match="trying the package index"):
        pull(entry(HUB, WHEELS), say=raising)


def raising(line: str) -> None:
    raise Enough(line)


def stopping_at(step: str, error: Exception, after: int = 0) -> Callable[[str, int, int], None]:
    def watch(what: str, done: int, total: int) -> None:
        if what.startswith(step) and done >= after:
            raise error

    return watch


def test_hub_killed_in_the_middle_then_resumed(hub: Server) -> None:
    hub.hold_after = 2_000_000
    process = pull_elsewhere()
    wait_until(lambda: sum(p.stat().st_size for p in models_dir().rglob(f"*{FILE}")) > 1_000_000)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (models_dir() / FILE).exists()
    assert not entry(HUB).present
    hub.hold_after = 0
    hub.go_on.set()
    before = len(served(hub))
    pull(entry(HUB))
    assert whole()
    assert served(hub)[before:][0] >= 1_000_000
    assert leftovers() == [FILE]


def test_two_pulls_at_once_fetch_once(hub: Server) -> None:
    hub.hold_after = 1_000_000
    first = pull_elsewhere()
    wait_until(lambda: served(hub))
    second = pull_elsewhere()
    assert "another process is fetching tiny; waiting" in second.stdout.readline()
    hub.go_on.set()
    out = [process.communicate(timeout=PATIENCE) for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), out
    assert whole()
    assert served(hub) == [0]


# -- data wheels ------------------------------------------------------------------------------------------------------


def test_parts_that_came_are_not_fetched_again(wheels: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", serve_index(server, wheels))
    last = f"/files/{wheels[2].name}"
    content = server.files.pop(last)
    with pytest.raises(DownloadError, match=r"Acme\.model_part3") as caught:
        pull(entry(WHEELS))
    assert "\n" not in str(caught.value)
    assert not entry().present
    server.files[last] = content
    n_requests = len(server.requests)
    pull(entry(WHEELS))
    assert whole()
    fetched = [path for _, path, _ in server.requests[n_requests:] if path.startswith("/files/")]
    assert last in fetched
    assert not any("part1-" in path for path in fetched)
    server.close()
    assert leftovers() == [FILE]


@pytest.mark.parametrize(
    ("part", "error", "words"),
    [
        ("acme_model_part2/data/x.bin", DigestMismatch, "wrong digest"),
        ("acme_model_part2/readme.txt", DownloadError, "does not contain"),
        (None, DownloadError, "damaged"),
    ],
    ids=["wrong content", "without the member", "encrypted"],
)
def test_wheels_that_are_not_what_they_should_be(
    wheels: list[Path], part: str | None, error: type[Exception], words: str
) -> None:
    if part is not None:
        write_wheel(wheels[1].parent, "acme-model-part2", "1.0", part, b"other" * 1000)
    else:
        data = bytearray(wheels[1].read_bytes())
        for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            data[data.index(mark) + flags] |= 1
        wheels[1].write_bytes(data)
    with pytest.raises(error, match=words):
        pull(entry(WHEELS))
    assert not entry().present
    assert error is DownloadError or leftovers() == []


def test_a_part_that_arrived_damaged_is_fetched_again(wheels: list[Path]) -> None:
    folder = parts_folder(entry()) / "wheels"
    folder.mkdir(parents=True)
    damaged = bytearray(wheels[0].read_bytes())
    damaged[5000:5100] = bytes(100)
    (folder / wheels[0].name).write_bytes(damaged)
    (folder / wheels[1].name).write_bytes(wheels[1].read_bytes()[:5000])  # not a zip: not even looked at
    with pytest.raises(DownloadError, match="damaged"):
        pull(entry(WHEELS))
    pull(entry(WHEELS))
    assert whole()


# -- several sources --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["refused", "hang", "status"])
def test_the_next_source_is_tried_soon(
    hub: Server, wheels: list[Path], trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub_module._SECONDS_TO_ANSWER[False] <= 10 < hub_module._SECONDS_TO_ANSWER[True]
    monkeypatch.setitem(hub_module._SECONDS_TO_ANSWER, False, 0.25)
    with socket.socket() as nobody:  # bound, and nobody listens
        nobody.bind(("127.0.0.1", 0))
        if trouble == "refused":
            monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        hub.hang, hub.status = trouble == "hang", 500 if trouble == "status" else 0
        said: list[str] = []
        pull(entry(HUB, WHEELS), say=said.append)
    assert whole()
    assert len(hub.requests) == (trouble != "refused"), "one attempt is enough where there is another source"
    (line,) = said
    assert line.startswith("the model hub: ")
    assert line.endswith("; trying the package index")
    assert "\n" not in line


def test_an_index_that_is_not_there_and_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(DownloadError, match="package index cannot be reached") as caught:
        pull(entry(WHEELS))
    assert "\n" not in str(caught.value)
    shutil.rmtree(models_dir())
    models_dir().write_text("a file where the folder should be")
    with pytest.raises(DownloadError, match="cannot write"):
        pull(entry(HUB))


def test_offline_touches_nothing(hub: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_OFFLINE", "1")
    with pytest.raises(DownloadError, match="LOCALSPEC_OFFLINE"):
        pull(entry(HUB, WHEELS))
    assert hub.requests == []
    assert not models_dir().exists()


# -- the disk ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "factor"), [(HUB, 1), (WHEELS, 2)])
def test_too_little_space_is_seen_before_anything_is_fetched(
    hub: Server, wheels: list[Path], place: dict[str, str], factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localspec.model_files.sources.base.free_bytes", lambda folder: 1000)
    with pytest.raises(NotEnoughSpace, match=rf"needs {factor * 3} MB .* 1 kB free"):
        pull(entry(place))
    assert served(hub) == []
    assert leftovers() == []


@pytest.mark.parametrize("kind", ["hf", "wheels"])
def test_a_disk_that_fills_up_leaves_nothing(hub: Server, wheels: list[Path], kind: str, tmp_path: Path) -> None:
    """No file of the child process may grow beyond 1.5 MB: writing fails in the middle, as on a full disk."""
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1500000, 1500000))\n" + PULL
    root = str(Path(__file__).parents[3])
    done = subprocess.run([sys.executable, "-c", code, root, kind], capture_output=True, text=True, cwd=root)
    assert "NotEnoughSpace" in done.stderr, done.stderr
    assert leftovers() == []


def test_models_in_parts(hub: Server) -> None:
    names = [f"big-{i:05}-of-00002.gguf" for i in (1, 2)]
    for i, name in enumerate(names):
        hub.files[f"/acme/models/resolve/main/q4/{name}"] = CONTENT[: 1000 + i]
    big = catalog.Catalog.load().entry(f"hf:acme/models/q4/{names[0]}")
    assert pull(big) == models_dir() / "hf/acme/models/q4" / names[0]
    assert big.present
    assert [(models_dir() / file).stat().st_size for file in big.files] == [1000, 1001]
    assert big.bytes_on_disk == 2001


def test_kinds_of_sources_requirements_wheels_and_sizes(wheels: list[Path]) -> None:
    assert expand("a==2") == ["a==2"]
    assert find_wheel(wheels[0].parent, "acme-model-part1==1") is None
    sizes = [size_text(n) for n in (0, 999, 1000, 999_499, 999_600, 1_117_320_768, 19_851_335_840)]
    assert sizes == ["0 B", "999 B", "1 kB", "999 kB", "1 MB", "1.12 GB", "19.9 GB"]
    kinds = {place["kind"] for each in catalog.Catalog.load().values() for place in each.sources}
    assert kinds == set(sources.NAMES) == set(sources.FETCH)
    assert sources.check(entry(WHEELS)) is None
