"""Types that make another weight of a frozen one, or rotate what goes into it."""

from __future__ import annotations

from peft_mux.modeling.adapters.catalogue.entry import Category, TypeEntry

_WEIGHTS = Category.WEIGHT_SPACE
_MORE_IN_FILES = "its files hold more than its weights, which stages do not send one another"
_DROPS = ("rank_dropout", "module_dropout")

WEIGHT_SPACE = (
    TypeEntry(
        "LOHA",
        _WEIGHTS,
        "an elementwise product of two low-rank matrices",
        ("r", "alpha", "rank_pattern", "alpha_pattern", *_DROPS, "init_weights"),
        draws=True,
        shares_base=True,
    ),
    TypeEntry(
        "LOKR",
        _WEIGHTS,
        "a Kronecker product, one of its factors perhaps of low rank",
        (
            *("r", "alpha", "rank_pattern", "alpha_pattern", *_DROPS, "rank_dropout_scale", "init_weights"),
            *("decompose_both", "decompose_factor"),
        ),
        draws=True,
        shares_base=True,
    ),
    TypeEntry(
        "HIRA",
        _WEIGHTS,
        "a low-rank matrix that multiplies the frozen weight elementwise",
        ("r", "hira_dropout", "init_weights", "rank_pattern"),
        shares_base=True,
    ),
    TypeEntry(
        "BOFT",
        _WEIGHTS,
        "butterflies of orthogonal blocks that rotate a weight",
        ("boft_block_size", "boft_block_num", "boft_n_butterfly_factor", "boft_dropout", "init_weights"),
        draws=True,
    ),
    TypeEntry(
        "OFT",
        _WEIGHTS,
        "orthogonal blocks that rotate the inputs",
        ("r", "oft_block_size", "init_weights", "block_share", "use_cayley_neumann", "num_cayley_neumann_terms"),
        reasons={
            "coft": "it changes its weights in the forward pass, while all passes of a step must see the same",
            "module_dropout": "PEFT's own layer never applies it",
        },
    ),
    TypeEntry("HRA", _WEIGHTS, "a chain of reflections of the inputs", ("r", "apply_GS", "init_weights")),
    TypeEntry(
        "SHIRA",
        _WEIGHTS,
        "some elements of a weight",
        ("r", "mask_type", "random_seed", "init_weights"),
        spans_layers=_MORE_IN_FILES,
    ),
    TypeEntry(
        "SUPERTUNING",
        _WEIGHTS,
        "the greatest elements of a weight, perhaps with low-rank factors",
        ("sparsity", "select_top", "r", "lora_alpha", "lora_dropout", "init_weights", "save_precomputed_indices"),
        reads_weights=True,
    ),
    TypeEntry("C3A", _WEIGHTS, "circular convolutions of blocks", ("block_size", "block_size_pattern", "init_weights")),
    TypeEntry(
        "FOURIERFT",
        _WEIGHTS,
        "some Fourier coefficients of a change of the weight",
        ("n_frequency", "scaling", "random_loc_seed", "n_frequency_pattern", "init_weights"),
        shares_base=True,
    ),
    TypeEntry(
        "WAVEFT",
        _WEIGHTS,
        "some wavelet coefficients of a change of the weight",
        (
            *("n_frequency", "scaling", "wavelet_family", "use_idwt", "random_loc_seed", "n_frequency_pattern"),
            *("proportional_parameters", "init_weights"),
        ),
        spans_layers="how many coefficients a layer has may depend on all other layers",
        shares_base=True,
    ),
    TypeEntry(
        "GLORA",
        _WEIGHTS,
        "factors, sums and biases on weight and bias",
        ("r", "config_A_B", "config_C", "config_D_E", "init_weights"),
        spans_layers=_MORE_IN_FILES,
        shares_base=True,
    ),
    TypeEntry(
        "PEANUT",
        _WEIGHTS,
        "a small network that makes a change of the weight of the weight",
        ("r", "depth", "act_fn", "scaling", "init_weights"),
        shares_base=True,
    ),
)
