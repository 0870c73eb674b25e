"""A model inside an asyncio program: two conversations at once, one that runs out of time, one that is cancelled.

python examples/embed_async.py                       # the default pair, pulled before
python examples/embed_async.py smollm2-135m
"""

from __future__ import annotations

import asyncio
import sys

from localspec import LLM, LocalspecError, SamplingParams

SHORT = SamplingParams(temperature=0.0, max_tokens=48)
LONG = SamplingParams(temperature=0.0, max_tokens=4096, ignore_eos=True)  # goes on until it is stopped


async def converse(llm: LLM, name: str, *questions: str) -> None:
    """A conversation of its own; what was read once stays in the memory that all of them share."""
    session = llm.session(system="Answer in one sentence.")
    for question in questions:
        reply = await session.achat(question, SHORT)
        stats = reply.stats
        print(f"{name}: {question} {reply.text.strip()!r}")
        print(
            f"{name}:   {stats['tokens_per_second']:.1f} tok/s, {stats['cached_tokens']} of {stats['prompt_tokens']} "
            f"prompt tokens from memory, {stats['num_accepted_tokens']} of {stats['num_draft_tokens']} guesses accepted"
        )


async def heartbeat() -> None:
    """The loop is free while the engine works, on its own thread."""
    beats = 0
    try:
        while True:
            await asyncio.sleep(0.1)
            beats += 1
    finally:
        print(f"meanwhile the loop went round {beats} times")


async def main(model: str = "qwen2.5-coder-1.5b", draft: str = "auto", **options: str) -> int:
    pulse = asyncio.create_task(heartbeat())
    try:
        async with await LLM.aload(model, draft, **options) as llm:
            # They take turns, one request at a time: first come, first served.
            await asyncio.gather(
                converse(llm, "A", "What is a river?", "And a lake?"),
                converse(llm, "B", "What is a hill?", "And a valley?"),
            )

            reply = await llm.achat("Count to ten thousand.", LONG, deadline=1.0)
            print(f"after a second: {reply.finish_reason} by the {reply.cancelled_by}, {len(reply.token_ids)} tokens")

            n_rounds = 0
            async with llm.arounds("Once upon a time", LONG) as rounds:
                async for _ in rounds:
                    n_rounds += 1
                    if n_rounds == 5:
                        break  # leaving stops the engine within a round
            print(f"left after {n_rounds} rounds: {(await rounds.reply()).text!r}")
    except LocalspecError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        pulse.cancel()
        await asyncio.gather(pulse, return_exceptions=True)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:3])))
