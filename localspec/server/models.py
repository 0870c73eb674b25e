"""What a server says of its models, and does with them: OpenAI's, llama-server's and Ollama's addresses."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from functools import lru_cache
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, Info, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from localspec._version import __version__
from localspec.errors import Cancelled, LocalspecError, UnknownModel
from localspec.model_files import sources
from localspec.model_files.catalog import ROOM, Catalog, Entry
from localspec.model_files.gguf import GGUFFile, fingerprint
from localspec.server import responses
from localspec.server.access import READS_TEXTS, SEES_OTHERS, Address, Client, client_of, public_name
from localspec.server.bodies import Body, Flag, read
from localspec.server.embeddings import EmbeddingService
from localspec.server.events import EventStream, while_connected
from localspec.server.hosting import Host, HostedModel, fills
from localspec.server.http import ApiError, invalid
from localspec.server.ollama import WIRE, line, timestamp
from localspec.server.service import Service
from localspec.system.machine import CPUTimes

OLLAMA_VERSION = "0.9.0"
"""Clients ask it whether tools, JSON schemas and thinking are known; Ollama knows all three since then."""


class OllamaShowBody(Body):
    """A body that names a model."""

    model: str | None = None
    name: str | None = None

    @property
    def asked(self) -> str:
        """The name; an ``ApiError`` where there is none."""
        name = self.name if self.model is None else self.model
        if name is None:
            raise invalid("model is missing", "model", "missing_required_parameter")
        return name


class OllamaPullBody(OllamaShowBody):
    """The body of ``/api/pull``."""

    stream: Flag = True


@dataclasses.dataclass
class ModelEndpoints:
    """What is served, and how it does."""

    host: Host

    def addresses(self) -> list[Address]:
        return [
            Address("/v1/responses/{id}", self.response, methods=("GET", "DELETE")),
            Address("/v1/models", self.models),
            Address("/v1/models/", self.models),
            Address("/v1/models/{model:path}", self.model),
            Address("/models/load", self.load, methods=("POST",)),
            Address("/models/unload", self.unload, methods=("POST",)),
            Address("/v1/localspec/models", self.all),
            Address("/v1/localspec/stats", self.stats),  # without figures about others, for those who may not see them
            Address("/metrics", self.metrics, SEES_OTHERS),
        ]

    def _named(self, name: str, model: HostedModel, client: Client) -> dict[str, Any]:
        created = self.host.started
        return {
            "id": name,
            "object": "model",
            "created": int(created),
            "type": "model",  # from here on, what Anthropic's clients read
            "display_name": name,
            "created_at": timestamp(created),
            "owned_by": "localspec",
            "localspec": {"loaded": model.state == "loaded", "size": model.file.n_bytes} | _about(model, client),
        }

    async def models(self, request: Request) -> Response:
        client, host = client_of(request), self.host
        # Of a server of one model every name counts; of several, each has one that answers call it.
        there = [model for model in host.models if not model.deleted]
        shown = [(name, model) for model in there for name in (model.names if model.fixed else model.names[:1])]
        pages = {"has_more": False, "first_id": shown[0][0], "last_id": shown[-1][0]} if shown else {"has_more": False}
        data = [self._named(name, model, client) for name, model in shown]
        return JSONResponse({"object": "list", "data": data} | pages)

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        return JSONResponse(self._named(name, self.host.known(name), client_of(request)))

    async def load(self, request: Request) -> Response:
        """llama-server's: load a model, and answer when it is."""
        model = await _asked(self.host, request)
        (await while_connected(request.receive, self.host.ending, self.host.take(model)))()
        return JSONResponse({"success": True})

    async def unload(self, request: Request) -> Response:
        """llama-server's: unload a model, once it is idle."""
        model = await _asked(self.host, request)
        if model.fixed:
            raise ApiError(400, f"{model.names[0]} is all that this server has, and stays", code="model_stays")
        self.host.leave(model)
        return JSONResponse({"success": True})

    async def all(self, request: Request) -> Response:
        """For the page: the models, what fits, what is loaded, and what could be fetched."""
        host, client = self.host, client_of(request)
        shown = [model for model in host.models if not model.deleted]
        models = [
            {
                "name": model.names[0],
                "state": model.state,
                "doing": model.doing[0] if model.state == "loading" else "",
                "fraction": model.doing[1] if model.state == "loading" else None,
                "size": model.file.n_bytes,
                "needed": model.plan.needed.ram,
                "fits": host.fits(model),
                "embeds": model.file.embeds,
                "error": model.error,
                "expires": model.expires,
            }
            for model in shown
        ]
        found: dict[str, Any] = {"models": models, "several": host.only is None}
        if host.only is None:
            limit, taken = host.memory, host.memory - host.room
            found["memory"] = {"limit": limit.ram, "taken": taken.ram}
            found["gpu_memory"] = {"limit": limit.gpu or 0, "taken": taken.gpu}
            found["fetches"], room = client.reads_texts, limit.ram + (limit.gpu or 0)
            catalog = Catalog.load() if client.reads_texts else {}
            heads = {name for entry in catalog.values() for name in entry.heads}  # which come with their models
            found["catalog"] = [
                {"name": entry.name, "size": entry.bytes, "fits": ROOM * entry.bytes <= room, "note": entry.note}
                for entry in catalog.values()
                if not entry.present and entry.name not in heads
            ]
        return JSONResponse(found)

    async def response(self, request: Request) -> Response:
        """Return, or delete, an answer of ``/v1/responses`` that is kept."""
        name, kept = request.path_params["id"], self.host.responses
        stored = responses.stored_response(kept, client_of(request), name)
        if request.method != "DELETE":
            return await asyncio.to_thread(JSONResponse, stored.response)
        kept.remove(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def stats(self, request: Request) -> Response:
        """Figures of the model that ``?model=`` names, by default of the first that is loaded."""
        client, host = client_of(request), self.host
        texts = [model for model in host.models if not model.file.embeds]
        usual = next((model for model in texts if model.state == "loaded"), texts[0] if texts else None)
        model = host.known(name) if (name := request.query_params.get("model")) else usual
        if model is None:
            return JSONResponse({"model": None, "version": __version__, "loaded": False})
        stats: dict[str, Any] = {"model": model.names[0], "version": __version__}
        if not isinstance(model.service, Service):
            stats |= {"loaded": False, "embeds": model.file.embeds, "backend": None, "drafters": []}
            stats |= {"context": model.plan.load.n_ctx, "thinks": False, "parallel": {"parallel": 1}}
            return JSONResponse(stats)
        service, llm = model.service.seen_by(client), model.service.llm
        stats |= {
            "loaded": True,
            "backend": llm.backend_name,
            "drafters": list(service.drafters),
            "draft_length": llm.draft_length,
            "context": llm.n_ctx,
            "thinks": service.served().thinks,
            "plain_tokens_per_second": llm.plain_tokens_per_second,
            "uptime_s": round(time.time() - host.started, 3),
            "queue": {"running": llm.busy, "waiting": llm.queue_length, "limit": llm.max_queue},
            "parallel": {n: value for n, value in llm.parallel_info().items() if n != "passes" or client.sees_others},
            "cpu": dataclasses.asdict(CPUTimes.now()),
        }
        if client.sees_others:
            stats["explanation"] = llm.explain()
            stats |= {"prefix_cache": llm.cache_info(), "totals": service.metrics.as_dict()}
        return JSONResponse(stats)

    async def metrics(self, request: Request) -> Response:
        host, registry = self.host, CollectorRegistry()
        gauges: list[tuple[str, str, float]] = [("uptime_seconds", "Since the start.", time.time() - host.started)]
        if (only := host.only) is None:
            registry.register(OfModels(host))
            gauges += [
                ("memory_limit_bytes", "What the models may take.", host.memory.ram),
                ("gpu_memory_limit_bytes", "What they may take of GPUs of their own memory.", host.memory.gpu or 0),
            ]
        else:
            registry.register(only.metrics)
            if isinstance(only.service, Service):
                service, llm = only.service.seen_by(client_of(request)), only.service.llm
                names = {"version": __version__, "model": service.names[0], "backend": llm.backend_name}
                about = names | {"draft": ",".join(service.drafters)}
                Info("localspec", "What is served.", registry=registry).info(about)
                gauges += [
                    ("requests_running", "Requests being answered.", llm.parallel_info()["running"]),
                    ("requests_waiting", "Requests in the queue.", llm.queue_length),
                    ("queue_limit", "Most requests that may wait.", llm.max_queue or 0),
                    ("plain_tokens_per_second", "Expected speed without drafting.", llm.plain_tokens_per_second),
                ]
        for name, documentation, value in gauges:
            Gauge(f"localspec_{name}", documentation, registry=registry).set(value)
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")


async def _asked(host: Host, request: Request) -> HostedModel:
    """The model that a request's body names."""
    async with host.bodies.json(request) as body:
        return host.known(read(OllamaShowBody, body).asked)


@dataclasses.dataclass(eq=False)
class OfModels(Collector):
    """The metrics of all models of a server, each sample with the ``model`` that it is of."""

    host: Host

    def collect(self) -> Iterator[Metric]:
        host, families = self.host, dict[str, Metric]()
        of_models = [(model.names[0], (*model.metrics.collect(), *_gauges(model))) for model in host.models]
        for name, found in (("", host.metrics.collect()), *of_models):
            for family in found:
                kept = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                kept.samples += (Sample(one.name, {"model": name} | one.labels, one.value) for one in family.samples)
        yield from families.values()


def _gauges(model: HostedModel) -> Iterator[Metric]:
    for stem, about, value in (
        ("loaded", "Whether the model is loaded.", model.state == "loaded"),
        ("memory_bytes", "Memory that it is counted with.", model.taken.ram),
        ("gpu_memory_bytes", "The same of GPUs of their own memory.", model.taken.gpu or 0),
        ("requests_running", "Requests that it answers.", model.n_uses),
        ("requests_waiting", "Requests that wait until it is loaded.", model.n_waiting),
    ):
        yield GaugeMetricFamily(f"localspec_model_{stem}", about, value=float(value))


def _about(model: HostedModel, client: Client) -> dict[str, Any]:
    """Context, engine and drafters of a model, or the numbers of an embedding, as far as they are known."""
    service = model.service
    if isinstance(service, EmbeddingService):
        made = service.model
        return {"context": made.n_ctx, "backend": made.backend, "dimensions": made.n_embd}
    if service is None:
        return {"context": model.plan.load.n_ctx}
    drafters = list(service.seen_by(client).drafters)
    return {"context": service.llm.n_ctx, "backend": service.llm.backend_name, "draft": drafters}


# What Ollama's clients ask about models, and have done with them.

_PATH = re.compile(r"(?:[A-Za-z]:)?(?:~|\.{1,2})?[\\/][^\n]*")

SECONDS_BETWEEN = 0.1  # between two lines that tell how far a fetch is


@dataclasses.dataclass
class OllamaModels:
    """The endpoints."""

    host: Host

    def addresses(self) -> list[Address]:
        # Only this computer decides what is on its disk.
        return [
            Address("/api/tags", self.tags),
            Address("/api/show", self.show, methods=("POST",)),
            Address("/api/ps", self.ps),
            Address("/api/pull", self.pull, READS_TEXTS, ("POST",)),
            Address("/api/delete", self.delete, READS_TEXTS, ("DELETE",)),
            Address("/api/version", self.version),
        ]

    def _header(self, model: HostedModel) -> dict[str, Any]:
        found = _header(model.file.path, model.file.path.stat().st_mtime)
        return found | ({} if model.llm is None else {"template": model.llm.template.source})

    async def _listed(self, models: Iterable[HostedModel]) -> list[dict[str, Any]]:
        listed = []
        for model in [model for model in models if not model.deleted]:
            try:
                header = await asyncio.to_thread(self._header, model)
            except (LocalspecError, OSError):
                continue  # the file went
            about = {"modified_at": header["modified_at"], "size": model.file.n_bytes, "digest": header["digest"]}
            names = model.names if model.fixed else model.names[:1]
            listed += [{"name": name, "model": name} | about | {"details": header["details"]} for name in names]
        return listed

    async def tags(self, request: Request) -> Response:
        return JSONResponse({"models": await self._listed(self.host.models)})

    async def ps(self, request: Request) -> Response:
        found = []
        for model in [model for model in self.host.models if model.state == "loaded"]:
            service = model.service
            n_ctx = model.llm.n_ctx if model.llm is not None else model.plan.load.n_ctx
            own: dict[str, Any] = {"context_length": n_ctx}
            if not model.fixed:
                on_gpu = isinstance(service, Service) and service.llm.inspect().target.capabilities.device == "gpu"
                own_gpu = model.taken.gpu or 0
                size = model.taken.ram + own_gpu
                vram = size if on_gpu and not self.host.memory.gpu else own_gpu  # else it is all one memory
                expires = timestamp(model.expires or (_IN_A_CENTURY if model.keep is None else time.time()))
                own |= {"size": size, "size_vram": vram, "expires_at": expires}
            for listed in await self._listed([model]):
                found.append({name: value for name, value in listed.items() if name != "modified_at"} | own)
        return JSONResponse({"models": found})

    async def show(self, request: Request) -> Response:
        model = await _asked(self.host, request)
        try:
            header = await asyncio.to_thread(self._header, model)
        except OSError:
            raise self.host.no_model(model.names[0]) from None
        header = {key: value for key, value in header.items() if key != "digest"}
        defaults = "\n".join(f"{k} {value}" for k, value in Catalog.load().chat_defaults(model.file.path).items())
        own = {"modelfile": f"FROM {model.names[0]}\n", "parameters": defaults}
        return JSONResponse(header | own | {"capabilities": await self._capabilities(model, header["template"])})

    async def _capabilities(self, model: HostedModel, template: str) -> list[str]:
        if model.file.embeds:
            return ["embedding"]
        thinks = model.llm.thinking is not None if model.llm is not None else "</think>" in template
        more = {"insert": await asyncio.to_thread(fills, model.file.path), "thinking": thinks}
        return ["completion", "tools", *(name for name, can in more.items() if can)]

    async def pull(self, request: Request) -> Response:
        """Fetch a model; it is served from then on. A client that leaves stops it, and what arrived is kept."""
        async with self.host.bodies.json(request) as body:
            asked = read(OllamaPullBody, body)
        self._check_may_change()
        try:
            entry = Catalog.load().find(asked.asked.removesuffix(":latest"))
        except UnknownModel as error:  # which says what is near
            raise ApiError(404, str(error), param="model", code="model_not_found") from None
        if asked.stream:
            return EventStream(self._fetched(entry), self.host.ending, WIRE)

        async def whole() -> dict[str, Any]:
            async with aclosing(self._fetched(entry)) as steps:
                async for _ in steps:
                    pass
            return {"status": "success"}

        return JSONResponse(await while_connected(request.receive, self.host.ending, whole()))

    def _check_may_change(self) -> None:
        if self.host.only is not None:
            message = "this server has one model, named at its start: localspec serve without a name has all"
            raise ApiError(400, message, code="one_model")

    async def _fetched(self, entry: Entry) -> AsyncGenerator[bytes, None]:
        """Fetch an entry, with the lines that Ollama sends meanwhile."""
        loop, steps = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any] | None]()
        digest = f"sha256:{entry.sha256 or entry.name}"
        left, told = False, 0.0

        def watch(what: str, done: int, total: int) -> None:
            nonlocal told
            if left:
                raise Cancelled("the client has gone")
            now = time.monotonic()
            if total and (now - told >= SECONDS_BETWEEN or done >= total):
                told = now
                step = {"status": f"pulling {entry.name}", "digest": digest, "total": total, "completed": done}
                loop.call_soon_threadsafe(steps.put_nowait, step)

        def fetch() -> None:
            try:
                sources.pull(entry, watch=watch)
            finally:
                loop.call_soon_threadsafe(steps.put_nowait, None)

        yield line({"status": "pulling manifest"})
        fetching = asyncio.ensure_future(asyncio.to_thread(fetch))
        try:
            while (step := await steps.get()) is not None:
                yield line(step)
            await fetching
        finally:
            left = True
            await asyncio.gather(fetching, return_exceptions=True)
        self.host.add(entry.name)
        for status in ("verifying sha256 digest", "writing manifest", "success"):
            yield line({"status": status})

    async def delete(self, request: Request) -> Response:
        self._check_may_change()
        await self.host.delete(await _asked(self.host, request))
        return Response(status_code=200)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": OLLAMA_VERSION, "localspec": __version__})


_IN_A_CENTURY = time.time() + 100 * 365.25 * 24 * 3600
"""When a model expires that stays: Ollama's clients take it for never."""


@lru_cache(256)
def _header(path: Path, modified: float) -> dict[str, Any]:
    """What a file's header says, as Ollama has it."""
    with GGUFFile(path) as file:
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
            "template": str(file.metadata.get("tokenizer.chat_template", "")),
            "modified_at": timestamp(modified),
            # Clients want 64 digits that tell files apart; reading all of a large file takes a minute.
            "digest": fingerprint(path) * 2,
        }


def _scalar(value: Any) -> Any:
    """A scalar of the header; of a path, which quantisers write into it, only the end."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return public_name(value) if _PATH.fullmatch(value) else value
    return value if isinstance(value, int | float) else None


def _rounded(n: int) -> str:
    """A number of parameters, such as 1.5B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n >= size:
            return f"{n / size:.1f}{unit}"
    return str(n)
