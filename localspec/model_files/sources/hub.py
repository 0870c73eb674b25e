"""The public model hub, or a mirror that ``HF_ENDPOINT`` names, through huggingface_hub."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.errors import DigestMismatch, DownloadError
from localspec.model_files.catalog import Entry, part_names
from localspec.model_files.sources.base import Hashing, Watch, check_space, mismatch

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SECONDS_TO_ANSWER = {False: 5.0, True: 20.0}
_SECONDS_OF_SILENCE = 20.0
_CHUNK = 1 << 18
_MOST_CONNECTIONS = 200


def fetch(entry: Entry, where: Mapping[str, Any], folder: Path, watch: Watch, patient: bool) -> list[Path]:
    """Files of a hub repository; interrupted downloads go on where they stopped. See ``sources.FETCH``."""
    found = []
    for name in _names(entry, where):
        watch(f"asking the hub for {name}", 0, 0)
        offered = _offered(entry, where["repo"], name, patient=patient)
        target = folder / "hub" / f"{offered.sha256[:12]}-{Path(name).name}"
        _download(offered, where["repo"], name, target, watch, 3 if patient else 2)
        found.append(target)
    return found


def check(entry: Entry, where: Mapping[str, Any]) -> int:
    """The size [bytes] of an entry's files on the hub. ``Unreachable``: it does not answer; ``DownloadError``: a file
    is not there, or not the one that was checked."""
    return sum(_offered(entry, where["repo"], name, patient=True).size for name in _names(entry, where))


class Unreachable(DownloadError):
    """The hub does not answer, so it is no use to ask it for another file."""


@dataclass(frozen=True, slots=True)
class _Offered:
    """A file as the hub offers it; size in bytes."""

    url: str
    size: int
    sha256: str


def _names(entry: Entry, where: Mapping[str, Any]) -> list[str]:
    # The parts of a split model lie side by side.
    return list(part_names(where.get("file", Path(entry.file).name)))


def _offered(entry: Entry, repo: str, name: str, *, patient: bool) -> _Offered:
    """A file's size and digest on the hub, compared with the catalogue's."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # is read when it is imported
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repo, name, endpoint=os.environ.get("HF_ENDPOINT") or None)
    try:
        metadata = get_hf_file_metadata(url, timeout=_SECONDS_TO_ANSWER[patient])
    except Exception as error:  # the library's own errors and its HTTP client's have no common base
        answered = getattr(error, "response", None) is not None
        raise (DownloadError if answered else Unreachable)(_reason(error, repo, name)) from None
    promised = (metadata.etag or "").strip('"')
    expected = entry.sha256 or (promised if _SHA256.fullmatch(promised) else "")
    if not expected:
        raise DownloadError(f"the hub has no digest for {repo}/{name}, so it cannot be verified")
    if entry.sha256 and _SHA256.fullmatch(promised) and promised != entry.sha256:
        raise DigestMismatch(f"{repo}/{name} was changed on the hub: it is not the file that was checked")
    size = metadata.size or 0
    if entry.sha256:  # then the catalogue knows the size too
        if size and size != entry.bytes:
            raise DigestMismatch(
                f"{repo}/{name} was changed on the hub: it has {size:,} bytes, and the file that was checked "
                f"{entry.bytes:,}"
            )
        size = entry.bytes
    if not size:
        raise DownloadError(f"the hub does not report the size of {repo}/{name}, so it is not fetched")
    return _Offered(url, size, expected)


def _download(offered: _Offered, repo: str, name: str, target: Path, watch: Watch, attempts: int) -> None:
    """Append to what an earlier attempt left; nothing may arrive from ``attempts`` connections in a row.

    ``hf_hub_download`` would do, but it starts over after every interruption.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("ab+") as file:
        out = Hashing(file)
        file.seek(0)
        while chunk := file.read(_CHUNK):
            out.digest(chunk)
            watch(f"checking what is there of {name}", out.n_bytes, offered.size)
        if out.n_bytes > offered.size:
            out.restart()  # whatever it is, it is not a beginning
        check_space(target.parent, offered.size - out.n_bytes, name)
        failures, n_connections = 0, 0
        while out.n_bytes < offered.size:
            before, n_connections = out.n_bytes, n_connections + 1
            error = _connect(offered, name, out, watch)
            if out.n_bytes >= offered.size:
                break
            failures = 0 if out.n_bytes > before else failures + 1
            was_answered = getattr(error, "response", None) is not None  # with an error status
            if was_answered or failures >= attempts or n_connections == _MOST_CONNECTIONS:
                sent = f"the hub sends {out.n_bytes:,} of the {offered.size:,} bytes of {name}"
                raise DownloadError(sent if error is None else _reason(error, repo, name))
            watch(f"the connection broke; asking again for {name}", out.n_bytes, offered.size)
            time.sleep(0.5 * failures)
        out.finish()
    if out.sha256 != offered.sha256:
        target.unlink()
        raise mismatch(name, offered.sha256, out.sha256)


def _connect(offered: _Offered, name: str, out: Hashing, watch: Watch) -> Exception | None:
    """Write what one connection sends; returns what goes wrong with it, and raises what goes wrong on this side."""
    from huggingface_hub import get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if out.n_bytes:
        headers["Range"] = f"bytes={out.n_bytes}-"
    options: dict[str, Any] = {"headers": headers, "timeout": _SECONDS_OF_SILENCE, "follow_redirects": True}
    try:
        with get_session().stream("GET", offered.url, **options) as response:
            hf_raise_for_status(response)
            if out.n_bytes and response.status_code != 206:
                out.restart()  # the server cannot give a range
            for chunk in response.iter_bytes(_CHUNK):
                if out.n_bytes + len(chunk) > offered.size:
                    out.restart()
                    raise DigestMismatch(
                        f"the hub sends more than the {offered.size:,} bytes of {name}; the download was deleted"
                    )
                out.write(chunk)
                watch(f"downloading {name}", out.n_bytes, offered.size)
    except DigestMismatch:
        raise
    except Exception as error:  # the library's own errors and its HTTP client's have no common base
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's: those of connections have no number
        return error
    return None


def _reason(error: Exception, repo: str, name: str) -> str:
    """Why the hub could not deliver, in a clause."""
    from huggingface_hub import errors

    if isinstance(error, DownloadError):
        return str(error)
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return f"{repo} asks you to accept its licence: do so on its page, and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"the hub has no repository {repo}, or it is private (HF_TOKEN)"
    if status == 404:
        return f"{repo} has no file {name}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if status is not None:
        return f"the hub answered with status {status}"
    detail = " ".join(str(error).split())[:120] or type(error).__name__
    return f"the hub cannot be reached ({detail})"
