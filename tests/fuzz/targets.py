"""Everything that is fuzzed."""

from __future__ import annotations

from tests.fuzz import asks, bodies, engines, headers, sessions, templates

TARGETS = {
    target.name: target
    for target in (
        asks.TARGET,
        sessions.TARGET,
        headers.TARGET,
        *engines.TARGETS,
        templates.TARGET,
        bodies.TARGET,
    )
}
