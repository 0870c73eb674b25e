"""Structured output: answers that follow a JSON schema or a grammar, as losslessly as free ones.

At every place of an answer, the tokens that the grammar forbids get the logit -inf before the sampling chain. That is
the whole rule, with drafting and without, so the law of the answer is the target's under that mask. A token is
forbidden if no text of the grammar begins with the answer so far and that token's own text; how a text is cut into
tokens is left to the model. Draft tokens that break the grammar are never sent to the target.

What the grammar leaves no choice about is drafted by ``spec_decode.drafters.grammar``.

::

    request.py      response_format, grammar -> what the matching library compiles; refuses what cannot be followed
    gbnf.py         llama.cpp's grammar notation, read; gbnf_lark.py writes it for the library
    compiler.py     the matching library, llguidance
    vocabulary.py   a model's tokens in the form that the library matches
    constraint.py   where an answer stands in its grammar: advance, go back, mask a row
"""
