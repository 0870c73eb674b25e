"""From ``corpus:PATH`` to an index that is up to date, or will be when nobody waits."""

from __future__ import annotations

from pathlib import Path

from localspec.backends.base import Model
from localspec.corpora.index import BYTES_PER_BYTE, CorpusIndex
from localspec.corpora.text_files import PathSource
from localspec.model_files.sources.base import size_text
from localspec.runtime.model_loading import Loader, Report
from localspec.runtime.saved_chats import SavedChats
from localspec.spec_decode.drafters.names import CHATS
from localspec.system.home import home
from localspec.system.steps import exhaust


def open_corpus(where: str, target: Model, loader: Loader, report: Report) -> CorpusIndex:
    """The index of a corpus for the target's tokenizer.

    What is new in it is read now, with progress, where there will be no idle time; else then. How much that is is said
    first.

    Args:
        where: a path, or ``chats``.
        target: the model whose tokens it is made of.
        loader: says whether there will be idle time, and takes remarks.
        report: takes progress; raising from it leaves what was indexed so far.

    Raises:
        UsageError: there is no such path, it holds too much, or the index cannot be written.
    """
    source = SavedChats() if where == CHATS else PathSource(Path(where))
    index = CorpusIndex(source, home() / "corpora", target.vocab.fingerprint, target.tokenize)
    survey = exhaust(index.survey(), lambda: report(f"looking at {where}", None))
    if not survey.n_files:
        loader.warnings.append(f"corpus {where} holds no text: nothing is copied from it")
    if survey.n_new:
        n_bytes, new_bytes = size_text(survey.n_bytes), size_text(survey.new_bytes)
        said = f"corpus {where}: {survey.n_files:,} files, {n_bytes}; indexing {new_bytes} of it"
        said += f", in at most {size_text(round(BYTES_PER_BYTE * survey.new_bytes))} of {index.folder.parent}"
        if loader.options.idle:
            loader.warnings.append(f"{said}, while nobody waits")
        else:
            report(said, None)
            exhaust(index.update(), lambda: report(f"indexing {where}", index.done))
    return index
