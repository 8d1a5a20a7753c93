"""Types whose layers add to what the frozen layer gives, or scale it: the cheap ones."""

from __future__ import annotations

from peft_mux.modeling.adapters.catalogue.entry import Category, TypeEntry

_SLICED = Category.SLICED

ADDING = (
    TypeEntry(
        "IA3",
        _SLICED,
        "one factor for each output of a layer (for each input of `feedforward_modules`, where the layer runs by task)",
        ("feedforward_modules", "init_ia3_weights"),
        shares_base=True,
    ),
    TypeEntry("BEFT", _SLICED, "a bias for each adapted layer", ("init_weights",), shares_base=True),
    TypeEntry(
        "ROAD",
        _SLICED,
        "rotations of pairs of output features",
        ("variant", "group_size", "init_weights"),
        shares_base=True,
    ),
    TypeEntry(
        "MISS",
        _SLICED,
        "a matrix shared by shards of the inputs",
        ("r", "mini_r", "miss_dropout", "init_weights"),
        shares_base=True,
    ),
    TypeEntry(
        "GRALORA",
        _SLICED,
        "low-rank factors for each block of a weight",
        ("r", "hybrid_r", "alpha", "gralora_dropout", "gralora_k", "init_weights"),
    ),
    TypeEntry(
        "DELORA",
        _SLICED,
        "low-rank factors of bounded norm, and the bound",
        ("r", "delora_lambda", "module_dropout", "init_weights", "rank_pattern", "lambda_pattern"),
        reads_weights=True,
        shares_base=True,
    ),
    TypeEntry(
        "DEFT",
        _SLICED,
        "a projection that takes a subspace out of the outputs, and what comes in its place",
        ("r", "decomposition_method", "init_scale", "alpha", "para", "deft_dropout", "init_weights"),
        reads_weights=True,
        shares_base=True,
    ),
    TypeEntry(
        "OSF",
        _SLICED,
        "the small singular values and vectors of a weight, away from the large ones",
        ("effective_rank", "rank_pattern", "init_weights"),
        reads_weights=True,
        shares_base=True,
    ),
    TypeEntry(
        "PSOFT",
        _SLICED,
        "a rotation within the principal subspace of a weight",
        (
            *("r", "psoft_alpha", "psoft_dropout", "ab_svd_init", "psoft_svd", "psoft_svd_lowrank_niter"),
            *("random_seed", "psoft_orth", "psoft_mag_b", "psoft_mag_a", "use_cayley_neumann"),
            *("num_cayley_neumann_terms", "cayley_neumann_eps", "init_weights"),
        ),
        reads_weights=True,
        shares_base=True,
    ),
    TypeEntry(
        "ADAMSS",
        _SLICED,
        "low-rank factors in clusters of a weight's principal subspace",
        ("r", "num_subspaces", "subspace_rank", "init_weights", "use_dynamic_rank", "svd_threshold", "random_seed"),
        reasons={"use_asa": "it freezes subspaces between steps by what their gradients were"},
        reads_weights=True,
        needs_weights=True,
        needs="sklearn",
    ),
    TypeEntry("LN_TUNING", _SLICED, "a copy of the norms", reads_weights=True),
    TypeEntry(
        "TRAINABLE_TOKENS",
        _SLICED,
        "the embeddings of some tokens",
        ("token_indices", "init_weights"),
        reads_weights=True,
    ),
)
"""Each layer is by itself."""

_SHARED = "layers share the frozen projections, which are as wide as the widest of them"

SHARING = (
    TypeEntry(
        "VERA",
        _SLICED,
        "two vectors a layer around frozen random projections",
        ("r", "projection_prng_key", "save_projection", "vera_dropout", "d_initial", "init_weights"),
        spans_layers=_SHARED,
        shares_base=True,
    ),
    TypeEntry(
        "PVERA",
        _SLICED,
        "as VeRA, of a random variable of which mean and variance are learned",
        ("r", "projection_prng_key", "save_projection", "pvera_dropout", "d_initial", "init_weights"),
        reasons={
            "sample_at_inference": "evaluation would draw",
            "generator_seed": "what training draws belongs to the task's seed, its step and the token's place",
        },
        spans_layers=_SHARED,
        shares_base=True,
    ),
    TypeEntry(
        "RANDLORA",
        _SLICED,
        "factors of many frozen random products",
        (
            *("r", "projection_prng_key", "save_projection", "sparse", "very_sparse", "randlora_dropout"),
            *("randlora_alpha", "init_weights"),
        ),
        spans_layers=_SHARED,
        shares_base=True,
    ),
    TypeEntry(
        "VBLORA",
        _SLICED,
        "a bank of vectors, of which all layers choose their low-rank factors",
        ("r", "num_vectors", "vector_length", "topk", "vblora_dropout", "init_vector_bank_bound", "init_logits_std"),
        reasons={"save_only_topk_weights": "training could not go on from what is saved"},
        spans_layers="layers share the bank of vectors, which is trained",
        shares_base=True,
    ),
    TypeEntry(
        "UNILORA",
        _SLICED,
        "one vector that the low-rank factors of all layers are read from",
        ("r", "proj_seed", "theta_d_length", "unilora_dropout", "init_theta_d_bound", "init_weights", "save_indices"),
        spans_layers="layers share the one vector that is trained",
        shares_base=True,
    ),
    TypeEntry(
        "TINYLORA",
        _SLICED,
        "a few numbers a group of layers, projected onto the singular vectors of their weights",
        (
            *("r", "u", "weight_tying", "projection_seed", "save_projection", "init_v_bound", "tinylora_dropout"),
            "init_weights",
        ),
        spans_layers="layers of a group share the vector that is trained",
        reads_weights=True,
    ),
    TypeEntry(
        "FROD",
        _SLICED,
        "singular values, and a sparse matrix, on a basis that all layers share",
        (
            *("projection_prng_key", "save_projection", "frod_dropout", "init_weights", "sparse_rate"),
            *("regularization_alpha", "progressbar"),
        ),
        reasons={"runtime_offload_base_weight": "it moves frozen weights, which tasks share"},
        spans_layers="layers of one name share a basis that is computed from all of their weights",
        reads_weights=True,
        needs_weights=True,
    ),
)
"""Layers of one task share state; here each task has its own, as when it is alone."""
