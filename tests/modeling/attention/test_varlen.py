"""Attention in one call over a packed stream: what each library is handed, by fakes that compute it on a CPU."""

from __future__ import annotations

import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from peft_mux.modeling.attention import varlen
from peft_mux.modeling.attention.varlen import VarlenKernel, as_kernel, varlen_attention, varlen_kernel, varlen_support
from tests.modeling.attention.kernel_cases import flash_attention

LENGTHS = (5, 1, 17, 8)
HEADS, CHANNELS = 4, 8
SCALING = 0.3
CUDA = torch.device("cuda")
States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def cu_seqlens(lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def states(key_heads: int, lengths: tuple[int, ...] = LENGTHS) -> States:
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        shape = (sum(lengths), heads, CHANNELS)
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    return draw(HEADS), draw(key_heads), draw(key_heads)


def each(change: Callable[[torch.Tensor], torch.Tensor], qkv: States) -> States:
    q, k, v = qkv
    return change(q), change(k), change(v)


SIGNATURES = {
    "torch_2_11": lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
    *, return_aux=None, scale=1.0, window_size=(-1, -1): None,
    "torch_2_13": lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
    *, return_aux=None, scale=1.0, window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None,
    num_splits=None: None,
    "flash_attn": lambda q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=1.0, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False, block_table=None: None,
    "flash_attn_interface": lambda q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
    seqused_k=None, softmax_scale=1.0, causal=False, qv=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
    num_splits=0, pack_gqa=None, deterministic=False, sm_margin=0: None,
}  # fmt: skip
"""The arguments of each library in one version."""


class Library:
    """Stands for a library in one version: checks what it is handed as that version does, and notes it."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.__signature__ = inspect.signature(SIGNATURES[version])
        self.seen: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.__signature__.bind(*args, **kwargs)
        bound.apply_defaults()
        self.seen, is_torch = dict(bound.arguments), self.version.startswith("torch")
        q, k, v, bounds, bounds_k, max_q, max_k = bound.args[:7]
        self.seen |= {"heads": k.shape[1], "max_q": max_q, "max_k": max_k}
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "channels lie apart"
        takes_groups = self.seen.get("enable_gqa", not is_torch)
        assert takes_groups or q.shape[1] == k.shape[1] == v.shape[1], "as many heads as key-value heads"
        assert torch.equal(bounds, bounds_k)
        others = ("seqused_k", "dropout_p", "softcap", "block_table", "attention_chunk", "qv")
        assert not any(self.seen.get(name) for name in others)
        left, right = self.seen["window_size"]
        reach = left, 0 if self.seen.get("causal") else right
        scale = self.seen["scale" if is_torch else "softmax_scale"]
        out = flash_attention(*bound.args[:7], scale=scale, window_size=reach, enable_gqa=True)
        return (out, torch.zeros(q.shape[1], q.shape[0])) if self.version == "flash_attn_interface" else out

    def kernel(self) -> VarlenKernel:
        found = as_kernel("torch" if self.version.startswith("torch") else self.version, self)
        assert found is not None
        return found


KINDS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True, "window": None},
    "bidirectional": {"is_causal": False, "window": None},
    "window": {"is_causal": True, "window": 3},
    "window in both directions": {"is_causal": False, "window": 3},
    "window of one token": {"is_causal": True, "window": 1},
    "window beyond every sequence": {"is_causal": True, "window": 100},
}


@pytest.fixture(params=SIGNATURES)
def library(request: pytest.FixtureRequest) -> Library:
    return Library(request.param)


def attend(library: Library, qkv: States, lengths: tuple[int, ...] = LENGTHS, **kind: Any) -> torch.Tensor:
    options = {"is_causal": True, "window": None, **kind}
    return varlen_attention(
        *qkv, cu_seqlens(lengths), max(lengths), scaling=SCALING, kernel=library.kernel(), **options
    )


def spelled_out(qkv: States, *, is_causal: bool, window: int | None) -> torch.Tensor:
    """Return attention by its definition: one query of one head at a time."""
    q, k, v = qkv
    groups, out = q.shape[1] // k.shape[1], []
    for start, end in itertools.pairwise(cu_seqlens().tolist()):
        for query in range(start, end):
            first = start if window is None else max(start, query - window + 1)
            last = query + 1 if is_causal else end if window is None else min(end, query + window)
            for head in range(q.shape[1]):
                keys, values = k[first:last, head // groups], v[first:last, head // groups]
                out.append(torch.softmax(keys @ q[query, head] * SCALING, dim=0) @ values)
    return torch.stack(out).view(q.shape)


@pytest.mark.parametrize("key_heads", [HEADS, 2, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_are_those_of_attention_spelled_out(library: Library, kind: str, key_heads: int) -> None:
    qkv = states(key_heads)
    found, wanted = attend(library, qkv, **KINDS[kind]), spelled_out(qkv, **KINDS[kind])
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)
    flow = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    gradients = zip(torch.autograd.grad(found, qkv, flow), torch.autograd.grad(wanted, qkv, flow), strict=True)
    for ours, theirs in gradients:
        assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-12)


def test_key_value_heads_are_repeated_only_where_the_library_wants_it(library: Library) -> None:
    attend(library, states(2))
    assert library.seen["heads"] == (HEADS if library.version == "torch_2_11" else 2)
    assert library.seen.get("enable_gqa", True)
    attend(library, states(HEADS))
    assert library.seen["heads"] == HEADS
    assert not library.seen.get("enable_gqa", False)
    assert library.seen.get("num_splits", 1) == 1, "the order of sums would depend on the longest sequence"


@pytest.mark.parametrize(
    ("kind", "reach"),
    [
        ("causal", (-1, 0)),
        ("bidirectional", (-1, -1)),
        ("window", (2, 0)),
        ("window in both directions", (2, 2)),
        ("window of one token", (0, 0)),
    ],
)
def test_windows_are_handed_on_as_the_tokens_next_to_the_query(
    library: Library, kind: str, reach: tuple[int, int]
) -> None:
    attend(library, states(HEADS), **KINDS[kind])
    assert library.seen["window_size"] == reach
    assert isinstance(library.seen["window_size"], tuple)  # torch compares it with (-1, 0)
    assert library.seen.get("causal", reach[1] == 0) == (reach[1] == 0)


@pytest.mark.parametrize("lengths", [(1, 1), (1,), (3, 1), (40, 3)])
def test_a_short_stream_is_not_announced_as_one_that_other_code_would_compute(
    library: Library, lengths: tuple[int, ...]
) -> None:
    attend(library, states(HEADS, lengths), lengths, window=7)
    assert library.seen["max_q"] >= max(2, *lengths)
    assert library.seen["max_k"] > library.seen["window_size"][0]
    assert library.seen["max_k"] >= max(lengths)


@pytest.mark.parametrize("asked", [True, False])
def test_packages_know_whether_determinism_was_asked_for(asked: bool) -> None:
    library, before = Library("flash_attn"), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(asked)
    try:
        attend(library, states(HEADS))
    finally:
        torch.use_deterministic_algorithms(before)
    assert library.seen["deterministic"] is asked


def test_states_in_the_layout_of_transformers_are_taken_and_strided_channels_are_copied(library: Library) -> None:
    qkv = states(2)
    as_model = each(lambda x: x.detach().transpose(0, 1).contiguous().transpose(0, 1), qkv)
    strided = each(lambda x: x.detach().transpose(1, 2).contiguous().transpose(1, 2), qkv)
    assert as_model[0].stride(0) != qkv[0].stride(0)
    assert strided[0].stride(-1) != 1
    wanted = attend(library, qkv)
    assert torch.equal(attend(library, as_model), wanted)
    assert torch.equal(attend(library, strided), wanted)


def test_an_empty_window_and_ragged_groups_of_heads_are_refused(library: Library) -> None:
    with pytest.raises(ValueError, match="a window must be of 1 token or more, got 0"):
        attend(library, states(HEADS), window=0)
    with pytest.raises(ValueError, match="the number of key-value heads must divide the 4 heads, got 3"):
        attend(library, states(3))


@pytest.mark.parametrize(("window", "key_heads"), [(None, HEADS), (3, 2)])
def test_the_installed_torch_takes_what_it_is_handed(window: int | None, key_heads: int) -> None:
    from torch.nn.attention.varlen import varlen_attn

    kernel = as_kernel("torch", varlen_attn)
    assert kernel is not None
    assert list(inspect.signature(varlen_attn).parameters)[:7] == [
        "query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k",
    ]  # fmt: skip
    qkv = each(lambda x: x.detach().to("meta", torch.bfloat16).requires_grad_(), states(key_heads))
    out = varlen_attention(
        *qkv, cu_seqlens().to("meta"), 17, is_causal=True, window=window, scaling=SCALING, kernel=kernel
    )
    gradients = torch.autograd.grad(out.sum(), qkv)
    assert out.shape == qkv[0].shape
    assert [gradient.shape for gradient in gradients] == [x.shape for x in qkv]


# ------------------------------------------------------------------------------------------ finding a kernel


@pytest.fixture
def fresh() -> Iterator[None]:
    """Forget what was found before, and what is found meanwhile."""
    varlen.varlen_kernel.cache_clear()
    yield
    varlen.varlen_kernel.cache_clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, fresh: None) -> Callable[..., None]:
    """Return a function that pretends that these libraries are there, and no others."""

    def pretend(*, has_flash: bool, torch_has: Any = None, packages: tuple[str, ...] = ()) -> None:
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: has_flash)
        module = types.ModuleType("torch.nn.attention.varlen")
        if torch_has is not None:
            module.varlen_attn = torch_has  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
        for name in ("flash_attn", "flash_attn_interface"):
            package = types.ModuleType(name) if name in packages else None
            if package is not None:
                package.flash_attn_varlen_func = Library(name)  # pyright: ignore
            monkeypatch.setitem(sys.modules, name, package)  # None makes the import fail

    return pretend


def found() -> str | None:
    varlen_kernel.cache_clear()
    kernel = varlen_kernel()
    return None if kernel is None else kernel.library


def before_windows(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
    raise AssertionError


def test_torch_comes_first_if_it_knows_windows_then_the_packages_then_nothing(install: Callable[..., None]) -> None:
    ours = Library("torch_2_11")
    both = ("flash_attn", "flash_attn_interface")
    install(has_flash=True, torch_has=ours, packages=both)
    assert found() == "torch"
    install(has_flash=True, packages=both)
    assert found() == "flash_attn_interface"
    install(has_flash=False, torch_has=ours, packages=("flash_attn",))
    assert found() == "flash_attn"
    install(has_flash=True, torch_has=before_windows, packages=("flash_attn",))
    assert found() == "flash_attn"
    install(has_flash=False, torch_has=ours)
    assert found() is None


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is a GPU with everything that is needed."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(varlen, "varlen_kernel", Library("torch_2_11").kernel)


def test_whatever_is_in_the_way_is_named(on_gpu: None) -> None:
    good = {"device": CUDA, "dtype": torch.bfloat16, "head_dim": 64}
    for fine in ({}, {"dtype": torch.float16}, {"head_dim": 72}, {"head_dim": 256, "value_dim": 256, "dropout": 0.0}):
        assert varlen_support(**{**good, **fine}) is None
    for reason, change in {
        "no kernel for cpu": {"device": torch.device("cpu")},
        "bf16 or fp16, not in float32": {"dtype": torch.float32},
        "264 channels": {"head_dim": 264},
        "100 channels, not a multiple of 8": {"head_dim": 100},
        "values have 32 channels and queries 64": {"value_dim": 32},
        "soft-capped": {"softcap": 50.0},
        "dropped out": {"dropout": 0.1},
        "sinks": {"has_sinks": True},
    }.items():
        assert reason in (varlen_support(**{**good, **change}) or "")


def test_cards_and_an_absent_kernel_are_named(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(varlen, "varlen_kernel", lambda: None)
        assert "neither torch nor" in (varlen_support(CUDA, torch.float16, 64) or "")
    for capability in ((8, 6), (8, 9), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, found=capability: found)
        for head_dim in (200, 224):
            assert f"{head_dim} channels, too many" in (varlen_support(CUDA, torch.bfloat16, head_dim) or "")
        assert [varlen_support(CUDA, torch.bfloat16, head_dim) for head_dim in (192, 232, 256)] == [None] * 3
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert "compute capability 8.0" in (varlen_support(CUDA, torch.float16, 64) or "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_the_kernel_agrees_with_attention_spelled_out_and_keeps_sequences_apart(
    kind: str, key_heads: int
) -> None:
    exact = each(lambda x: x.detach().to(torch.bfloat16).double().requires_grad_(), states(key_heads))
    qkv = each(lambda x: x.detach().to("cuda", torch.bfloat16).requires_grad_(), exact)
    assert varlen_support(qkv[0].device, torch.bfloat16, CHANNELS) is None
    bounds = cu_seqlens().cuda()
    out = varlen_attention(*qkv, bounds, max(LENGTHS), scaling=SCALING, **KINDS[kind])
    wanted = spelled_out(exact, **KINDS[kind])
    pairs = [(out, wanted)]
    pairs += zip(torch.autograd.grad(out.sum(), qkv), torch.autograd.grad(wanted.sum(), exact), strict=True)
    for ours, theirs in pairs:
        assert (ours.cpu().double() - theirs).norm() < 1e-2 * theirs.norm()
    leaves = each(lambda x: x.detach().clone(), qkv)
    for x in leaves:
        x[: LENGTHS[0]] = float("nan")
        x.requires_grad_()
    again = varlen_attention(*leaves, bounds, max(LENGTHS), scaling=SCALING, **KINDS[kind])
    assert torch.equal(again[LENGTHS[0] :], out[LENGTHS[0] :])
    for gradient in torch.autograd.grad(again.sum(), leaves):
        assert torch.isfinite(gradient[LENGTHS[0] :]).all()
