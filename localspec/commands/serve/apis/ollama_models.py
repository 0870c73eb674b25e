"""What Ollama's clients ask about models: ``/api/tags``, ``/api/show``, ``/api/ps``, ``/api/version``."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from functools import cached_property
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localspec import __version__
from localspec.commands.serve import known_fields as known
from localspec.commands.serve.access import public_name
from localspec.commands.serve.apis.ollama import timestamp
from localspec.commands.serve.fields import Fields
from localspec.commands.serve.service import Service
from localspec.model_files.gguf_file import GGUFFile

_PATH = re.compile(r"(?:[A-Za-z]:)?(?:~|\.{1,2})?[\\/][^\n]*")

OLLAMA_VERSION = "0.9.0"
"""Clients ask it whether tools, JSON schemas and thinking are known; Ollama knows all three since then."""


class OllamaModels:
    """The endpoints.

    Args:
        service: whose model is shown.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    @cached_property
    def _header(self) -> dict[str, Any]:
        """What the file's header says, as Ollama has it."""
        llm = self._service.llm
        with GGUFFile(llm.model_path) as file:
            scalars = {name: _scalar(value) for name, value in file.metadata.items()}
            return {
                "details": {
                    "parent_model": "",
                    "format": "gguf",
                    "family": file.architecture,
                    "families": [file.architecture],
                    "parameter_size": _rounded(file.n_params),
                    "quantization_level": file.quantization,
                },
                "model_info": scalars | {"general.parameter_count": file.n_params},
                "license": str(file.metadata.get("general.license", "")),
                "template": llm.template.source,
                "modified_at": timestamp(llm.model_path.stat().st_mtime),
            }

    async def _listed(self) -> list[dict[str, Any]]:
        header = await asyncio.to_thread(lambda: self._header)
        llm = self._service.llm
        # Clients want 64 digits that tell files apart; reading all of a large file for its own digest takes a minute.
        digest = hashlib.sha256(
            f"{llm.vocab.fingerprint} {llm.size_bytes} {header['modified_at']}".encode()
        ).hexdigest()
        about = {"modified_at": header["modified_at"], "size": llm.size_bytes, "digest": digest}
        return [{"name": name, "model": name} | about | {"details": header["details"]} for name in self._service.names]

    async def tags(self, request: Request) -> Response:
        return JSONResponse({"models": await self._listed()})

    async def ps(self, request: Request) -> Response:
        models = [
            {name: value for name, value in model.items() if name != "modified_at"} for model in await self._listed()
        ]
        return JSONResponse({"models": [model | {"context_length": self._service.llm.n_ctx} for model in models]})

    async def show(self, request: Request) -> Response:
        async with self._service.bodies.json(request) as body:
            fields = Fields(body).known(known.OLLAMA_SHOW)
        name = fields.text("model") or fields.required_text("name")
        self._service.check_model(name)
        header = await asyncio.to_thread(lambda: self._header)
        defaults = "\n".join(f"{key} {value}" for key, value in self._service.llm.chat_defaults.items())
        own = {"modelfile": f"FROM {self._service.names[0]}\n", "parameters": defaults}
        return JSONResponse(header | own | {"capabilities": self._capabilities()})

    def _capabilities(self) -> list[str]:
        llm = self._service.llm
        more = {"insert": "fim_mid" in llm.vocab.fim, "thinking": llm.thinking is not None}
        return ["completion", "tools", *(name for name, can in more.items() if can)]

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": OLLAMA_VERSION, "localspec": __version__})


def _scalar(value: Any) -> Any:
    """A value of the header that is no list; of a path, as quantisers write that of their statistics, only its end."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return public_name(value) if _PATH.fullmatch(value) else value
    return value if isinstance(value, int | float) else None


def _rounded(n: int) -> str:
    """A number of parameters as people say it, such as 1.5B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n >= size:
            return f"{n / size:.1f}{unit}"
    return str(n)
