"""What the way to the box adds to a request, over a way that is known to be slow."""

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from orchestrator.box import roundtrip, way
from orchestrator.box.transports import LocalTransport

PROGRAM = (sys.executable, "-m", "vllm")


class _Health(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_args) -> None:
        pass


@contextmanager
def serving() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Health) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_port
        server.shutdown()


class SlowWay(LocalTransport):
    """This machine, reached by a relay that keeps each piece for a while."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self.delay_s = delay_s
        self.listener = socket.create_server(("127.0.0.1", 0))

    def reach(self, port: int) -> tuple[str, int]:
        threading.Thread(target=self._accept, args=(port,), daemon=True).start()
        return self.listener.getsockname()[:2]

    def _accept(self, port: int) -> None:
        here, _ = self.listener.accept()
        there = socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=self._pass, args=(there, here), daemon=True).start()
        self._pass(here, there)

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(65536):
            time.sleep(self.delay_s)
            sink.sendall(data)
        sink.close()

    def close(self) -> None:
        self.listener.close()
        super().close()


def test_a_way_that_keeps_each_piece_for_10_ms_adds_about_20_ms_to_a_request():
    transport = SlowWay(0.01)
    with serving() as port:
        added = way.added_ms(transport, PROGRAM, port, "/health")
    transport.close()
    assert 18 < added < 60


def test_a_way_without_a_forward_adds_nothing_and_is_not_measured():
    transport = LocalTransport()
    with serving() as port:
        assert way.added_ms(transport, PROGRAM, port, "/health") is None
    transport.close()


def test_a_box_without_a_python_of_its_own_or_a_dead_port_leaves_it_unknown(monkeypatch, tmp_path):
    transport = SlowWay(0.0)
    with serving() as port:
        assert way.added_ms(transport, ("/no/such/python3", "-m", "vllm"), port, "/health") is None
        monkeypatch.setenv("PATH", str(tmp_path))
        assert way.added_ms(transport, ("docker", "run", "vllm"), port, "/health") is None
    assert way.added_ms(transport, PROGRAM, port, "/health") is None
    transport.close()


def test_a_slow_server_is_asked_three_times_and_a_quick_one_as_often_as_was_said(monkeypatch):
    asked = []
    monkeypatch.setattr(_Health, "do_GET", lambda self, get=_Health.do_GET: (asked.append(self.path), get(self)))
    with serving() as port:
        assert roundtrip.median_ms("127.0.0.1", port, "/health", count=15, limit_s=10) < 1000
        assert len(asked) == 16
        roundtrip.median_ms("127.0.0.1", port, "/health", count=15, limit_s=0)
    assert asked[16:] == ["/health"] * 4


def test_nothing_that_listens_is_an_error_of_its_own():
    with serving() as port:
        pass
    with pytest.raises(OSError, match="refused"):
        roundtrip.median_ms("127.0.0.1", port, "/health", count=3, limit_s=1)
