"""Heads: drafters that continue hidden states of the target. They plug in by entry points, see pyproject.toml."""

HEAD = "head"
EARLY_EXIT = "early-exit"
# What --draft calls a head, also head:FILE; the target's own first layers, also early-exit:N; and the target's own
# layer for multi-token prediction
MTP = "mtp"

FROM_STATES = (HEAD, EARLY_EXIT, MTP)

PUBLISHED = "an EAGLE-3 or DFlash file"  # for help texts: what --draft MODEL may be besides a model
