"""``localspec verify``: is it lossless, here, with these kernels and this model?

The pair that is loaded is made to answer in every way it can draft, and in one that no drafter would: an adversary that
knows the answer and puts errors into it, so that drafts of every width are sent and a rejection falls on every position
of one. Next to it stands an oracle (``plain``): the same target in fresh contexts, one token a pass, never rolled back.

What is claimed of every round, and how surely a defect is found:

*Decision*: each emitted token is the argmax of the row that was computed for it; with a seed, the draw that the seed
makes from it. Exact. (Relaxed acceptance, a token accepted behind a rejected one, a bonus from the wrong row, penalties
blind to the draft.)

*Memory*: after every round the context holds what was settled. Exact. (A truncation that is skipped or off by one.)

*Row*: the row behind each token is the oracle's, up to the noise that the width of a pass makes, as measured on this
engine, model and text (``rounding``). One healthy audit in 100 has to look at a row twice. The power is measured each
time: contexts are made wrong on purpose, and the share found is reported (``rollbacks.sensitivity``).

*Rollback*: rows after a rollback are the oracle's, and do not depend on what was rejected. The first with the power
above; the second to the bit, where the engine computes the rows of a pass independently: no trace of a rejected token
is too small (``rollbacks``). (Rows left in the engine, a checkpoint not restored.)

*Kernel*: wide passes compute what narrow ones do. A mean divergence over 0.15 nats is a defect; healthy engines show
about 0.003 (``backends.trust``).

*Law of verification*: asked thousands of times about real drafts, verification emits token i with exactly p_i
(``verification_law``). (Acceptance on q, a missing residual.)

*Law of decoding*: at a temperature, each token of an answer follows the row computed for it, drafter, decoder and all
(``betting``). (A draft that lies about its law.) False alarm 10^-6 for each law; the power is part of the report.

*Samples*: whether a draft token that was sampled is sent does not depend on which token came out, and it follows the
law that it is said to come from (``samples``). The law of verification takes that on trust. False alarm 10^-6.

*Thinking*: where the model marks what it thinks, answers have budgets that are spent at once. Nothing that was accepted
is left unsaid while the answer goes on: its place would be judged again with the same noise. Exact.

*Several*: answers that share passes, draft steps and a memory are the target's own, up to the rounding of fresh
memories of as many sequences (``several``). The pair is loaded anew for that.

A greedy answer that differs from plain decoding is a *float tie* where all of this holds: its row says so, the row is
right up to rounding, and the gap at width 1 is one that rounding can bridge. Everything else is a defect. Where the
engine claims that width does not matter (``reference``), all rows are equal to the bit, and there are no ties.

What it cannot see: what plain decoding does wrong as well (a wrong sampling chain, template or tokenizer, a damaged
file); kernels that are wrong in the same way at every width (``backends.trust`` compares engines for that); defects
that need longer contexts, other widths, other prompts or more load than these answers make; samples dropped for a
reason that has to do with neither their probability nor their id; errors of a row under the noise bound that change no
token and leave no trace behind a rollback; and whether the draft's own context is right, which costs speed, never text.
"""
