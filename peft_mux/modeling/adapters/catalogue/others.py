"""LoRA, types of virtual tokens, and types that cannot be trained for several owners in one pass."""

from __future__ import annotations

from peft_mux.modeling.adapters.catalogue.entry import Category, TypeEntry

FUSED = (
    TypeEntry("LORA", Category.FUSED, "low-rank factors"),
    TypeEntry("BOTTLENECK", Category.FUSED, "small networks behind layers (Adapter Tuning); registered by peft_mux"),
    TypeEntry(
        "DIFF_PRUNING",
        Category.FUSED,
        "sparse differences of weights; registered by peft_mux",
        spans_layers="the penalty of one stage would not reach the loss, which is taken on the last",
    ),
)

PROMPTS = tuple(
    TypeEntry(name, Category.PROMPT, trains)
    for name, trains in (
        ("PROMPT_TUNING", "virtual tokens before each sequence"),
        ("MULTITASK_PROMPT_TUNING", "virtual tokens, scaled by a low-rank matrix for each task"),
        ("P_TUNING", "virtual tokens, made by a small network"),
        ("PREFIX_TUNING", "keys and values before each sequence"),
        ("CPT", "virtual tokens that begin as those of an example, with a loss of its own"),
        ("CARTRIDGE", "keys and values that stand for a long text"),
    )
)
"""Types of virtual tokens; one that has no kind counts as refused."""

REFUSED = tuple(
    TypeEntry(name, Category.REFUSED, trains, refusal=refusal, nearest=nearest)
    for name, trains, nearest, refusal in (
        (
            "ADAPTION_PROMPT",
            "keys and values that a gate lets into the attention of the upper layers",
            ("PREFIX_TUNING", "LORA"),
            "PEFT puts whole attention modules in the place of the backbone's, for one active adapter",
        ),
        (
            "ADALORA",
            "low-rank factors whose ranks are given to the layers that need them most",
            ("LORA", "DELORA"),
            "it takes ranks away after each step by what gradients were, and adds a regulariser to the loss; set ranks "
            "by rank_pattern",
        ),
        (
            "XLORA",
            "a classifier that mixes LoRA adapters that were trained before",
            ("LORA",),
            "each of its passes needs the hidden states of another one; train the adapters that it would mix",
        ),
        (
            "POLY",
            "a bank of low-rank factors, and a router that chooses among them by task",
            ("LORA", "VBLORA"),
            "its router wants a number of the task beside each row, and draws its gates anew for each row",
        ),
        (
            "LILY",
            "low-rank factors that layers share, and a router over them",
            ("VBLORA", "VERA"),
            "its router averages over all tokens of a call, so that a row's result depends on the rows beside it",
        ),
        (
            "SHADOW",
            "a small network of layers beside the backbone",
            ("PEANUT", "LORA"),
            "its layers run beside the backbone's, with attention and a loss of their own",
        ),
    )
)
