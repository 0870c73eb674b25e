"""What is asked of a pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localspec.errors import UsageError
from localspec.prompts.prompts import Prompt, PromptEncoder, is_messages
from localspec.runtime.arguments import DraftLength, checked_length, checked_params, drafter_names
from localspec.sampling.logprobs import checked_top
from localspec.sampling.sampling import SamplingParams
from localspec.sampling.structured.request import grammar_of
from localspec.spec_decode.thinking import ThinkingReader
from localspec.values import checked_whole


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """What is asked of a pair.

    Attributes:
        prompt: text, messages or token ids; or what makes them when the request's turn comes.
        params: the sampling parameters.
        draft_length: ``auto``, or a number of tokens; 0 decodes plainly.
        n_logprobs: alternatives to name for every token; None names none and judges none.
        model_name: what the reply calls the target.
        drafters, prediction: see ``Seat.drafters_for``.
        keep_tokens: all but so many tokens of the prompt's beginning are dropped from memory afterwards; None keeps
            all, answer included.
        think: ``auto``, ``on``, ``off`` or an effort, see ``prompts.thinking``; None: only messages are asked so.
        thinking_budget: tokens until a thinking block is closed; None is any number.
        end_marks: texts that end the answer besides ``params.stop``, see ``PromptEncoder``.
    """

    prompt: Prompt | Callable[[], Prompt]
    params: SamplingParams
    draft_length: DraftLength
    n_logprobs: int | None
    model_name: str
    drafters: Sequence[str] | None = None
    prediction: Sequence[int] = ()
    keep_tokens: int | None = None
    think: str | None = None
    thinking_budget: int | None = None
    end_marks: Sequence[str] = ()

    @classmethod
    def checked(
        cls,
        prompt: Prompt | Callable[[], Prompt],
        params: SamplingParams | None,
        encoder: PromptEncoder,
        default_length: DraftLength,
        model_name: str,
        *,
        speculate: bool = True,
        draft_length: DraftLength | None = None,
        logprobs: int | None = None,
        drafters: Sequence[str] | None = None,
        prediction: str | Sequence[int] | None = None,
        keep_tokens: int | None = None,
        think: str | None = None,
        thinking_budget: int | None = None,
    ) -> AnswerRequest:
        """A request of the options that ``Asking.rounds`` explains.

        Raises:
            UsageError: one makes no sense.
        """
        length = default_length if draft_length is None else checked_length(draft_length)
        is_chat = think is not None or callable(prompt) or is_messages(prompt)  # a function makes a session's messages
        return cls(
            prompt=prompt,
            params=checked_params(params),
            draft_length=length if speculate else 0,
            n_logprobs=None if logprobs is None else checked_top(logprobs),
            model_name=model_name,
            drafters=drafter_names(drafters),
            prediction=encoder.ids("prediction", () if prediction is None else prediction),
            keep_tokens=None if keep_tokens is None else checked_whole("keep_tokens", keep_tokens, 0),
            think=None if think is None else encoder.checked_think(think),
            thinking_budget=None if thinking_budget is None else checked_whole("thinking_budget", thinking_budget, 0),
            end_marks=encoder.end_marks if is_chat else (),
        )

    def read(self, encoder: PromptEncoder, room: int | None = None) -> tuple[list[int], ThinkingReader | None]:
        """The prompt's tokens, and what tells thinking and answer apart; None where the model is not known to think.

        ``room``: see ``PromptEncoder.encode``.

        Raises:
            UsageError, TemplateError: the prompt cannot be.
        """
        prompt = self.prompt() if callable(self.prompt) else self.prompt
        think = self.think or "auto"
        if grammar_of(self.params.response_format, self.params.grammar) is not None:
            if think not in ("auto", "off"):
                raise UsageError("constrained output cannot be combined with thinking: leave out one of them")
            think = "off"
        tokens = encoder.encode(prompt, think=think, room=room)
        if encoder.thinking is None or (self.think is None and not is_messages(prompt)):
            return tokens, None
        state = encoder.thinking_state(tokens)
        budget = 0 if think == "off" else self.thinking_budget
        return tokens, ThinkingReader(encoder.thinking, inside=state == "inside", over=state == "over", budget=budget)
