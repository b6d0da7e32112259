"""Settings of server processes that live under faults.

`FAULT_CLOCK` (seconds) puts the process's clock wrong, `FAULT_HOST` lets it believe that it runs
on a machine of that name, so that no other process can look after it by its pid.
"""

from __future__ import annotations

import os
import socket
import time

from tests.live.settings import *  # noqa: F403

if skew := float(os.environ.get("FAULT_CLOCK", "0")):
    _time, _time_ns = time.time, time.time_ns
    time.time = lambda: _time() + skew
    time.time_ns = lambda: _time_ns() + int(skew * 1_000_000_000)
if host := os.environ.get("FAULT_HOST"):
    socket.gethostname = lambda: str(host)
