"""`TypeEntry`: all that the product says of one PEFT type: how it runs, what of it may be set, why it is refused.

Entries know types by name, as releases of PEFT have more types or fewer; those that the installed one lacks are passed
over. The kind that an entry stands for is made of it in `peft_mux.modeling.adapters.special_kinds`.
"""

# MERGED: Types whose layers add to what the frozen layer gives, or scale it: the cheap ones.
# MERGED: LoRA, types of virtual tokens, and types that cannot be trained for several owners in one pass.
# MERGED: Types that make another weight of a frozen one, or rotate what goes into it.
# MERGED: Which entry a PEFT type has: all that checks, documents and tests know of types is read off here.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib.util import find_spec

from peft import PeftType

from peft_mux.modeling.adapters.kind import KINDS
from peft_mux.modeling.adapters.sliced import SlicedKind


class Category(Enum):
    """How a PEFT type runs when tasks of it share a pass."""

    FUSED = "fused"
    SLICED = "sliced"
    WEIGHT_SPACE = "weight-space"
    PROMPT = "prompt/KV"
    REFUSED = "refused"

    @property
    def meaning(self) -> str:
        """What it means, in a sentence."""
        return _MEANINGS[self]


_MEANINGS = {
    Category.FUSED: "The frozen layer runs once over the whole stream, and one function adds what the adapters of all "
    "tasks give, each on its own rows; on a GPU those of LoRA and of Adapter Tuning are a few launches for all tasks.",
    Category.SLICED: "PEFT's own layer runs on the rows of each task; it adds to what the frozen one gives.",
    Category.WEIGHT_SPACE: "PEFT's own layer runs on the rows of each task, with a weight, or a rotation of the frozen "
    "one's inputs, that it makes anew in each pass: its cost grows with the layer's size as well as with the rows.",
    Category.PROMPT: "Virtual tokens, or keys and values before the first token, of each sequence in the stream.",
    Category.REFUSED: "A task of this type is refused before anything runs, with the reason and the nearest type.",
}


WEIGHTS_ARE_READ = "what it begins with is computed from frozen weights"
"""Why a type that reads weights cannot be held by a part of a model."""


@dataclass(frozen=True)
class TypeEntry:
    """What is known of one PEFT type.

    Attributes:
        name: name of the member of `PeftType`.
        category: how it runs; refused where it does not.
        trains: what it trains, in a phrase.
        fields: fields of its configuration that may be set, beside those that name target modules.
        reasons: why other fields may not be set, by name.
        spans_layers: why a process that holds some of the layers cannot hold it, such as what layers of a task share;
            empty where each layer is by itself.
        needs_weights: it cannot even be described before frozen weights are loaded.
        reads_weights: its initial state is computed from frozen weights, which a part of a model does not have all of.
        draws: it draws random numbers for whole weights in training, which are made to belong to the task's step.
        shares_base: its layers call the frozen ones with the inputs that they get themselves, which then run once for
            all tasks.
        needs: a package that PEFT imports for it.
        refusal: why tasks of this type are refused.
        nearest: names of types that work and come nearest to a refused one; the nearest first.
    """

    name: str
    category: Category
    trains: str
    fields: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    spans_layers: str = ""
    reads_weights: bool = False
    needs_weights: bool = False
    draws: bool = False
    shares_base: bool = False
    needs: str = ""
    refusal: str = ""
    nearest: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that refusals are whole."""
        if bool(self.refusal) != (self.category is Category.REFUSED) or bool(self.refusal) != bool(self.nearest):
            raise ValueError(f"{self.name}: a refused type has a reason and a nearest type, and no other type has one.")

    @property
    def peft_type(self) -> PeftType | None:
        """The member of PEFT's enumeration; `None` where the installed PEFT has no such type."""
        return PeftType.__members__.get(self.name)

    @property
    def is_importable(self) -> bool:
        """Whether the package that PEFT needs for it is installed."""
        return not self.needs or find_spec(self.needs) is not None


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


ENTRIES: dict[str, TypeEntry] = {
    entry.name: entry for entry in (*FUSED, *ADDING, *SHARING, *WEIGHT_SPACE, *PROMPTS, *REFUSED)
}
"""What is known of PEFT's types, by name; also of types that the installed PEFT lacks."""

_ALWAYS = ("LORA",)


def register_entry(entry: TypeEntry) -> TypeEntry:
    """Say what is to be known of a type, in place of what was known of it before; returns the entry."""
    ENTRIES[entry.name] = entry
    return entry


def entry_of(peft_type: PeftType) -> TypeEntry:
    """Return what is known of a PEFT type; a type that no entry tells of has one made from its kind, or is refused."""
    entry, kind = ENTRIES.get(peft_type.name), KINDS.get(peft_type)
    if kind is not None:
        if entry is not None and entry.category is not Category.REFUSED:
            return entry
        category = Category.SLICED if isinstance(kind, SlicedKind) else Category.FUSED
        return TypeEntry(peft_type.name, category, entry.trains if entry else "what its own documents say")
    if entry is not None and entry.category is Category.REFUSED:
        return entry
    return _refused(peft_type.name, entry)


def category_of(peft_type: PeftType) -> Category:
    """Return how a PEFT type runs here."""
    return entry_of(peft_type).category


def _refused(name: str, entry: TypeEntry | None) -> TypeEntry:
    if entry is None:
        trains, refusal = "unknown here", "this release of peft_mux does not know it"
    elif not entry.is_importable:
        trains, refusal = entry.trains, f"PEFT needs the package {entry.needs} for it, which is not installed"
    else:
        trains, refusal = entry.trains, "it has no kind of its own here"
    return TypeEntry(name, Category.REFUSED, trains, refusal=refusal, nearest=_ALWAYS)
