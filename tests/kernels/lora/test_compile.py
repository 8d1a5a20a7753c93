"""Grouped LoRA kernels compile for a real GPU without one: no spills, no local memory, no stack, in shared memory.

A process compiles or interprets, whichever Triton's first import found in the environment, so compilation runs in a
child process that does not interpret: this file as a script. It prints JSON.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.kernels.compiling import Compilation, compiled, listing, run_compiling, usage_of

pytestmark = pytest.mark.slow

BUCKETS = (16, 64, 128, 256)
WIDTHS = (4096, 14336, 1024)
SHARED_MEMORY = 227 * 1024


class Variant(NamedTuple):
    kernel: str
    width: int
    block_ranks: int
    drop: bool
    dtype: str = "bf16"
    device: str = "H200"

    @property
    def name(self) -> str:
        return "-".join(map(str, self))


def variants(width: int, dtype: str = "bf16", device: str = "H200") -> list[Variant]:
    """Return all kernels of one width; ranks above 16 share one block size, so every bucket is among them."""
    made = [
        Variant(kernel, width, block_ranks, drop, dtype, device)
        for kernel in ("shrink", "expand", "wgrad")
        for block_ranks in (16, 64)
        for drop in (False, True)
    ]
    return [*made, Variant("reduce", width, 16, False, dtype, device)]


# What fits with dropout fits without, as it takes more registers.
QUICK = [one for one in variants(4096) if one.block_ranks == 64 or one.drop or one.kernel == "reduce"]
SWEEP = [
    *[one for one in variants(4096) if one not in QUICK],
    *[variant for width in WIDTHS[1:] for variant in variants(width)],
    *[variant for dtype in ("fp16", "fp32") for variant in variants(4096, dtype)],
    *variants(4096, device="another GPU"),
    *variants(1000),  # no multiple of a tile
]


# ------------------------------------------------------------------------------ what the child computes


def constants_of(variant: Variant) -> dict[str, object]:
    from peft_mux.kernels.lora import tables

    element_size = 4 if variant.dtype == "fp32" else 2
    tile = tables.tiles(variant.kernel, variant.device, variant.block_ranks, element_size)
    if variant.kernel == "reduce":
        return {"D": variant.width, "BLOCK_R": 16, "BLOCK_D": tile.columns, "ACCUMULATE": True, "tile": tile}
    width, columns = ("K", "BLOCK_K") if variant.kernel == "expand" else ("D", "BLOCK_D")
    constants: dict[str, object] = {width: variant.width, columns: tile.columns, "tile": tile}
    constants |= {"BLOCK_M": tables.BLOCK_ROWS, "BLOCK_R": variant.block_ranks, "DROP": variant.drop}
    if variant.kernel == "expand":
        constants |= {"HAS_BIAS": not variant.drop, "ADD": variant.drop}
    if variant.kernel == "wgrad":
        constants |= {"CHUNK": tables.CHUNK_ROWS, "ACCUMULATE": True}
    return constants | {"UPCAST": False}


def type_of(argument: str, dtype: str) -> str:
    if argument in ("x_ptr", "w_ptr", "s_ptr", "y_ptr", "bias_ptr"):
        return f"*{dtype}"
    if argument in ("places_ptr", "step_seed_ptr", "w_offset_ptr"):
        return "*i64"
    if argument in ("part_ptr", "grad_ptr", "scale_ptr", "keep_scale_ptr"):
        return "*fp32"
    if argument.endswith("_ptr"):
        return "*i32"
    return "i64" if argument == "module_seed" else "i32"


def compile_variant(variant: Variant, folder: Path) -> dict[str, int]:
    """Compile as the launcher would, and read the machine code."""
    from peft_mux.kernels.lora import device as kernels

    function = getattr(kernels, f"{variant.kernel}_kernel")
    constants = constants_of(variant)
    tile: Any = constants.pop("tile")
    types = {name: type_of(name, variant.dtype) for name in function.arg_names}
    unspecialized = {"module_seed", "scaled", "part_ranks", "lowest_rank", "highest_rank"}
    aligned = types.keys() - constants.keys() - unspecialized
    options, cubin = {"num_warps": tile.warps, "num_stages": tile.stages}, folder / f"{variant.name}.cubin"
    usage = usage_of(compiled(Compilation(function, types, constants, aligned, options)), cubin)
    code = listing(cubin)
    return {
        **usage,
        "local accesses": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "atomics": len(re.findall(r"\b(?:RED|ATOM|ATOMG)\b", code)),
        "products": len(re.findall(r"\bHGMMA\b", code)),
        "wide stores": len(re.findall(r"STG\.E\.128", code)),
        "multiplications": len(re.findall(r"\bIMAD\.(?:WIDE|HI)\.U32\b", code)),
    }


def main(folder: Path, chosen: list[Variant]) -> None:
    print(json.dumps({variant.name: compile_variant(variant, folder) for variant in chosen}))


# ------------------------------------------------------------------------------ the tests


Usages = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Usages:
    return run_compiling(__file__, tmp_path_factory.mktemp("cubins"), "quick")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Usages:
    return run_compiling(__file__, tmp_path_factory.mktemp("cubins"), "sweep")


def assert_lean(usage: dict[str, int]) -> None:
    assert (usage["stack"], usage["local"], usage["local accesses"]) == (0, 0, 0), usage
    assert usage["shared"] <= SHARED_MEMORY, usage
    assert usage["atomics"] == 0, usage


@pytest.mark.parametrize("name", [variant.name for variant in QUICK])
def test_a_kernel_fits_into_registers_and_shared_memory(quick: Usages, name: str) -> None:
    assert_lean(quick[name])


@pytest.mark.parametrize("name", [variant.name for variant in QUICK if variant.kernel != "reduce"])
def test_products_run_on_the_tensor_cores_of_a_warp_group(quick: Usages, name: str) -> None:
    assert quick[name]["products"] > 0


@pytest.mark.parametrize("name", [variant.name for variant in QUICK])
def test_results_are_stored_sixteen_bytes_at_a_time(quick: Usages, name: str) -> None:
    assert quick[name]["wide stores"] > 0


@pytest.mark.parametrize("kernel", ["shrink", "expand", "wgrad"])
def test_the_generator_runs_once_per_eight_columns(quick: Usages, kernel: str) -> None:
    with_mask, without = (quick[Variant(kernel, 4096, 64, drop).name]["multiplications"] for drop in (True, False))
    # A thread masks 64 elements: 8 calls of 7 rounds of 2 wide products, less the first round of a counter that is
    # mostly zeros. In the layout of a product it would be four times as many.
    assert 60 <= with_mask - without <= 240


def test_every_rank_bucket_is_served_by_block_sizes_that_are_compiled_here() -> None:
    from peft_mux.kernels.lora import tables as tunings
    from peft_mux.kernels.lora.tables import RankTable

    for rank in BUCKETS:
        table = RankTable([rank], [1.0])
        assert (table.has_narrow, table.has_wide) == (rank <= tunings.NARROW_RANK, rank > tunings.NARROW_RANK)
    assert {tunings.NARROW_RANK, tunings.WIDE_BLOCK} == {variant.block_ranks for variant in QUICK}


@pytest.mark.parametrize("name", [variant.name for variant in SWEEP])
def test_a_kernel_of_other_widths_and_types_fits_too(sweep: Usages, name: str) -> None:
    assert_lean(sweep[name])


if __name__ == "__main__":
    main(Path(sys.argv[1]), QUICK if sys.argv[2] == "quick" else SWEEP)
