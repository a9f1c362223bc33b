"""The real box, shared by every test that asks for it. Such tests carry the marker `box`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import pytest
from nspawn import Box, NoBox, base_tree

from orchestrator.box.ssh import SshTransport
from orchestrator.box.sshconfig import hop


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "box" in getattr(item, "fixturenames", ()):
            item.add_marker("box")


def pytest_collection_finish(session: pytest.Session) -> None:
    # Building the tree takes a minute or more: not on the time limit of whichever test is the first.
    if not session.config.option.collectonly and any(item.get_closest_marker("box") for item in session.items):
        with contextlib.suppress(NoBox):
            base_tree()


@pytest.fixture(scope="session")
def box() -> Iterator[Box]:
    """A running Debian with systemd and sshd; skipped, with the reason, where this machine cannot have it."""
    with contextlib.ExitStack() as stack:
        try:
            running = stack.enter_context(Box(base_tree()))
        except NoBox as why:
            pytest.skip(str(why))
        yield running


@pytest.fixture
def install_sudoers(box: Box) -> Iterator[Callable[[Sequence[str]], None]]:
    """Allows the login exactly these lines of sudoers, for one test."""
    yield box.write_sudoers
    box.write_sudoers(())


@pytest.fixture
def ssh(box: Box) -> Iterator[SshTransport]:
    """A connection of the login without root."""
    transport = SshTransport(hop(box.alias, config=box.ssh_config))
    yield transport
    transport.close()


@pytest.fixture
def root_ssh(box: Box) -> Iterator[SshTransport]:
    """A connection of root."""
    transport = SshTransport(hop(box.root_alias, config=box.ssh_config))
    yield transport
    transport.close()
