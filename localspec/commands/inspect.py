"""``localspec inspect``: what a file says of itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from localspec.model_files.catalog import Catalog
from localspec.model_files.sources.base import size_text
from localspec.terminal.text import on_one_line

_CURVE_ROWS = 12
"""Points of a learning curve that are printed; ``--json`` has all."""


def inspect_command(model: str, as_json: bool = False) -> int:
    """Print what a model file says of itself; only its header is read.

    Raises:
        UnknownModel: no such name or file.
        ModelFileError: it is not a readable GGUF.
    """
    from localspec.model_files.inspection import inspect

    facts = inspect(Catalog.load().resolve(model))
    if as_json:
        print(json.dumps(facts, ensure_ascii=False, indent=2))
    else:
        _print_facts(facts)
    return 0


def _print_facts(facts: dict[str, Any]) -> None:
    rows: list[tuple[str, str]] = [("file", facts["path"])]
    rows.append(("name", f"{facts['name']} ({facts['architecture'] or 'no architecture'})"))
    if facts["license"]:
        rows.append(("licence", facts["license"]))
    parts = f" in {facts['files']} files" if facts["files"] > 1 else ""
    rows.append(("size", f"{size_text(facts['bytes'])}{parts}, {facts['n_params'] / 1e6:,.0f} M parameters"))
    rows.append(("quantisation", facts["quantization"]))
    total = max(1, sum(facts["bytes_by_tensor_type"].values()))
    for kind, n_bytes in facts["bytes_by_tensor_type"].items():
        rows.append(("", f"{kind:<8} {size_text(n_bytes):>8}  {n_bytes / total:4.0%}"))
    if "head" in facts:
        rows += _head_rows(facts["head"])
    elif "published_head" in facts:
        rows += _published_rows(facts["published_head"])
    else:
        rows += _model_rows(facts)
    if facts["cannot_generate_text"] and not facts.keys() & {"head", "published_head"}:
        rows.append(("note", facts["cannot_generate_text"]))
    for label, text in rows:
        # What a file says of itself must not be able to steer the terminal.
        print(f"{label:<13} {on_one_line(text)}".rstrip())


def _model_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("context", f"{facts['context_length']:,} tokens" if facts["context_length"] else "not told")]
    if vocabulary := facts["vocabulary"]:
        pre = f", {vocabulary['pre']}" if vocabulary["pre"] else ""
        rows.append(("vocabulary", f"{vocabulary['n_tokens']:,} tokens ({vocabulary['kind']}{pre})"))
        named = [f"{k} {t['id']} {t['text']!r}" for k, t in vocabulary["special"].items() if t]
        rows.append(("special", ", ".join(named) or "none"))
        ends = ", ".join(f"{t['id']} {t['text']!r}" for t in vocabulary["ends_generation"][:8])
        rows.append(("ends with", ends or "nothing"))
    if template := facts["chat_template"]:
        extras = [name for name in ("system", "tools", "thinking") if template[name]]
        rows.append(("template", f"{template['format']}, {template['characters']:,} characters; {', '.join(extras)}"))
    else:
        rows.append(("template", "none: a base model, or one that was stripped"))
    if mtp := facts["mtp"]:
        engines = "llama-cpp or mlx" if facts["architecture"] == "glm4moe" else "llama-cpp"
        usable = mtp["unusable"] or f"--draft mtp drafts with it, on {engines}"
        rows.append(("MTP", f"{mtp['layers']} for multi-token prediction; {usable}"))
    return rows + _memory_rows(facts["memory"])


def _published_rows(head: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("head", f"{head['title']}, reads {', '.join(head['taps'])}")]
    rows.append(("for", f"a model with {head['n_vocab']:,} tokens and states of {head['target_embedding_length']:,}"))
    at_once = f", {block['guesses']} tokens in a pass" if (block := head["block"]) else ""
    rows.append(("guesses", f"{head['n_out']:,} of them{at_once}"))
    borrowed = " and ".join(head["borrows"])
    engines = "llama-cpp or mlx" if head["kind"] == "eagle3" else "llama-cpp"
    own = f"{borrowed} of the target, on {engines}" if borrowed else "nothing of the target's weights"
    return [*rows, ("takes", own), *(_training_rows(head["training"]) if head["training"] else [])]


def _head_rows(head: dict[str, Any]) -> list[tuple[str, str]]:
    target, training = head["target"], head["training"]
    sizes = f"{target['n_layers']} layers of {target['n_embd']:,} channels"
    rows = [("head for", f"{target['name']} ({target['architecture']}, {sizes})")]
    rows.append(("", f"its file's fingerprint {target['fingerprint']}, its vocabulary's {target['vocab']}"))
    vocabulary = f"among {head['n_out']:,} of {target['n_vocab']:,} tokens"
    rows.append(("kind", f"{head['kind']}: reads {', '.join(head['taps'])}; {head['steps']} ahead, {vocabulary}"))
    if head["n_head"]:
        heads = f"{head['n_head']} heads, {head['n_head_kv']} of keys, of {head['d_head']} channels"
        rows.append(("block", f"{heads}; MLP of {head['d_ff']:,}"))
    return rows + _training_rows(training)


def _training_rows(training: dict[str, Any]) -> list[tuple[str, str]]:
    """How a head was made."""
    if not training["command"]:
        return [("training", "none")]
    rows = [("made by", training["command"])]
    versions = ", ".join(f"{name} {version}" for name, version in training["versions"].items())
    rows.append(("", "; ".join(filter(None, [f"seed {training['seed']}", training["machine"], versions]))))
    rows += [("went on from" * (not i), line) for i, line in enumerate(training["earlier"])]
    data, seen = training["data_tokens"], training["tokens_seen"]
    rows.append(("training", f"{data:,} tokens of data, {seen:,} seen, {training['minutes']:,.0f} minutes"))
    return rows + _rate_rows(training["acceptance"]) + _curve_rows(training["curve"])


def _rate_rows(acceptance: dict[str, Sequence[float]]) -> list[tuple[str, str]]:
    """Category by category, how often it was right so many tokens ahead."""
    steps, width = max(map(len, acceptance.values()), default=0), max(map(len, acceptance), default=0)
    rows = [(" " * width + "".join(f"{step:>6}" for step in range(1, steps + 1)))] if steps else []
    rows += [
        category.ljust(width) + "".join(f"{rate:>6.2f}" for rate in rates) for category, rates in acceptance.items()
    ]
    return [("right at" * (not i), row) for i, row in enumerate(rows)]


def _curve_rows(curve: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """The learning curve: at some moments, how often the first tokens ahead were right in all texts, and the first one
    in each category."""
    from localspec.model_files.head_card import ALL_TEXTS

    rates = {name: point["acceptance"][name] for point in curve for name in point["acceptance"]}
    columns = [(name, k) for name in rates for k in range(len(rates[name]) if name == ALL_TEXTS else 1)]
    widths = [6 if k else max(6, len(name) + 2) for name, k in columns]
    titles = [f"{k + 1 if k else name:>{width}}" for (name, k), width in zip(columns, widths, strict=True)]
    rows = [f"{'tokens seen':>12}{'minutes':>9}" + "".join(titles)]
    step = max(1, -(-len(curve) // _CURVE_ROWS))
    shown = [*reversed(curve[::-1][::step])]
    for point in shown:
        found = [point["acceptance"].get(name, ())[k : k + 1] for name, k in columns]
        cells = [f"{f'{rate[0]:.2f}' if rate else '':>{width}}" for rate, width in zip(found, widths, strict=True)]
        rows.append(f"{point['tokens_seen']:>12,}{point['minutes']:>9,.0f}{''.join(cells)}")
    return [("curve" * (not i), row) for i, row in enumerate(rows if shown else [])]


def _memory_rows(memory: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("memory", f"{size_text(memory['kv_bytes_per_token'])} of cache per token ({memory['kv_type']})")]
    if memory["sliding_window"]:
        rows.append(
            ("", f"{memory['windowed_layers']} layers look at the last {memory['sliding_window']:,} tokens only")
        )
    if memory["recurrent"]:
        rows.append(("", "some layers keep a state of fixed size, not counted here"))
    for at in memory["contexts"]:
        line = f"{at['n_ctx']:>9,} tokens: {size_text(at['kv_bytes']):>8} + weights = {size_text(at['total_bytes'])}"
        if at["kv_bytes_window_only"] != at["kv_bytes"]:
            line += f"  ({size_text(at['kv_bytes_window_only'])} if only the window is kept)"
        rows.append(("", line))
    return rows
