"""A thread folded up to any event, quickly: the process remembers folds on the way there.

A seek goes on from the nearest remembered fold, so that it costs at most `STRIDE` events once
the stretch was walked. The memory holds pickles, because a fold cannot be rewound; it is keyed
by the thread's epoch, because only a new epoch may rewrite history.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from threading import Lock

from aguiapp import protocol, store
from aguiapp.models import Run, Thread

STRIDE = 2000
MEMORY_BYTES = 64 * 1024 * 1024
#: A larger fold is not remembered.
FOLD_BYTES = MEMORY_BYTES // 8

Key = tuple[int, str, int]


class Memory:
    """Folds by thread, epoch and position, the least used forgotten first."""

    def __init__(self) -> None:
        self._folds: OrderedDict[Key, bytes] = OrderedDict()
        #: Bytes held.
        self.used = 0
        self._lock = Lock()

    def nearest(self, thread: Thread, position: int) -> store.ThreadSnapshot:
        """A copy of the furthest fold that is not beyond the position."""
        with self._lock:
            known = [key[2] for key in self._folds if key[:2] == (thread.pk, thread.epoch)]
            best = max((each for each in known if each <= position), default=None)
            if best is None:
                return store.ThreadSnapshot(0, protocol.Fold())
            key = (thread.pk, thread.epoch, best)
            self._folds.move_to_end(key)
            packed = self._folds[key]
        found: store.ThreadSnapshot = pickle.loads(packed)  # noqa: S301  (made by this process)
        return found

    def keep(self, thread: Thread, found: store.ThreadSnapshot) -> None:
        """Remember the fold as it is now, unless it is too large or too deep."""
        try:
            packed = pickle.dumps(found, pickle.HIGHEST_PROTOCOL)
        except RecursionError:
            return
        if len(packed) > FOLD_BYTES:
            return
        with self._lock:
            key = (thread.pk, thread.epoch, found.position)
            self.used += len(packed) - len(self._folds.pop(key, b""))
            self._folds[key] = packed
            while self.used > MEMORY_BYTES:
                self.used -= len(self._folds.popitem(last=False)[1])

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._folds.clear()
            self.used = 0


memory = Memory()


def at(run: Run, seq: int) -> store.ThreadSnapshot:
    """The run's thread after the run's first `seq` events; nothing while the run is queued."""
    if run.offset is None:
        return store.ThreadSnapshot(0, protocol.Fold())
    target = run.offset + seq
    found = memory.nearest(run.thread, target)
    kept = found.position
    for earlier in store.placed_runs(run.thread_id).filter(offset__lt=target):
        offset = earlier.offset or 0
        if earlier.ended and offset + earlier.last_seq <= found.position:
            continue
        for page in store.pages(
            earlier.pk, after=max(found.position - offset, 0), until=target - offset
        ):
            found.feed(offset, page)
            if found.position - kept >= STRIDE:
                memory.keep(run.thread, found)
                kept = found.position
    return found
