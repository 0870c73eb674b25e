"""One round of speculative decoding: draft, verify, accept."""
