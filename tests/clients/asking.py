"""What the programs of this folder share: they run outside of localspec, with the client libraries' own environment.

``python NAME.py URL MODEL`` asks a server as an app built on that library would, and ends with 0 if it was answered as
the library expects. The model says nonsense: a grammar (``extra_body``) or a schema holds what it says.
"""

from __future__ import annotations

import json
import sys
from typing import Literal

from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]
ASK = [{"role": "user", "content": "How is the weather in Rome?"}]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Says the weather.", "parameters": Weather.model_json_schema()},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


def says(text: str) -> dict[str, str]:
    """A grammar that lets the model say nothing but this."""
    return {"grammar": f"root ::= {json.dumps(text)}"}
