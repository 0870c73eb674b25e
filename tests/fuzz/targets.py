"""Everything that is fuzzed."""

from __future__ import annotations

from tests.fuzz import answers, bodies, engines, headers, heads, sessions, templates

TARGETS = {
    target.name: target
    for target in (
        *answers.TARGETS,
        sessions.TARGET,
        headers.TARGET,
        heads.TARGET,
        *engines.TARGETS,
        templates.TARGET,
        bodies.TARGET,
    )
}
