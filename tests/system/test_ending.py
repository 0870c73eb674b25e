"""Programs that end with a model open, and those that fork: no abort, no traceback, no wait, and the parent goes on."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import pytest

from tests.conftest import TinyFiles, open_backend

FORKING = """
import asyncio, gc, multiprocessing, os, sys, threading
from localspec import LLM, Closed, SamplingParams

path, backend, *ways = sys.argv[1:]
params = SamplingParams(max_tokens=3, ignore_eos=True)
llm = LLM(path, draft=None, backend=backend, n_ctx=128, n_threads=1)
session = llm.session(params=params)
expected = llm.generate("hi", params).token_ids
held, entered = threading.Event(), threading.Event()

def busy(pair):
    entered.set()
    held.wait(60)

caller = threading.Thread(target=llm.run, args=(busy,))
caller.start()
entered.wait(60)
waiting = llm.rounds("hi", params)

async def ask():
    await llm.agenerate("hi", params)

def child():
    global llm, session, waiting
    refused = 0
    for use in (
        lambda: llm.generate("hi", params), lambda: llm.chat("hi"), lambda: list(llm.stream("hi")),
        lambda: llm.logprobs("hi"), lambda: llm.set_draft(None), lambda: session.chat("hi"),
        lambda: session.save("x.session"), lambda: asyncio.run(ask()), lambda: waiting.reply,
    ):
        try:
            use()
        except Closed as error:
            assert "forked" in str(error) and chr(10) not in str(error)
            refused += 1
    assert llm.tokenize("hi") and llm.queue_length == 0 and not llm.busy
    print(refused, "refused", flush=True)
    if way == "close":
        llm.close()
    llm = session = waiting = None
    gc.collect()
    if way == "load":
        with LLM(path, draft=None, backend=backend, n_ctx=128, n_threads=1) as another:
            assert another.generate("hi", params).token_ids == expected

def forked():
    pair = llm.inspect()
    with pair.worker.queue._changed, pair.encoder._in_use.alone():  # as others may have them
        pid = os.fork()
    return pid

statuses = []
for way in ways:
    if way == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        statuses.append(process.exitcode)
    elif (pid := forked()) == 0:
        child()
        sys.exit(0)
    else:
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
held.set()
caller.join()
assert waiting.reply.token_ids == llm.generate("hi", params).token_ids == expected
llm.close()
print(*statuses)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("backend", ["reference", "ik-llama", "llama-cpp", "mlx"])
def test_an_llm_in_forked_children(tiny: TinyFiles, backend: str) -> None:
    ways = ["close", "drop", *(["load"] if backend != "mlx" else [])]  # MLX is refused in a child
    ways += ["multiprocessing"] if "fork" in multiprocessing.get_all_start_methods() else []
    open_backend(backend)
    command = [sys.executable, "-W", "ignore", "-c", FORKING, str(tiny.quick.target), backend, *ways]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    expected = "9 refused\n" * len(ways) + " ".join("0" for _ in ways) + "\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


ENDING = """
import sys, threading, time
from localspec import LLM, SamplingParams

llm = LLM(sys.argv[1], draft=None, backend=sys.argv[2], n_ctx=1024, n_threads=1)
for _ in range(2000 if sys.argv[3] == "busy" else 0):  # until a measurement, which the answer interrupts, has begun
    items = llm.inspect().worker.idle._entries[1:]  # behind what reads ahead
    if not items or items[0].due > time.monotonic() or items[0].steps:
        break
    time.sleep(0.001)
print(llm.generate("hello", SamplingParams(max_tokens=4)).stats["completion_tokens"])
started = threading.Event()
if sys.argv[3] == "idle work":

    def task(stopped):
        with llm.inspect().target.new_context(1024) as context:
            started.set()
            while not stopped():
                context.decode([5] * 64, "none")
                context.truncate(0)
        yield

    llm.inspect().worker.when_idle(task)
    started.wait()
if sys.argv[3] == "busy":  # the program ends while its model answers
    endless = SamplingParams(max_tokens=1000, ignore_eos=True)
    threading.Thread(target=lambda: [started.set() for _ in llm.stream("hello", endless)], daemon=True).start()
    started.wait()
"""


@pytest.mark.parametrize("way", ["idle", "busy", "idle work"])
@pytest.mark.parametrize("backend", ["ik-llama", "llama-cpp", "mlx", "reference"])
def test_nobody_closed_the_model(tiny: TinyFiles, backend: str, way: str) -> None:
    """Left alone, MLX aborts one process in three."""
    open_backend(backend)
    for _ in range(2 if backend == "mlx" else 1):
        command = [sys.executable, "-c", ENDING, str(tiny.quick.target), backend, way]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")
