"""What the way to the box adds to a request: the same small GET from here and on the box itself, medians compared."""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from pathlib import Path

from orchestrator.box import roundtrip
from orchestrator.box.facts import engine_of
from orchestrator.box.transports import Transport
from orchestrator.errors import BoxError

COUNT = 15
LIMIT_S = 0.15
_RUN_S = 10.0
# The engine's own Python is there for sure where the engine is a Python program; a container has the box's, or none.
_SCRIPT = """
case "${1##*/}" in python*|pypy*) ;; *) set -- python3 "$2" "$3" "$4" "$5";; esac
exec "$1" -I - 127.0.0.1 "$2" "$3" "$4" "$5"
"""


def added_ms(transport: Transport, program: Sequence[str], port: int, path: str) -> float | None:
    """Milliseconds that a request from here takes longer than one on the box; None where that cannot be known.

    Args:
        transport: The way. One that adds nothing (`local`) is not measured.
        program: The engine's command; its Python asks on the box.
        port: Where something answers on the box.
        path: What is asked; it should cost the server next to nothing.
    """
    host, here = transport.reach(port)
    if (host, here) == ("127.0.0.1", port):
        return None
    source = Path(roundtrip.__file__).read_text("utf-8")
    asked = ("coldboot", engine_of(program) or "", str(port), path, str(COUNT), str(LIMIT_S))
    try:
        there = transport.run(("sh", "-c", _SCRIPT, *asked), timeout_s=_RUN_S, input=source).stdout
        ours = roundtrip.median_ms(host, here, path, count=COUNT, limit_s=LIMIT_S)
        return max(0.0, ours - float(there))
    except (BoxError, OSError, http.client.HTTPException, ValueError):
        return None
