"""AG-UI 1.0 without I/O: events are plain dicts in wire form, time and ids come in."""

from aguiapp.protocol.check import Verdict, check
from aguiapp.protocol.chunks import Expander
from aguiapp.protocol.compact import compact
from aguiapp.protocol.enforce import Enforced, conforms, enforce
from aguiapp.protocol.events import (
    CHUNKS,
    PROTOCOL_VERSION,
    TERMINAL,
    TYPE_CODES,
    TYPE_NAMES,
    TYPES,
    Event,
    Finding,
    ProtocolError,
)
from aguiapp.protocol.fold import Fold, Snapshot, fold
from aguiapp.protocol.halves import Halves
from aguiapp.protocol.inbound import (
    InputError,
    check_input,
    is_id,
    parse_input,
    parse_input_verbose,
)
from aguiapp.protocol.join import join
from aguiapp.protocol.jsontext import MAX_DEPTH, JSONTextError, dumps, loads
from aguiapp.protocol.legacy import Upgrader
from aguiapp.protocol.negotiate import PROTO, negotiate
from aguiapp.protocol.opened import OpenItem
from aguiapp.protocol.patch import PatchError, PatchLimit, patch
from aguiapp.protocol.proto import (
    ProtoDecoder,
    available as proto_available,
    decode_proto,
    encode_proto,
    encode_proto_frame,
)
from aguiapp.protocol.restate import restate
from aguiapp.protocol.sse import FrameError, SSEDecoder, encode_sse
from aguiapp.protocol.transcript import join_halves
from aguiapp.protocol.verify import Verifier
from aguiapp.protocol.wire import to_wire

__all__ = [
    "CHUNKS",
    "MAX_DEPTH",
    "PROTO",
    "PROTOCOL_VERSION",
    "TERMINAL",
    "TYPES",
    "TYPE_CODES",
    "TYPE_NAMES",
    "Enforced",
    "Event",
    "Expander",
    "Finding",
    "Fold",
    "FrameError",
    "Halves",
    "InputError",
    "JSONTextError",
    "OpenItem",
    "PatchError",
    "PatchLimit",
    "ProtoDecoder",
    "ProtocolError",
    "SSEDecoder",
    "Snapshot",
    "Upgrader",
    "Verdict",
    "Verifier",
    "check",
    "check_input",
    "compact",
    "conforms",
    "decode_proto",
    "dumps",
    "encode_proto",
    "encode_proto_frame",
    "encode_sse",
    "enforce",
    "fold",
    "is_id",
    "join",
    "join_halves",
    "loads",
    "negotiate",
    "parse_input",
    "parse_input_verbose",
    "patch",
    "proto_available",
    "restate",
    "to_wire",
]
