"""``serve --parallel N``: several clients at a time, each answered as if it were alone, whatever the others do."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from localspec import LLM
from localspec.server.app import ServerProtocol
from tests.conftest import TinyFiles, open_backend
from tests.support.memory import check_only_conversations_are_held, passes_of, share_every_pass
from tests.support.serving import Server, post, read_all, said_by, serve
from tests.support.waiting import PATIENCE, Brake, wait_until

SERVE: dict[str, Any] = {"queue": 20}

N = 3

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"

TEXT = "la la lo la le la "


both_engines = pytest.mark.parametrize("llm", ["reference", "llama-cpp"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def llm(request: pytest.FixtureRequest, tiny: TinyFiles, module_home: Path) -> Iterator[LLM]:
    engine = getattr(request, "param", "reference")
    open_backend(engine)
    files = tiny.quick if engine == "reference" else tiny.pair
    with LLM(files.target, draft="ngram", backend=engine, n_ctx=512, parallel=N) as loaded:
        yield loaded


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM, server: Server) -> Iterator[None]:
    """Whatever the clients did, nobody runs or waits at the end, and every cell in use belongs to a conversation."""
    yield
    server.wait_idle()
    llm.run(check_only_conversations_are_held)


def body_of(i: int, **changes: Any) -> dict[str, Any]:
    """A text to continue, each another; greedy."""
    return {"prompt": TEXT * (1 + i % 4) + str(i), "max_tokens": 30 + 7 * i % 25, "ignore_eos": True} | changes


def asked(server: Server, n: int, *, in_turns: bool = False, **changes: Any) -> Callable[[], list[bytes]]:
    """Sends so many requests; the next when the server has the one before, if in turns. Called, it waits for the
    answers."""
    pool, llm = ThreadPoolExecutor(n), server.service.llm
    answers, before = [], n_here(llm)
    for i in range(n):
        answers.append(pool.submit(server.ask, "POST", "/v1/completions", body_of(i, **changes)))
        if in_turns:
            wait_until(lambda i=i: n_here(llm) == before + i + 1)
    pool.shutdown(wait=False)

    def answered() -> list[bytes]:
        found = [each.result(PATIENCE) for each in answers]
        assert [status for status, _, _ in found] == [200] * n
        return [answer for _, _, answer in found]

    return answered


def n_here(llm: LLM) -> int:
    """How many requests run or wait."""
    return llm.parallel_info()["running"] + llm.queue_length


def closing_post(body: Any) -> bytes:
    return post(body, "/v1/completions", extra="Connection: close\r\n")


def texts_of(streamed: bytes) -> str:
    """The text of a streamed completion; it came to its end."""
    assert streamed.rstrip(b"\r\n0").endswith(b"data: [DONE]"), streamed[-300:]
    lines = [line for line in streamed.decode().splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for line in lines for choice in json.loads(line[6:])["choices"])


@both_engines
def test_who_hangs_up_in_mid_answer_changes_nobody_else(server: Server, llm: LLM) -> None:
    alone = [said_by(server.ask("POST", "/v1/completions", body_of(i))[2]) for i in range(2)]
    cancelled = server.service.metrics.requests["completions", "cancelled"]
    with Brake(llm, after=4) as brake, server.connect() as first, server.connect() as last:
        first.sendall(closing_post(body_of(8, stream=True, max_tokens=400)))
        brake.wait()
        answered = asked(server, 2, in_turns=True)
        last.sendall(closing_post(body_of(9, max_tokens=400)))  # waits for one of the others
        wait_until(lambda: n_here(llm) == 4)
        for sock in (first, last):
            sock.close()
        wait_until(lambda: n_here(llm) == 2)
        brake.release()
        assert [said_by(answer) for answer in answered()] == alone or llm.backend_name != "reference"
    wait_until(lambda: server.service.metrics.requests["completions", "cancelled"] == cancelled + 2)


def small_buffers(server: Server, sock: socket.socket) -> None:
    """Connect, so that a few kilobytes that are not read are all that fits in between."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(PATIENCE)
    sock.connect(("127.0.0.1", server.port))
    port = sock.getsockname()[1]

    def found() -> list[Any]:
        connections = list(server.runner.server_state.connections)
        return [each for each in connections if each.transport.get_extra_info("peername")[1] == port]

    wait_until(found)
    found()[0].transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


def test_who_reads_slowly_has_the_whole_answer_and_holds_nobody_up(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServerProtocol, "stall_seconds", PATIENCE)
    body = body_of(5, max_tokens=250, stream=True)
    alone = texts_of(server.ask("POST", "/v1/completions", body)[2])
    with closing(socket.socket()) as slow:
        small_buffers(server, slow)
        slow.sendall(closing_post(body | {"stream_options": {"localspec_rounds": True}}))  # as many bytes as can be had
        begin = slow.recv(100)
        asked(server, 2 * N)()  # all that time nothing was read
        server.wait_idle()  # and its answer is there too
        whole = texts_of(begin + read_all(slow, 700))
    assert whole == alone


def test_who_does_not_read_at_all_is_dropped_and_the_others_go_on(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServerProtocol, "stall_seconds", 0.2)
    with closing(socket.socket()) as silent:
        small_buffers(server, silent)
        body = body_of(5, max_tokens=450, stream=True, stream_options={"localspec_rounds": True})
        silent.sendall(closing_post(body))
        asked(server, N)()
        server.wait_idle()
        wait_until(lambda: not server.runner.server_state.connections)


def stats_of(server: Server) -> dict[str, Any]:
    return json.loads(server.ask("GET", "/v1/localspec/stats")[2])


def test_the_figures_say_how_many_run_and_wait(server: Server, llm: LLM) -> None:
    with Brake(llm, after=0) as brake:
        answered = asked(server, N + 2, in_turns=True)
        stats, metrics = stats_of(server), server.ask("GET", "/metrics")[2].decode()
        assert stats["parallel"]["parallel"] == N
        assert stats["parallel"]["running"] + stats["queue"]["waiting"] == N + 2
        assert stats["queue"]["running"] is True
        assert f"localspec_requests_running {stats['parallel']['running']}" in metrics
        brake.release()
        answers = answered()
    server.wait_idle()
    assert stats_of(server)["parallel"]["running"] == 0
    explained = [json.loads(answer)["localspec"]["explanation"] for answer in answers]
    assert any("Shared with other answers" in each for each in explained)


def test_the_figures_say_what_the_rows_of_shared_passes_were_for(
    server: Server, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are counted where they are decoded, and compared with what the answers say of themselves."""
    share_every_pass(monkeypatch)
    passes = passes_of(llm.inspect().state.batch, monkeypatch)
    before = stats_of(server)["parallel"]["passes"]
    with Brake(llm, after=0) as brake:
        answered = asked(server, N, in_turns=True, localspec={"draft_length": 3}, max_tokens=20)
        brake.release()
        stats = [json.loads(answer)["localspec"]["stats"] for answer in answered()]
    server.wait_idle()
    after = stats_of(server)["parallel"]["passes"]
    rows = {name: after["rows"][name] - before["rows"][name] for name in after["rows"]}
    assert after["passes"] - before["passes"] == len(passes)
    assert rows["drafts"] == sum(each["num_draft_tokens"] for each in stats) > 0
    assert rows["answers"] == sum(each["num_rounds"] for each in stats)
    assert sum(rows.values()) == sum(len(piece.tokens) for pieces in passes for piece in pieces)
    assert max(map(len, passes)) == N
    assert after["mean_answers"] > 1
    n_pieces = before["mean_answers"] * before["passes"] + sum(map(len, passes))
    assert after["mean_answers"] == pytest.approx(n_pieces / after["passes"], abs=0.002)  # both are rounded


@both_engines
def test_the_end_of_the_server_ends_all_that_run_and_wait(llm: LLM) -> None:
    with serve(llm) as other, Brake(llm, after=2 * N) as brake, ExitStack() as stack:
        socks = [stack.enter_context(closing(other.connect())) for _ in range(N + 2)]
        for i, sock in enumerate(socks):
            sock.sendall(closing_post(body_of(i, max_tokens=400, stream=i % 2 == 0)))
        brake.wait()
        wait_until(lambda: n_here(llm) == N + 2)
        other.runner.stop()
        answers = [read_all(sock) for sock in socks]
    assert all(b"shutting_down" in answer for answer in answers)
    assert not any(b"[DONE]" in answer for answer in answers)
    assert not llm.busy


def test_under_load_nothing_is_lost_mixed_up_or_stuck(tiny: TinyFiles, tmp_path: Path) -> None:
    """A short soak; the long one is run by hand, its figures are in benchmarks/results/soak.md."""
    pair = ["--draft", "ngram", "--draft", tiny.quick.draft, "--backend", "reference", "--gap", "0", "--parallel", "3"]
    out = tmp_path / "soak.json"
    size = ["--requests", "100", "--clients", "6", "--questions", "10", "--json", out]
    command = [sys.executable, SOAK, tiny.quick.target, *pair, *size]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["failures"] == []
    assert found["parallel"] == "3"
    assert found["requests"] >= 100
    assert found["greedy_equal"] > 40
    assert found["greedy_near_ties"] == 0
    assert found["server"]["failed"] == 0
    assert found["server"]["cancelled"] > 0
    assert found["memory_mb"]["growth"] < 50
    assert "Traceback" not in done.stderr
