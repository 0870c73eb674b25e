"""``localspec distill``: a head for a target, trained on this machine; can be watched, stopped and gone on with."""
