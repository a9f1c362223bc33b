"""The median time of a small HTTP GET on one kept connection, milliseconds.

A program of its own as well: the box's own Python runs this file's text, so that both ends measure alike. Therefore it
needs nothing but the standard library, of any Python from 3.8 on.
"""

from __future__ import annotations

import http.client
import statistics
import sys
import time

AT_LEAST = 3


def median_ms(host: str, port: int, path: str, *, count: int, limit_s: float) -> float:
    """Ask `count` times, but stop when `limit_s` have passed and `AT_LEAST` answers are there.

    The first request, which opens the connection, does not count.

    Raises:
        OSError: Nothing answers, or not within two seconds.
        http.client.HTTPException: What answers speaks no HTTP.
    """
    connection = http.client.HTTPConnection(host, port, timeout=2.0)
    took: list[float] = []
    try:
        end = time.perf_counter() + limit_s
        while len(took) <= count and (len(took) <= AT_LEAST or time.perf_counter() < end):
            begun = time.perf_counter()
            connection.request("GET", path)
            connection.getresponse().read()
            took.append(time.perf_counter() - begun)
    finally:
        connection.close()
    return 1000 * statistics.median(took[1:])


if __name__ == "__main__":
    said = median_ms(sys.argv[1], int(sys.argv[2]), sys.argv[3], count=int(sys.argv[4]), limit_s=float(sys.argv[5]))
    sys.stdout.write(f"{said}\n")
