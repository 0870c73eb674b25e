"""Models on llama.cpp's RPC servers: two of them on loopback, compiled from the source of what is installed."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.network_delay import Delay
from localspec import LLM, EngineError, EngineUnavailable, Placement, SamplingParams
from localspec.backends import rpc_build
from localspec.backends.llama import llama_cpp, rpc
from localspec.backends.llama.ggml import engine_log
from localspec.backends.llama.passes import LlamaPasses
from localspec.backends.llama.rpc import ask
from localspec.backends.placement import Target, layout
from localspec.engine.worker import Job
from localspec.model_files.gguf import GGUFFile
from tests.conftest import TinyFiles, open_backend
from tests.support.ggufs import Shape, write_llama

PARAMS = SamplingParams(max_tokens=40)
TEXT = "hello world hello"


def options(**more: Any) -> dict[str, Any]:
    return {"backend": "llama-cpp", "n_ctx": 256, "idle": False} | more


@pytest.fixture(scope="module")
def built(shared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The RPC backend for the llama-cpp-python that is installed, compiled once for all of these tests.

    LOCALSPEC_TEST_LLAMA_SOURCE names llama.cpp's source, else it is fetched.
    """
    open_backend("llama-cpp")
    if not shutil.which("c++"):
        pytest.skip("there is no C++ compiler")
    source = os.environ.get("LOCALSPEC_TEST_LLAMA_SOURCE")
    try:
        rpc_build.build(Path(source) if source else rpc_build.fetch_source(tmp_path_factory.mktemp("source")))
    except EngineUnavailable as error:
        pytest.skip(str(error))
    return shared_home / "build"


@pytest.fixture
def library(built: Path, isolated_home: Path) -> None:
    """It is in this test's home too."""
    isolated_home.mkdir(exist_ok=True)
    (isolated_home / "build").symlink_to(built)


@contextmanager
def serving(port: int = 0) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server in a process of its own; yields its address."""
    if not port:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    command = [sys.executable, "-m", "localspec.backends.rpc_server", "--port", str(port), "--threads", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            lines = list(takewhile(lambda line: "unencrypted and unauthenticated" not in line, process.stderr))
            assert process.poll() is None, "".join(lines)
            address = f"127.0.0.1:{port}"
            for _ in range(100):  # it says so before it listens
                with suppress(EngineError):
                    ask(address)
                    break
                time.sleep(0.1)
            yield address, process
        finally:
            process.kill()


@pytest.fixture
def addresses(library: None) -> Iterator[tuple[str, ...]]:
    """Two servers."""
    with ExitStack() as stack:
        yield tuple(stack.enter_context(serving())[0] for _ in range(2))


def test_without_the_library_it_says_how_to_get_it(tiny: TinyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    open_backend("llama-cpp")
    monkeypatch.setattr(rpc, "rpc", rpc.Rpc)
    monkeypatch.setattr("localspec.backends.llama.llama_cpp.rpc", rpc.Rpc)
    from localspec.backends.llama.ggml import Ggml

    if Ggml().bind("ggml_backend_reg_by_name", [rpc.ctypes.c_char_p], rpc.ctypes.c_void_p)(b"RPC"):
        pytest.skip("the backend is there")
    with pytest.raises(EngineUnavailable, match="python -m localspec"):
        LLM(tiny.bpe, "ngram", placement=Placement(rpc="127.0.0.1:9"), **options())


@pytest.mark.slow
def test_the_same_tokens_as_without(tiny: TinyFiles, addresses: tuple[str, ...]) -> None:
    with LLM(tiny.bpe, "ngram", **options()) as llm:
        wanted = llm.generate(TEXT, PARAMS).token_ids
    for split in (None, (1, 1), (1, 0)):
        override = (f"ffn=RPC0[{addresses[1]}]",) if split == (1, 1) else ()  # what a server's memory is called
        placement = Placement(rpc=addresses, tensor_split=split, override_tensor=override)
        with LLM(tiny.bpe, "ngram", placement=placement, **options()) as llm:
            links = llm.run(lambda pair: pair.target.placed.links)
            before = [link.n_requests for link in links]
            assert llm.generate(TEXT, PARAMS).token_ids == wanted
            assert llm.generate(TEXT, PARAMS, speculate=False).token_ids == wanted
            used = [link.n_requests > n for link, n in zip(links, before, strict=True)]
            assert used == [True, split != (1, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(("delay_ms", "device"), [(0.0, "mixed"), (4.0, "gpu")])
def test_drafting_goes_on_beside_far_servers_only(
    delay_ms: float, device: str, tiny: TinyFiles, addresses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers on this machine compute on the processor that the draft model is on."""
    # However busy this machine is, what is not delayed counts as near.
    monkeypatch.setattr("localspec.backends.llama.rpc._NEAR_MS", delay_ms or 1e9)
    with ExitStack() as stack:
        proxies = [stack.enter_context(Delay(each, delay_ms / 1e3)) for each in addresses]
        placement = Placement(rpc=tuple(each.address for each in proxies), tensor_split=(1, 1))
        llm = stack.enter_context(LLM(tiny.pair.target, tiny.pair.draft, placement=placement, **options()))
        assert llm.run(lambda pair: pair.target.capabilities.device) == device
        assert llm.run(lambda pair: pair.state.drafting_ahead is not None) == (device == "gpu")
        assert llm.generate(TEXT, PARAMS, draft_length=3).token_ids


@pytest.mark.slow
@pytest.mark.parametrize(("soon_ms", "beside"), [(1e9, True), (0.0, False)])
def test_a_round_is_handed_on_before_a_far_server_has_computed_the_next_pass(
    soon_ms: float, beside: bool, tiny: TinyFiles, addresses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine gives the pass away, and is asked for logits when the round before has been given to its reader; but
    not where it takes long to come back, as it may have waited for the pass."""
    monkeypatch.setattr("localspec.backends.llama.rpc._NEAR_MS", 0.0)
    monkeypatch.setattr("localspec.backends.llama.passes.SOON_MS", soon_ms)
    log: list[str] = []

    def watch(kind: type[Any], name: str) -> None:
        call = getattr(kind, name)

        def logged(self: Any, *arguments: Any) -> Any:
            found = call(self, *arguments)
            log.append(name if name != "give" else type(arguments[0]).__name__)
            return found

        monkeypatch.setattr(kind, name, logged)

    with LLM(tiny.bpe, "ngram", placement=Placement(rpc=addresses[:1]), **options()) as llm:
        wanted = llm.generate(TEXT, PARAMS, speculate=False).token_ids
        for kind, name in ((LlamaPasses, "_decode"), (LlamaPasses, "_logits"), (Job, "give")):
            watch(kind, name)
        assert llm.generate(TEXT, SamplingParams(max_tokens=4), speculate=False).token_ids == wanted[:4]
    at = log.index("Round")
    if beside:
        assert log[at - 2 :] == ["_logits", *["_decode", "Round", "_logits"] * 3, "Round", "Job"]
    else:
        assert log[at - 2 :] == [*["_decode", "_logits", "Round"] * 4, "Job"]


@pytest.mark.slow
def test_a_server_that_dies_ends_an_answer_and_not_the_process(tiny: TinyFiles, library: None) -> None:
    with LLM(tiny.bpe, "ngram", **options()) as llm:
        wanted = llm.generate(TEXT, PARAMS).token_ids
    with serving() as (first, _), ExitStack() as stack:
        second, process = stack.enter_context(serving())
        with LLM(tiny.bpe, "ngram", placement=Placement(rpc=(first, second)), **options()) as llm:
            session = llm.session(params=PARAMS)
            said = session.chat("the cat").text
            rounds = llm.rounds(TEXT, PARAMS)
            next(rounds)
            process.kill()
            with pytest.raises(EngineError, match=f"{second} is gone.*the conversation is kept"):
                list(rounds)
            with pytest.raises(EngineError, match=f"no RPC server answers at {second}"):
                llm.generate(TEXT, PARAMS)
            assert llm.tokenize(TEXT)
            process.wait(10)
            with serving(int(second.rpartition(":")[2])):
                assert llm.generate(TEXT, PARAMS).token_ids == wanted
                assert session.messages[-1]["content"] == said
                session.chat("and the dog")
                assert len(session.messages) == 4


@pytest.mark.slow
def test_a_server_serves_one_client(tiny: TinyFiles, library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localspec.backends.llama.rpc._CONNECT_S", 0.5)
    with ExitStack() as stack:
        address, _ = stack.enter_context(serving())
        stack.enter_context(LLM(tiny.bpe, "ngram", placement=Placement(rpc=address), **options()))
        with pytest.raises(EngineError, match="busy with another client"):
            ask(address)


@pytest.mark.slow
@pytest.mark.parametrize("n_layers", [-1, 3, 0])
@pytest.mark.parametrize("split", [(1.0, 1.0), (5.0, 1.0), (0.0, 1.0)])
def test_layers_lie_where_the_layout_says(
    tmp_path: Path,
    addresses: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    split: tuple[float, ...],
    n_layers: int,
) -> None:
    path = write_llama(tmp_path / "seven.gguf", Shape(n_layer=7, n_embd=64, n_head=2, n_head_kv=1, n_ff=64))
    monkeypatch.setattr(engine_log, "recent", deque(maxlen=10_000))
    placement = Placement(rpc=addresses, tensor_split=split)
    places = llama_cpp.binding().places(placement).usual
    with llama_cpp.load(path, placement=placement, n_gpu_layers=n_layers):
        lines = [re.search(r"layer +(\d+) assigned to device (\S+),", line) for line in engine_log.recent]
    with GGUFFile(path) as gguf:
        used = [Target(place.name, place.buffer, 1) for place in places]
        shares = layout(gguf, placement, used, n_layers, 256, "f16")
        assert sum(share.weights_bytes for share in shares) == sum(each.n_bytes for each in gguf.tensors.values())
    assert {int(line[1]): line[2] for line in lines if line} == {
        layer: share.name for share in shares for layer in share.layers
    }
