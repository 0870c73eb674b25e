"""``localspec verify``: is it lossless, here, with these kernels and this model?

The loaded pair answers in every way it can draft, and with an adversary that knows the answer and puts errors into it,
so that drafts of every width are sent and every position is rejected. The oracle is the same target in fresh contexts,
one token a pass, never rolled back. docs/lossless.md lists the claims and how each is checked.

A greedy answer that differs from plain decoding is a *float tie* where its row says so, the row is right up to
rounding, and the gap at width 1 is one that rounding can bridge. Everything else is a defect. Where the engine claims
that width does not matter (``reference``), all rows are equal to the bit, and there are no ties.

Not detected: what plain decoding does wrong as well (a sampling chain, template or tokenizer, a damaged file); kernels
that are wrong at every width (``backends.trust`` compares engines); defects that need longer contexts, other widths,
prompts or load; samples dropped for a reason unrelated to their probability and id; errors of a row under the noise
bound that change no token and leave no trace behind a rollback; errors in a draft's own context, which cost speed,
never text.
"""
