"""Everything that is fuzzed."""

from __future__ import annotations

from tests.fuzz import asks, bodies, engines, headers, heads, hyperparameters, sessions, templates

TARGETS = {
    target.name: target
    for target in (
        asks.TARGET,
        sessions.TARGET,
        headers.TARGET,
        heads.TARGET,
        *engines.TARGETS,
        *hyperparameters.TARGETS,
        templates.TARGET,
        bodies.TARGET,
    )
}
