"""How completions are asked for and returned: `GenerationRequest`, `Completion`, and options of transformers.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from peft_mux.errors import Fault, is_integer, raise_faults, shown
from peft_mux.modeling.sampling import (
    MOST_SEED,
    MOST_TOKENS,
    KnownSettings,
    SamplingOptions,
    unknown_faults,
)

if TYPE_CHECKING:
    from transformers import GenerationConfig

_HARMLESS = frozenset({"transformers_version", "bos_token_id", "pad_token_id", "use_cache", "cache_implementation"})
"""Fields of a `GenerationConfig` that every checkpoint has and that change no completion here."""


def sampling_options(config: SamplingOptions | GenerationConfig | None, settings: Mapping[str, Any]) -> SamplingOptions:
    """Return options from either form that a caller passes, with single fields replaced.

    Args:
        config: our own options, those of transformers, or nothing for the defaults.
        settings: fields by name.

    Raises:
        ConfigError: naming every field that is not known here.
    """
    known = [item.name for item in fields(SamplingOptions)]
    given: dict[str, Any] = {}
    if isinstance(config, SamplingOptions):
        pass
    elif hasattr(config, "to_diff_dict"):
        # What is off asks for nothing; transformers writes some of it when it makes this from a model's configuration.
        for name, value in config.to_diff_dict().items():  # type: ignore[union-attr]
            if value is not False and name not in _HARMLESS and not name.startswith("_"):
                given[name] = value
    elif config is not None:
        allowed = "a SamplingOptions, a transformers.GenerationConfig, or None"
        raise_faults([Fault("generation_config", shown(config), allowed)])
    given |= settings
    raise_faults(unknown_faults(given, known, SamplingOptions._advice))
    return replace(config, **given) if isinstance(config, SamplingOptions) else SamplingOptions(**given)


Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or messages with `role` and `content`, which go through the tokenizer's chat template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest(KnownSettings):
    """A prompt with its own options.

    Attributes:
        task: name of the task whose adapter completes the prompt.
        prompt: a text, token ids, or messages.
        options: how the completion is drawn; `None` for those of the call.
        seed: fixes the draws; `None` for the seed of the options plus the request's place among those of its task.
        top_logprobs: how many of the likeliest tokens `Completion.top_logprobs` has for each token of the completion.
        prompt_logprobs: how many of them `Completion.prompt_top_logprobs` has for each token of the prompt, 0 for the
            log-probabilities of the prompt's own tokens alone; `None` for neither.

    Raises:
        ConfigError: naming every field that is of a wrong type.
    """

    _advice: ClassVar[Mapping[str, str]] = {
        item.name: f"Write options=SamplingOptions({item.name}=...)." for item in fields(SamplingOptions)
    }

    task: str
    prompt: Prompt
    options: SamplingOptions | None = None
    seed: int | None = None
    top_logprobs: int = 0
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        """Check the fields that the prompt's own check leaves out."""
        faults = []
        if not isinstance(self.task, str):
            faults.append(Fault("task", shown(self.task), "the name of a task"))
        if not isinstance(self.options, SamplingOptions | None):
            faults.append(Fault("options", shown(self.options), "SamplingOptions(...), or None"))
        if self.seed is not None and not is_integer(self.seed, 0, MOST_SEED):
            faults.append(Fault("seed", shown(self.seed), "an integer in [0, 2**63), or None"))
        if not is_integer(self.top_logprobs, 0, MOST_TOKENS):
            faults.append(Fault("top_logprobs", shown(self.top_logprobs), "an integer of at least 0"))
        if self.prompt_logprobs is not None and not is_integer(self.prompt_logprobs, 0, MOST_TOKENS):
            faults.append(Fault("prompt_logprobs", shown(self.prompt_logprobs), "an integer of at least 0, or None"))
        raise_faults(faults)


TopLogprobs = tuple[tuple[int, float], ...]
"""The likeliest tokens at a place with their log-probabilities, the likeliest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What a task's adapter made of a prompt.

    Attributes:
        task: name of the task.
        prompt_token_ids: the tokens of the prompt.
        token_ids: the tokens of the completion, the one that ended it included.
        text: the completion as text, without special tokens and up to a stop string; `None` without a tokenizer.
        logprobs: natural log-probability of each token of the completion under the model, before temperature, filters
            and penalties.
        finish_reason: "stop" for an end-of-sequence token, a stop string or stop tokens, "length" for `max_new_tokens`,
            and "non_finite" if the model's next logits were NaN or infinite; such a row ends there, and it alone.
        seed: what the draws were made from.
        top_logprobs: for each token of the completion the likeliest ones, as many as were asked for.
        prompt_logprobs: log-probability of each token of the prompt but the first, which has `None`; empty if they were
            not asked for.
        prompt_top_logprobs: for each token of the prompt the likeliest ones, none for the first.
    """

    task: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length", "non_finite"]
    seed: int
    top_logprobs: tuple[TopLogprobs, ...] = ()
    prompt_logprobs: tuple[float | None, ...] = ()
    prompt_top_logprobs: tuple[TopLogprobs, ...] = ()
