"""What parsers are given: sound documents in which a few values are others, and sound bytes with a few others."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, TypeVar

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

T = TypeVar("T")
U = TypeVar("U")

Source = Callable[[Random], T]
"""Makes inputs, the same ones by the same chance."""

DEEP = (40, 400, 20_000)
"""Levels of nesting: some that are sound, some that most parsers take, some that none can take."""

_NEAR = range(820, 990, 8)
"""Levels near what Python's stack has room for: what can be read there can perhaps not be shown or written."""

_SIMPLE: tuple[object, ...] = (
    None,
    True,
    -1,
    0,
    7,
    1.5,
    -1e300,
    2**31,
    2**63 - 1,
    2**64 - 1,
    "",
    "x",
    "é\u2028👋",
    "\x00\n\r",
    "a,b:c",
    "../x",
    "y" * 3_000,
    [],
    [[]],
    {},
    {"": ""},
    ["x", 1, None],
    [{}] * 300,
)

_JSON = (
    *map(
        msgspec.Raw, (b'"\\ud800"', b"NaN", b"-Infinity", b"1e999", b"-0", b"9" * 400, b"9" * 5_000, b'{"a":1,"a":2}')
    ),
    *(msgspec.Raw(b"[" * depth + b"]" * depth) for depth in DEEP),
    *(msgspec.Raw(b"[" * depth + b"]" * depth) for depth in _NEAR),
    *(msgspec.Raw(b'{"a":' * depth + b"1" + b"}" * depth) for depth in DEEP),
)

_MSGPACK = (
    *map(msgspec.Raw, (b"\xa2\xff\xfe", b"\xc4\x02\xff\xfe", b"\xc7\x04\x05abcd", b"\xd6\xff\xff\xff\xff\xff")),
    # Texts, lists and maps of sizes that do not follow.
    *map(msgspec.Raw, (b"\xdb\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc1")),
    *(msgspec.Raw(b"\x91" * depth + b"\xc0") for depth in (*DEEP, *_NEAR)),
    float("nan"),
    b"\xff\xfe",
)

_BYTES = (
    b"\x00",
    b"\xff",
    b"\n",
    b"\r",
    b"\r\n",
    b"\n\n",
    b'"',
    b"\\",
    b"{",
    b"[",
    b"}",
    b":",
    b",",
    b" ",
    b"=",
    b"9" * 30,
)

_ABSENT = object()
_Path = tuple[Any, ...]


def json_of(*samples: Mapping[str, Any]) -> Source[bytes]:
    """JSON like that of the samples."""
    return edited(_bent(samples, (*_SIMPLE, *_JSON), msgspec.json.encode))


def msgpack_of(*samples: Any) -> Source[bytes]:
    """Msgpack like that of the samples."""
    return edited(_bent(samples, (*_SIMPLE, *_MSGPACK), msgspec.msgpack.encode))


def messages_of(*samples: Message) -> Source[bytes]:
    """Protobuf messages like the samples, serialized."""

    def bent(chance: Random) -> bytes:
        message = copy.deepcopy(chance.choice(samples))
        for _ in range(chance.randrange(4)):
            places = list(_places(message))
            if not places:
                break
            inner, field = chance.choice(places)
            _set(inner, field, chance.randrange(1_000))
        data: bytes = message.SerializeToString()
        return data

    return edited(bent)


def samples_of(*samples: bytes) -> Source[bytes]:
    """Bytes like the samples."""
    return edited(lambda chance: chance.choice(samples))


def edited(sound: Source[bytes]) -> Source[bytes]:
    """Bytes of which, every other time, a few are others, gone, or there twice."""

    def edit(chance: Random) -> bytes:
        data = bytearray(sound(chance))
        for _ in range(max(0, chance.randint(-3, 3))):
            _edit(data, chance)
        return bytes(data)

    return edit


def _edit(data: bytearray, chance: Random) -> None:
    where, size = chance.randint(0, len(data)), chance.randint(1, 40)
    match chance.randrange(5):
        case 0:
            data[where : where + 1] = chance.randbytes(1)
        case 1:
            data[where:where] = chance.choice(_BYTES)
        case 2:
            del data[where : where + size]
        case 3:
            data[where:where] = data[where : where + size] * (1 + size % 3)
        case _:
            del data[where:]


def in_pieces(whole: Source[bytes]) -> Source[tuple[bytes, ...]]:
    """The same bytes in one to four pieces."""

    def cut(chance: Random) -> tuple[bytes, ...]:
        data = whole(chance)
        cuts = sorted(chance.randint(0, len(data)) for _ in range(chance.randrange(4)))
        return tuple(data[start:end] for start, end in zip((0, *cuts), (*cuts, len(data)), strict=True))

    return cut


def lists_of(item: Source[T], *, most: int, least: int = 0) -> Source[list[T]]:
    """Lists of a few of them."""
    return lambda chance: [item(chance) for _ in range(chance.randint(least, most))]


def one_of(*sources: Source[T]) -> Source[T]:
    """Now of one, now of another."""
    return lambda chance: chance.choice(sources)(chance)


def made_of(source: Source[T], make: Callable[[T], U]) -> Source[U]:
    """What is made of each of them."""
    return lambda chance: make(source(chance))


def _bent(samples: Sequence[Any], values: Sequence[object], encode: Callable[[Any], bytes]) -> Source[bytes]:
    known = [(sample, list(_paths(sample))) for sample in samples]
    values = (*values, _ABSENT)

    def bent(chance: Random) -> bytes:
        sample, paths = chance.choice(known)
        document = copy.deepcopy(sample)
        for _ in range(chance.randrange(4)):
            _put(document, chance.choice(paths), chance.choice(values))
        return encode(document)

    return bent


def _paths(value: Any, path: _Path = ()) -> Iterator[_Path]:
    """Yields the places in a document, its own excepted."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _paths(inner, (*path, key))


def _put(document: Any, path: _Path, value: object) -> None:
    for key in path[:-1]:
        try:
            document = document[key]
        except (LookupError, TypeError):
            return
    key = path[-1]
    if isinstance(value, list | dict):
        # The next edit may be inside it.
        value = copy.deepcopy(value)
    if isinstance(document, dict):
        document[key] = value
        if value is _ABSENT:
            del document[key]
    elif isinstance(document, list) and isinstance(key, int):
        document[key:] = [] if value is _ABSENT else [value, *document[key + 1 :]]


def _places(message: Message) -> Iterator[tuple[Message, Any]]:
    for field in message.DESCRIPTOR.fields:
        yield message, field
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for inner in value if field.is_repeated else (value,):
            yield from _places(inner)


_TEXTS = ("", "x", "é👋", "\x00\n", "a,b:c", "y" * 3_000, "http://h:1", "0")
_NUMBERS = (-(2**31), -1, 0, 1, 2**31 - 1)
_LARGE = (-(2**63), -1, 0, 1, 2**63 - 1)


def _set(message: Message, field: Any, choice: int) -> None:
    """Gives a field another value, or several."""
    if field.message_type is not None:
        _set_inner(message, field, choice)
        return
    value = _value(field, choice)
    if field.is_repeated:
        getattr(message, field.name).extend([value] * (1 if choice % 3 else 300))
    else:
        setattr(message, field.name, value)


def _set_inner(message: Message, field: Any, choice: int) -> None:
    if not field.is_repeated:
        if choice % 2:
            message.ClearField(field.name)
        else:
            getattr(message, field.name).SetInParent()
    elif not field.message_type.GetOptions().map_entry:
        value = getattr(message, field.name)
        value.add()
        value.extend(list(value) * (choice % 4))


def _value(field: Any, choice: int) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return _TEXTS[choice % len(_TEXTS)].encode() + b"\xff" * (choice % 2)
        case FieldDescriptor.CPPTYPE_STRING:
            return _TEXTS[choice % len(_TEXTS)]
        case FieldDescriptor.CPPTYPE_BOOL:
            return bool(choice % 2)
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return (0.0, -1.0, 1e300, float("nan"), float("inf"))[choice % 5]
        case FieldDescriptor.CPPTYPE_INT32:
            return _NUMBERS[choice % len(_NUMBERS)]
        case FieldDescriptor.CPPTYPE_INT64:
            return _LARGE[choice % len(_LARGE)]
        case FieldDescriptor.CPPTYPE_ENUM:
            return choice % 9
        case _:
            return choice
