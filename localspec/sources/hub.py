"""The public model hub, or a mirror that ``HF_ENDPOINT`` names, through huggingface_hub."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from localspec.catalog import Entry
from localspec.errors import DigestMismatch, DownloadError
from localspec.sources.base import FULL, Source, Watch, check_digest, check_space

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SECONDS_TO_ANSWER = {False: 5.0, True: 20.0}


class Hub(Source):
    """Files of a hub repository; interrupted downloads go on where they stopped."""

    kind = "hf"

    def fetch(self, entry: Entry, where: Mapping[str, Any], folder: Path, watch: Watch, *, patient: bool) -> list[Path]:
        first = where.get("file", Path(entry.file).name)
        # The parts of a split model lie side by side.
        names = [str(Path(first).with_name(Path(file).name)) if len(entry.files) > 1 else first for file in entry.files]
        return [self._fetch_one(entry, where["repo"], name, folder / "hub", watch, patient) for name in names]

    def _fetch_one(self, entry: Entry, repo: str, name: str, folder: Path, watch: Watch, patient: bool) -> Path:
        _settle_environment()
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

        endpoint = os.environ.get("HF_ENDPOINT") or None
        seconds = _SECONDS_TO_ANSWER[patient]
        try:
            watch(f"asking the hub for {name}", 0, 0)
            metadata = get_hf_file_metadata(hf_hub_url(repo, name, endpoint=endpoint), timeout=seconds)
            promised = (metadata.etag or "").strip('"')
            expected = entry.sha256 or (promised if _SHA256.fullmatch(promised) else "")
            if not expected:
                raise DownloadError(f"the hub gives no digest for {repo}/{name}, so it could not be checked")
            if entry.sha256 and _SHA256.fullmatch(promised) and promised != entry.sha256:
                raise DigestMismatch(f"{repo}/{name} was changed on the hub: it is not the file that was checked")
            size = metadata.size or entry.bytes
            check_space(folder, size - _already_there(folder), name)
            path = hf_hub_download(
                repo,
                name,
                revision=metadata.commit_hash,
                local_dir=folder,
                endpoint=endpoint,
                etag_timeout=seconds,
                tqdm_class=_progress_bar(f"downloading {name}", size, watch),
            )
        except DownloadError:
            raise
        except OSError as error:
            if error.errno in FULL:
                raise
            raise DownloadError(_reason(error, repo, name)) from None
        except Exception as error:  # the library's own errors and its HTTP client's have no common base
            raise DownloadError(_reason(error, repo, name)) from None
        check_digest(Path(path), expected, name, watch)
        return Path(path)


def _settle_environment() -> None:
    """Settings that huggingface_hub reads when it is imported."""
    # Its other transfer protocol starts over after an interruption.
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import constants

    # It writes, and reports, in pieces of this size: 10 MB would be half a minute on a slow line.
    constants.DOWNLOAD_CHUNK_SIZE = 1 << 20
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def _already_there(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.incomplete"))


def _progress_bar(label: str, total: int, watch: Watch) -> type[Any]:
    """A class in the manner of tqdm that reports to ``watch``."""
    base: Any = import_module("tqdm").tqdm

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        self.done = int(kwargs.get("initial") or 0)
        base.__init__(self, *args, **{**kwargs, "disable": True})

    def update(self: Any, n: float | None = 1) -> None:
        self.done += int(n or 0)
        watch(label, self.done, total)

    return type("Bar", (base,), {"__init__": init, "update": update})


def _reason(error: Exception, repo: str, name: str) -> str:
    """Why the hub could not deliver, in a clause."""
    from huggingface_hub import errors

    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return f"{repo} asks you to accept its licence: do so on its page, and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"the hub has no repository {repo}, or it is private (HF_TOKEN)"
    if isinstance(error, errors.EntryNotFoundError) and status == 404:
        return f"{repo} has no file {name}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if status is not None:
        return f"the hub answered with status {status}"
    detail = " ".join(str(error).split())[:120] or type(error).__name__
    return f"the hub cannot be reached ({detail})"
