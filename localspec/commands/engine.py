"""``localspec engine``: ik-llama compiled for this CPU. Remarks go to standard error."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from localspec.backends import native_build
from localspec.backends.llama import ik_llama
from localspec.backends.llama.ggml import NATIVE_COMMAND, built_for, native_gain, system_info
from localspec.backends.native_build import BuildComparison
from localspec.commands.files import note, print_columns
from localspec.controllers.cost_model import PassTimes
from localspec.engine.loading import nominal_ms
from localspec.model_files.catalog import Catalog
from localspec.model_files.sources.base import size_text
from localspec.system.machine import cpu_features
from localspec.system.terminal import Progress


def build_command(*, idle: bool, jobs: int | None, force: bool) -> int:
    """Compile the engine; 130 where that was interrupted."""
    is_used, is_old = ik_llama.compiled_library() is not None, ik_llama.compiled_earlier()
    if is_used and not (force or is_old):
        print("the engine compiled for this CPU is here and in use; localspec engine remove undoes it")
        return 0
    features = built_for(system_info(ik_llama.binding().lib))
    if not (force or is_old) and native_gain(features, cpu_features()) is None:
        print(
            f"nothing to compile: the engine that is here ({' '.join(features)}) uses all of this CPU that "
            "there are kernels for; --force compiles it nevertheless"
        )
        return 0
    models = native_build.files_to_compare(
        [entry.path for entry in Catalog.load().values() if entry.present and entry.path.suffix == ".gguf"]
    )
    if native_build.unfinished():
        note("going on with the build that was interrupted")
    elif not idle:
        note("some 8 to 14 minutes on two cores")
    try:
        with Progress() as progress:
            found, wrong = native_build.build(models, progress.report, jobs=jobs, idle=idle)
    except KeyboardInterrupt:
        note("interrupted; what is compiled is kept, and localspec engine build goes on from there")
        return 130
    print("the engine compiled for this CPU is used from now on; localspec engine remove undoes it")
    for each in found:
        print(_said(each))
    for line in wrong:
        print(f"{line}: a repacked copy of it, or another engine, will be used for it")
    if not found:
        print("no model is on this disk yet: it is checked with each file at its first load, as every engine is")
    return 0


def _said(found: BuildComparison) -> str:
    """A comparison in a line: how near both are, what further rows cost, and what a nominal answer gains."""
    shares = [f"{(ms[2] - ms[1]) / ms[1]:.2f}" for ms in found.ms]
    wheel, compiled = (nominal_ms(PassTimes(ms)) for ms in found.ms)
    return (
        f"{found.file}: same best token at {found.top1:.0%} of places (KL {found.mean_kl:.1g} nats); a pass over one "
        f"token takes {found.ratio(1):.2f} of the wheel's time, over 8 {found.ratio(8):.2f}; a second row costs "
        f"{shares[1]} of a token (wheel {shares[0]}); a drafted answer {compiled / wheel:.2f} of the time"
    )


def list_command(as_json: bool) -> int:
    found, record = native_build.comparisons(), ik_llama.compiled_record()
    is_used = ik_llama.compiled_library() is not None
    engine = ik_llama.binding()
    features = built_for(system_info(engine.lib))
    wheel = found[0].features[0] if found else [] if is_used else features
    compiled = features if is_used else found[0].features[1] if found else []
    if as_json:
        listing: dict[str, Any] = {
            "version": ik_llama.VERSION,
            "used": "compiled" if is_used else "wheel",
            "wheel": {"features": wheel},
            "compiled": record
            and {"features": compiled, "day": record.get("day"), "path": str(ik_llama.compiled_folder() / "lib")},
            "comparisons": [asdict(each) for each in found],
            "unfinished": native_build.unfinished(),
        }
        print(json.dumps(listing, indent=2))
        return 0
    rows = [("ENGINE", "IN USE", "BUILT FOR"), (_name("wheel"), "" if is_used else "yes", " ".join(wheel))]
    if record is not None:
        rows.append((_name("compiled"), "yes" if is_used else "", " ".join(compiled) or "this CPU"))
    print_columns(rows)
    if found:
        print()
    for each in found:
        print(_said(each))
    if record is not None and not is_used:
        print("\nwhat was compiled is damaged or for another CPU; localspec engine build --force compiles it again")
    if native_build.unfinished():
        print("\na build was interrupted; localspec engine build goes on from there")
    elif ik_llama.compiled_earlier():
        print(f"\n{ik_llama.EARLIER}: {NATIVE_COMMAND}")
    elif record is None and (gain := native_gain(features, cpu_features())) is not None:
        print(f"\ncompiled here it makes more of this CPU's {gain[0]} ({gain[1]}): localspec engine build")
    return 0


def _name(which: str) -> str:
    return f"{ik_llama.NAME} {ik_llama.VERSION}, {which}"


def remove_command() -> int:
    freed = native_build.remove()
    removed = f"removed ({size_text(freed)}); the wheel is used again"
    print(removed if freed else "nothing was compiled, so nothing is removed")
    return 0
