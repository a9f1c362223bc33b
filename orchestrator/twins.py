"""A matrix of one configuration under two names: what differs between them is the rig's own noise. Pure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orchestrator.matrix import BoxSpec, Matrix, Variant
from orchestrator.matrix_keys import MAX_NAME

NAMES = ("twin-a", "twin-b")


def twin_matrix(matrix: Matrix, variant: str, *, windows: int) -> str:
    """The text of a matrix with two variants like `variant`, as JSON, which is YAML 1.2.

    Args:
        matrix: Where it comes from; boxes, levels, load and deadlines stay as they are.
        variant: Which of its variants is doubled.
        windows: How many windows each level has in one boot, to tell noise within boots from noise between them.

    Raises:
        UsageError: there is no such variant.
    """
    body = _body(matrix.variant(variant))
    load = _load(matrix, matrix.load.model_dump(mode="json", exclude_unset=True), windows)
    data = {
        "experiment": f"{matrix.experiment[: MAX_NAME - 3]}-aa",
        "box": matrix.box,
        "variants": dict.fromkeys(NAMES, body),
        "concurrency": list(matrix.concurrency),
        "cache": list(matrix.cache),
        "seed": matrix.seed,
        "tolerance": matrix.tolerance,
        "headroom": matrix.headroom,
        "load": load,
        "deadlines": matrix.deadlines.model_dump(mode="json", exclude_unset=True),
        "boxes": {name: _box(matrix, box, windows) for name, box in matrix.boxes.items()},
    }
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _body(variant: Variant) -> dict[str, Any]:
    body: dict[str, Any] = dict(variant.set)
    if variant.unset:
        body["unset"] = list(variant.unset)
    if variant.env:
        body["env"] = dict(variant.env)
    if variant.program:
        body["program"] = list(variant.program)
    return body


def _load(matrix: Matrix, load: dict[str, Any], windows: int) -> dict[str, Any]:
    """A load with so many windows; the text is kept elsewhere than the file to which its paths are relative."""
    if load.get("prompts") is not None:
        load["prompts"] = str((matrix.path.parent / Path(load["prompts"]).expanduser()).absolute())
    return load | {"windows": windows}


def _box(matrix: Matrix, box: BoxSpec, windows: int) -> dict[str, Any]:
    data = box.model_dump(mode="json", exclude_unset=True, exclude={"name"})
    if box.unit_file is not None:  # the text is kept elsewhere than the file that it was read from
        data["unit_file"] = str(box.unit_file.absolute())
    if "load" in data and data["load"] is not None:
        data["load"] = _load(matrix, data["load"], windows)
    return {name: value for name, value in data.items() if value is not None}
