"""The real llama.vim, in a real vim and Neovim: a suggestion appears while one types, and Tab takes it.

``LOCALSPEC_TEST_LLAMA_VIM`` names a checkout of github.com/ggml-org/llama.vim; without one the test is skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec import LLM, SamplingParams
from tests.conftest import TinyFiles
from tests.support.serving import Server, serve
from tests.support.tmux import Tmux
from tests.support.waiting import wait_until

PLUGIN = Path(os.environ.get("LOCALSPEC_TEST_LLAMA_VIM") or "missing")
SAID = "the an in on"
LINES = [f"def area_{i}(r):" for i in range(30)]


@pytest.fixture
def server(tiny: TinyFiles) -> Iterator[Server]:
    if not (PLUGIN / "autoload" / "llama.vim").is_file():
        pytest.skip("LOCALSPEC_TEST_LLAMA_VIM names no checkout of llama.vim")
    if not shutil.which("curl"):
        pytest.skip("curl is not installed")
    # A tiny model talks gibberish; a grammar has it say something that can be told from the file.
    params = SamplingParams(grammar=f'root ::= "{SAID}"')
    with LLM(tiny.fim.target, draft=["ngram"], backend="reference", n_ctx=2048) as llm, serve(llm, params=params) as it:
        yield it


@pytest.mark.parametrize("editor", ["vim", "nvim"])
def test_a_suggestion_appears_and_is_taken(server: Server, tmp_path: Path, editor: str) -> None:
    if not shutil.which(editor):
        pytest.skip(f"{editor} is not installed")
    asked = subprocess.run(
        [editor, "-es", "-u", "NONE", "-i", "NONE", "-c", "if !exists('*extendnew') | cquit | endif", "-c", "qall!"],
        stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    if asked.returncode:
        pytest.skip(f"this {editor} is too old for llama.vim")
    vimrc, file = tmp_path / "vimrc", tmp_path / "area.py"
    vimrc.write_text(
        f"set nocompatible noswapfile\n"
        f"let g:llama_config = {{'endpoint_fim': '{server.url}/infill', 'n_predict': 16}}\n"
        f"set runtimepath^={PLUGIN}\n",
        encoding="utf-8",
    )
    file.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    vim = Tmux([editor, "-u", str(vimrc), "-i", "NONE", str(file)], tmp_path, {"TERM": "xterm-256color"}, columns=160)
    try:
        if "Press ENTER" in vim.wait(lambda screen: "Press ENTER" in screen or LINES[-1] in screen):
            vim.keys("Enter")  # the plugin tells vim 9.0 that it is old
            vim.wait(LINES[-1])
        vim.keys("1", "0", "G", "o")
        vim.keys("-l", "return it:")
        shown = vim.wait(lambda screen: f"return it:{SAID}" in screen and re.search(r"\| g: [1-9]", screen))
        assert "| p: " in shown  # the plugin's line of figures, made of the timings
        assert SAID not in file.read_text(encoding="utf-8")
        vim.keys("Tab", "Escape")
        vim.keys("-l", ":w")
        vim.keys("Enter")
        wait_until(lambda: SAID in file.read_text(encoding="utf-8"), "the file is written")
    finally:
        vim.close()
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines[:10] + lines[11:] == LINES
    assert lines[10].strip() == f"return it:{SAID}"  # Neovim indents
    server.wait_idle()
    assert server.service.metrics.requests["infill", "answered"] >= 1
    assert not any(outcome in ("invalid", "failed") for _, outcome in server.service.metrics.requests)
