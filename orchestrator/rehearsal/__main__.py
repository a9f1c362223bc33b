"""``python -m orchestrator.rehearsal``: vLLM's command line in, vLLM's exit status out."""

from __future__ import annotations

import os
import sys

from orchestrator.rehearsal import flags, personality


def main(arguments: list[str]) -> int:
    """Runs the rehearsal engine.

    Args:
        arguments: vLLM's flags, with or without the word ``serve`` before them.

    Returns:
        0 after an orderly stop, and after the engine's death at run time; 1 when the boot fails; 2 for flags that vLLM
        does not have.
    """
    if arguments[:1] == ["serve"]:
        arguments = arguments[1:]
    if "-h" in arguments or "--help" in arguments:
        sys.stdout.write(flags.usage())
        return 0
    constants = personality.load()
    try:
        settings = flags.parse(arguments, constants, os.environ)
    except flags.UsageError as error:
        sys.stderr.write(f"{flags.usage()}api_server.py: error: {error}\n")
        return 2
    except flags.ConfigError as error:
        return _refuse(f"ValueError: {error}")
    return _run(settings, constants)


def _run(settings: flags.Settings, constants: personality.Personality) -> int:
    # Late imports keep the engine's process small: it is forked before asyncio and the HTTP parser are loaded.
    from orchestrator.rehearsal import configuration, engine, setup  # noqa: PLC0415 - see above

    scale = float(os.environ.get("COLDBOOT_REHEARSAL_TIME_SCALE") or 1.0)
    log = configuration.configure(settings, constants, scale, os.environ)
    try:
        listener = configuration.bind(settings)
    except OSError as error:
        return _refuse(f"OSError: [Errno {error.errno}] {error.strerror}")
    noted: list[int] = []
    configuration.note_signals(noted)
    run = setup.Setup(settings, constants, scale)
    handle = engine.spawn(run, listener)
    from orchestrator.rehearsal import server  # noqa: PLC0415 - see above

    return server.serve(run, log, listener, handle, noted)


def _refuse(error: str) -> int:
    from orchestrator.rehearsal.log import Log  # noqa: PLC0415 - see above

    Log("APIServer").raw(["Traceback (most recent call last):", *error.split("\n")])
    return 1


if __name__ == "__main__":
    sys.stdout.flush()
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.exit(status)
