"""What ran: the engine, its models, and what their passes cost."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Literal

from localspec.backends.base import Context
from localspec.backends.trust import fingerprint
from localspec.commands.bench.record import Engine, ModelFile
from localspec.commands.doctor.costs import WIDTHS, Watch
from localspec.controllers.calibration import calibrating
from localspec.controllers.cost_model import PassTimes
from localspec.controllers.passes import WHOLE, PassKind
from localspec.measuring.subject import EngineUnderTest, kv_bytes
from localspec.model_files.gguf_parts import model_bytes, model_files
from localspec.runtime.pair import Pair
from localspec.system.home import home
from localspec.system.json_store import JsonStore
from localspec.system.steps import exhaust


def engine_facts(subject: EngineUnderTest, kv_type: str, watch: Watch, *, measure: bool) -> Engine:
    """What ran here.

    Args:
        subject: the loaded pair.
        kv_type: type of the attention cache.
        watch: progress and interruption.
        measure: measure t(w) now; else it is what was measured at the first load.
    """
    llm, own = subject.llm, subject.own
    files = [_model_file("target", llm.model_name, own.context, own.target.path, kv_type, watch)]
    for draft in own.models:  # of a head the file that was trained, not what was made of it here
        path = draft.model.path if draft.drafter.reads_text else draft.path
        files.append(_model_file(draft.source, draft.name, draft.context, path, kv_type, watch))
    times = {"target": own.times} | {draft.source: draft.times for draft in own.models}
    measured: Literal["now", "before"] = "before"
    if measure:
        measured = "now"
        kinds = {"target": (own.context, WHOLE)} | {draft.source: (draft.context, draft.passes) for draft in own.models}
        for file in files:
            watch.report(f"measuring what a pass of {file.name} costs", None)
            times[file.source] = watch.call(llm, partial(_measured, *kinds[file.source], watch))
    return Engine(
        backend=llm.backend_name,
        version=llm.engine,
        device=own.target.capabilities.device,
        threads=own.target.n_threads,
        n_ctx=llm.n_ctx,
        models=files,
        sources=subject.sources,
        pass_ms={str(width): round(times["target"](width), 4) for width in WIDTHS},
        draft_ms={draft.source: round(times[draft.source](1), 4) for draft in own.models},
        passes_measured=measured,
        warnings=llm.warnings,
        one_pass=[draft.source for draft in own.models if draft.drafter.one_pass],
    )


def _measured(context: Context, passes: PassKind, watch: Watch, pair: Pair) -> PassTimes:
    return exhaust(calibrating(context.model, context.n_ctx, passes), tick=watch.check)


def _model_file(source: str, name: str, context: Context, path: Path, kv_type: str, watch: Watch) -> ModelFile:
    kv = kv_bytes(context, kv_type)
    return ModelFile(source, name, path.name, context.model.size_bytes, sha256(path, watch), kv)


def sha256(path: Path, watch: Watch) -> str:
    """A model's digest, of all its parts one after the other; kept, as reading a large file takes seconds."""
    files = model_files(path)
    changed = " ".join(str(file.stat().st_mtime_ns) for file in files)
    store, key = JsonStore(home() / "digests", 1), {"file": fingerprint(path), "changed": changed}
    known = (store.get(key) or {}).get("sha256")
    if isinstance(known, str):
        return known
    found, done, size = hashlib.sha256(), 0, model_bytes(path) or 1
    for each in files:
        with each.open("rb") as file:
            while block := file.read(1 << 22):
                found.update(block)
                done += len(block)
                watch.report(f"digest of {path.name}", done / size)
    store.put(key, {"sha256": found.hexdigest()})
    return found.hexdigest()
