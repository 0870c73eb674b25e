"""Whether drafts may branch, which on some engines has to be known when the target's context is made."""

from __future__ import annotations

from localspec.backends.base import Model
from localspec.backends.branch_trust import why_no_branches
from localspec.controllers.auto_controller import FLAT_ROW, row_ms
from localspec.controllers.cost_model import PassTimes
from localspec.runtime.load_options import LoadOptions
from localspec.runtime.model_loading import Report


def why_chains(model: Model, times: PassTimes, options: LoadOptions, parallel: int, report: Report) -> str | None:
    """Why drafts are chains, as part of a sentence; None where they may branch. An engine is checked the first time.

    Args:
        model: the target.
        times: the cost model of its passes.
        options: how it was loaded.
        parallel: how many answers share passes.
        report: takes progress.
    """
    if parallel > 1:
        return "answers share passes"
    if not model.capabilities.trees or not model.capabilities.trees_apart:
        return model.why_no_trees()
    row = row_ms(times) / times(1)
    if row >= FLAT_ROW:
        return f"a further row of a pass costs {row:.2f} of a token here, and branches pay under {FLAT_ROW}"
    return why_no_branches(model, options.n_gpu_layers, lambda line: report(line, None))
