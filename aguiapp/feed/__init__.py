"""From the log to its readers: the tail of what was just committed, and the one follower.

The table is the truth. A wake-up carries no event; one that is lost costs a poll interval.
"""

from aguiapp.feed.batches import TERMINAL_CODES, Batch, cursor, parse_cursor
from aguiapp.feed.bell import Bell
from aguiapp.feed.follower import Follower, Pruned
from aguiapp.feed.hints import group
from aguiapp.feed.loop import Feed, Tail, current

__all__ = [
    "TERMINAL_CODES",
    "Batch",
    "Bell",
    "Feed",
    "Follower",
    "Pruned",
    "Tail",
    "current",
    "cursor",
    "group",
    "parse_cursor",
]
