"""Record what a policy needs to know about texts: what each drafter would have guessed, and was it right.

    python benchmarks/record_traces.py OUT.json [MODEL] [--draft NAME ...] [--head] [--backend NAME] [--set tuning]
        [--tokens N] [--temperature T] [--category NAME ...] [--prompts FILE] [--answers TRACES.json]

The target answers every prompt plainly. Then the draft model reads the answers (one pass each, so this is quick), and
the n-gram drafter follows them token by token. One of another vocabulary drafts at every place, as many steps as show
where its first token ends. Further draft models are the sources ``model2``, … With ``--head`` so does the head for this
target, at every place for as many draft tokens as it was trained for; what was drafted before each is the answer
itself, as only then it matters.
The tokens are recorded too, for drafters that cost nothing and learn from answer to answer. OUT is written after each
answer, and answers that it has already are kept. ``--answers`` takes the first N tokens of answers that were recorded
before, so that only what drafters say of them is new. ``replay_traces.py`` replays policies on such traces in
milliseconds, with any cost curve: the text, the confidences and the fates are real, only the clock is simulated.

At temperature 0 a fate is 0 or 1. Above, it is the exact probability of acceptance at that position: p(x) of a guess
x that was not sampled, sum(min(p, q)) of one sampled from q.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from localspec import LLM, SamplingParams
from localspec.backends.base import Context, FloatArray, Forward
from localspec.engine.state import DraftModel
from localspec.heads.drafters import HeadDrafter
from localspec.prompts.questions import in_turns, of_categories, own_questions, read_questions
from localspec.sampling.sampling import Distribution, Noise, distribution, top_probability
from localspec.spec_decode.drafters.base import Drafter, Plan, Proposer
from localspec.spec_decode.drafters.ngram import NgramDrafter
from localspec.system.files import write_atomically

PIECE = 128


class Spy(Plan):
    """A plan that lets a drafter make one guess and notes its confidence.

    Args:
        sampled: whether a model's guess is to be a sample.
    """

    def __init__(self, *, sampled: bool = False) -> None:
        super().__init__(room=1)
        self.confidence = float("nan")
        self.sampled = sampled

    def samples(self, source: str, confidence: float) -> bool:
        return self.sampled

    def keep(self, source: str, confidence: float, *, sampled: bool = False) -> float | None:
        self.confidence, self.room = confidence, 0
        return confidence


class FirstOfTwo(Spy):
    """A plan that lets a drafter draft on until its first token is kept, and notes how many passes that took."""

    def __init__(self) -> None:
        super().__init__()
        self.room, self.n_passes = 4, 0

    def keep(self, source: str, confidence: float, *, sampled: bool = False) -> float | None:
        return super().keep(source, confidence) if self.room else None

    def spent(self, source: str, n_tokens: int, ms: float) -> None:
        self.n_passes += 1


def reading(context: Context, tokens: list[int], first: int) -> Forward:
    """A text read once: logits that predict tokens[first:], and the hidden states after all tokens but the last."""
    known = context.reuse([] if context.hidden else tokens[: first - 1])
    logits, hidden = [], {tap: list[FloatArray]() for tap in context.hidden}
    for start in range(known, len(tokens) - 1, PIECE):
        forward = context.decode(tokens[start : min(start + PIECE, len(tokens) - 1)])
        logits.append(forward.logits[max(0, first - 1 - start) :].copy())
        for tap, states in forward.hidden.items():
            hidden[tap].append(states.copy())
    context.truncate(0)
    return Forward(np.concatenate(logits), {tap: np.concatenate(states) for tap, states in hidden.items()})


def model_trace(
    draft: DraftModel, target: Forward, prompt: list[int], answer: list[int], params: SamplingParams
) -> dict[str, list[float]]:
    if draft.drafter.info.as_text:
        return carried_trace(draft.drafter, target, prompt, answer, params)
    tokens = prompt + answer
    drafts = reading(draft.context, tokens, len(prompt)).logits
    trace: dict[str, list[float]] = {"confidence": [], "right": [], "sampled": [], "certainty": []}
    for i, row in enumerate(drafts):
        history = tokens[: len(prompt) + i]
        trace["certainty"].append(round(top_probability(target.logits[i], params.temperature or 1.0), 4))
        if params.greedy:
            guess = int(row.argmax())
            confidence = top_probability(row)
            right = sampled = float(guess == answer[i])
        else:
            q, p = distribution(row, history, params), distribution(target.logits[i], history, params)
            confidence, right = float(q.probs.max()), p.prob(q.argmax())
            sampled = overlap(p, q)
        for name, value in (("confidence", confidence), ("right", right), ("sampled", sampled)):
            trace[name].append(round(value, 4))
    return trace


def overlap(p: Distribution, q: Distribution) -> float:
    """How likely a sample from q is accepted."""
    return sum(min(p.prob(int(token)), float(prob)) for token, prob in zip(q.ids, q.probs, strict=True))


def carried_trace(
    drafter: Drafter, target: Forward, prompt: list[int], answer: list[int], params: SamplingParams
) -> dict[str, list[float]]:
    """Of a draft model with another vocabulary; ``steps`` are passes for a draft token, without the one
    that shows where it ends."""
    trace: dict[str, list[float]] = {"confidence": [], "right": [], "sampled": [], "certainty": [], "steps": []}
    tokens = list(prompt)
    for row, token in zip(target.logits, answer, strict=True):
        trace["certainty"].append(round(top_probability(row, params.temperature or 1.0), 4))
        plan = FirstOfTwo()
        drafted = drafter.draft(tokens, plan, Proposer(params, Noise(0)))
        right = distribution(row, tokens, params).prob(drafted[0].id) if drafted else 0.0
        confidence = plan.confidence if drafted else -1.0
        for name, value in (("confidence", confidence), ("right", right), ("sampled", right)):
            trace[name].append(round(value, 4))
        trace["steps"].append(max(1, plan.n_passes - 1))
        tokens.append(token)
    return trace


def ngram_trace(
    target: Forward, prompt: list[int], answer: list[int], params: SamplingParams
) -> dict[str, list[float]]:
    drafter, proposer = NgramDrafter(), Proposer(params, Noise(0))
    drafter.begin(prompt)
    trace: dict[str, list[float]] = {"confidence": [], "right": []}
    tokens = list(prompt)
    for i, token in enumerate(answer):
        spy = Spy()
        guesses = drafter.draft(tokens, spy, proposer)
        right = float(guesses[0].id == token) if guesses else 0.0
        if guesses and not params.greedy:
            right = distribution(target.logits[i], tokens, params).prob(guesses[0].id)
        trace["confidence"].append(round(spy.confidence, 4) if guesses else -1.0)
        trace["right"].append(round(right, 4))
        drafter.accept([token])
        tokens.append(token)
    return trace


def head_trace(
    drafter: Drafter, target: Forward, prompt: list[int], answer: list[int], params: SamplingParams
) -> dict[str, list[list[float]]]:
    """What a chained head would have guessed: [steps, n], by draft tokens before it and place; -1 where it has none."""
    assert isinstance(drafter, HeadDrafter)
    proposer = Proposer(replace(params, seed=None), Noise(0))
    names, steps = ("confidence", "right", "sampled"), range(drafter.head.card.steps)
    found = {name: [[-1.0] * len(answer) for _ in steps] for name in names}
    tokens = prompt + answer
    rows = () if params.greedy else target.logits
    laws = [distribution(row, tokens[: len(prompt) + i], params) for i, row in enumerate(rows)]

    def process(first: int, last: int) -> None:
        states = {tap: states[first:last] for tap, states in target.hidden.items()}
        drafter.process(tokens[first:last], Forward(target.logits[:0], states))

    process(0, len(prompt) - 1)
    drafter.begin(prompt)
    for place in range(len(answer)):
        settled = len(prompt) + place
        for depth in steps[: len(answer) - place]:
            spy, at = Spy(sampled=True), place + depth
            for token in drafter.draft(tokens[: settled + depth], spy, proposer):
                right = sampled = float(token.id == answer[at])
                if token.dist is not None:
                    right, sampled = laws[at].prob(token.dist.argmax()), overlap(laws[at], token.dist)
                for name, value in zip(names, (spy.confidence, right, sampled), strict=True):
                    found[name][depth][at] = round(value, 4)
        process(settled - 1, settled)
        drafter.accept(tokens[settled : settled + 1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", nargs="+", default=["qwen2.5-coder-0.5b"])
    parser.add_argument("--head", action="store_true", help="the head for the model too")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--set", default="tuning", choices=["tuning", "report"])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--category", nargs="+", help="only these")
    parser.add_argument("--prompts", type=Path, help="questions to add, such as short_questions.jsonl")
    parser.add_argument("--answers", type=Path, help="traces of the same model and temperature whose answers to take")
    args = parser.parse_args()
    questions = of_categories(own_questions(args.set), args.category or ())
    questions = in_turns(questions + (read_questions(args.prompts) if args.prompts else []))
    drafts = [*args.draft, *["head"] * args.head]
    traces = json.loads(args.out.read_text())["traces"] if args.out.exists() else []
    known = {trace["id"] for trace in traces}
    before = json.loads(args.answers.read_text())["traces"] if args.answers else []
    answers = {trace["id"]: trace["answer"][: args.tokens] for trace in before}
    with LLM(args.model, drafts, backend=args.backend, remember=False, idle=False) as llm:
        pair = llm.inspect()
        stored = {"engine": pair.target.engine, "temperature": args.temperature}
        functions: dict[str, Any] = {"ngram": ngram_trace}
        for draft in pair.state.models:
            is_head = draft.source == "head"
            functions[draft.source] = partial(head_trace, draft.drafter) if is_head else partial(model_trace, draft)
        times = {"target": pair.times} | {draft.source: draft.times for draft in pair.state.models}
        stored["ms"] = {source: each.curve.measured for source, each in times.items()}
        infos = [draft.drafter.info for draft in pair.state.models]
        stored["passes"] = {info.source: info.passes for info in infos if info.as_text}
        stored["rates"] = {info.source: info.rate for info in infos}
        for question in questions:
            if question.id in known:
                continue
            messages = [{"role": "user", "content": question.turns[0]}]
            top_k = 40 if args.temperature else 0
            params = SamplingParams(temperature=args.temperature, top_k=top_k, seed=1, max_tokens=args.tokens)
            answer = answers.get(question.id) or llm.chat(messages, params, speculate=False).token_ids
            tokens = llm.encode(messages)
            text, n_prompt = tokens + answer, len(tokens)
            target = llm.run(lambda pair, t=text, n=n_prompt: reading(pair.context, t, n))
            sources = {
                name: llm.run(lambda pair, f=f, x=target, t=tokens, a=answer, p=params: f(x, t, a, p))
                for name, f in functions.items()
            }
            trace = {"id": question.id, "category": question.category, "prompt_tokens": len(tokens)}
            traces.append(trace | {"prompt": tokens, "answer": answer, "sources": sources})
            with write_atomically(args.out, durable=False) as file:
                file.write(f"{json.dumps(stored | {'traces': traces})}\n".encode())
            of_all = {name: source["right"] for name, source in sources.items()} | (
                {"head": sources["head"]["right"][0]} if args.head else {}
            )
            right = {name: round(float(np.mean(each)), 3) for name, each in of_all.items()}
            print(question.id, len(answer), right, flush=True)


if __name__ == "__main__":
    main()
