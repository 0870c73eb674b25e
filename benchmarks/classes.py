"""Targets that answer like a small model and cost like a larger one: the gain per class of model, on this machine.

    python benchmarks/classes.py make FOLDER [--factors 2 5 9] [--model NAME]
    python benchmarks/classes.py bench FOLDER [--factors 1 2 5] [--temperatures 0 0.8] [--draft NAME] [options of bench]
    python benchmarks/classes.py show FOLDER

``make`` writes a copy of the model with each layer K times over. The added layers are identities: the output matrices
of their attention and of their feed-forward network are zero, so that the residual stream passes through unchanged. A
pass reads K times the bytes of the layers and says what the original says. Each copy is checked: its logits over a text
are those of the original, on the engine that answers. With Qwen2.5-Coder 1.5B, factor 2 costs what a 3B costs, 5 what a
7B costs, 9 what a 14B costs.

``bench`` runs ``localspec bench`` on each copy: plain decoding, n-grams alone, the draft model alone, both (``auto``),
and drafts of fixed lengths, in turns of a few tokens on the same questions. ``show`` prints a row for each class and
temperature from the files that ``bench`` has left in FOLDER. llama.cpp's own program runs on the same files with
``llama_cpp_speculative.py --model FILE --draft NAME --localspec``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType, GGUFWriter, ReaderTensor

from localspec import backends
from localspec.backends.trust import CHECK_TEXT
from localspec.commands.bench.record import read_record
from localspec.commands.bench.report import interval_text
from localspec.commands.bench.results import ALL, analyse
from localspec.model_files.catalog import Catalog

FIXED = ["2", "4", "8"]
ARMS = ["auto", "ngram:auto", "model:auto", *FIXED]
CLASSES = {1: "1.5B", 2: "3B", 5: "7B", 9: "14B"}
"""What a copy of the 1.5B costs, by factor."""

OUTPUTS = ("attn_output", "ffn_down")
"""The two matrices of a layer that write into the residual stream."""

N_CHECKED = 48
"""Tokens whose logits are compared."""


def name_of(factor: int) -> str:
    return f"times-{factor}.gguf"


def layers(tensors: Sequence[ReaderTensor], factor: int) -> Iterator[tuple[str, ReaderTensor, bool]]:
    """Name, tensor of the original, and whether it is to be zero; of every tensor of the copy."""
    for tensor in tensors:
        if not tensor.name.startswith("blk."):
            yield tensor.name, tensor, False
            continue
        _, layer, rest = tensor.name.split(".", 2)
        for copy in range(factor):
            yield f"blk.{int(layer) * factor + copy}.{rest}", tensor, copy > 0 and rest.startswith(OUTPUTS)


def write_copy(source: Path, target: Path, factor: int) -> None:
    """Write the model with every layer ``factor`` times."""
    reader = GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    part = target.with_name(f"{target.name}.part")
    writer = GGUFWriter(part, architecture)
    changed = {
        f"{architecture}.block_count": int(reader.fields[f"{architecture}.block_count"].contents()) * factor,
        "general.name": f"{source.stem}, layers times {factor}",
    }
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, value = field.types[0], changed.get(name, field.contents())
        writer.add_key_value(name, value, kind, sub_type=field.types[-1] if kind == GGUFValueType.ARRAY else None)
    plan = list(layers(reader.tensors, factor))
    for name, tensor, _ in plan:
        data = tensor.data
        writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, tensor, is_zero in plan:
        # Zero bytes are zero weights in every type: their scales are zero too.
        writer.write_tensor_data(np.zeros_like(tensor.data) if is_zero else np.asarray(tensor.data))
    writer.close()
    part.replace(target)


def logits(path: Path) -> npt.NDArray[np.float32]:
    """Logits [n, n_vocab] over a text, in pieces as decoding reads it."""
    with backends.load(path) as model, model.new_context(256) as context:
        tokens = model.tokenize(CHECK_TEXT)[:N_CHECKED]
        return np.concatenate([context.decode(tokens[i : i + 4]).logits.copy() for i in range(0, len(tokens), 4)])


def check(source: Path, copy: Path) -> float:
    """The largest difference of a logit over the deviation of all; SystemExit where the copy says something else."""
    expected, found = logits(source), logits(copy)
    apart = float(np.abs(expected - found).max() / expected.std())
    if apart > 1e-3 or (expected.argmax(axis=1) != found.argmax(axis=1)).any():
        raise SystemExit(f"{copy} does not compute what {source.name} computes: {apart:.3g} deviations apart")
    return apart


def make(folder: Path, factors: Sequence[int], model: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    source = Catalog.load().resolve(model)
    for factor in factors:
        target = folder / name_of(factor)
        if not target.is_file():
            write_copy(source, target, factor)
        apart = check(source, target)
        print(
            f"{target}: {target.stat().st_size / 1e9:.1f} GB, logits at most {apart:.1g} deviations apart", flush=True
        )


def bench(folder: Path, args: argparse.Namespace, more: Sequence[str]) -> None:
    for factor in args.factors:
        target = args.model if factor == 1 else str(folder / name_of(factor))
        for temperature in args.temperatures:
            record = folder / f"times-{factor}-at-{temperature:g}.json"
            command = [sys.executable, "-m", "localspec", "bench", target, "--draft", args.draft, "--set", args.set]
            command += ["--arm", ",".join(ARMS), "--temperature", str(temperature), "--minutes", str(args.minutes)]
            command += ["--resume" if record.is_file() else "--json", str(record), *more]
            subprocess.run(command, check=True)
    show(folder)


def show(folder: Path) -> None:
    """A table: a row for each arm of each record, medians over questions of the ratio to plain decoding."""
    for file in sorted(folder.glob("times-*-at-*.json")):
        results = analyse(read_record(file))
        columns = list(dict.fromkeys(row.category for row in results.rows if row.category != ALL))
        factor, temperature = re.findall(r"[\d.]+", file.stem)
        print(f"\n{CLASSES.get(int(factor), f'times {factor}')}, temperature {temperature}")
        print("| arm | all (95 %) | " + " | ".join(columns) + " | slowest |")
        print("|---|---|" + "--:|" * (len(columns) + 1))
        for whole in results.overall:
            cells = [results.row(category, whole.backend, whole.arm) for category in columns]
            if whole.speedup is None or whole.worst_speedup is None:
                continue
            medians = " | ".join(f"{cell.speedup.median:.2f}" if cell and cell.speedup else "" for cell in cells)
            print(f"| {whole.arm} | {interval_text(whole.speedup)} | {medians} | {whole.worst_speedup:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["make", "bench", "show"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--factors", type=int, nargs="+", default=[2, 5])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b")
    parser.add_argument("--set", default="report", choices=["report", "tuning"])
    parser.add_argument("--minutes", type=float, default=30.0, help="at most so long for each record")
    args, more = parser.parse_known_args()
    if args.verb == "make":
        make(args.folder, args.factors, args.model)
    elif args.verb == "bench":
        bench(args.folder, args, more)
    else:
        show(args.folder)


if __name__ == "__main__":
    main()
