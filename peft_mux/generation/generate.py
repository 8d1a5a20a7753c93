"""`generate`: completions for the prompts of many tasks at once, in batches of mixed adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from peft_mux.errors import ConfigError, Fault, UnsupportedModelError, raise_faults, shown
from peft_mux.generation.completion import Completion
from peft_mux.generation.decoding import Decoding, learnt_prompt
from peft_mux.generation.options import SamplingOptions, sampling_options
from peft_mux.generation.rows import Requests, Row, RowMaker, StopTexts, as_requests
from peft_mux.modeling.backbone.checks import max_positions
from peft_mux.modeling.backbone.modules import language_model
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.view import require_whole

if TYPE_CHECKING:
    from transformers import GenerationConfig


def generate(
    model: MultiTaskPeftModel,
    prompts: Requests,
    *,
    processing_class: Any = None,
    generation_config: SamplingOptions | GenerationConfig | None = None,
    max_batch_tokens: int = 16_384,
    **settings: Any,
) -> list[Completion]:
    """Return a completion for every prompt, each made by the adapter of its task; all of them share the backbone.

    Greedy completions are those of `PeftModel.from_pretrained(base, folder).generate(do_sample=False)` on the prompt
    alone, and drawn ones those after `torch.manual_seed(seed)`; neither neighbours in the batch nor how batches are cut
    change them (where two tokens are equally likely up to rounding, either may come). NaN of one adapter ends its own
    rows alone. The model may be in the midst of training, between two steps: nothing of it is changed.

    Args:
        model: holds the tasks; whole, in one process.
        prompts: lists of prompts by task name, or a list of `GenerationRequest` with options of their own. A prompt is
            a text, token ids, or messages.
        processing_class: tokenizer; may be left out where all prompts are token ids.
        generation_config: how completions are drawn, where a request does not say; greedy by default. Give
            `model.backbone.generation_config` for what the backbone's makers recommend.
        max_batch_tokens: most tokens, padding and completions included, that one batch may grow to; a longer row is a
            batch of its own.
        **settings: fields of `SamplingOptions` in place of those of `generation_config`, such as `max_new_tokens=32`.

    Returns:
        One completion a prompt, in the order of the prompts.

    Raises:
        ConfigError: for a model that cannot generate so, tasks that it does not hold, or settings that cannot be used.
        DataError: naming the task and the number of a prompt that cannot be completed.

    Example:
        >>> completions = peft_mux.generate(model, {"sql": ["..."], "qa": ["..."]}, processing_class=tokenizer,
        ...                                 max_new_tokens=64)  # doctest: +SKIP
    """
    options = sampling_options(generation_config, settings)
    requests = as_requests(prompts)
    if not isinstance(max_batch_tokens, int) or max_batch_tokens < 1:
        raise_faults([Fault("max_batch_tokens", shown(max_batch_tokens), "an integer of at least 1")])
    check_model(model)
    config = model.backbone.config
    maker = RowMaker(
        tasks=model.tasks,
        tokenizer=processing_class,
        options=options,
        eos=_eos_tokens(model.backbone, processing_class),
        vocab_size=config.get_text_config().vocab_size,
        max_positions=_most_tokens(model),
    )
    rows = maker.rows(requests)
    stops = None if processing_class is None else StopTexts(processing_class)
    complete(model, rows, stops, max_batch_tokens)
    return [row.completion(stops) for row in rows]


def _most_tokens(model: MultiTaskPeftModel) -> dict[str, int] | None:
    """Return how many tokens prompt and completion of each task may have; `None` for no limit."""
    limit = max_positions(model.backbone.config)
    return None if limit is None else {name: limit - learnt_prompt(model, name).num_positions for name in model.tasks}


def check_model(model: Any) -> None:
    """Refuse a model for which completions cannot be generated in mixed batches.

    Args:
        model: what a caller took for a model.

    Raises:
        ConfigError: if it is no whole multi-task language model.
        UnsupportedModelError: if its backbone does not generate.
    """
    if not isinstance(model, MultiTaskPeftModel):
        raise ConfigError(
            f"model: got {type(model).__name__}; allowed: a MultiTaskPeftModel. Load saved adapters with "
            "MultiTaskPeftModel.from_pretrained(base, folder), or take trainer.model."
        )
    require_whole(model, "generate")
    backbone = model.backbone
    # Encoders look at what comes later, which no token by token completion has; towers of images may.
    text_modules = language_model(backbone).modules()
    looks_ahead = any(getattr(module, "is_causal", True) is False for module in text_modules)
    if model.is_classifier or looks_ahead or not backbone.can_generate():
        raise UnsupportedModelError(
            f"generate: got {type(backbone).__name__}; allowed: decoder-only language models (AutoModelForCausalLM). "
            "For classes, call model.task_view(name)."
        )
    if backbone.device.type == "meta":
        raise ConfigError("generate: got a model without weights; allowed: a loaded one. Train or evaluate it first.")


@torch.no_grad()
def complete(model: MultiTaskPeftModel, rows: Sequence[Row], stops: StopTexts | None, max_batch_tokens: int) -> None:
    """Append tokens to rows until every one of them has ended.

    Args:
        model: a model that `check_model` lets pass; it is as before afterwards.
        rows: rows of any tasks, in any order.
        stops: reads tokens as text; `None` without a tokenizer.
        max_batch_tokens: most tokens that one batch may grow to.
    """
    was_training = model.training
    model.eval()
    try:
        for batch in _batches(rows, max_batch_tokens):
            order = {name: place for place, name in enumerate(model.tasks)}
            Decoding(model, sorted(batch, key=lambda row: order[row.task]), stops).run()
    finally:
        model.train(was_training)


def _batches(rows: Sequence[Row], max_batch_tokens: int) -> Iterator[list[Row]]:
    """Yield rows of near-equal length together, as shorter ones are padded to the longest."""
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: row.max_length, reverse=True):
        # The first row of a batch is its longest, in prompt and completion together.
        if batch and (len(batch) + 1) * batch[0].max_length > max_batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _eos_tokens(backbone: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return what ends a completion: tokens of the backbone's generation configuration, and the tokenizer's.

    Both, as training appends the tokenizer's; `Trainer` brings the two together in the same way.
    """
    own = getattr(backbone.generation_config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)
    return tuple(token for one in own if one is not None for token in ((one,) if isinstance(one, int) else one))
