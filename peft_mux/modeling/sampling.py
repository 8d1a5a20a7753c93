"""How completions are drawn, and what evaluations generate: `SamplingOptions`, `GenerateOptions`.

Names and meanings are those of `transformers.GenerationConfig`; settings without a meaning here are refused by name.
Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from peft_mux.errors import Fault, closest, is_integer, is_real, is_text, raise_faults, shown

MOST_TOKENS = 10**6
MOST_SEED = 2**63 - 1
ANSWER_METRICS: tuple[str, ...] = ("exact_match", "contains", "f1")
"""Names of the metrics of a completion and its reference, from 0 to 1."""
_FILTERS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Settings that only draws read, with the values that have no effect."""


def unknown_faults(given: Mapping[str, Any], known: Collection[str], advice: Mapping[str, str]) -> list[Fault]:
    """Return a fault for each setting that does not exist, with advice by its name or the closest name."""
    return [
        Fault(name, shown(value), f"one of {', '.join(known)}", advice.get(name) or closest(name, known))
        for name, value in given.items()
        if name not in known
    ]


class KnownSettings:
    """Refuses keyword arguments that do not exist with the one that was meant, which Python would not."""

    __slots__ = ()
    _advice: ClassVar[Mapping[str, str]] = {}

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        """Check the names of the settings."""
        known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
        raise_faults(unknown_faults(settings, known, cls._advice))
        return object.__new__(cls)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions(KnownSettings):
    """How the completion of a prompt is drawn; each row of a batch may have its own options.

    Attributes:
        max_new_tokens: tokens after which a completion ends; the last one counts.
        do_sample: draw tokens by their probabilities; otherwise the likeliest one is taken.
        temperature: logits are divided by it before a draw.
        top_k: draws are among this many likeliest tokens; 0 for all.
        top_p: draws are among the fewest likeliest tokens whose probabilities add up to this.
        min_p: draws are among tokens of at least this times the probability of the likeliest one.
        repetition_penalty: logits of tokens that came before, in the prompt or the completion, are divided by it where
            positive and multiplied where negative; 1 for none. It applies with and without `do_sample`.
        stop_strings: texts after which a completion ends; `Completion.text` ends before them.
        stop_token_ids: sequences of tokens after which a completion ends.
        eos_token_id: tokens that end a completion; by default those of the backbone's generation configuration, and
            the tokenizer's.
        seed: fixes the draws of a row. A row's completion is what `PeftModel.generate` gives for it alone after
            `torch.manual_seed(seed)`, whatever else is in the batch.

    Raises:
        ConfigError: naming every field that cannot be used, or would be ignored.
    """

    _advice: ClassVar[Mapping[str, str]] = {
        "max_length": "Set max_new_tokens, which does not count the prompt.",
        "num_beams": "Draw, or be greedy.",
        "max_tokens": "Set max_new_tokens.",
        "stop": "Set stop_strings.",
    }
    """What to set here for settings of transformers and of vLLM."""

    max_new_tokens: int = 64
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_strings: Sequence[str] = ()
    stop_token_ids: Sequence[Sequence[int]] = ()
    eos_token_id: int | Sequence[int] | None = None
    seed: int = 42

    def __post_init__(self) -> None:
        """Check every field."""
        # As transformers takes one text or one token for a list of it.
        if isinstance(self.stop_strings, str):
            object.__setattr__(self, "stop_strings", (self.stop_strings,))
        stops, eos, penalty = self.stop_strings, self.eos_token_id, self.repetition_penalty
        eos_ids = eos if isinstance(eos, (list, tuple)) else [0 if eos is None else eos]
        rules = {
            "max_new_tokens": (is_integer(self.max_new_tokens, 1, MOST_TOKENS), f"an integer from 1 to {MOST_TOKENS}"),
            "do_sample": (isinstance(self.do_sample, bool), "True or False"),
            "temperature": (is_real(self.temperature) and self.temperature > 0, "a finite number above 0"),
            "top_k": (is_integer(self.top_k, 0, MOST_TOKENS), "an integer of at least 0"),
            "top_p": (is_real(self.top_p) and 0 < self.top_p <= 1, "a number above 0, at most 1"),
            "min_p": (is_real(self.min_p) and 0 <= self.min_p <= 1, "a number from 0 to 1"),
            "repetition_penalty": (is_real(penalty) and penalty > 0, "a finite number above 0"),
            "stop_strings": (
                isinstance(stops, (list, tuple)) and all(map(is_text, stops)),
                "texts of at least one character",
            ),
            "stop_token_ids": (
                isinstance(self.stop_token_ids, (list, tuple)) and all(map(_are_tokens, self.stop_token_ids)),
                "lists of at least one token id",
            ),
            "eos_token_id": (_are_tokens(eos_ids), "a token id, a list of them, or None"),
            "seed": (is_integer(self.seed, 0, MOST_SEED), "an integer in [0, 2**63)"),
        }
        faults = [
            Fault(name, shown(getattr(self, name)), allowed) for name, (fits, allowed) in rules.items() if not fits
        ]
        if not faults and not self.do_sample:
            unused = [f"{name}={getattr(self, name)}" for name, idle in _FILTERS.items() if getattr(self, name) != idle]
            if unused:
                got = f"False with {', '.join(unused)}"
                faults.append(Fault("do_sample", got, "True with settings of sampling", "Set do_sample=True."))
        raise_faults(faults)

    @property
    def eos_token_ids(self) -> tuple[int, ...] | None:
        """The tokens that end a completion; `None` for those of the backbone."""
        given = self.eos_token_id
        return None if given is None else (given,) if isinstance(given, int) else tuple(given)


def _are_tokens(ids: Any) -> bool:
    """Whether a value is a list of at least one token id."""
    return isinstance(ids, (list, tuple)) and bool(ids) and all(is_integer(token, 0, MOST_TOKENS) for token in ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions(SamplingOptions):
    """What each evaluation of a task generates from its held-out prompts, and how it judges the completions.

    The fields of `SamplingOptions`, which it has too, determine how they are drawn.

    Attributes:
        metrics: names of `exact_match`, `contains` and `f1`, and functions that take `(prompts, completions,
            references)`, three lists of texts, and return a dict of numbers; logged under keys that begin with `eval_`.
        num_rows: how many held-out rows, from the first one on, are generated for; `None` for all.
        num_logged: how many completions of each evaluation are shown in the log and written to `metrics.jsonl`.

    Raises:
        ConfigError: naming every field that cannot be used, or would be ignored.
    """

    metrics: Sequence[str | Callable[[list[str], list[str], list[str]], Mapping[str, float]]] = ("exact_match",)
    num_rows: int | None = None
    num_logged: int = 2

    def __post_init__(self) -> None:
        """Check every field."""
        if isinstance(self.metrics, str) or callable(self.metrics):
            object.__setattr__(self, "metrics", (self.metrics,))
        # By its name: dataclasses with slots are created twice, and `super()` would look for the first class.
        SamplingOptions.__post_init__(self)
        allowed, faults = f"{', '.join(ANSWER_METRICS)}, or functions of (prompts, completions, references)", []
        if not isinstance(self.metrics, (list, tuple)):
            faults.append(Fault("metrics", shown(self.metrics), f"a list of {allowed}"))
        else:
            for metric in self.metrics:
                if not callable(metric) and (not isinstance(metric, str) or metric not in ANSWER_METRICS):
                    faults.append(Fault("metrics", shown(metric), allowed, closest(metric, ANSWER_METRICS)))  # type: ignore[arg-type]
        if self.num_rows is not None and not is_integer(self.num_rows, 1, MOST_TOKENS):
            faults.append(Fault("num_rows", shown(self.num_rows), "an integer of at least 1, or None for all rows"))
        if not is_integer(self.num_logged, 0, MOST_TOKENS):
            faults.append(Fault("num_logged", shown(self.num_logged), "an integer of at least 0"))
        raise_faults(faults)

    @property
    def metric_names(self) -> tuple[str, ...] | None:
        """Keys of the metrics; `None` if a function of the user's makes some."""
        names = [metric for metric in self.metrics if isinstance(metric, str)]
        return tuple(f"eval_{name}" for name in names) if len(names) == len(self.metrics) else None

    @property
    def described(self) -> dict[str, Any]:
        """All fields as plain values, functions by their names."""
        names = [metric if isinstance(metric, str) else getattr(metric, "__name__", "") for metric in self.metrics]
        return {**{item.name: getattr(self, item.name) for item in fields(self)}, "metrics": names}
