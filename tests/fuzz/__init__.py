"""Fuzzing: the same strategies for a fixed number of cases in the test suite, and at length by ``make fuzz``.

Each module here describes one surface: the cases (a hypothesis strategy) and the check that every case has to pass.
``targets`` lists them; ``tests/test_fuzz.py`` runs them derandomised, ``python -m tests.fuzz`` at random until its time
is up.
"""
