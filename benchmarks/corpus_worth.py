"""What one's own files are worth as drafts: files that the corpus does not hold, replayed token by token.

    python benchmarks/corpus_worth.py MODEL.gguf [--package NAME] [--files N] [--tokens N] [--curve NAME ...]

The text of a repository (Python's standard library; a package from site-packages) is split by file: every ninth file is
held out, the others are the corpus. Held-out files are replayed as if a model wrote them, in two ways:

- *new code*: the prompt is the file's first 200 tokens, the answer what follows.
- *edit*: the prompt is the file, the answer the file with one name changed throughout, as edits are: n-grams have
  nearly all of it in the prompt, and a corpus can add little.

A round sends what the drafters propose, as long as it pays at the costs of a machine (``CURVES`` of
``replay_traces.py``) with the real controller, and moves on by what the text confirms. Only the clock is simulated, and
the text is a person's, not a model's: a model's own text is more regular, and less like the corpus. What looking for a
guess takes is measured, as CPU time, at places of the held-out files. A held-out file of which a line in three or more
stands in the corpus (lines of 20 characters and more) is a near-duplicate: such files are listed, and counted apart.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import re
import statistics
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from benchmarks.replay_traces import CURVES, OTHER_MS, WIDEST
from localspec.backends import registry
from localspec.backends.base import Model
from localspec.controllers.acceptance import COPIED, SourceAcceptance
from localspec.controllers.auto import AutoController
from localspec.controllers.cost_model import PassTimes
from localspec.controllers.learned import TimeBudget
from localspec.sampling.sampling import Noise, SamplingParams
from localspec.spec_decode.drafters.base import Drafter, Proposer
from localspec.spec_decode.drafters.corpus import DEPTH, CorpusDrafter, CorpusIndex, PathSource, read_text
from localspec.spec_decode.drafters.group import DrafterGroup
from localspec.spec_decode.drafters.ngram import NgramDrafter
from localspec.spec_decode.rounds import EmittedToken, Round, Verdict
from localspec.system.steps import exhaust

HELD_OUT = 9
N_PROMPT = 200
LEAST_LINE = 20
NEAR = 1 / 3
GUESS_MS = 0.05
N_TIMED = 2000


def replay(drafters: Sequence[Drafter], prompt: list[int], answer: list[int], curve: str) -> tuple[float, Counter[str]]:
    """The speed-up over plain decoding of an answer, and how many draft tokens of each source were sent and right."""
    real = CURVES[curve][0]  # of 1 to 8 tokens every width is there, and WIDEST is 7
    times, sources = PassTimes(dict(real)), {drafter.info.source: SourceAcceptance(COPIED) for drafter in drafters}
    controller = AutoController(times, {}, sources, {}, WIDEST, TimeBudget())
    group = DrafterGroup(list(drafters), Proposer(SamplingParams(), Noise(0)))
    for drafter in drafters:
        drafter.begin(prompt)
    text, at, ms, counts = list(prompt), 0, 0.0, Counter[str]()
    while at < len(answer):
        plan = controller.plan(room=len(answer) - at - 1, n_past=len(text))
        draft = group.draft(text, plan)
        ms_draft = GUESS_MS * (len(draft) + 1)
        fates = [token.id == answer[at + i] for i, token in enumerate(draft)]
        n = fates.index(False) if False in fates else len(fates)
        for i, token in enumerate(draft):
            counts[f"{token.source} sent"] += 1
            counts[f"{token.source} right"] += i < n
        emitted = answer[at : at + n + 1]
        ms_verify = real[len(draft) + 1]
        tokens = [EmittedToken(0, "plain")] * len(emitted)
        controller.learn(Round(0, draft, Verdict(n, 0, "plain"), tokens, ms_draft=ms_draft, ms_verify=ms_verify))
        for drafter in drafters:
            drafter.accept(emitted)
        text += emitted
        at += len(emitted)
        ms += ms_draft + ms_verify + OTHER_MS
    return len(answer) * (real[1] + 0.25) / ms, counts


def renamed(text: str, rng: random.Random) -> str:
    """The text with one of its names changed everywhere."""
    names = Counter(re.findall(r"\b[a-z_][a-z_0-9]{4,}\b", text))
    often = sorted(name for name, n in names.items() if n >= 3) or sorted(names)
    name = rng.choice(often) if often else "x"
    return re.sub(rf"\b{name}\b", f"{name}_2", text)


def lines_of(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= LEAST_LINE}


def guess_times(index: CorpusIndex, texts: list[list[int]], rng: random.Random) -> tuple[float, float]:
    """Microseconds to find the best match of the tokens before a place: the median, and what 99 in 100 are under."""
    times = []
    for _ in range(N_TIMED):
        text = rng.choice(texts)
        end = rng.randrange(len(text) + 1)
        recent = text[max(0, end - DEPTH) : end]
        started = time.thread_time()
        index.match(recent).best()
        times.append((time.thread_time() - started) * 1e6)
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


def measure(name: str, root: Path, files: list[Path], model: Model, args: argparse.Namespace) -> None:
    files = [path for path in files if read_text(path, 1 << 20)]
    held = files[::HELD_OUT]
    kept = [path for path in files if path not in set(held)]
    with tempfile.TemporaryDirectory() as folder:
        known: set[str] = set()
        for path in kept:
            copy = Path(folder, "text", path.relative_to(root))
            copy.parent.mkdir(parents=True, exist_ok=True)
            text = read_text(path, None) or ""
            copy.write_text(text, encoding="utf-8")
            known |= lines_of(text)
        index = CorpusIndex(PathSource(Path(folder, "text")), Path(folder, "index"), "", model.tokenize)
        started = time.perf_counter()
        exhaust(index.update())
        seconds = time.perf_counter() - started
        print(
            f"\n{name}: {len(kept)} files, {index.n_tokens:,} tokens, indexed in {seconds:.0f} s, "
            f"{sum(each.size_bytes for each in index.segments) / 1e6:.0f} MB; {len(held)} files held out"
        )
        rng = random.Random(1)
        rng.shuffle(held)
        middle, most = guess_times(index, [model.tokenize(read_text(path, None) or "") for path in held[:20]], rng)
        print(f"  a guess takes {middle:.0f} µs (median), {most:.0f} µs (99 %)")
        found: dict[tuple[str, ...], list[float]] = {}
        rates: dict[tuple[str, ...], Counter[str]] = {}
        near: list[str] = []
        for path in held[: args.files]:
            text = read_text(path, None) or ""
            lines = lines_of(text)
            is_near = bool(lines) and len(lines & known) / len(lines) >= NEAR
            if is_near:
                near.append(path.relative_to(root).as_posix())
            tokens = model.tokenize(text)
            tasks = {"new code": (tokens[:N_PROMPT], tokens[N_PROMPT : N_PROMPT + args.tokens])}
            tasks["edit"] = (tokens[: args.tokens], model.tokenize(renamed(text, rng))[: args.tokens])
            for task, (prompt, answer) in tasks.items():
                if len(answer) < 50:
                    continue
                for curve, arm in product(args.curve, ("ngram", "ngram + corpus")):
                    drafters: list[Drafter] = [NgramDrafter()]
                    if arm != "ngram":
                        drafters.append(CorpusDrafter(index, "corpus", "corpus"))
                    speed, counts = replay(drafters, prompt, answer, curve)
                    key = (curve, task, "near-duplicate" if is_near else "", arm)
                    found.setdefault(key, []).append(speed)
                    rates.setdefault(key, Counter()).update(counts)
        for key, speeds in sorted(found.items()):
            counts = rates[key]
            shares = ", ".join(
                f"{source} {counts[f'{source} right']} of {counts[f'{source} sent']} right"
                for source in ("ngram", "corpus")
                if counts[f"{source} sent"]
            )
            print(
                f"  {' '.join(filter(None, key)):46} {len(speeds):3} files  mean x{statistics.fmean(speeds):.3f}  "
                f"median x{statistics.median(speeds):.3f}  lowest x{min(speeds):.3f}  {shares}"
            )
        if near:
            print(f"  near-duplicates: {', '.join(near)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="whose tokens; it is not run")
    parser.add_argument("--backend", default="ik-llama")
    parser.add_argument("--package", default="rich", help="an installed package")
    parser.add_argument("--files", type=int, default=20, help="held-out files that are replayed")
    parser.add_argument("--tokens", type=int, default=600, help="of an answer, at most")
    parser.add_argument("--curve", nargs="+", default=["avx2"], choices=list(CURVES), help="what passes cost")
    args = parser.parse_args()
    spec = importlib.util.find_spec(args.package)
    if spec is None or spec.origin is None:
        parser.error(f"the package {args.package} is not installed")
    package, library = Path(spec.origin).parent, Path(sysconfig.get_paths()["stdlib"])
    own = [path for path in sorted(library.rglob("*.py")) if not {"site-packages", "test", "tests"} & set(path.parts)]
    with registry.engine_module(args.backend).load(args.model) as model:
        measure("standard library", library, own, model, args)
        measure(args.package, package.parent, sorted(package.rglob("*.py")), model, args)


if __name__ == "__main__":
    main()
