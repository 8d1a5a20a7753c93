"""What travels in protobuf: training requests, their results, and samples.

`tinker_public.proto` next to this file is read when this module is imported, so no compiler is needed and no generated
code can differ from it. Messages live in a pool of their own: a process may hold the client, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from peft_mux.errors import DataError, shown

MAX_BODY_BYTES = 64 * 2**20
"""Most bytes of a request, as it travels and decompressed."""
_FIELD = re.compile(
    r"oneof (?P<oneof>\w+) \{|(?P<end>\})|"
    r"(?P<label>repeated |optional )?(?:map<string, (?P<value>\w+)>|(?P<type>\w+)) (?P<name>\w+) = (?P<number>\d+);"
)
_SCALARS = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13}
"""Numbers of scalar types in a descriptor."""


def _read_proto(text: str) -> descriptor_pb2.FileDescriptorProto:
    """Return the descriptor of a proto3 file of messages, enums, oneofs and maps from strings."""
    text = re.sub(r"//[^\n]*", "", text)
    file = descriptor_pb2.FileDescriptorProto(name="tinker_public.proto", package="tinker_public", syntax="proto3")
    enums = set(re.findall(r"enum (\w+)", text))

    def add(message: Any, name: str, number: str, kind: str, label: int = 1) -> Any:
        field = message.field.add(name=name, number=int(number), label=label)
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
        else:
            field.type, field.type_name = 14 if kind in enums else 11, f".tinker_public.{kind}"
        return field

    for name, body in re.findall(r"enum (\w+) \{([^}]*)\}", text):
        values = [{"name": key, "number": int(number)} for key, number in re.findall(r"(\w+) = (\d+)", body)]
        file.enum_type.add(name=name, value=[descriptor_pb2.EnumValueDescriptorProto(**value) for value in values])
    for name, body in re.findall(r"message (\w+) \{(?:\}|(.*?)\n\})", text, re.DOTALL):
        message, optional, oneof = file.message_type.add(name=name), [], None
        for part in _FIELD.finditer(body):
            if part["oneof"]:
                oneof = len(message.oneof_decl)
                message.oneof_decl.add(name=part["oneof"])
            elif part["end"]:
                oneof = None
            elif part["value"]:
                entry = "".join(word.capitalize() for word in part["name"].split("_")) + "Entry"
                nested = message.nested_type.add(name=entry)
                nested.options.map_entry = True
                add(nested, "key", "1", "string")
                add(nested, "value", "2", part["value"])
                add(message, part["name"], part["number"], f"{name}.{entry}", label=3)
            else:
                repeated = part["label"] == "repeated "
                field = add(message, part["name"], part["number"], part["type"], 3 if repeated else 1)
                if oneof is not None:
                    field.oneof_index = oneof
                elif part["label"]:
                    optional += [] if repeated else [field]
        for field in optional:  # proto3 has their presence in oneofs, which come after all others
            field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{field.name}")
    return file


FILE = _read_proto(Path(__file__).with_name("tinker_public.proto").read_text("utf-8"))
_POOL = descriptor_pool.DescriptorPool()
_POOL.AddSerializedFile(FILE.SerializeToString())


def message(name: str) -> Any:
    """Return the class of a message of `tinker_public.proto`."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"tinker_public.{name}"))


_DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4"), 4: np.dtype("<u2")}
"""Types of elements by their number; the last one is bfloat16, which numpy does not have."""
_PROTOBUF = "application/x-protobuf"


class BodyError(ValueError):
    """A body that cannot be read; `status` is the answer's."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Datum:
    """A row of a training request.

    Attributes:
        tokens: int64 `[T]`.
        inputs: what the loss reads, by name, fp32 or int64.
    """

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class TrainingRequest:
    """A request to compute a loss; `rows()` reads its tensors.

    Attributes:
        model_id: the model.
        seq_id: the number of the request, counted for each model.
        loss_fn: name of the loss.
        loss_fn_config: its settings.
        forward_only: compute no gradient.
        message: the message itself.
    """

    model_id: str
    seq_id: int
    loss_fn: str
    loss_fn_config: dict[str, float | str]
    forward_only: bool
    message: Any

    def rows(self) -> list[Datum]:
        """Return the rows.

        Raises:
            DataError: naming the row and the tensor that cannot be read.
        """
        return [_read_datum(datum, f"data[{number}]") for number, datum in enumerate(self.message.data)]


def decompressed(body: bytes, encoding: str) -> bytes:
    """Return a body without its content encoding.

    Raises:
        BodyError: if it is broken, too large, or of another encoding.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise BodyError(415, f"content-encoding must be zstd or identity, got {shown(encoding)}.")
    try:
        reader = zstandard.ZstdDecompressor().stream_reader(body)
        read = reader.read(MAX_BODY_BYTES + 1)
        # A frame that was cut off ends without an error, so its length is compared.
        if len(read) <= MAX_BODY_BYTES and zstandard.frame_content_size(body) not in (-1, len(read)):
            raise zstandard.ZstdError("it ends too early")
    except zstandard.ZstdError as error:
        raise BodyError(400, f"the body must be one whole zstd frame, got a broken one ({error}).") from error
    if len(read) > MAX_BODY_BYTES:
        raise BodyError(413, f"the body must have at most {MAX_BODY_BYTES} bytes once decompressed. Send fewer rows.")
    return read


def read_training_request(body: bytes, content_type: str = _PROTOBUF) -> TrainingRequest:
    """Read the body of a `forward_backward` request.

    Raises:
        BodyError: if it is not protobuf.
    """
    if "protobuf" not in content_type:
        raise BodyError(415, f"content-type must be {_PROTOBUF}, got {shown(content_type)}. Use tinker>=0.25.")
    read = message("ForwardBackwardRequest")()
    try:
        read.ParseFromString(body)
    except DecodeError as error:
        raise BodyError(
            415, f"the body must be a ForwardBackwardRequest in protobuf, got other bytes ({error})."
        ) from error
    config: dict[str, float | str] = dict(read.loss_fn_config)
    for name, value in read.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return TrainingRequest(read.model_id, read.seq_id, read.loss_fn, config, read.forward_only, read)


def _read_datum(datum: Any, where: str) -> Datum:
    parts = []
    for number, chunk in enumerate(datum.model_input):
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise DataError(
                f"{where}.model_input[{number}] must be text, got {kind or 'nothing'}. Images and audio are not "
                "served: send token ids."
            )
        parts.append(_elements(chunk.encoded_text.tokens, 3, f"{where}.model_input[{number}].tokens"))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
    return Datum(
        tokens,
        {name: _read_tensor(tensor, f"{where}.loss_fn_inputs.{name}") for name, tensor in datum.loss_fn_inputs.items()},
    )


def _elements(raw: bytes, dtype: int, where: str) -> np.ndarray:
    if dtype not in _DTYPES:
        raise DataError(f"{where}.dtype must be 1 (float32), 2 (int64), 3 (int32) or 4 (bfloat16), got {dtype}.")
    if len(raw) % _DTYPES[dtype].itemsize:
        raise DataError(f"{where} must have whole elements of {_DTYPES[dtype].itemsize} bytes, got {len(raw)} bytes.")
    flat = np.frombuffer(raw, _DTYPES[dtype])
    if dtype == 4:
        flat = (flat.astype("<u4") << 16).view("<f4")
    return flat.astype(np.int64) if flat.dtype.kind == "i" else flat


def _read_tensor(tensor: Any, where: str) -> np.ndarray:
    """Return a tensor, dense or as compressed rows, whose other elements are 0."""
    shape = list(tensor.shape)
    sparse = tensor.WhichOneof("encoding") == "sparse_csr"
    flat = _elements(tensor.sparse_csr.values if sparse else tensor.dense, tensor.dtype, where)
    if not sparse:
        shape = shape or [flat.size]
        if min(shape) < 0 or len(shape) > 2 or int(np.prod(shape, dtype=object)) != flat.size:
            raise DataError(f"{where}.shape must be of one or two dimensions with {flat.size} elements, got {shape}.")
        return flat.reshape(shape)
    rows = _elements(tensor.sparse_csr.crow_indices, 2, f"{where}.crow_indices")
    columns = _elements(tensor.sparse_csr.col_indices, 2, f"{where}.col_indices")
    # Elements that are not listed take memory, too, so their number is limited like the bytes of a body.
    if len(shape) != 2 or min(shape) < 0 or shape[0] * shape[1] > MAX_BODY_BYTES // 4:
        raise DataError(
            f"{where}.shape must have two dimensions of at most {MAX_BODY_BYTES // 4} elements, got {shape}."
        )
    counts = np.diff(rows)
    if (
        rows.size != shape[0] + 1
        or rows[0] != 0
        or rows[-1] != flat.size
        or columns.size != flat.size
        or (counts < 0).any()
        or (columns.size and (columns.min() < 0 or columns.max() >= shape[1]))
    ):
        raise DataError(f"{where} must have row and column indices (CSR) that fit its shape {shape}. Send it dense.")
    dense = np.zeros(shape, flat.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = flat
    return dense


def write_training_result(loss: float, logprobs: Sequence[np.ndarray]) -> bytes:
    """Return the result of a training request: the loss, and the log-probabilities of each row's targets."""
    output = message("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord")
    output.metrics["loss:sum"] = loss
    start = 0
    # Rows whose targets have the same trailing shape share a record.
    for end in range(1, len(logprobs) + 1):
        if end < len(logprobs) and logprobs[end].shape[1:] == logprobs[start].shape[1:]:
            continue
        rows = [np.ascontiguousarray(row, "<f4") for row in logprobs[start:end]]
        record = output.loss_fn_outputs.add(num_datums=len(rows))
        field = record.fields["logprobs"]
        field.data, field.dtype = b"".join(row.tobytes() for row in rows), 1
        field.offsets = np.cumsum([0, *(row.nbytes for row in rows)]).astype("<i8").tobytes()
        field.trailing_shape.extend(rows[0].shape[1:])
        start = end
    return output.SerializeToString()


TopK = Sequence[Sequence[tuple[int, float]] | None]
"""The likeliest tokens of each position with their log-probabilities; `None` where there are none."""


def write_samples(
    completions: Sequence[tuple[bool, Sequence[int], Sequence[float], TopK | None]],
    prompt_logprobs: Sequence[float] | None,
    prompt_topk: TopK | None,
) -> bytes:
    """Return the result of a sampling request.

    Args:
        completions: of each, whether it has reached its end, its tokens and their log-probabilities, and the likeliest
            tokens of each position if they are wanted.
        prompt_logprobs: of each token of the prompt, NaN where there is none; `None` if they are not wanted.
        prompt_topk: the likeliest tokens at each place of the prompt, if they are wanted.
    """
    output = message("SampleResponse")()
    for is_stopped, tokens, logprobs, topk in completions:
        sequence = output.sequences.add(stop_reason=0 if is_stopped else 1)
        sequence.tokens = np.asarray(tokens, "<i4").tobytes()
        sequence.logprobs = np.asarray(logprobs, "<f4").tobytes()
        if topk is not None:
            sequence.topk_sampled_logprobs.CopyFrom(_topk(topk))
    if prompt_logprobs is not None:
        output.prompt_logprobs = np.asarray(prompt_logprobs, "<f4").tobytes()
    if prompt_topk is not None:
        output.topk_prompt_logprobs.CopyFrom(_topk(prompt_topk))
    return output.SerializeToString()


def _topk(rows: TopK) -> Any:
    k = max((len(row) for row in rows if row), default=0)
    ids, logprobs = np.zeros((len(rows), k), "<i4"), np.full((len(rows), k), -99999.0, "<f4")  # what the client skips
    for place, row in enumerate(rows):
        for column, (token, logprob) in enumerate(row or ()):
            ids[place, column], logprobs[place, column] = token, logprob
    return message("TopkLogprobs")(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=len(rows))
