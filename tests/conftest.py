"""Shared fixtures: tiny model files, the engines to run them on, and real models where this machine has them."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from localspec.backends.base import Model
from localspec.backends.registry import engine_module, unavailable_reason
from localspec.system.files import models_dir
from tests.support import ggufs
from tests.support.browsing import chromium
from tests.support.embedders import write_bert
from tests.support.gguf_vocabs import fim_vocab
from tests.support.mlx_ggufs import TinyFile

# A shell that starts pytest in the background makes it, and all it starts, ignore Ctrl-C; the tests send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same cases on every run and every machine, however slow it is; none from an earlier run's folder.
settings.register_profile(
    "tests", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

ENGINES = ("llama-cpp", "ik-llama", "mlx", "reference")

REAL_MODELS = {
    "qwen2.5-coder-1.5b": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    "qwen2.5-coder-0.5b": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "smollm2-135m": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3-270m": "gemma-3-270m-q4_k_m.gguf",
}

REAL_FOLDER = Path(os.environ.get("LOCALSPEC_TEST_MODELS") or models_dir())  # Read before ``isolated_home`` hides it


ONCE_PER_FILE = ("calibration", "digests", "drafts", "engines", "repacked", "trials", "trust")
"""Folders of a home that say nothing of what was asked, only of files and the machine."""


ENGINES_ONCE_PER_FILE = ("calibration", "digests", "engines", "trials", "trust")
"""Those of them that say how fast and how right an engine is, and nothing of lighter copies."""


TERMINAL_SETTINGS = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "COLUMNS", "LINES")


REAL_SECONDS = 1800
"""Until a test of real models is given up: it may be the one that measures and checks them, on a busy machine too."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("localspec")
    group.addoption("--one-in", type=int, default=1, metavar="N", help="run one in N tests of a module, at least one")
    group.addoption("--first", type=int, default=0, metavar="I", help="with --one-in: count from this test")
    group.addoption("--failures-at-once", action="store_true", help="print each failure when it comes too")


def pytest_configure(config: pytest.Config) -> None:
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # trainings of the same shapes are compiled once, not in each run
        folder = tempfile.TemporaryDirectory(prefix="localspec-jax-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    if config.getoption("failures_at_once"):
        config.pluginmanager.register(FailuresAtOnce(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("real") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(REAL_SECONDS))
    one_in, first = config.getoption("one_in"), config.getoption("first")
    if one_in > 1:
        modules = [list(tests) for _, tests in groupby(items, lambda item: item.path)]
        kept = [item for tests in modules for item in tests[first % len(tests) % one_in :: one_in]]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


def pytest_collection(session: pytest.Session) -> None:
    """Keep the garbage collector from modules and test items, which stay: a look at them all takes it 0.7 s."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


class FailuresAtOnce:
    """Prints each failure when it comes: a run that is cut off has shown those until then."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.getplugin("terminalreporter")
        if report.failed and terminal is not None:  # the workers of xdist have none
            terminal.write_line(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}")


class TinyFiles:
    """Model files of a few hundred kilobytes, each written when it is first asked for."""

    spm: Path  # SentencePiece vocabulary, F32: the engines agree on it to a few thousandths of a logit
    bpe: Path  # byte-level BPE with ChatML's special tokens, Q8_0
    pair: ggufs.Pair  # target and draft with one BPE vocabulary; the draft is right about two times in three
    quick: ggufs.Pair  # a pair for the reference backend that takes 0.1 ms a token
    fim: ggufs.Pair  # as ``quick``, with Qwen's tokens of fill-in-the-middle
    micro: Path  # five tokens; reference backend only
    micro_draft: Path  # a draft for ``micro`` that is a different model
    sliding: Path  # a Gemma 3 with a window of 32 tokens
    recurrent: Path  # a Mamba: its memory cannot be rewound
    convolutions: Path  # an LFM2: some layers keep the last rows of a convolution, the others keys and values
    hybrid: Path  # a Qwen 3.5: some layers keep a state that cannot be rewound, the others keys and values
    trap: Path  # a sound file that ik-llama computes wrongly in wide passes
    experts: Path  # a mixture of four experts, F32
    tokenizer_only: Path
    embedding: Path

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getattr__(self, name: str) -> Any:
        if name not in TINY_FILES:
            raise AttributeError(name)
        made = TINY_FILES[name](self.folder / f"tiny-{name}.gguf")
        setattr(self, name, made)
        return made


TINY_FILES: dict[str, Callable[[Path], Path | ggufs.Pair]] = {
    "spm": ggufs.write_llama,
    "bpe": lambda path: ggufs.write_llama(path, vocab=ggufs.bpe_vocab(), seed=3, tensor_type="Q8_0"),
    "pair": lambda path: ggufs.correlated_pair(path.parent),
    "quick": lambda path: ggufs.correlated_pair(path.parent, ggufs.bpe_vocab(300), shape=ggufs.QUICK, name="quick"),
    "fim": lambda path: ggufs.correlated_pair(path.parent, fim_vocab(), shape=ggufs.QUICK, name="fim"),
    "micro": lambda path: ggufs.micro_model(path, 5),
    "micro_draft": lambda path: ggufs.micro_model(path, 5, seed=5),
    "sliding": ggufs.write_sliding_window,
    "recurrent": ggufs.write_mamba,
    "convolutions": TinyFile("lfm2").write,
    "hybrid": ggufs.write_hybrid,
    "trap": ggufs.write_trap,
    "experts": ggufs.write_experts,
    "tokenizer_only": ggufs.write_tokenizer_only,
    "embedding": write_bert,
}


class Backend:
    """One engine under test."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.load: Callable[..., Model] = engine_module(name).load
        # Logits must be equal to the bit, however tokens are grouped into passes.
        self.exact = name == "reference"

    def __repr__(self) -> str:
        return self.name


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyFiles:
    """The tiny model files."""
    return TinyFiles(tmp_path_factory.mktemp("tiny"))


def open_backend(name: str) -> Backend:
    """An engine by name; skips the test where it cannot run."""
    backend = Backend(name)
    if (reason := unavailable_reason(name)) is not None:
        pytest.skip(reason)
    return backend


@pytest.fixture(scope="session", params=ENGINES)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every engine in turn."""
    return open_backend(request.param)


@pytest.fixture(scope="session", params=[name for name in ENGINES if name != "reference"])
def fast_backend(request: pytest.FixtureRequest) -> Backend:
    """Every engine that is not the reference."""
    return open_backend(request.param)


@pytest.fixture(scope="session")
def reference() -> Backend:
    """The reference engine alone."""
    return open_backend("reference")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    with chromium() as running:
        yield running


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """Catalogue name -> path of the real file.

    Looked for where ``localspec pull`` puts it, and skipped where it is not; or in $LOCALSPEC_TEST_MODELS, and then it
    has to be there: ``make test-real`` must not pass because nothing ran.
    """

    def find(name: str) -> Path:
        path = REAL_FOLDER / REAL_MODELS[name]
        if not path.exists():
            missing = f"{path.name} is not in {REAL_FOLDER} (LOCALSPEC_TEST_MODELS names another folder)"
            pytest.fail(missing) if "LOCALSPEC_TEST_MODELS" in os.environ else pytest.skip(missing)
        return path

    return find


@pytest.fixture(scope="session", autouse=True)
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where fixtures of a module load their models, and what the tests of real models start from.

    What somebody has set for their own work and terminal is not there in the tests, nor in what they start.
    """
    home = tmp_path_factory.mktemp("shared-home")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            foreign = name.startswith(("LOCALSPEC_", "HF_")) and not name.startswith("LOCALSPEC_TEST_")
            if foreign or name in TERMINAL_SETTINGS or name.lower().endswith("_proxy"):
                patch.delenv(name)
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("LOCALSPEC_HOME", str(home))
        yield home


def share(home: Path, shared_home: Path, names: tuple[str, ...] = ONCE_PER_FILE) -> None:
    """Let a new home have what is measured and made once per file in common with others."""
    home.mkdir()
    for name in names:
        (shared_home / name).mkdir(exist_ok=True)
        (home / name).symlink_to(shared_home / name)


@pytest.fixture(scope="module")
def module_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home for what the fixtures of a module load: what is learned there is no other module's."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("LOCALSPEC_HOME", str(home))
        yield home


@pytest.fixture
def measured_home(isolated_home: Path, shared_home: Path) -> Path:
    """A home in which the tiny files are measured and checked by the first test that loads them, and not again."""
    if not isolated_home.exists():  # tests of real models have such a home already
        share(isolated_home, shared_home)
    return isolated_home


@pytest.fixture(autouse=True)
def isolated_home(
    request: pytest.FixtureRequest, shared_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """No test reads or writes the user's own LOCALSPEC_HOME, or goes to the network.

    What is measured and made once per file, a minute's work for a real pair, is shared by the tests of real models.
    """
    home = tmp_path / "home"
    if request.node.get_closest_marker("real"):
        share(home, shared_home)
    monkeypatch.setenv("LOCALSPEC_HOME", str(home))
    monkeypatch.setenv("LOCALSPEC_OFFLINE", "1")
    return home
