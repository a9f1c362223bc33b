"""How large a model's weights are on the box's disk, as each card will hold them: for engines whose log is mute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestrator.box.engines import parse_flags, split_program
from orchestrator.box.transports import Transport
from orchestrator.box.unit import COMMAND_S
from orchestrator.errors import BoxError

# As the engine does: safetensors where there are some, else what else holds weights. A single file is itself.
_SCRIPT = r"""
for place; do
    total=0
    for kind in .safetensors .gguf .bin .pt; do
        for file in "$place" "$place"/*"$kind"; do
            case $file in *"$kind") [ -f "$file" ] && total=$((total + $(stat -Lc %s "$file"))) ;; esac
        done
        [ "$total" = 0 ] || break
    done
    echo "$total"
done
"""


def per_card_gib(transport: Transport, commands: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """GiB of weights a card, by the name of the command; absent where its model is no folder or file of the box.

    A model by its name on a hub is not looked for. Tensor parallelism is taken to share the weights out evenly.
    """
    models = {name: found for name, argv in commands.items() if (found := _model(argv)) is not None}
    places = tuple(dict.fromkeys(place for place, _ in models.values()))
    if not places:
        return {}
    try:
        said = transport.run(("sh", "-c", _SCRIPT, "coldboot", *places), timeout_s=COMMAND_S).stdout.split()
        sizes = {place: int(size) for place, size in zip(places, said, strict=True)}
    except (BoxError, ValueError):
        return {}
    return {name: round(sizes[place] / cards / 2**30, 3) for name, (place, cards) in models.items() if sizes[place]}


def _model(argv: Sequence[str]) -> tuple[str, int] | None:
    """Where a command's model lies, and on how many cards it is shared out; None for a model that is no path."""
    positional, flags = parse_flags(split_program(argv)[1])
    told = {flag.name: flag.values[0] for flag in flags if flag.values}
    place = told.get("model") or next((word for word in positional if word != "serve"), None)
    cards = told.get("tensor-parallel-size", "1")
    if place is None or not place.startswith("/") or told.get("load-format") == "dummy":
        return None
    return place, max(1, int(cards)) if cards.isdecimal() else 1
