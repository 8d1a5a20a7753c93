"""What `generate` is asked for, and what it returns: one value a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from peft_mux.errors import Fault, raise_faults, shown
from peft_mux.generation.options import SamplingOptions, is_seed, unknown_faults

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or messages with `role` and `content`, which go through the tokenizer's chat template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """A prompt with options of its own.

    Attributes:
        task: name of the task whose adapter completes the prompt.
        prompt: a text, token ids, or messages.
        options: how the completion is drawn; `None` for those of the call.
        seed: fixes the draws; `None` for the seed of the options plus the request's place among those of its task.

    Raises:
        ConfigError: naming every field that is of a wrong type.
    """

    task: str
    prompt: Prompt
    options: SamplingOptions | None = None
    seed: int | None = None

    def __new__(cls, *args: Any, **settings: Any) -> GenerationRequest:
        """Refuse settings that there are not by saying where they belong or what was meant, which Python would not."""
        drawn = SamplingOptions.__dataclass_fields__
        of_options = {name: f"Write options=SamplingOptions({name}=...)." for name in drawn}
        raise_faults(unknown_faults(settings, cls.__dataclass_fields__, of_options))
        return object.__new__(cls)

    def __post_init__(self) -> None:
        """Check what is not checked with the prompt."""
        rules = {
            "task": (isinstance(self.task, str), "the name of a task"),
            "options": (isinstance(self.options, SamplingOptions | None), "SamplingOptions(...), or None"),
            "seed": (self.seed is None or is_seed(self.seed), "an integer in [0, 2**63), or None"),
        }
        wrong = {name: allowed for name, (is_fine, allowed) in rules.items() if not is_fine}
        raise_faults([Fault(name, shown(getattr(self, name)), allowed) for name, allowed in wrong.items()])


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
        finish_reason: "stop" for an end-of-sequence token or a stop string, "length" for `max_new_tokens`, and
            "non_finite" where the model's next logits were NaN or infinite; such a row ends there, and it alone.
        seed: what the draws were made from.
    """

    task: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length", "non_finite"]
    seed: int
