"""One server of several models: loaded when asked for, unloaded when idle or when another needs their memory."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM
from localspec.backends.registry import unavailable_reason
from localspec.engine.fit import Space
from localspec.engine.worker import Turns
from localspec.server import hosting
from localspec.server.http import read_keep_alive
from localspec.system.files import models_dir
from tests.server.apis.packages import APIS
from tests.server.conftest import SHAPE
from tests.support import ggufs
from tests.support.contexts import watch_passes
from tests.support.embedders import write_bert
from tests.support.serving import Server, asking, opening, post, said_by, serve_several
from tests.support.standin import Server as Hub
from tests.support.waiting import PATIENCE, wait_until


def chat(model: str, text: str = "hi", n: int = 8, **more: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": text}]
    return {"model": model, "messages": said, "max_tokens": n, "ignore_eos": True, "seed": 1} | more


def ask(server: Server, path: str, body: Any = None, method: str = "") -> Any:
    status, _, answer = server.ask(method or ("GET" if body is None else "POST"), path, body)
    assert status == 200, answer
    return json.loads(answer)


def refused(server: Server, path: str, body: Any, method: str = "POST") -> tuple[int, str]:
    status, _, answer = server.ask(method, path, body)
    error = json.loads(answer)["error"]
    return status, error["message"] if isinstance(error, dict) else error


def loaded(server: Server) -> list[str]:
    return [model["name"] for model in ask(server, "/api/ps")["models"]]


def needs(server: Server) -> list[int]:
    """Memory of the machine that each model is expected to take [bytes]."""
    return [model.plan.needed.ram for model in server.host.models]


def gone(server: Server, *stay: str) -> None:
    """Wait until no others are loaded."""
    wait_until(lambda: loaded(server) == [*stay], "it is unloaded")


@contextmanager
def held(server: Server, name: str) -> Iterator[None]:
    """While a request uses a model."""
    taking = server.host.take(server.host.named(name))
    release = asyncio.run_coroutine_threadsafe(taking, server.loop).result()
    try:
        yield
    finally:
        server.loop.call_soon_threadsafe(release)


def heard(sock: socket.socket, end: bytes, before: bytes = b"") -> bytes:
    """What has come when something has, within the chunks of a stream."""
    while end not in before.partition(b"\r\n\r\n")[2].replace(b"\r\n1\r\n", b""):
        before += sock.recv(4096)
    return before


class Gate:
    """Loading that waits until it is let through, or for some seconds."""

    def __init__(self, name: str = "", seconds: float = PATIENCE) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        usual = opening()

        def text(file: hosting.ServedFile, plan: hosting.LoadPlan, report: Any, cancel: threading.Event) -> LLM:
            end = time.monotonic() + seconds
            if file.name.startswith(name):
                self.begun.set()
                while not (self.go_on.wait(0.01) or cancel.is_set() or time.monotonic() > end):
                    report("waiting", 0.5)
            return usual.text(file, plan, report, cancel)

        self.opening = replace(usual, text=text)


def test_all_on_the_disk_are_served_and_loaded_when_asked_for(disk: Path) -> None:
    (disk / "broken.gguf").write_bytes(b"GGUF no more")
    said: list[str] = []
    with serve_several(opening(warn=said.append)) as server:
        assert [line for line in said if "broken" in line]
        data = [(each["id"], each["localspec"]) for each in ask(server, "/v1/models")["data"]]
        assert [(name, shown["loaded"]) for name, shown in data] == [("blue", False), ("code", False), ("red", False)]
        assert all(shown["size"] == (disk / f"{name}.gguf").stat().st_size for name, shown in data)
        assert [each["name"] for each in ask(server, "/api/tags")["models"]] == ["blue", "code", "red"]
        assert loaded(server) == []
        assert "insert" in ask(server, "/api/show", {"model": "code"})["capabilities"]  # without loading it
        assert "insert" not in ask(server, "/api/show", {"model": "red"})["capabilities"]
        assert ask(server, "/v1/localspec/stats?model=red")["loaded"] is False
        for name in ("red", "red:latest", "hf:acme/tiny/red.gguf"):
            assert ask(server, "/v1/chat/completions", chat(name))["model"] == "red"
        assert loaded(server) == ["red"]
        # A request that names none goes to the first that can do it.
        assert ask(server, "/v1/completions", {"prompt": "a", "max_tokens": 2})["model"] == "blue"
        fill = {"input_prefix": "a", "input_suffix": "b", "n_predict": 2}
        assert ask(server, "/infill", fill)["model"] == "code"
        assert sorted(loaded(server)) == ["blue", "code", "red"]
        assert ask(server, "/v1/localspec/stats?model=red")["loaded"] is True
        status, message = refused(server, "/v1/chat/completions", chat("green"))
        assert (status, message) == (404, "there is no model 'green' here; /v1/models lists those that are")
        message = refused(server, "/api/chat", {"model": "qwen2.5-coder-0.5b"})[1]
        assert message.startswith("qwen2.5-coder-0.5b is not on this disk; localspec pull qwen2.5-coder-0.5b")
        assert refused(server, "/v1/embeddings", {"input": "a"})[0] == 400
        _, _, metrics = server.ask("GET", "/metrics")
        assert b'localspec_requests_total{endpoint="chat",model="red",outcome="answered"} 3.0' in metrics
        assert b'localspec_model_loaded{model="code"} 1.0' in metrics


def test_files_of_one_name_are_told_apart(disk: Path) -> None:
    (models_dir() / "hf/acme/more").mkdir()
    shutil.copy(disk / "red.gguf", models_dir() / "hf/acme/more/red.gguf")
    with serve_several(aliases=["gpt-4"]) as server:
        assert sorted(each["id"] for each in ask(server, "/v1/models")["data"]) == ["blue", "code", "red", "red-2"]
        first, second = (ask(server, "/api/show", {"model": f"hf:acme/{repo}/red.gguf"}) for repo in ("tiny", "more"))
        assert {first["modelfile"], second["modelfile"]} == {"FROM red\n", "FROM red-2\n"}
        assert [model.names[-1] for model in server.host.models].count("gpt-4") == 1


def test_named_models_alone_are_served(disk: Path) -> None:
    how = opening(specs=[str(disk / "red.gguf"), "hf:acme/tiny/code.gguf"])
    with serve_several(how, aliases=["gpt-4"]) as server:
        assert [each["id"] for each in ask(server, "/v1/models")["data"]] == ["red", "code"]
        assert ask(server, "/v1/chat/completions", chat("gpt-4"))["model"] == "red"
        assert refused(server, "/v1/chat/completions", chat("blue"))[0] == 404
        status, message = refused(server, "/api/delete", {"model": "red"}, "DELETE")
        assert (status, (disk / "red.gguf").exists()) == (400, True)
        assert "a file of yours" in message


DURATIONS = {
    0: 0, 5: 5, 1.5: 1.5, "0": 0, "0s": 0, "300": 300, "5m": 300, "1h30m": 5400, "1.5h": 5400, "250ms": 0.25,
    "10µs": 1e-5, "+2s": 2, -1: None, "-1": None, "-1m": None, 1e30: None,
}  # fmt: skip


def test_keep_alive_has_ollama_s_forms() -> None:
    assert {value: read_keep_alive(value) for value in DURATIONS} == pytest.approx(DURATIONS)
    for value in ("forever", "", "5 m", "m", True, "1e9", [], "--5m", "1" * 1_000_000, "111s" * 24 + "x"):
        with pytest.raises(ValueError, match="no duration"):
            read_keep_alive(value)


def test_a_model_stays_as_long_as_was_said(disk: Path) -> None:
    with serve_several(keep_alive=3600.0) as server:

        def generate(**more: Any) -> Any:
            return ask(server, "/api/generate", {"model": "red", "stream": False, **more})

        assert generate()["done_reason"] == "load"
        (shown,) = ask(server, "/api/ps")["models"]
        assert 0 < shown["size"] == server.host.named("red").plan.needed.ram
        assert "T" in shown["expires_at"]
        assert generate(keep_alive=-1)["done_reason"] == "load"
        (shown,) = ask(server, "/api/ps")["models"]
        assert int(shown["expires_at"][:4]) > time.gmtime().tm_year + 50
        # Asked for nothing and 0, it goes at once; with a question it answers first.
        assert generate(keep_alive=0)["done_reason"] == "unload"
        gone(server)
        assert generate(keep_alive=0)["done_reason"] == "unload"  # and is not loaded for that
        for time_to_stay in ("0s", "50ms"):
            first = generate(prompt="a", keep_alive=time_to_stay, options={"num_predict": 3})
            assert (first["eval_count"], first["total_duration"] >= first["load_duration"]) == (3, True)
            gone(server)
        status, message = refused(server, "/api/generate", {"model": "red", "keep_alive": "soon"})
        assert (status, message.startswith("keep_alive must be a duration")) == (400, True)
        # While it answers, it stays; also where it is to go.
        generate()
        assert generate(prompt="a", options={"num_predict": 3})["load_duration"] < first["load_duration"]
        with held(server, "red"):
            assert ask(server, "/models/unload", {"model": "red"}) == {"success": True}
            assert loaded(server) == ["red"]
        gone(server)


def test_one_that_is_used_least_recently_makes_room(disk: Path) -> None:
    with serve_several(prefix_cache=0) as server:
        server.host.memory = Space(sum(sorted(needs(server))[1:]), 0)
        for name, expected in (
            ("blue", ["blue"]),
            ("code", ["blue", "code"]),
            ("blue", ["blue", "code"]),
            ("red", ["blue", "red"]),
            ("code", ["code", "red"]),
        ):
            ask(server, "/v1/chat/completions", chat(name))
            assert sorted(loaded(server)) == expected


def test_one_that_can_never_fit_is_refused_with_the_numbers(disk: Path) -> None:
    with serve_several(memory=100_000) as server:
        status, message = refused(server, "/v1/chat/completions", chat("red"))
        assert (status, "with a context of 512 tokens" in message) == (400, True)
        assert message.endswith("may take 100 kB (--memory)")
        assert ask(server, "/v1/localspec/models")["models"][0]["fits"] is False
        assert refused(server, "/v1/messages", chat("red"))[1] == message
    ggufs.write_llama(disk / "alpha.gguf", SHAPE, ggufs.bpe_vocab(4000), seed=1)
    with serve_several(prefix_cache=0) as server:
        server.host.memory = server.host.named("blue").plan.needed
        assert not server.host.fits(server.host.named("alpha"))  # what names none goes to one that fits
        assert ask(server, "/v1/completions", {"prompt": "a", "max_tokens": 1})["model"] == "blue"


def test_a_gpu_has_a_budget_of_its_own(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_several(gpu_memory=1 << 30, prefix_cache=0) as server:
        blue, _, red = server.host.models
        assert (blue.plan.load.n_gpu_layers, blue.plan.needed) == (-1, Space(0, red.plan.needed.gpu))  # all of it
        most = max(model.plan.needed.gpu for model in server.host.models)
    monkeypatch.setattr(hosting, "_taken", lambda *given, **more: Space(0, most))  # as if there was one
    with serve_several(gpu_memory=2 * most, prefix_cache=0) as server:
        for name in ("blue", "code", "red"):
            ask(server, "/v1/chat/completions", chat(name))
        assert sorted(loaded(server)) == ["code", "red"]  # there was room for blue in the machine's memory
        found = ask(server, "/v1/localspec/models")
        assert found["gpu_memory"] == {"limit": 2 * most, "taken": 2 * most}
        assert found["memory"]["taken"] == 0
        assert [each["size_vram"] for each in ask(server, "/api/ps")["models"]] == [most, most]
        ask(server, "/models/unload", {"model": "red"})
        wait_until(lambda: server.host.room.gpu == most, "red is unloaded")
    # Where it does not hold all layers, it is given some; those that were asked for are too many.
    with serve_several(gpu_memory=blue.plan.needed.gpu - 1, prefix_cache=0) as server:
        part = server.host.models[0].plan
        assert part.load.n_gpu_layers in (0, 1, 2)
        assert 0 < part.needed.ram < blue.plan.needed.gpu
        assert part.needed.gpu < blue.plan.needed.gpu
    with serve_several(opening({"n_gpu_layers": 3}), gpu_memory=1000, prefix_cache=0) as server:
        status, message = refused(server, "/v1/chat/completions", chat("red"))
        assert (status, "on the GPU" in message) == (400, True)
        assert not any(each["fits"] for each in ask(server, "/v1/localspec/models")["models"])


def test_what_does_not_fit_beside_what_answers_waits(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_several(prefix_cache=0) as server:
        blue, _, red = server.host.models
        server.host.memory = Space(max(needs(server)), 0)
        answers: list[str] = []

        def one(model: str) -> None:
            answers.append(ask(server, "/v1/chat/completions", chat(model))["model"])

        with ThreadPoolExecutor() as pool, held(server, "red"):
            pool.submit(one, "blue")
            wait_until(lambda: blue.n_waiting == 1, "it waits")
            assert loaded(server) == ["red"]
            # At first, what is loaded goes on answering; then its requests come after the one that waits.
            pool.submit(one, "red").result()
            assert answers == ["red"]
            monkeypatch.setattr(hosting, "GRACE_S", 0.0)
            pool.submit(one, "red")
            wait_until(lambda: red.n_waiting == 1, "it waits too")
        assert answers == ["red", "blue", "red"]
        assert server.host.room.ram >= 0


def test_where_memory_is_short_a_model_is_loaded_with_less(disk: Path) -> None:
    how = opening({"parallel": 2})
    with serve_several(how, prefix_cache=0) as server:
        plan = server.host.named("red").plan
        most = plan.needed.ram
        assert (plan.load.parallel, plan.drafts) == (2, True)
    for memory in (most, most - 1):
        with serve_several(how, prefix_cache=0, memory=memory) as server:
            model = server.host.named("red")
            assert model.plan.load.parallel == (2 if memory == most else 1)
            ask(server, "/v1/chat/completions", chat("red"))
            assert 0 < model.taken.ram <= memory


def test_the_packages_of_all_apis(disk: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finds the models, has one loaded and another, and reads past the signs of life of a stream that waits for
    its model; Ollama's has them fetched, unloaded and deleted too."""
    ollama = pytest.importorskip("ollama")
    monkeypatch.setattr("localspec.server.events.KEEP_ALIVE_SECONDS", 0.05)
    with ExitStack() as stack:
        server = stack.enter_context(serve_several(Gate(seconds=0.3).opening))
        for name, kind in APIS.items():
            api = kind(server.url, "red")
            three = stack.enter_context(closing(api.package))  # Ollama's in the end
            if name != "ollama":
                assert [model.id for model in three.models.list()] == ["blue", "code", "red"]
            assert api.ask(n=3, stream=True).n <= 3
            assert loaded(server) == ["red"]
            ask(server, "/models/unload", {"model": "red"})
            gone(server)
            with pytest.raises(api.error, match="no model 'green' here"):
                api.ask(model="green")
        with pytest.raises(ollama.ResponseError) as caught:
            three.show("green")
        assert caught.value.status_code == 404  # which has `ollama run` fetch it
        steps = list(three.pull("hf:acme/more/green.gguf", stream=True))
        assert steps[-1].status == "success"
        assert any(step.total == step.completed == (disk / "blue.gguf").stat().st_size for step in steps)
        assert three.pull("hf:acme/more/green.gguf").status == "success"
        assert list(three.generate("green", "a", stream=True, options={"num_predict": 2}))[-1].done
        with held(server, "green"):
            assert refused(server, "/api/delete", {"model": "green"}, "DELETE")[0] == 409
        assert three.generate("green", keep_alive=0).done_reason == "unload"
        wait_until(lambda: not three.ps().models, "it is unloaded")
        assert three.delete("green").status == "success"
        assert not (models_dir() / "hf/acme/more/green.gguf").exists()
        assert {model.model for model in three.list().models} == {"blue", "code", "red"}
        assert refused(server, "/v1/chat/completions", chat("green"))[0] == 404
        assert refused(server, "/api/delete", {"model": "green"}, "DELETE")[0] == 404
        status, message = refused(server, "/api/pull", {"model": "qwen2.5-coder-0.6b"})
        assert (status, "did you mean" in message) == (404, True)
        with pytest.raises(ollama.ResponseError):
            list(three.pull("hf:acme/more/none.gguf", stream=True))


def test_too_many_that_wait_are_turned_away(disk: Path) -> None:
    gate = Gate()
    with serve_several(gate.opening, queue=2) as server, ThreadPoolExecutor() as pool:
        waiting = [pool.submit(ask, server, "/v1/chat/completions", chat("red")) for _ in range(2)]
        wait_until(lambda: server.host.named("red").n_waiting == 2, "as many as may wait once it is loaded")
        refusal = refused(server, "/v1/chat/completions", chat("red"))
        gate.go_on.set()
        assert refusal == (429, "2 requests wait for a model already")
        assert [each.result()["model"] for each in waiting] == ["red", "red"]


def test_streams_live_while_a_model_is_loaded(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localspec.server.events.KEEP_ALIVE_SECONDS", 0.05)
    signs = {"/v1/messages": b"event: ping\n", "/api/chat": b"  ", "/api/generate": b"  "}
    for path, body in requests_of("red", "hi", 4)[1::2]:
        gate = Gate()
        with serve_several(gate.opening) as server, server.connect() as sock:
            sock.sendall(post(body, path))
            begun = heard(sock, signs.get(path, b": waiting\n\n"))
            assert begun.startswith(b"HTTP/1.1 200")
            assert loaded(server) == []
            gate.go_on.set()
            assert b"localspec" in heard(sock, b"\r\n0\r\n\r\n", begun)  # the figures at the end
            assert loaded(server) == ["red"]
            ask(server, "/models/unload", {"model": "red"})  # no stream holds it any more
            gone(server)


def test_a_stream_tells_how_far_its_model_is_loaded_where_it_is_asked(disk: Path) -> None:
    gate = Gate()
    body = chat("red", stream=True, stream_options={"localspec_rounds": True})
    with serve_several(gate.opening) as server, server.connect() as sock:
        sock.sendall(post(body))
        begun = heard(sock, b'"doing":"waiting","fraction":0.5')
        gate.go_on.set()
        said = heard(sock, b"\r\n0\r\n\r\n", begun)
        names = [line[7:].decode().strip() for line in said.splitlines() if line.startswith(b"event: ")]
        assert [name for name, _ in groupby(names)] == ["localspec.loading", "localspec.round"]
        assert b'"doing":"loaded","fraction":1.0' in said
        # One that is loaded says nothing of it, nor does a stream that does not ask.
        assert b"localspec.loading" not in server.ask("POST", "/v1/chat/completions", body)[2]


def test_a_client_that_leaves_while_a_model_is_loaded(disk: Path) -> None:
    gate = Gate("red")
    with serve_several(gate.opening, keep_alive=3600.0) as server:
        for wanted in ("", "blue"):
            gate.begun.clear()
            with server.connect() as sock:
                sock.sendall(post(chat("red", stream=True)))
                assert gate.begun.wait(60)
            wait_until(lambda: server.host.named("red").n_waiting == 0, "it has left")
            assert server.host.named("red").state == "loading"
            if wanted:  # another is asked for: what nobody waits for gives way
                assert ask(server, "/v1/chat/completions", chat(wanted))["model"] == wanted
                assert loaded(server) == [wanted]
            else:  # a client that asks again later finds it
                gate.go_on.set()
                wait_until(lambda: loaded(server) == ["red"], "it is loaded all the same")
                ask(server, "/models/unload", {"model": "red"})
                gone(server)
                gate.go_on.clear()


def test_a_load_that_fails_is_one_error_and_the_next_works(disk: Path) -> None:
    whole = (disk / "red.gguf").read_bytes()
    with serve_several() as server:
        (disk / "red.gguf").write_bytes(whole[: len(whole) // 2])
        for path, body in requests_of("red", "a", 2):
            status, message = refused(server, path, body)
            assert status >= 400
            assert ("red.gguf" in message, "\n" in message) == (True, False)
        shown = {each["name"]: each for each in ask(server, "/v1/localspec/models")["models"]}
        assert "red.gguf" in shown["red"]["error"]
        assert server.host.room == server.host.memory
        ask(server, "/v1/chat/completions", chat("blue"))
        (disk / "red.gguf").write_bytes(whole)
        ask(server, "/v1/chat/completions", chat("red"))


def test_the_server_ends_while_a_model_is_loaded(disk: Path) -> None:
    gate = Gate()
    with ThreadPoolExecutor() as pool:
        with serve_several(gate.opening) as server:
            asked = pool.submit(server.ask, "POST", "/v1/chat/completions", chat("red"))
            assert gate.begun.wait(60)
        assert asked.result()[0] == 503  # the server has stopped, and did not wait for the gate
    assert server.host.named("red").service is None


def test_rounds_of_two_models_alternate(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, order = Turns(), list[str]()
    with (
        LLM(disk / "red.gguf", None, backend="reference") as one,
        LLM(disk / "blue.gguf", None, backend="reference") as two,
    ):
        both = threading.Barrier(2)

        def answer(llm: LLM, name: str) -> None:
            def counted(n: int) -> None:
                order.append(name)
                time.sleep(0.002)  # so that the other asks for its turn meanwhile

            llm.take_turns(turns)
            watch_passes(llm.inspect().context, monkeypatch, after=counted)
            both.wait()
            llm.generate("a", max_tokens=60, ignore_eos=True)

        with ThreadPoolExecutor() as pool:
            asked = [pool.submit(answer, *each) for each in ((one, "one"), (two, "two"))]
        assert all(each.exception() is None for each in asked)
    together = order[20:80]
    assert sum(a != b for a, b in pairwise(together)) > 0.9 * len(together)


def requests_of(model: str, text: str, n: int, fills: bool = False) -> list[tuple[str, dict[str, Any]]]:
    """A request of every API that a model can answer, in both forms."""
    found = [(path, body) for path, body in asking(text, n, seed=1).items() if fills or path != "/infill"]
    return [(path, body | {"model": model, "stream": stream}) for path, body in found for stream in (False, True)]


def test_mixed_requests_are_answered_as_one_after_the_other(disk: Path) -> None:
    """In turns of several clients, some of which leave, with memory for two of the models at a time."""
    asked = [
        each
        for model in ("blue", "code", "red")
        for text in ("hi", "the cat sat")
        for each in requests_of(model, text, 6, model == "code")
    ]
    if unavailable_reason("llama-cpp") is None:
        write_bert(disk / "bert.gguf")
        asked += [("/api/embed", {"model": "bert", "input": text}) for text in ("the cat", "a dog")]
    with serve_several(keep_alive=0.2, queue=64, prefix_cache=0) as server:

        def said(path: str, body: dict[str, Any]) -> str:
            status, _, answer = server.ask("POST", path, body)
            assert status == 200, (path, body, answer)
            return said_by(answer)

        expected = [said(*each) for each in asked]
        by_model = {body["model"]: text for (path, body), text in zip(asked, expected, strict=True) if "chat" in path}
        assert len(set(by_model.values())) == 3  # each says something else
        server.host.memory = Space(sum(sorted(needs(server))[-2:]), 0)
        which = random.Random(1).choices(range(len(asked)), k=120)

        def ask_one(n: int) -> int:
            taken = sum(model.taken.ram for model in server.host.models)
            path, body = asked[i := which[n]]
            if n % 10:
                assert said(path, body) == expected[i], (path, body)
            else:
                with server.connect() as sock:
                    sock.sendall(post(body, path))
                    time.sleep(0.02)
            return taken

        with ThreadPoolExecutor(6) as pool:
            most = max(pool.map(ask_one, range(len(which))))
        assert most <= server.host.memory.ram
        wait_until(lambda: not any(model.n_uses or model.n_waiting for model in server.host.models), "none is stuck")
        wait_until(lambda: server.host.room == server.host.memory, "all are unloaded in the end")


@pytest.mark.skipif(unavailable_reason("llama-cpp") is not None, reason="no llama-cpp here")
def test_an_embedder_beside_the_others(disk: Path) -> None:
    write_bert(disk / "bert.gguf")
    with serve_several() as server:
        found = ask(server, "/v1/embeddings", {"model": "GPT-4", "input": "a dog"})  # as llama.vscode calls every model
        assert found["model"] == "bert"
        rows = ask(server, "/api/embed", {"model": "bert", "input": "a dog"})["embeddings"]
        assert rows == [found["data"][0]["embedding"]]
        assert ask(server, "/api/show", {"model": "bert"})["capabilities"] == ["embedding"]
        assert ask(server, "/v1/chat/completions", chat("red"))["model"] == "red"
        assert sorted(loaded(server)) == ["bert", "red"]
        assert "makes embeddings" in refused(server, "/v1/chat/completions", chat("bert"))[1]
        assert "continues text" in refused(server, "/api/embed", {"model": "red", "input": "a"})[1]
        assert ask(server, "/api/embed", {"model": "bert", "keep_alive": 0})["embeddings"] == []
        gone(server, "red")
