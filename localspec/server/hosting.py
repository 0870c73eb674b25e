"""The models of one server: loaded when a request names them, unloaded when they are idle or another needs the memory.

One model is loaded at a time. What is to be loaded stands in a line, in the order in which it was first asked for. Room
is made by unloading models that answer nothing, those first that were used least recently; where that is not enough,
the line waits. A model that has to go for the first in the line takes no new requests once that has waited for
``GRACE_S``, so that two models which do not fit together take turns.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

from localspec.backends.llama.embedding import MAX_CTX, EmbeddingModel, pooling_of
from localspec.engine.fit import (
    PROGRAM_BYTES,
    USUAL_CTX,
    Load,
    Sizes,
    Space,
    choose_context,
    gpu_share,
    gpus_of,
    loads_for,
    read_sizes,
    taken,
)
from localspec.engine.loading import Report
from localspec.engine.options import LoadOptions
from localspec.engine.worker import Turns
from localspec.errors import Cancelled, LocalspecError, UnknownModel, line_of
from localspec.llm import LLM
from localspec.model_files.catalog import Catalog
from localspec.model_files.gguf import GGUFFile, model_bytes
from localspec.model_files.local_files import known_entries, remove
from localspec.model_files.sources.base import size_text
from localspec.model_files.vocab import Vocab
from localspec.server.access import public_name
from localspec.server.embeddings import EmbeddingService
from localspec.server.http import (
    KEEP_ALIVE_S,
    ApiError,
    BodyReader,
    KeepAlive,
    ServerSettings,
    stopping,
    too_busy,
    too_late,
)
from localspec.server.service import Metrics, ResponseStore, Service
from localspec.system.files import is_same_file
from localspec.system.machine import read_memory

GRACE_S = 5.0  # for so long the models that answer go on taking requests while another waits for their memory

MEMORY_SHARE = 0.8
"""Of the memory that is free when the server starts, what its models may take; of that of GPUs likewise."""

CACHE_SHARE = 1 / 16  # of that, what the conversations put aside may take, for each model

CONTEXT_SHARE = 1 / 3
"""Of that, what a model with a context over the usual may take: a chat, an editor's and an embedding model go together.
"""

SEVERAL = 2  # answers at a time that memory is counted with where there may be several; for more it is the same

State = Literal["unloaded", "loading", "loaded", "unloading"]
Use = Literal["text", "fill", "embed"]


@dataclass(frozen=True, slots=True)
class ServedFile:
    """What a header says."""

    name: str  # what requests call the model
    spec: str  # what a command line calls it
    path: Path  # of the file, or of its first part
    n_bytes: int  # of all parts
    sizes: Sizes
    n_ctx_train: int  # tokens of context that it was trained for; 0: not told
    embeds: bool  # it makes embeddings, and continues no text

    @classmethod
    def read(cls, spec: str) -> ServedFile:
        """The file that a MODEL argument means; a ``LocalspecError`` if it is no model that answers."""
        path = Catalog.load().resolve(spec)
        return cls.of(path, spec, path.name.removesuffix(".gguf") if spec.endswith(".gguf") else spec)

    @classmethod
    def of(cls, path: Path, spec: str, name: str) -> ServedFile:
        with GGUFFile(path) as file:
            embeds = pooling_of(file) is not None
            if not embeds:
                file.check_generates_text()
            sizes, trained = Sizes.of(file), file.n_ctx_train
        return cls(public_name(name), spec, path, model_bytes(path), sizes, trained, embeds)


@lru_cache(256)
def fills(path: Path) -> bool:
    """Whether a model has tokens for what stands between two texts; it takes a while to find out."""
    with GGUFFile(path) as file:
        return "fim_mid" in Vocab.from_gguf(file).fim


NOTHING, PROGRAM = Space(0), Space(PROGRAM_BYTES)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How a model is loaded, with the most memory that fits."""

    load: LoadOptions
    drafts: bool = False  # the catalogue's draft model is loaded as well
    needed: Space = NOTHING  # what all takes together


@dataclass(frozen=True, slots=True)
class Opening:
    """How the models of a server are loaded."""

    text: Callable[[ServedFile, LoadPlan, Report, threading.Event], LLM]  # the last one cancels it
    embedding: Callable[[ServedFile, LoadPlan], EmbeddingModel]
    settings: Callable[[LLM, ServerSettings], ServerSettings] = lambda llm, settings: settings  # of a loaded model
    load: LoadOptions = field(default_factory=LoadOptions)  # context and answers at a time: as memory allows
    drafts: bool = True  # as ``LoadPlan`` has it, where there is memory for it
    specs: Sequence[str] | None = None  # None: all on the disk, also those that are fetched later
    made_of: Callable[[Path], Iterable[Path]] = lambda path: ()  # files that go with a model
    warn: Callable[[str], None] = lambda line: None  # takes a line for the person who started the server


@dataclass(eq=False, slots=True)
class HostedModel:
    """One model of a server. Used from the event loop only."""

    file: ServedFile
    plan: LoadPlan
    names: Sequence[str]  # what requests may call it; the first is what answers call it
    metrics: Metrics = field(default_factory=Metrics)
    fixed: bool = False  # loaded by somebody else, and stays
    state: State = "unloaded"
    service: Service | EmbeddingService | None = None
    taken: Space = NOTHING  # that it is counted with now
    n_uses: int = 0  # requests that it answers
    n_waiting: int = 0  # requests that wait for it
    n_promised: int = 0  # those that waited when it was loaded, and come before it is unloaded for another
    used: float = 0.0  # by ``time.monotonic``
    keep: KeepAlive = KEEP_ALIVE_S
    expires: float | None = None  # when it is unloaded, in seconds since 1970; None: at no time
    doing: tuple[str, float | None] = ("", None)  # to load it, and the fraction done if it is known
    error: str | None = None  # why it could not be loaded the last time
    leaves: bool = False  # once it is idle
    deleted: bool = False
    failure: ApiError | None = None
    cancel: threading.Event = field(default_factory=threading.Event)
    timer: asyncio.TimerHandle | None = None

    @property
    def llm(self) -> LLM | None:
        return self.service.llm if isinstance(self.service, Service) else None

    @property
    def is_idle(self) -> bool:
        return self.state == "loaded" and not (self.n_uses or self.n_promised or self.fixed)


class Host:
    """Used from the event loop only.

    Args:
        settings: the server's.
        opening: how models are loaded; None: there is one, which is loaded already.
        memory, gpu_memory: what all models may take, of the machine's and of GPUs' own [bytes]; None is a share of what
            is free now.
        keep_alive: where a request says nothing.
    """

    def __init__(
        self,
        settings: ServerSettings,
        opening: Opening | None = None,
        *,
        memory: int | None = None,
        gpu_memory: int | None = None,
        keep_alive: KeepAlive = KEEP_ALIVE_S,
    ) -> None:
        self.settings = settings
        self.bodies = BodyReader(settings)
        self.responses = ResponseStore()
        self.ending = asyncio.Event()  # set once the server goes down
        self.started = time.time()
        self.turns = Turns()  # of the rounds of all models
        if memory is None:
            memory = round(MEMORY_SHARE * read_memory().available)
        if gpu_memory is None and opening is not None:
            gpu_memory = round(MEMORY_SHARE * _free_on_gpus(opening))
        self.memory = Space(memory, gpu_memory)
        self.keep_alive = keep_alive
        self.metrics = Metrics()  # of requests that named no model that is here
        self.models: list[HostedModel] = []
        self._opening = opening
        self._line: dict[HostedModel, float] = {}
        self._change = asyncio.Event()
        self._tasks = set[asyncio.Task[None]]()
        if opening is not None:
            self.refresh()

    @classmethod
    def of_one(cls, engine: LLM | EmbeddingModel, settings: ServerSettings) -> Host:
        """A host of a model that is loaded already, and stays loaded; it is not closed here."""
        host = cls(settings, memory=0)
        if isinstance(engine, EmbeddingModel):
            file = ServedFile.of(engine.path, engine.path.stem, engine.path.stem)
        else:
            file = ServedFile.of(engine.model_path, engine.model_name, engine.model_name)
        names = tuple(dict.fromkeys((file.name, *settings.aliases)))
        plan = LoadPlan(LoadOptions(n_ctx=engine.n_ctx))
        host.models.append(HostedModel(file, plan, names, fixed=True))
        host._serve(host.models[0], engine)
        return host

    # -- which there are -------------------------------------------------------------------------------------------

    @property
    def opening(self) -> Opening:
        assert self._opening is not None
        return self._opening

    @property
    def only(self) -> HostedModel | None:
        """The model of a server that has one, which stays."""
        return self.models[0] if self._opening is None else None

    def check_open(self, use: Use) -> None:
        """Refuse, whatever is asked, what this server does not do, or not any more."""
        if self.ending.is_set():
            raise stopping()
        if self.only is not None:
            _check_use(self.only, use)

    def end(self) -> None:
        """The server goes down: what runs ends."""
        self.ending.set()
        for model in self.models:
            model.cancel.set()

    def refresh(self) -> None:
        """Add what was asked for, or all on the disk."""
        specs, catalog = self.opening.specs, Catalog.load()
        if specs is None:  # a request that names no model goes to the first
            usual = (catalog.default[0], catalog.fallback[0])
            present = [entry.name for entry in known_entries() if entry.present]
            specs = sorted(present, key=lambda name: usual.index(name) if name in usual else len(usual))
        for spec in specs:
            try:
                self.add(spec)
            except LocalspecError as error:
                if self.opening.specs is not None:
                    raise
                if not any(spec in entry.heads for entry in catalog.values()):
                    self.opening.warn(f"not served: {error}")

    def add(self, spec: str) -> None:
        """A model on the disk; a ``LocalspecError`` if it is none that answers."""
        if any(each.file.spec == spec for each in self.models):
            return
        file = ServedFile.read(spec)
        taken = {name for model in self.models for name in model.names}
        own = file.name
        if own in taken:
            own = next(name for n in count(2) if (name := f"{file.name}-{n}") not in taken)
        aliases = self.settings.aliases if not self.models else ()
        others = (file.name, file.spec, file.path.name.removesuffix(".gguf"), *aliases)
        names = [own, *(name for name in others if name not in taken)]
        self.models.append(HostedModel(file, self._plan(file), tuple(dict.fromkeys(names)), keep=self.keep_alive))

    def _plan(self, file: ServedFile) -> LoadPlan:
        """As it was asked for; where that is more than all models may take, one answer at a time, then no draft."""
        opening, load, trained = self.opening, self.opening.load, file.n_ctx_train or USUAL_CTX
        if file.embeds:
            n_ctx, sizes = min(load.n_ctx or MAX_CTX, trained), file.sizes
            # A text is one pass; every token of it attends to all others.
            n_bytes = sizes.n_bytes + 4 * n_ctx * (3 * sizes.n_ff + 5 * sizes.n_embd + sizes.n_head * n_ctx)
            needed = Space(0, n_bytes) if self.memory.gpu else Space(n_bytes)
            return LoadPlan(replace(load, n_ctx=n_ctx), needed=needed)
        backend = "ik-llama" if load.backend == "auto" else load.backend  # whose buffers are the larger ones
        cache_bytes = min(self.settings.prefix_cache << 20, round(CACHE_SHARE * self.memory.ram))
        space = Space(round(CONTEXT_SHARE * self.memory.ram), round(CONTEXT_SHARE * (self.memory.gpu or 0)) or None)
        draft = Catalog.load().draft_for(file.path) if opening.drafts else None
        draft_sizes = read_sizes(draft) if draft is not None else None
        for drafts, several in ((True, True), (True, False), (False, False)):
            models = [Load(draft_sizes)] if draft_sizes is not None and drafts else []
            loads = loads_for(Load(file.sizes), models, [], SEVERAL if load.parallel != 1 and several else 1)
            usual = load.n_ctx or min(USUAL_CTX, trained)
            n_layers, loads = self._on_gpus(loads, usual, backend)
            on_gpu = loads[0].gpu_share == 1
            found = choose_context(loads, load.kv_cache_type, backend, space, file.n_ctx_train, on_gpu=on_gpu)
            n_ctx = load.n_ctx or max(found.n_ctx, usual)
            takes = taken(loads, n_ctx, load.kv_cache_type, backend) - PROGRAM
            how = replace(
                load,
                n_ctx=n_ctx,
                n_gpu_layers=n_layers,
                prefix_cache_bytes=cache_bytes,
                parallel=load.parallel if several else 1,
            )
            plan = LoadPlan(how, drafts, takes + Space(cache_bytes))
            if self.memory.holds(plan.needed):
                break
        return plan

    def _on_gpus(self, loads: Sequence[Load], n_ctx: int, backend: str) -> tuple[int | None, list[Load]]:
        """The layers of a target (the first) that go to GPUs with memory of their own, and what then lies where: all
        that were asked for, or as many as fit with what drafts."""
        load, n_all = self.opening.load, loads[0].sizes.n_layer + 1
        if not self.memory.gpu:
            return load.n_gpu_layers, list(loads)
        for n in range(n_all, -1, -1) if load.n_gpu_layers is None else (load.n_gpu_layers,):
            share = gpu_share(n, loads[0].sizes.n_layer)
            drafts = [replace(each, gpu_share=float(share > 0)) for each in loads[1:]]
            placed = [replace(loads[0], gpu_share=share), *drafts]
            if (taken(placed, n_ctx, load.kv_cache_type, backend).gpu or 0) <= self.memory.gpu:
                break
        return (-1 if n == n_all else n), placed

    def fits(self, model: HostedModel) -> bool:
        """Whether a model can be loaded, if no other is."""
        return model.fixed or self.memory.holds(model.plan.needed)

    async def find(self, name: str | None, use: Use, *, any_name: bool = False) -> HostedModel:
        """The model that a request names, or the first that can do what it asks for; ``any_name``: a name that is not
        known stands for none.

        Raises:
            ApiError: there is no such model here (404), or it does something else (400).
        """
        model = self.named(name) if name else None
        if model is None and (not name or any_name):
            able = [each for each in self.models if not each.deleted and each.file.embeds == (use == "embed")]
            if use == "fill" and len(able) > 1:
                able = [each for each in able if await asyncio.to_thread(fills, each.file.path)] or able
            if not able:
                _check_use(None, use)
            return next((each for each in able if self.fits(each)), able[0])
        if model is None:
            raise self.no_model(name or "")
        _check_use(model, use)
        return model

    def named(self, name: str) -> HostedModel | None:
        plain = name.removesuffix(":latest")  # Ollama's clients add it
        return next(
            (model for model in self.models if plain in (*model.names, model.file.spec) and not model.deleted), None
        )

    def known(self, name: str) -> HostedModel:
        """The model of a name, the first where it is empty; an ``ApiError`` if there is none (404)."""
        model = self.named(name) if name else next(iter(self.models), None)
        if model is None:
            raise self.no_model(name)
        return model

    def no_model(self, name: str) -> ApiError:
        if self.only is not None:
            message = f"there is no model {name!r:.80} here; this server answers with {self.only.names[0]}"
        else:
            message = f"there is no model {name!r:.80} here; /v1/models lists those that are"
            if (entry := Catalog.load().get(name.removesuffix(":latest"))) is not None and not entry.present:
                message = (
                    f"{entry.name} is not on this disk; localspec pull {entry.name}, or POST /api/pull, fetches it"
                )
        return ApiError(404, message, param="model", code="model_not_found")

    # -- loading ---------------------------------------------------------------------------------------------------

    async def take(self, model: HostedModel, keep: KeepAlive | Literal["usual"] = "usual") -> Callable[[], None]:
        """Have a model loaded until what this returns is called, once; ``keep``: how long it stays then.

        Raises:
            ApiError: it can never fit (400), too many wait (429), the wait was too long (503), it is gone (404), or it
                cannot be loaded (500).
        """
        if model.fixed:
            model.n_uses += 1
        else:
            await self._enter(model)
        model.used = time.monotonic()
        if model.timer is not None:
            model.timer.cancel()
        model.expires = None
        return partial(self._release, model, keep)

    async def _enter(self, model: HostedModel) -> None:
        if model.state == "unloaded" and not self.fits(model):
            raise ApiError(400, self.too_large(model), param="model", code="model_too_large")
        most = max(1, self.settings.queue)  # as many as may wait for it once it is loaded
        if not self._is_open_to(model) and sum(each.n_waiting for each in self.models) >= most:
            raise too_busy(f"{most} requests wait for a model already", 5)
        earlier = model.failure
        model.n_waiting += 1
        try:
            async with asyncio.timeout(self.settings.time_limit):
                while not self._is_open_to(model):
                    if model.deleted:
                        raise self.no_model(model.names[0])
                    if model.failure is not None and model.failure is not earlier:
                        raise model.failure
                    if model.state != "loaded":
                        self._line.setdefault(model, time.monotonic())
                    self._advance()
                    await self._change.wait()
            model.n_uses += 1
        except TimeoutError:
            raise too_late(self.settings.time_limit) from None
        finally:
            model.n_waiting -= 1
            model.n_promised = max(0, min(model.n_promised - 1, model.n_waiting))
            if not model.n_waiting:
                self._line.pop(model, None)
                self._rest(model)
                self._advance()

    def too_large(self, model: HostedModel) -> str:
        needed, gpus, limit = model.plan.needed, "", ""
        if self.memory.gpu:
            gpus, limit = f" and {size_text(needed.gpu or 0)} on the GPU", f" and {size_text(self.memory.gpu)}"
        return (
            f"{model.names[0]} needs {size_text(needed.ram)}{gpus} with a context of {model.plan.load.n_ctx:,} tokens, "
            f"and the models of this server may take {size_text(self.memory.ram)}{limit} (--memory)"
        )

    def _release(self, model: HostedModel, keep: KeepAlive | Literal["usual"]) -> None:
        model.n_uses -= 1
        model.used = time.monotonic()
        model.keep = self.keep_alive if keep == "usual" else keep
        self._rest(model)
        self._changed()

    def _rest(self, model: HostedModel) -> None:
        """Begin to count the time for which a model is idle."""
        if not model.is_idle:
            return
        if model.timer is not None:
            model.timer.cancel()
        seconds = 0.0 if model.leaves else model.keep
        if seconds is None:
            model.expires = None
        elif seconds <= 0 and not model.n_waiting:
            self._unload(model)
        else:
            model.expires = time.time() + seconds
            model.timer = asyncio.get_running_loop().call_later(seconds, self._expire, model)

    def _expire(self, model: HostedModel) -> None:
        if model.is_idle and not model.n_waiting:
            self._unload(model)

    def leave(self, model: HostedModel) -> None:
        """Unload a model now, or once it is idle."""
        if model.is_idle:
            self._unload(model)
        elif model.state == "loading" and not model.n_waiting:
            model.cancel.set()
        elif model.n_uses and not model.fixed:
            model.leaves = True

    def _is_open_to(self, model: HostedModel) -> bool:
        """Whether a model is loaded, and no other has waited so long for its memory that new requests have to wait."""
        if model.state != "loaded":
            return False
        if model.n_promised:
            return True
        first, since = next(iter(self._line.items()), (None, 0.0))
        if first is None or first.state != "unloaded" or time.monotonic() - since < GRACE_S:
            return True
        return model not in self._in_the_way(first)

    def _in_the_way(self, wanted: HostedModel) -> list[HostedModel]:
        """The loaded models that have to go for one that is wanted, those used least recently first."""
        room, found = self.room, list[HostedModel]()
        loaded = [model for model in self.models if model.state == "loaded" and not model.fixed]
        for model in sorted(loaded, key=lambda model: (not model.is_idle, model.used)):
            lack = wanted.plan.needed - room
            if NOTHING.holds(lack):
                break
            if (lack.ram > 0 and model.taken.ram) or ((lack.gpu or 0) > 0 and model.taken.gpu):
                room += model.taken
                found.append(model)
        return found

    @property
    def room(self) -> Space:
        """Memory that no model takes."""
        return self.memory - _all_taken(self.models)

    @property
    def _over_budget(self) -> bool:
        """Whether the models that stay loaded take more than they may: one can turn out larger than was expected."""
        return not self.memory.holds(_all_taken(model for model in self.models if model.state != "unloading"))

    def _changed(self) -> None:
        self._advance()
        self._change.set()
        self._change = asyncio.Event()

    def _advance(self) -> None:
        """Load the next of the line, or make room for it."""
        if self.ending.is_set():
            return
        for model in sorted((model for model in self.models if model.is_idle), key=lambda model: model.used):
            if self._over_budget:
                self._unload(model)
        if not self._line:
            return
        first, *others = self._line
        if loading := next((model for model in self.models if model.state == "loading"), None):
            if loading is not first and not loading.n_waiting:  # who asked for it has left
                loading.cancel.set()
            return
        if any(model.state == "unloading" for model in self.models):
            return
        if self.room.holds(first.plan.needed):
            self._start(first)
            return
        way = self._in_the_way(first)
        if all(model.is_idle for model in way):
            for model in way:
                self._unload(model)
            return
        for model in others:
            if model.state == "unloaded" and self.room.holds(model.plan.needed):
                self._start(model)
                return

    def _start(self, model: HostedModel) -> None:
        model.state, model.error, model.taken = "loading", None, model.plan.needed
        model.cancel, model.doing, model.leaves = threading.Event(), ("loading", None), False
        self._run(self._load(model))

    async def _load(self, model: HostedModel) -> None:
        try:
            engine, model.taken = await asyncio.to_thread(self._opened, model)
        except Exception as error:
            model.state, model.taken = "unloaded", NOTHING
            self._line.pop(model, None)
            if not (isinstance(error, Cancelled) and model.cancel.is_set()):
                model.error = line_of(error).replace(str(model.file.path), model.file.path.name)
                message = f"{model.names[0]} cannot be loaded: {model.error}"
                model.failure = ApiError(500, message, param="model", code="model_not_loaded")
                self.opening.warn(message)
        else:
            self._serve(model, engine)
            model.used = time.monotonic()
            model.n_promised = model.n_waiting
            self._line.pop(model, None)
            self._rest(model)
        self._changed()

    def _opened(self, model: HostedModel) -> tuple[LLM | EmbeddingModel, Space]:
        """Load a model; it takes time."""
        opening, file = self.opening, model.file
        if file.embeds:
            return opening.embedding(file, model.plan), model.plan.needed

        def report(what: str, fraction: float | None) -> None:
            model.doing = (what, fraction)

        llm = opening.text(file, model.plan, report, model.cancel)
        try:
            llm.take_turns(self.turns)
            takes = _taken(llm, opening.load.kv_cache_type, gpus=bool(self.memory.gpu))
            return llm, takes + Space(model.plan.load.prefix_cache_bytes)
        except BaseException:
            llm.close(cancel=True)
            raise

    def _serve(self, model: HostedModel, engine: LLM | EmbeddingModel) -> None:
        if isinstance(engine, EmbeddingModel):
            model.service = EmbeddingService(engine, self.settings.queue, self.ending, model.names, self.turns)
        else:
            settings = self.settings if self._opening is None else self._opening.settings(engine, self.settings)
            model.service = Service(engine, settings, self.responses, model.metrics, model.names)
        model.state = "loaded"

    def _unload(self, model: HostedModel) -> None:
        model.state = "unloading"
        if model.timer is not None:
            model.timer.cancel()
        self._run(self._closed(model))

    async def _closed(self, model: HostedModel) -> None:
        service, model.service, model.expires = model.service, None, None
        assert service is not None
        await asyncio.to_thread(service.close)
        model.state, model.taken = "unloaded", NOTHING
        self._changed()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def delete(self, model: HostedModel) -> None:
        """Unload a model and remove its files.

        Raises:
            ApiError: it answers (409), or its file is none that localspec fetched (400).
            ModelFileError: its files cannot be removed.
        """
        if model.n_uses or model.n_waiting:
            message = f"{model.names[0]} answers {model.n_uses + model.n_waiting} requests; ask again when it is idle"
            raise ApiError(409, message, param="model", code="model_in_use")
        try:
            entry = Catalog.load().entry(model.file.spec)
        except UnknownModel:
            message = f"{model.names[0]} is a file of yours, not one that localspec fetched: delete it yourself"
            raise ApiError(400, message, param="model", code="not_fetched") from None
        model.deleted = True
        try:
            self.leave(model)
            while model.state != "unloaded":
                await self._change.wait()
            await asyncio.to_thread(remove, entry, self.opening.made_of(model.file.path))
        except BaseException:
            model.deleted = False
            raise
        self.models.remove(model)
        self._changed()

    def close(self) -> None:
        """After the server has ended: free what is loaded."""
        for model in self.models:
            if model.service is not None and not model.fixed:
                model.service.close()
                model.service = None


def _check_use(model: HostedModel | None, use: Use) -> None:
    """Refuse what a model (None: every one here) does not do."""
    if use == "embed" and (model is None or not model.file.embeds):
        message = "this model continues text; it makes no embeddings: that takes a server of an embedding model"
        raise ApiError(400, message, code="unsupported_endpoint")
    if use != "embed" and (model is None or model.file.embeds):
        raise ApiError(400, "this model makes embeddings; it continues no text", code="unsupported_endpoint")


def _free_on_gpus(opening: Opening) -> int:
    """Memory that is free on GPUs with memory of their own [bytes], where models may be put on them."""
    if opening.load.n_gpu_layers == 0 or opening.load.backend not in ("auto", "llama-cpp"):
        return 0
    return sum(each.free_bytes for each in gpus_of("llama-cpp") if not each.shared)


def _taken(llm: LLM, kv_type: str, *, gpus: bool) -> Space:
    """Memory of a loaded model with what it drafts with; ``gpus``: whether there are some with memory of their own."""
    pair = llm.inspect()
    on_gpu = gpus and pair.target.capabilities.device != "cpu"
    target, models, heads = read_sizes(pair.target.path), list[Load](), list[Load]()
    for draft in pair.state.models:
        is_own = is_same_file(draft.model.path, pair.target.path)  # the target's own layers
        found = target.own_layer if is_own and target is not None else read_sizes(draft.model.path)
        if found is not None:
            share = float(gpus and draft.model.capabilities.device != "cpu")
            (models if draft.drafter.info.is_draft_model else heads).append(Load(found, gpu_share=share))
    parallel, loads = int(llm.parallel_info()["parallel"]), list[Load]()
    if target is not None:
        share = gpu_share(pair.options.n_gpu_layers, target.n_layer) if on_gpu else 0.0
        loads = loads_for(Load(target, gpu_share=share), models, heads, parallel)
    return taken(loads, llm.n_ctx, kv_type, llm.backend_name) - PROGRAM


def _all_taken(models: Iterable[HostedModel]) -> Space:
    return sum((model.taken for model in models), NOTHING)
