"""What it gains that draft models' steps of several answers are one pass: answers side by side, in turns.

    python -m benchmarks.draft_steps [MODEL] [--draft NAME] [--answers 4] [--rounds 4] [--tokens 64] [--temperature T]

In every round so many chats are asked at once, twice each: once with steps as they are, once with a pass for each
answer's; the order changes from round to round. Printed are tokens per second, their ratio by round, and of the steps
how many were taken together.
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from localspec import LLM, SamplingParams
from localspec.measuring.questions import in_turns, own_questions
from localspec.runtime import draft_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", nargs="+", default=["qwen2.5-coder-0.5b"])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    params = SamplingParams(temperature=args.temperature, max_tokens=args.tokens, ignore_eos=True)
    questions = [question.turns[0] for question in in_turns(own_questions("report")) if len(question.turns[0]) < 600]
    widths: dict[str, list[int]] = {"together": [], "apart": []}
    real = draft_steps._Memory._together

    def counted(self: Any, wanted: Any) -> Any:
        widths["together"].append(len(wanted))
        return real(self, wanted)

    def apart(self: Any, wanted: Any) -> Any:
        widths["apart"].append(len(wanted))
        return {}

    ratios = []
    options: dict[str, Any] = {"backend": args.backend, "parallel": args.answers, "remember": False, "idle": False}
    with LLM(args.model, args.draft, **options) as llm:
        for round_ in range(args.rounds + 1):
            asked = [questions[(round_ * args.answers + i) % len(questions)] for i in range(args.answers)]
            speeds: dict[str, float] = {}
            for arm in ("together", "apart") if round_ % 2 else ("apart", "together"):
                with ExitStack() as stack:
                    stack.enter_context(
                        patch.object(draft_steps._Memory, "_together", counted if arm == "together" else apart)
                    )
                    if arm == "apart":
                        stack.enter_context(patch.object(draft_steps._Memory, "is_one_pass", False))
                    started = time.perf_counter()
                    with ThreadPoolExecutor(args.answers) as pool:
                        replies = pool.map(lambda text: llm.chat([{"role": "user", "content": text}], params), asked)
                        n_tokens = sum(len(reply.token_ids) for reply in replies)
                    speeds[arm] = n_tokens / (time.perf_counter() - started)
            if round_:  # the first is for what is learned and for caches
                ratios.append(speeds["together"] / speeds["apart"])
                print(f"{speeds['together']:.1f} {speeds['apart']:.1f} tokens/s, {ratios[-1]:.3f}", flush=True)
    several = [n for n in widths["together"] if n > 1]
    print(f"median {statistics.median(ratios):.3f}; of {len(widths['together'])} passes {len(several)} were of several")


if __name__ == "__main__":
    main()
