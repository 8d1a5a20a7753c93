"""Facts about each PEFT type: how it runs here, which settings are refused, and which parts of a model can hold it.

The table names types instead of importing them, because releases of PEFT have more types or fewer. A type without an
entry is refused. What the types train is described in `docs/peft_types.md`, which `tools/peft_types.py` writes.
"""

from __future__ import annotations

from peft_mux.modeling.adapters.kind import ENTRIES, Category, TypeEntry

_OF_ASA = (
    *("asa_target_subspaces", "asa_importance_beta", "asa_uncertainty_beta", "asa_schedule_exponent"),
    *("init_warmup", "final_warmup", "mask_interval"),
)

# Each layer is independent of the others.
_ADDING = (
    TypeEntry("IA3", shares_base=True),
    TypeEntry("BEFT", shares_base=True),
    TypeEntry("ROAD", shares_base=True),
    TypeEntry("MISS", shares_base=True),
    TypeEntry("GRALORA"),
    TypeEntry("DELORA", reads_weights=True, shares_base=True),
    TypeEntry("DEFT", reads_weights=True, shares_base=True),
    TypeEntry("OSF", reasons={"target_svd_config": "PEFT ignores it"}, reads_weights=True, shares_base=True),
    TypeEntry("PSOFT", reads_weights=True, shares_base=True),
    TypeEntry(
        "ADAMSS",
        reasons={
            "use_asa": "it freezes subspaces between steps, depending on their gradients",
            **dict.fromkeys(_OF_ASA, "it belongs to use_asa, which is not supported"),
        },
        reads_weights=True,
        needs_weights=True,
        needs="sklearn",
    ),
    TypeEntry("LN_TUNING", reads_weights=True),
    TypeEntry("TRAINABLE_TOKENS", reads_weights=True),
)

_SHARED = "layers share frozen projections, which are as wide as the widest layer"

# Layers of one task share state; each task has its own, as when it is alone.
_SHARING = (
    TypeEntry("VERA", spans_layers=_SHARED, shares_base=True),
    TypeEntry(
        "PVERA",
        reasons={
            "sample_at_inference": "evaluation would be random",
            "generator_seed": "random numbers depend on the task's seed, its step and the token's position",
        },
        spans_layers=_SHARED,
        draws_noise=True,
        shares_base=True,
    ),
    TypeEntry("RANDLORA", spans_layers=_SHARED, shares_base=True),
    TypeEntry(
        "VBLORA",
        reasons={"save_only_topk_weights": "training could not resume from the saved adapter"},
        spans_layers="layers share the bank of vectors, which is trained",
        shares_base=True,
    ),
    TypeEntry("UNILORA", spans_layers="layers share the one vector that is trained", shares_base=True),
    TypeEntry("TINYLORA", spans_layers="layers of a group share the vector that is trained", reads_weights=True),
    TypeEntry(
        "FROD",
        reasons={"runtime_offload_base_weight": "it moves frozen weights, which tasks share"},
        spans_layers="layers of one name share a basis that is computed from all their weights",
        reads_weights=True,
        needs_weights=True,
    ),
)

_WEIGHTS = Category.WEIGHT_SPACE
_MORE_IN_FILES = "its files contain more than its weights, which stages do not send to each other"
_CONVOLUTIONS = {"use_effective_conv2d": "convolutions are not adapted"}

_WEIGHT_SPACE = (
    TypeEntry("LOHA", _WEIGHTS, _CONVOLUTIONS, draws=True, shares_base=True),
    TypeEntry("LOKR", _WEIGHTS, _CONVOLUTIONS, draws=True, shares_base=True),
    TypeEntry("HIRA", _WEIGHTS, shares_base=True),
    TypeEntry("BOFT", _WEIGHTS, draws=True),
    TypeEntry(
        "OFT",
        _WEIGHTS,
        {
            "coft": "it changes its weights in the forward pass, but all passes of a step must use the same weights",
            "eps": "it belongs to coft, which is not supported",
            "module_dropout": "PEFT's own layer never applies it",
        },
    ),
    TypeEntry("HRA", _WEIGHTS),
    TypeEntry("SHIRA", _WEIGHTS, spans_layers=_MORE_IN_FILES),
    TypeEntry("SUPERTUNING", _WEIGHTS, reads_weights=True),
    TypeEntry("C3A", _WEIGHTS),
    TypeEntry("FOURIERFT", _WEIGHTS, shares_base=True),
    TypeEntry(
        "WAVEFT",
        _WEIGHTS,
        spans_layers="the number of coefficients of a layer may depend on all other layers",
        shares_base=True,
    ),
    TypeEntry("GLORA", _WEIGHTS, spans_layers=_MORE_IN_FILES, shares_base=True),
    TypeEntry("PEANUT", _WEIGHTS, shares_base=True),
)

_PROMPT_NAMES = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE")
_PROMPTS = tuple(
    TypeEntry(
        name,
        Category.PROMPT,
        {"modules_to_save": "a prompt sits alone"},
        spans_layers="a prompt adapts no layers, so no part of a model holds a part of it",
    )
    for name in _PROMPT_NAMES
)

_REFUSED = tuple(
    TypeEntry(name, Category.REFUSED, refusal=refusal, nearest=nearest)
    for name, nearest, refusal in (
        (
            "ADAPTION_PROMPT",
            ("PREFIX_TUNING", "LORA"),
            "PEFT replaces whole attention modules of the backbone, for one active adapter",
        ),
        (
            "ADALORA",
            ("LORA", "DELORA"),
            "it removes ranks after each step, depending on gradients, and adds a regulariser to the loss; set ranks "
            "with rank_pattern",
        ),
        (
            "XLORA",
            ("LORA",),
            "each of its passes needs the hidden states of another pass; train the adapters that it would mix",
        ),
        (
            "POLY",
            ("LORA", "VBLORA"),
            "its router needs a task number for each row, and draws new gates for each row",
        ),
        (
            "LILY",
            ("VBLORA", "VERA"),
            "its router averages over all tokens of a call, so that a row's result depends on other rows",
        ),
        (
            "SHADOW",
            ("PEANUT", "LORA"),
            "its layers run parallel to the backbone's, with their own attention and loss",
        ),
    )
)

# Also of types that the installed PEFT lacks.
ENTRIES.update({entry.name: entry for entry in (*_ADDING, *_SHARING, *_WEIGHT_SPACE, *_PROMPTS, *_REFUSED)})
