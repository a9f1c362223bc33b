"""A copy of this checkout, and what a step needs to install it without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parent.parent


def copy_to(folder: Path) -> Path:
    """Everything that git does not ignore, as it stands in the working tree."""
    listed = subprocess.run(
        ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"),
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=60,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source = ROOT / name
        if source.is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    return folder


def environment(home: Path) -> dict[str, str]:
    """An environment in which `pip install .` takes its dependencies from this test's Python.

    PYTHONPATH does not read .pth files, so the editable install of this checkout is not among them.
    """
    here = Path(sys.executable).parent
    return {
        "PATH": f"{here}:{os.environ['PATH']}",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "PYTHONPATH": sysconfig.get_path("purelib"),
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "false",  # pip reads a switch that begins with `no` the other way round
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
