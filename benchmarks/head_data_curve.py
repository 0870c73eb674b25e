"""What more examples would do for a head: trained on parts of those that a run of ``localspec distill`` has made, and
what the curve extrapolates to at ten times as many.

    python benchmarks/head_data_curve.py MODEL [--examples FOLDER] [--parts 8 4 2 1] [--seconds 120]
        [--json FILE]

Each head is trained anew, on the first eighth, fourth, half of the examples and on all of them, as long in proportion;
all are asked the same held-out places. Each part's linear head, with which training begins, is asked too. The share of
places at which the first token is right is fitted in two ways, by least squares over the parts: as a line over the
logarithm of the number of examples, and as a power law of what is wrong, 1 - r = a n^-b (Hestness et al. 2017,
arXiv:1712.00409). Both go on as if nothing else would limit the head, its size for one, so the smaller figure is the
one to count on. The run's own trimmed vocabulary is used for every part.

``--examples`` takes the shards of another run, if its states are among them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from localspec.heads.card import ALL_TEXTS, Rates
from localspec.heads.trained import target_facts
from localspec.heads.training.run_folder import Recipe, RunFolder, taps_of
from localspec.heads.training.shards import Passage, Shards
from localspec.heads.training.start import new_card, start
from localspec.heads.training.trainer import Trainer, TrainingSettings
from localspec.model_files.catalog import Catalog
from localspec.model_files.gguf import GGUFFile, tensor_rows
from localspec.report.renderers import table

MORE = 10
"""Times as many examples."""


@dataclass(frozen=True)
class Point:
    """Heads of one part of the examples.

    Attributes:
        n_places: examples learned from.
        tokens_seen: lessons, repetitions counted.
        linear, trained: how often each is right on held-out places, by category and tokens ahead.
    """

    n_places: int
    tokens_seen: int
    linear: Rates
    trained: Rates


def read_examples(folder: Path, taps: Sequence[str], n_embd: int) -> list[Passage]:
    """The passages of a run's shards, with these states."""
    first = min(folder.glob("[0-9]*.shard"), default=None)
    if first is None:
        raise SystemExit(f"{folder} has no examples; localspec distill writes them into LOCALSPEC_HOME")
    with first.open("rb") as file:
        there = json.loads(file.readline(1 << 26))["taps"]
    columns = [there.index(tap) for tap in taps]
    passages = Shards(folder, there, n_embd).passages
    return [replace(passage, states=passage.states[:, columns]) for passage in passages]


def first_part(passages: Sequence[Passage], divisor: int) -> list[Passage]:
    """Passages until there are so many places, in the order in which they were written."""
    most, found, n = sum(map(len, passages)) / divisor, list[Passage](), 0
    for passage in passages:
        if n >= most:
            break
        found.append(passage)
        n += len(passage)
    return found


def train(file: GGUFFile, folder: RunFolder, recipe: Recipe, examples: Path, divisor: int, seconds: float) -> Point:
    """Heads of one part."""
    facts, run = target_facts(Path(file.path)), folder.read()
    if run is None or not run.token_map:
        raise SystemExit(f"{folder.path} has no examples; begin with localspec distill")
    ids = np.array(run.token_map, dtype=np.int32)
    card = new_card(file, facts.fingerprint, recipe, ids)
    output = tensor_rows(file, "output.weight" if "output.weight" in file.tensors else "token_embd.weight", ids)

    def embed(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        some, places = np.unique(tokens, return_inverse=True)
        return tensor_rows(file, "token_embd.weight", some)[places]

    passages = read_examples(examples, taps_of(facts.n_layers), facts.n_embd)
    learned = first_part([each for each in passages if not each.held_out], divisor)
    with tempfile.TemporaryDirectory() as there:
        trainer = Trainer(
            card,
            lambda: start(file, card, embed, learned, recipe.seed),
            output,
            embed,
            learned,
            [each for each in passages if each.held_out],
            Path(there) / "checkpoint.npz",
            TrainingSettings(seed=recipe.seed),
        )
        trainer.train(seconds / divisor, lambda: None, lambda: False, test_every=1e9)
    first, last = trainer.curve[0], trainer.curve[-1]
    return Point(sum(map(len, learned)), trainer.tokens_seen, first.acceptance, last.acceptance)


def extrapolated(n_places: Sequence[int], rates: Sequence[float]) -> tuple[float, float, float]:
    """The gain of a doubling by a straight line, and the shares at ``MORE`` times the most examples: by that line, and
    by a power law of what is wrong."""
    doublings = np.log2(n_places)
    slope, offset = np.polyfit(doublings, rates, 1)
    exponent, factor = np.polyfit(doublings, np.log(1 - np.array(rates)), 1)
    there = doublings[-1] + np.log2(MORE)
    return float(slope), float(offset + slope * there), float(1 - np.exp(factor + exponent * there))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=Path, help="the folder of shards")
    parser.add_argument("--parts", type=int, nargs="+", default=[8, 4, 2, 1], help="all examples by each of these")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="of training on all examples; 0: linear heads only"
    )
    parser.add_argument("--json", type=Path, help="add the figures to this file; parts in it are not trained again")
    args = parser.parse_args()
    path, recipe = Catalog.load().resolve(args.model), Recipe(seed=args.seed)
    folder = RunFolder(path, target_facts(path).fingerprint)
    found: dict[str, Point] = {}
    if args.json and args.json.exists():
        found = {name: Point(**point) for name, point in json.loads(args.json.read_text()).items()}
    with GGUFFile(path) as file:
        for part in (part for part in args.parts if str(part) not in found):
            found[str(part)] = train(file, folder, recipe, args.examples or folder.shards, part, args.seconds)
            print(part, found[str(part)], flush=True)
            if args.json:
                args.json.write_text(json.dumps({name: vars(point) for name, point in found.items()}) + "\n")
    points = sorted(found.values(), key=lambda point: point.n_places)
    rows = [
        [f"{point.n_places:,}", kind, f"{seen:,}", *(f"{rate:.3f}" for rate in rates[ALL_TEXTS]), own]
        for point in points
        for kind, seen, rates in (("linear", 0, point.linear), ("trained", point.tokens_seen, point.trained))
        if seen or kind == "linear"
        for own in [f"{rates['own'][0]:.3f}" if "own" in rates else ""]
    ]
    print("\n" + table(["examples", "head", "lessons", *map(str, range(1, recipe.steps + 1)), "own: 1"], rows, 1))
    for kind in ("linear", "trained") if points[-1].tokens_seen else ("linear",):
        rates = [getattr(point, kind)[ALL_TEXTS][0] for point in points]
        slope, line, power = extrapolated([point.n_places for point in points], rates)
        most = f"with {MORE} times as many {power:.2f} by a power law, {line:.2f} by a line"
        print(f"{kind}: {slope:+.3f} a doubling; {most}")


if __name__ == "__main__":
    main()
