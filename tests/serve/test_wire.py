"""Bodies in protobuf, written by the client and read by the server, and the other way round."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from google.protobuf import descriptor_pb2
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tinker import types
from tinker.proto import tinker_public_pb2 as client_pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from peft_mux.errors import DataError
from peft_mux.serve import wire

FLOATS = st.floats(-1e3, 1e3, width=32)


def test_every_field_has_the_number_and_type_of_the_clients() -> None:
    theirs = descriptor_pb2.FileDescriptorProto()
    client_pb.DESCRIPTOR.CopyToProto(theirs)
    for ours in wire.FILE.message_type:
        (same,) = [message for message in theirs.message_type if message.name == ours.name]
        fields = {field.name: (field.number, field.type, field.type_name, field.label) for field in same.field}
        assert {f.name: (f.number, f.type, f.type_name, f.label) for f in ours.field}.items() <= fields.items()
    for ours in wire.FILE.enum_type:
        assert ours in theirs.enum_type


@st.composite
def requests(draw: st.DrawFn) -> types.ForwardBackwardRequest:
    data = []
    for _ in range(draw(st.integers(1, 3))):
        tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6))
        shape = draw(st.sampled_from([(len(tokens),), (len(tokens), 3)]))
        inputs = {"target_tokens": draw(arrays.arrays(np.int64, shape, elements=st.sampled_from([0, 0, 0, 5])))}
        inputs["weights"] = draw(arrays.arrays(np.float32, shape, elements=FLOATS))
        pieces = draw(st.integers(0, len(tokens)))
        chunks = [types.EncodedTextChunk(tokens=tokens[:pieces]), types.EncodedTextChunk(tokens=tokens[pieces:])]
        if len(shape) == 2 and draw(st.booleans()):
            torch = pytest.importorskip("torch")  # the client sends rows of zeros compressed
            inputs = {name: types.TensorData.from_torch_sparse(torch.tensor(own)) for name, own in inputs.items()}
        else:
            inputs = {name: types.TensorData.from_numpy(own) for name, own in inputs.items()}
        data.append(types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs))
    config = draw(st.none() | st.dictionaries(st.sampled_from(["beta", "clip"]), FLOATS | st.text(max_size=5)))
    given_input = types.ForwardBackwardInput(data=data, loss_fn="ppo", loss_fn_config=config)
    return types.ForwardBackwardRequest(forward_backward_input=given_input, model_id="s:train:0", seq_id=7)


@given(requests(), st.booleans())
def test_a_request_of_the_client_is_read_as_it_was_written(request: types.ForwardBackwardRequest, packed: bool) -> None:
    body = forward_backward_request_to_proto(request).SerializeToString()
    if packed:
        body = wire.decompressed(zstandard.compress(body), "zstd")
    read = wire.read_training_request(body)
    assert (read.model_id, read.seq_id, read.loss_fn, read.forward_only) == ("s:train:0", 7, "ppo", False)
    assert read.loss_fn_config == (request.forward_backward_input.loss_fn_config or {})
    for ours, theirs in zip(read.rows(), request.forward_backward_input.data, strict=True):
        assert ours.tokens.tolist() == theirs.model_input.to_ints()
        for name, values in theirs.loss_fn_inputs.items():
            np.testing.assert_array_equal(ours.inputs[name], values.to_numpy())


@given(st.lists(arrays.array_shapes(min_dims=1, max_dims=2, min_side=1, max_side=4), max_size=4), st.data())
def test_a_result_is_read_by_the_client_as_it_was_written(shapes: list[tuple[int, ...]], data: st.DataObject) -> None:
    rows = [data.draw(arrays.arrays(np.float32, shape, elements=FLOATS)) for shape in shapes]
    read = deserialize_forward_backward_output(wire.write_training_result(2.5, rows))
    assert read.metrics == {"loss:sum": 2.5}
    for ours, theirs in zip(rows, read.loss_fn_outputs, strict=True):
        np.testing.assert_array_equal(theirs["logprobs"].to_numpy(), ours)


def test_samples_are_read_by_the_client_as_they_were_written() -> None:
    topk = [None, [(4, -0.5), (9, -1.5)], [(2, -0.25)]]
    body = wire.write_samples(
        [(True, [5, 6], [-1.0, -2.0], None), (False, [7], [-3.0], topk[1:2])], [np.nan, -1.0], topk
    )
    read = deserialize_sample_response(body)
    assert [(own.stop_reason, own.tokens, own.logprobs) for own in read.sequences] == [
        ("stop", [5, 6], [-1.0, -2.0]),
        ("length", [7], [-3.0]),
    ]
    assert read.sequences[1].topk_logprobs == topk[1:2]
    assert read.prompt_logprobs == [None, -1.0]
    assert read.topk_prompt_logprobs == topk


@pytest.mark.parametrize(
    ("body", "encoding", "content_type", "status"),
    [
        (b"{}", "", "application/json", 415),
        (b"\xff\xff\xff", "", "application/x-protobuf", 415),
        (b"abc", "gzip", "application/x-protobuf", 415),
        (b"abc", "zstd", "application/x-protobuf", 400),
        (zstandard.compress(bytes(100_000))[:-3], "zstd", "application/x-protobuf", 400),
        (zstandard.compress(bytes(wire.MAX_BODY_BYTES + 1)), "zstd", "application/x-protobuf", 413),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(body: bytes, encoding: str, content_type: str, status: int) -> None:
    with pytest.raises(wire.BodyError) as refused:
        wire.read_training_request(wire.decompressed(body, encoding), content_type)
    assert refused.value.status == status


def _datum(**tensor: object) -> bytes:
    request = wire.message("ForwardBackwardRequest")()
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray([1, 2], "<i4").tobytes()
    datum.loss_fn_inputs["weights"].CopyFrom(wire.message("Tensor")(**tensor))
    return request.SerializeToString()


def _sparse(rows: list[int], columns: list[int], values: int = 1) -> object:
    raw = [np.asarray(own, "<i8").tobytes() for own in (rows, columns)]
    return wire.message("SparseCsr")(values=bytes(4 * values), crow_indices=raw[0], col_indices=raw[1])


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ({"dense": bytes(5), "dtype": 1, "shape": [1]}, "whole elements of 4 bytes, got 5"),
        ({"dense": bytes(8), "dtype": 9, "shape": [1]}, "dtype must be 1"),
        ({"dense": bytes(8), "dtype": 1, "shape": [3]}, "with 2 elements, got \\[3\\]"),
        ({"dense": bytes(8), "dtype": 1, "shape": [2**40, 2**40]}, "shape must be"),
        ({"sparse_csr": _sparse([0, 1, 1], [7]), "dtype": 1, "shape": [2, 3]}, "must have row and column indices"),
        ({"sparse_csr": _sparse([0, 2, 1], [0]), "dtype": 1, "shape": [2, 3]}, "must have row and column indices"),
        ({"sparse_csr": _sparse([0, 1, 1], [0]), "dtype": 1, "shape": [2**40, 3]}, "at most"),
    ],
)
def test_a_tensor_that_does_not_fit_its_shape_is_refused_by_its_place(tensor: dict, words: str) -> None:
    with pytest.raises(DataError, match=rf"data\[0\].loss_fn_inputs.weights.*{words}"):
        wire.read_training_request(_datum(**tensor)).rows()


def test_images_are_refused_and_bfloat16_is_read() -> None:
    request = wire.message("ForwardBackwardRequest")()
    request.data.add().model_input.add().image.SetInParent()
    with pytest.raises(DataError, match=r"data\[0\].model_input\[0\] must be text, got image"):
        wire.read_training_request(request.SerializeToString()).rows()
    halves = (np.asarray([1.5, -2.0], "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    (row,) = wire.read_training_request(_datum(dense=halves, dtype=4, shape=[2])).rows()
    assert row.inputs["weights"].tolist() == [1.5, -2.0]
