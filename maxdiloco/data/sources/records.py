"""Read text from ArrayRecord files of tf.train.Example messages, as TFDS writes them.

The package array_record reads the files, and protobuf reads the messages. TensorFlow is not needed.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from maxdiloco.data.corpus import Skip, Span, Text
from maxdiloco.errors import DataError

# Number of records that are read at once.
_RECORDS = 256
# The necessary fields of tensorflow/core/example/{example,feature}.proto.
_EXAMPLE = """
name: "example.proto" package: "own" syntax: "proto3"
message_type { name: "BytesList"
  field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
message_type { name: "Feature"
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".own.BytesList" } }
message_type { name: "Features"
  field { name: "feature" number: 1 type: TYPE_MESSAGE label: LABEL_REPEATED
          type_name: ".own.Features.FeatureEntry" }
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".own.Feature" } } }
message_type { name: "Example"
  field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".own.Features" } }
"""


def read(file: BinaryIO, path: str, span: Span, column: str, skip: Skip) -> Iterator[Text]:
    """Yield the text of each record of a span.

    In a file of N records and S bytes, record i counts as beginning at byte i * S / N. Spans
    therefore need no index.

    Args:
      file: the open file, of which only the size is used.
      path: local path of the file.
      span: the bytes to read.
      column: the feature that holds the text.
      skip: called for each damaged record.
    """
    from array_record.python.array_record_module import ArrayRecordReader

    message = _example_class()
    size = file.seek(0, 2)
    try:
        with contextlib.closing(ArrayRecordReader(path)) as reader:
            count = reader.num_records()
            first, last = (-(-place * count // size) for place in (span.begin, span.end))
            for begin in range(first, last, _RECORDS):
                end = min(begin + _RECORDS, last)
                for number, record in enumerate(reader.read(begin, end), start=begin):
                    text = _text(message, record, column, f"{path} record {number}", skip)
                    if text:
                        yield Text(text)
    except (RuntimeError, ValueError, IndexError) as error:
        if isinstance(error, DataError):  # raised by skip
            raise
        skip(path, f"not an ArrayRecord file, or a damaged one ({error})")


def _text(message: Any, record: bytes, column: str, where: str, skip: Skip) -> str:
    from google.protobuf.message import DecodeError

    try:
        features = message.FromString(record).features.feature
    except DecodeError:
        skip(where, "not a tf.train.Example")
        return ""
    values = features[column].bytes_list.value if column in features else ()
    if len(values) != 1:
        names = ", ".join(sorted(features)) or "no feature"
        skip(where, f"text_column={column} is not one of its texts: it has {names}")
        return ""
    try:
        return values[0].decode()
    except UnicodeDecodeError as error:
        skip(where, f"not UTF-8 ({error.reason})")
        return ""


def _example_class() -> Any:
    """Return a message class that reads the text features of tf.train.Example."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_EXAMPLE, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("own.Example"))
