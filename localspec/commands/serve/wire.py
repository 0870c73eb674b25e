"""What both endpoints send alike: usage, our own figures, identifiers, tokens with their log-probabilities."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from localspec.commands.serve.events import event
from localspec.commands.serve.service import Happening, Service
from localspec.runtime.stream import Reply
from localspec.spec_decode.rounds import EmittedToken

ROUND_EVENT = "localspec.round"


@dataclass(slots=True)
class Envelope:
    """The frame of one request's answer, and what its answers add up to.

    Attributes:
        service: whose answer it is.
        prefix: of the identifier, as OpenAI has it.
        kind: ``object`` of a whole answer.
        chunk: ``object`` of a piece of one.
        replies: those that are complete.
    """

    service: Service
    prefix: str
    kind: str
    chunk: str
    prompt_tokens: int
    replies: list[Reply] = field(default_factory=list)
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(14)}"

    def frame(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.service.names[0],
            "system_fingerprint": self.service.fingerprint,
        }

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage. Predictions are guesses of any drafter; what the client sent as one is among them.

        Accepted are those that are in the answer, rejected those that the target refused. Neither is part of
        ``completion_tokens`` twice: an accepted guess is a token of the answer, a rejected one is none.
        """
        completion = sum(reply.stats.completion_tokens for reply in self.replies)
        accepted = sum(token.kind == "accepted" for reply in self.replies for token in reply.tokens)
        rejected = sum(reply.stats.num_draft_tokens - reply.stats.num_accepted_tokens for reply in self.replies)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {
                "cached_tokens": self.replies[0].stats.cached_tokens if self.replies else 0,
                "audio_tokens": 0,
            },
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
                "reasoning_tokens": 0,
                "audio_tokens": 0,
            },
        }

    def figures(self) -> dict[str, Any]:
        """Our own part: the statistics of the answer, or a list of them where there are several."""
        stats = [reply.stats.as_dict() for reply in self.replies]
        last = self.replies[-1] if self.replies else None
        return {
            "stats": stats[0] if len(stats) == 1 else stats,
            "draft": last.draft if last else [],
            "backend": last.backend if last else "",
            "explanation": last.explanation if last else "",
            "seconds_waited": round(self.replies[0].seconds_waited, 3) if self.replies else 0.0,
        }

    def round_event(self, happening: Happening) -> bytes:
        """A round. OpenAI's clients do not look at an event's name, so it is also a chunk without choices."""
        assert happening.round is not None
        own = {"choice": happening.index, "round": happening.round.as_event()}
        return event(self.frame(self.chunk) | {"choices": [], "localspec": own}, ROUND_EVENT)

    def last_event(self) -> bytes:
        """Usage and figures, behind the last choice."""
        rest = {"choices": [], "usage": self.usage(), "localspec": self.figures()}
        return event(self.frame(self.chunk) | rest)


def prompt_tokens(jobs: Sequence[Any]) -> int:
    """Tokens of the different prompts among the jobs; several answers to one prompt count it once."""
    return sum({id(job.prompt): len(job.prompt) for job in jobs}.values())


def token_entry(service: Service, token: int, logprob: float) -> dict[str, Any]:
    """A token with its log-probability, as chat completions have it."""
    raw = service.llm.vocab.token_bytes(token)
    return {"token": service.llm.token_text(token), "logprob": _finite(logprob), "bytes": list(raw)}


def chat_logprobs(service: Service, tokens: Sequence[EmittedToken]) -> list[dict[str, Any]]:
    """``logprobs.content`` of a chat completion."""
    entries = []
    for token in tokens:
        assert token.logprobs is not None
        entry = token_entry(service, token.id, token.logprobs.logprob)
        entry["top_logprobs"] = [token_entry(service, i, logprob) for i, logprob in token.logprobs.top]
        entries.append(entry)
    return entries


def completion_logprobs(service: Service, tokens: Sequence[EmittedToken], offset: int) -> dict[str, Any]:
    """``logprobs`` of a completion.

    Args:
        service: knows the tokens' texts.
        tokens: in order.
        offset: characters of the answer before them.
    """
    llm = service.llm
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        assert token.logprobs is not None
        found["tokens"].append(llm.token_text(token.id))
        found["token_logprobs"].append(_finite(token.logprobs.logprob))
        found["top_logprobs"].append({llm.token_text(i): _finite(logprob) for i, logprob in token.logprobs.top})
        found["text_offset"].append(offset)
        offset += len(token.text)
    return found


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # OpenAI's own figure for "never"; JSON has no infinity
