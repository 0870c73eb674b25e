"""OpenAI's own package against ``localspec serve``: streaming, what speculation did, and predicted outputs.

localspec serve                                   # in another terminal; prints its address
pip install openai
python examples/openai_client.py                  # http://127.0.0.1:8642, or its address as an argument
"""

from __future__ import annotations

import sys

import openai

CODE = '''\
def area(width, height):
    """The area of a rectangle."""
    return width * height
'''
EDIT = f"Rename the function to rectangle_area. Answer with the code only.\n\n```python\n{CODE}```"


def main(url: str = "http://127.0.0.1:8642") -> int:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")  # the key, where the server asks for one
    try:
        model = client.models.list().data[0].id
        print(f"{model}, streamed:")
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Name three rivers, one on each line."}],
            max_tokens=64,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            if chunk.usage:
                report("\n", chunk.usage)

        # An edit repeats most of what it was given. OpenAI's `prediction` says so; copying from it costs nothing.
        for name, extra in (
            ("plain", {"localspec": {"off": True}}),
            ("speculative", {}),
            ("with a prediction", {"prediction": {"type": "content", "content": CODE}}),
        ):
            reply = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": EDIT}],
                max_tokens=128,
                temperature=0,
                extra_body=extra,  # what OpenAI's API does not have; `prediction` could stand outside as well
            )
            stats = reply.localspec["stats"]
            report(f"edit, {name}: {stats['tokens_per_second']:.1f} tok/s, ", reply.usage)
    except openai.APIError as error:
        message = "no server there; start one with: localspec serve" if _unreachable(error) else error.message
        print(f"{url}: {message}", file=sys.stderr)
        return 1
    return 0


def report(before: str, usage: openai.types.CompletionUsage) -> None:
    details = usage.completion_tokens_details
    accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    print(f"{before}{usage.completion_tokens} tokens; guesses: {accepted} accepted, {rejected} rejected")


def _unreachable(error: openai.APIError) -> bool:
    return isinstance(error, openai.APIConnectionError)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
