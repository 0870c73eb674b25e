"""``localspec doctor``: this machine and this pair. Does it fit, does it match, does it pay?

``machine`` and ``engines`` look at the computer, by way of ``localspec.system``; ``models`` and ``fit`` at model
files, before anything is loaded; ``costs`` measures passes, ``payoff`` says what they mean for speculation,
``ranking`` tries candidates, ``advice`` draws the conclusion. All of it goes into an ``Examination`` (``facts``);
``screen`` makes parts of a report of it, ``command`` runs it.
"""
