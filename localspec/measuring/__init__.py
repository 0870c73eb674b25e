"""Ways of decoding measured against each other on one loaded pair: the arms of a question take turns.

A ``subject`` is a pair that decodes in one of the ``arms`` after the other, none helped by another. ``answer`` is one
answer, timed; ``turns`` brings all arms' answers to a question to their ends; ``schedule`` says which question is next
and when it is enough, ``statistics`` how sure the medians are. ``questions`` are
those that come with localspec. ``bench``, ``doctor --rank`` and training measure with it.
"""
