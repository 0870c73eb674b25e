"""What the programs of this folder share: they run outside of localspec, with the client libraries' own environment.

``python NAME.py URL MODEL`` asks a server as an app built on that library would, and ends with 0 if it was answered as
the library expects. The model says nonsense, and other nonsense on another CPU: each request holds what it says, by a
grammar (``extra_body``), a schema or a call that must be made.
"""

from __future__ import annotations

import json
import sys
from typing import Literal

from pydantic import BaseModel, ConfigDict

URL, MODEL = sys.argv[1:3]
ASK = [{"role": "user", "content": "How is the weather in Rome?"}]


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")  # or the model adds properties until its tokens run out
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Says the weather.", "parameters": Weather.model_json_schema()},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
TEXT = "The weather is fine."


def says(text: str) -> dict[str, str]:
    """A grammar that lets the model say nothing but this."""
    return {"grammar": f"root ::= {json.dumps(text)}"}
