"""``localspec serve``: an OpenAI-compatible server for the programs on this computer.

It is a consumer of rounds like the chat screen: no decoding logic lives here. Reading order: ``app`` (the routes),
``requests`` (what a client may ask), ``service`` (one answer at a time), ``deltas`` (what a round adds to an answer),
``answers`` with ``chat`` and ``completions`` (OpenAI's shapes), ``tools`` (what may be called), ``tool_calls`` with
``call_marks``, ``call_values`` and ``argument_types`` (what was called); ``guard``, ``body`` and ``protocol`` keep
strangers out.
"""
