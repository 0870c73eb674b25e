"""How far to draft.

From what decides down to what it is decided by:

    auto_controller   as far as it pays: plans every round and learns from it (``fixed``: always as far)
    auto_plan         the draft under way: is a step worth its time, a token its row of the target's pass?
    estimates         what is known of a pair, and the stopping problem solved with it
    stopping          when to stop drafting: the value of going on, by dynamic programming
    acceptance        how likely a draft token is accepted; ``acceptance_store`` keeps it across runs
    cost_model        what a pass costs; ``calibration`` measures it
    time_budget       what drafting may still cost
    prefill_gate      whether a draft model should read what it has missed
    break_even        the speed-up formula, for comparing models and engines before there is a text
    explainer         why there is drafting or not, in a sentence

"The replay" beside a constant is ``benchmarks/replay_traces.py`` on 52 recorded greedy answers, each cut at 48 to 256
tokens, with the costs of two machines, calm and beside another program, learning from answer to answer and not: 3,088
ends of answers in two orders, on the mean 1.20 times as fast as plain decoding, 92 of them under 0.97 of it.
"""
