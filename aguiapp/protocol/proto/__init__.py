"""The binary representation of AG-UI 1.0 events: protobuf messages, each behind its length.

Needs the `protobuf` package (the extra `aguiapp[binary]`), and only when called. JSON stays
the form that is stored; on the way through this one an event loses what has no place there:

* fields the protocol does not know, and extra members of patch operations;
* null where it means nothing, and metadata of an event, message, call or tool that is no object;
* empty `toolCalls`, `usage`, `pendingToolCallIds` and `interruptIds`: they read as absent;
* absent `tools`, `context` and `resume` of an echoed input: they read as empty arrays;
* integers beyond 2^53, which are rounded, and the difference between 1 and 1.0;
* halves of surrogate pairs: joined when they meet, U+FFFD when alone;
* content parts of unknown type, and sources of unknown type with their part;
* the contents of an outcome of unknown type, or of one that it does not belong to.

An event type that is not known cannot be written at all, nor can NaN, nor more than 128 levels.
Where the official encoder writes "undefined" or "null" for a required string that is missing,
this one refuses.
"""

from aguiapp.protocol.proto.decode import decode_proto
from aguiapp.protocol.proto.descriptor import available
from aguiapp.protocol.proto.encode import encode_proto
from aguiapp.protocol.proto.frames import ProtoDecoder, encode_proto_frame

__all__ = [
    "ProtoDecoder",
    "available",
    "decode_proto",
    "encode_proto",
    "encode_proto_frame",
]
