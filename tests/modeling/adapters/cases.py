"""A configuration of every PEFT type that trains, small enough for the tiny backbone (hidden 32, 2 layers)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import peft
import pytest
from peft import PeftConfig, PeftType

from peft_mux import BottleneckConfig, DiffPruningConfig


@dataclass(frozen=True)
class Case:
    """What the tests need to know of a kind.

    Attributes:
        make: returns a configuration for target modules; the number makes two of them differ.
        wrong: a field that cannot be trained, and a value of it.
        dropped: returns the first configuration with dropout, if the type has dropout.
        is_random: whether training draws at random whatever is set; plain PEFT is then a judge of evaluation alone.
        merges: whether PEFT can merge it into the backbone.
    """

    make: Callable[[int], PeftConfig]
    wrong: tuple[str, Any] = ("modules_to_save", ["norm"])
    dropped: Callable[[], PeftConfig] | None = None
    is_random: bool = False
    merges: bool = True


_TARGETS = (["q_proj", "down_proj"], ["v_proj", "q_proj"])
"""Of the first task and of the second: one layer in common, whose frozen weight is wider in the MLP."""


def _case(config: str, settings: Callable[[int], dict[str, Any]], *, dropout: str = "", **facts: Any) -> Case:
    """Return the case of a type whose configuration is `config` with the settings of a number, on linear layers."""

    def make(number: int, **more: Any) -> PeftConfig:
        return getattr(peft, config)(**{"target_modules": list(_TARGETS[number]), **settings(number), **more})

    dropped = (lambda: make(0, **{dropout: 0.4})) if dropout else None
    return Case(make, dropped=dropped, **facts)


_IA3_TARGETS = ["k_proj", "down_proj", "v_proj"]

CASES_BY_NAME: dict[str, Case] = {
    "LORA": Case(
        lambda number: peft.LoraConfig(r=2 + number, target_modules="all-linear"),
        ("use_qalora", True),
        lambda: peft.LoraConfig(r=3, target_modules="all-linear", lora_dropout=0.4),
    ),
    "BOTTLENECK": Case(
        lambda number: BottleneckConfig(bottleneck_size=3 + number, target_modules=["o_proj", "down_proj"]),
        dropped=lambda: BottleneckConfig(
            bottleneck_size=3, target_modules=["o_proj", "down_proj"], adapter_dropout=0.4
        ),
        merges=False,
    ),
    "DIFF_PRUNING": Case(
        lambda number: DiffPruningConfig(target_modules=["q_proj", "down_proj"][number:], structured=number == 0),
        ("kept", {"model.layers.0.self_attn.q_proj": 1}),
        lambda: DiffPruningConfig(target_modules=["q_proj", "down_proj"], alpha_init=0.5),
        is_random=True,
    ),
    "IA3": _case("IA3Config", lambda n: {"target_modules": _IA3_TARGETS[n:], "feedforward_modules": ["down_proj"]}),
    "BEFT": _case("BeftConfig", lambda n: {}, merges=False),
    "ROAD": _case("RoadConfig", lambda n: {"group_size": 8, "variant": f"road_{1 + n}"}),
    "MISS": _case("MissConfig", lambda n: {"r": 2 + 2 * n}, dropout="miss_dropout", wrong=("bias", "all")),
    "GRALORA": _case("GraloraConfig", lambda n: {"r": 4, "alpha": 4 + n, "hybrid_r": 2 * n}, dropout="gralora_dropout"),
    "DELORA": _case("DeloraConfig", lambda n: {"r": 2 + n}, dropout="module_dropout"),
    # With the default method its first gradients are near zero, and two orders of one batch train plain PEFT apart.
    "DEFT": _case("DeftConfig", lambda n: {"r": 2 + n, "decomposition_method": "qr"}, dropout="deft_dropout"),
    "OSF": _case("OSFConfig", lambda n: {"effective_rank": 24 + n}),
    "PSOFT": _case("PsoftConfig", lambda n: {"r": 4 + n, "psoft_alpha": 4}, dropout="psoft_dropout"),
    "ADAMSS": _case("AdamssConfig", lambda n: {"r": 8, "num_subspaces": 2 + n}, wrong=("use_asa", True)),
    "LN_TUNING": _case("LNTuningConfig", lambda n: {"target_modules": ["input_layernorm", "norm"][n:]}),
    "TRAINABLE_TOKENS": _case(
        "TrainableTokensConfig",
        lambda n: {"target_modules": ["embed_tokens"], "token_indices": [*range(n, 97, 3)]},
        wrong=("token_indices", [5, 5]),
    ),
    "VERA": _case("VeraConfig", lambda n: {"r": 4 + 4 * n, "projection_prng_key": n}, dropout="vera_dropout"),
    "PVERA": _case(
        "PveraConfig",
        lambda n: {"r": 4, "projection_prng_key": n},
        dropout="pvera_dropout",
        wrong=("sample_at_inference", True),
        is_random=True,
    ),
    "RANDLORA": _case(
        "RandLoraConfig",
        lambda n: {"r": 4 + n, "projection_prng_key": n, "randlora_alpha": 4},
        dropout="randlora_dropout",
    ),
    "VBLORA": _case(
        "VBLoRAConfig",
        lambda n: {"r": 2, "num_vectors": 8 + n, "vector_length": 8},
        dropout="vblora_dropout",
        wrong=("save_only_topk_weights", True),
    ),
    "UNILORA": _case(
        "UniLoraConfig", lambda n: {"r": 2, "theta_d_length": 32 + n, "proj_seed": n}, dropout="unilora_dropout"
    ),
    "TINYLORA": _case("TinyLoraConfig", lambda n: {"u": 4 + n, "projection_seed": n}, dropout="tinylora_dropout"),
    "FROD": _case(
        "FrodConfig",
        lambda n: {"sparse_rate": 0.1, "projection_prng_key": n, "progressbar": False},
        dropout="frod_dropout",
        wrong=("runtime_offload_base_weight", True),
    ),
    "LOHA": _case("LoHaConfig", lambda n: {"r": 2 + n}, dropout="rank_dropout"),
    "LOKR": _case("LoKrConfig", lambda n: {"r": 2 + n}, dropout="rank_dropout"),
    "HIRA": _case("HiraConfig", lambda n: {"r": 2 + n}, dropout="hira_dropout"),
    "BOFT": _case("BOFTConfig", lambda n: {"boft_block_size": 4 + 4 * n}, dropout="boft_dropout"),
    "OFT": _case("OFTConfig", lambda n: {"oft_block_size": 4 + 4 * n}, wrong=("coft", True)),
    "HRA": _case("HRAConfig", lambda n: {"r": 2 + 2 * n}, wrong=("bias", "hra_only")),
    "SHIRA": _case("ShiraConfig", lambda n: {"r": 2 + n, "random_seed": n}),
    "SUPERTUNING": _case(
        "SupertuningConfig", lambda n: {"sparsity": 0.9, "r": 2, "lora_alpha": 2 + n}, dropout="lora_dropout"
    ),
    "C3A": _case("C3AConfig", lambda n: {"block_size": 4 + 4 * n}),
    "FOURIERFT": _case("FourierFTConfig", lambda n: {"n_frequency": 20 + n, "random_loc_seed": n, "scaling": 9.0}),
    "WAVEFT": _case("WaveFTConfig", lambda n: {"n_frequency": 16 + n, "random_loc_seed": n}),
    "GLORA": _case("GloraConfig", lambda n: {"r": 2, "config_A_B": ("lora", "vector")[n]}),
    "PEANUT": _case("PeanutConfig", lambda n: {"r": 2, "depth": n, "act_fn": ("relu", "tanh")[n]}),
}

FAST = "LORA BOTTLENECK DIFF_PRUNING IA3 OFT VERA PVERA PSOFT OSF SHIRA LN_TUNING TRAINABLE_TOKENS ADAMSS".split()
"""Types of each way to run one; where the others go one of these ways, they follow in the slow part of CI."""

CASES = {PeftType[name]: case for name, case in CASES_BY_NAME.items() if name in PeftType.__members__}


def each_type(chosen: Iterable[PeftType], fast: Iterable[str] = CASES_BY_NAME) -> pytest.MarkDecorator:
    """Return a mark that runs a test once for each of some types, in the slow part for all but some."""
    marks = {one: [] if one.name in fast else [pytest.mark.slow] for one in chosen}
    return pytest.mark.parametrize(
        "peft_type", [pytest.param(one, id=one.name, marks=mark) for one, mark in marks.items()]
    )
