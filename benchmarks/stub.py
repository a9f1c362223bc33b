"""A stub server that streams chunks at exact times, for benchmarks/clients.py: `python benchmarks/stub.py arrival 64`.

One process, plain sockets, a heap of what is due: every chunk is a send of its own at its own time, spread over the
gap, as tokens of independent streams come from a real server (an event loop's timers would send them in bunches of a
millisecond). It serves until its stdin closes, and prints lines: its port, `first` when the first request of the load
has come, `ended` when the last answer of so many has gone out. `GET /truth` tells how long each request really waited
for its first token (seconds from the arrival of the request's last byte), and how many answers there were. What clients
ask beforehand (`/v1/models`, `/health`) is answered and not counted.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import re
import select
import socket
import struct
import sys
import time
from dataclasses import dataclass

TOKENS = 256
# As in orchestrator/wire.py, and not taken from there: what a client is measured against shares none of its code.
SO_TIMESTAMPNS = 35
TIMESPEC = struct.Struct("@qq")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass(frozen=True)
class Pace:
    """Seconds to the first token, between tokens, and of a stall before every `stall_every`-th token."""

    ttft_s: float
    gap_s: float
    stall_every: int = 0
    stall_s: float = 0.0

    def due(self, token: int) -> float:
        """Seconds from the request to this token (from 0)."""
        stalls = token // self.stall_every if self.stall_every else 0
        return self.ttft_s + token * self.gap_s + stalls * self.stall_s


PACES = {
    "burst8": Pace(0.0, 0.0),
    "burst64": Pace(0.0, 0.0),
    "arrival": Pace(0.0, 0.005),
    "paced": Pace(0.1, 0.02),
    "stall": Pace(0.1, 0.02, 50, 0.2),
}


def framed(event: object) -> bytes:
    """One event as one HTTP chunk."""
    data = event if isinstance(event, bytes) else json.dumps(event, separators=(",", ":")).encode()
    piece = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(piece), piece)


def token_event() -> bytes:
    """A token as vLLM's chat stream sends it: 275 bytes of event."""
    choice = {"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None, "token_ids": None}
    event = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1796048002,
        "model": "m" * 40,
        "choices": [choice],
    }
    pad = 275 - len(json.dumps(event, separators=(",", ":"))) - len("data: \n\n")
    return framed(event | {"model": "m" * (40 + pad)})


TOKEN = token_event()
USAGE = {"prompt_tokens": 512, "completion_tokens": TOKENS, "total_tokens": 512 + TOKENS}
MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 32768}]}).encode()
END = framed({"choices": [], "usage": USAGE}) + framed(b"[DONE]") + b"0\r\n\r\n"


class Stub:
    """All connections and what is due on them."""

    def __init__(self, pace: Pace, expected: int) -> None:
        self.pace = pace
        self.expected = expected
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.poll = select.epoll()
        self.poll.register(self.listener, select.EPOLLIN)
        self.poll.register(sys.stdin, select.EPOLLIN)
        self.peers: dict[int, socket.socket] = {}
        self.unread: dict[int, bytes] = {}
        self.due: list[tuple[float, int, int, float]] = []
        self.waited_s: list[float] = []
        self.answered = 0

    def serve(self) -> None:
        """Until stdin closes."""
        while True:
            wait_s = max(0.0, self.due[0][0] - time.monotonic()) if self.due else 1.0
            # epoll waits whole milliseconds: the last one is spun away, for the sake of exact times.
            for number, _ in self.poll.poll(0 if wait_s < 0.0015 else wait_s - 0.001):
                if number == sys.stdin.fileno():
                    return
                if number == self.listener.fileno():
                    self.accept()
                else:
                    self.read(number)
            while self.due and self.due[0][0] <= time.monotonic():
                self.send()

    def accept(self) -> None:
        """One new connection."""
        peer, _ = self.listener.accept()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self.peers[peer.fileno()] = peer
        self.unread[peer.fileno()] = b""
        self.poll.register(peer, select.EPOLLIN)

    def read(self, number: int) -> None:
        """A piece of a request; when it is whole, its answer is planned."""
        data, ancillary, _, _ = self.peers[number].recvmsg(1 << 20, socket.CMSG_SPACE(TIMESPEC.size))
        now = time.monotonic()
        # When the request came in, by the kernel: 64 at once wait for each other, and that is the server's time.
        for _, kind, stamp in ancillary:
            if kind == SO_TIMESTAMPNS:
                seconds, nanoseconds = TIMESPEC.unpack(stamp)
                now -= (time.time_ns() - seconds * 10**9 - nanoseconds) / 1e9
        if not data:
            self.poll.unregister(number)
            self.peers.pop(number).close()
            return
        self.unread[number] += data
        head, found, body = self.unread[number].partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        if not found or (length and len(body) < int(length[1])):
            return
        self.unread[number] = b""
        verb, path, _ = head.split(b" ", 2)
        if verb == b"GET" or not path.endswith(b"/completions"):
            self.tell(number, path)
            return
        if not self.waited_s and not self.due:
            print("first", flush=True)
        if self.pace.gap_s == 0:
            self.waited_s.append(time.monotonic() - now)
            self.peers[number].sendall(HEAD + TOKEN * TOKENS + END)
            self.end()
        else:
            heapq.heappush(self.due, (now + self.pace.due(0), number, 0, now))

    def tell(self, number: int, path: bytes) -> None:
        """What is no load."""
        said, status = MODELS, b"200 OK"
        if path.endswith(b"/truth"):
            said = json.dumps({"waited_s": self.waited_s, "answered": self.answered}).encode()
        elif not path.endswith((b"/models", b"/health")):
            said, status = b"{}", b"404 Not Found"
        head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(said))
        self.peers[number].sendall(head + said)

    def send(self) -> None:
        """What is due first."""
        _, number, token, began = heapq.heappop(self.due)
        peer = self.peers.get(number)
        if peer is None:
            return
        if token == 0:
            self.waited_s.append(time.monotonic() - began)
        peer.send(TOKEN if token else HEAD + TOKEN)
        if token + 1 < TOKENS:
            heapq.heappush(self.due, (began + self.pace.due(token + 1), number, token + 1, began))
        else:
            peer.send(END)
            self.end()

    def end(self) -> None:
        """One answer has gone out."""
        self.answered += 1
        if self.answered == self.expected:
            print("ended", flush=True)


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pace", choices=PACES)
    parser.add_argument("expected", type=int, help="answers after which the load has ended")
    parser.add_argument("--cpu", type=int, help="the core to stay on")
    options = parser.parse_args()
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    stub = Stub(PACES[options.pace], options.expected)
    print(stub.listener.getsockname()[1], flush=True)
    stub.serve()


if __name__ == "__main__":
    main()
