"""Places at which a test makes a campaign stand still, so that it can break the world just there.

`COLDBOOT_FAILPOINT=ready:FOLDER` stops the campaign the first time that it reaches the place `ready`: it makes
`FOLDER/reached`, and goes on when `FOLDER/go` is there, or after two minutes. Without that variable nothing happens.
The places are the steps of a boot (`records.STEPS`), and `armed`, `between`, `restoring` and `restored` of a campaign.
Imports nothing of ours.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

VARIABLE = "COLDBOOT_FAILPOINT"
PATIENCE_S = 120.0


def reached(place: str) -> None:
    """Stands still here when a test has asked for it, once."""
    wanted, _, folder = os.environ.get(VARIABLE, "").partition(":")
    if wanted != place or (mark := Path(folder) / "reached").exists():
        return
    mark.touch()
    end = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while not (Path(folder) / "go").exists() and time.monotonic() < end:
        pause.wait(0.01)
