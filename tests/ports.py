"""Ports for servers that start only later."""

from __future__ import annotations

import random
import socket

_BELOW = 32_000  # from 32768 on Linux takes ports for connections


def free_port() -> int:
    """A port that nothing uses, and that no connection is given by chance."""
    for port in random.sample(range(20_000, _BELOW), 100):
        with socket.socket() as taken:
            try:
                taken.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"100 ports below {_BELOW} are in use")
