"""`generate`: completions for the prompts of many tasks at once, in batches of mixed adapters.

A batch of rows of any tasks is completed token by token: prompts in one packed pass, then one token of every row a
pass. All passes are those that train, `[1, T]` with rows sorted by task, so that every layer sees what it sees in
training and adapters of any kind run as they do there. Only attention knows more: where the keys and values of the
tokens before are (`KeyValueRows`).

Scores pass through the processors of transformers, in the order in which its `generate` has them. Rows with equal
options pass together; each draw is made for its row alone, so that nothing of it depends on the other rows.

Shape letters: B rows, n rows with equal options, T tokens of a pass, D hidden features, V words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from peft_mux.data.batch import MuxBatch
from peft_mux.data.row_cells import RowCells
from peft_mux.data.task_batch import IGNORE_INDEX, PLACEHOLDER_ID
from peft_mux.errors import ConfigError, DataError, Fault, UnsupportedModelError, closest, raise_faults, shown
from peft_mux.generation.key_value_rows import KeyValueRows
from peft_mux.generation.requests_and_completions import (
    Completion,
    GenerationRequest,
    Prompt,
    TopLogprobs,
    sampling_options,
)
from peft_mux.kernels.cross_entropy.linear import block_rows
from peft_mux.modeling.adapters.kind import kind_of
from peft_mux.modeling.backbone.modules import CLASSIFICATION, head_kind_of, language_model
from peft_mux.modeling.backbone.probe import max_positions
from peft_mux.modeling.model import MultiTaskPeftModel, require_whole, require_words
from peft_mux.modeling.objectives.heads import head_logits
from peft_mux.modeling.sampling import SamplingOptions
from peft_mux.modeling.stream import Passes, in_mode, temporary_attributes

if TYPE_CHECKING:
    from transformers import GenerationConfig

Requests = Mapping[str, Sequence[Prompt]] | Sequence[GenerationRequest]


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
    change them (if two tokens are equally likely up to rounding, either may come). NaN of one adapter ends its own
    rows alone. The model may be in training, between two steps: nothing of it is changed.

    Args:
        model: holds the tasks; whole, in one process.
        prompts: lists of prompts by task name, or a list of `GenerationRequest` with options of their own. A prompt is
            a text, token ids, or messages.
        processing_class: tokenizer; may be left out if all prompts are token ids.
        generation_config: how completions are drawn, for requests without options; greedy by default. Give
            `model.backbone.generation_config` for what the backbone's makers recommend.
        max_batch_tokens: most tokens, padding and completions included, that one batch may grow to; a longer row is a
            batch by itself.
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
    requests = _as_requests(prompts)
    if not isinstance(max_batch_tokens, int) or max_batch_tokens < 1:
        raise_faults([Fault("max_batch_tokens", shown(max_batch_tokens), "an integer of at least 1")])
    check_model(model, "generate")
    num_prompts: Counter[str] = Counter()
    rows = []
    for request in requests:
        task = request.task
        if task not in model.tasks:
            hint = closest(task, model.tasks)
            raise ConfigError(
                f"prompts must name tasks of {', '.join(model.tasks)}, got {shown(task)}. {hint}".rstrip()
            )
        require_words(model, task, f"prompts.{task}")
        rows.append(checked_row(model, request, task, num_prompts[task], processing_class, options))
        num_prompts[task] += 1
    with in_mode(model, training=False):
        for batch in _batches(rows, max_batch_tokens):
            running = RunningRows(model, processing_class)
            running.add(batch)
            while running.rows:
                running.advance()
    return [row.completion(processing_class) for row in rows]


# ------------------------------------------------------------- before any pass


def _as_requests(prompts: Requests) -> list[GenerationRequest]:
    """Return prompts in either form as a list of requests; raise `ConfigError` if they are of neither."""
    allowed = "a dict of prompts by task name, or a list of GenerationRequest"
    if isinstance(prompts, Mapping):
        for name, rows in prompts.items():
            if isinstance(rows, (str, bytes, Mapping)) or not hasattr(rows, "__iter__"):
                raise ConfigError(f"prompts.{name} must be a list of prompts, got {shown(rows)}. Put it into a list.")
        return [GenerationRequest(task=name, prompt=prompt) for name, rows in prompts.items() for prompt in rows]
    if isinstance(prompts, (str, bytes)) or not hasattr(prompts, "__iter__"):
        raise ConfigError(f"prompts must be {allowed}, got {shown(prompts)}.")
    requests = list(prompts)
    for request in requests:
        if not isinstance(request, GenerationRequest):
            raise ConfigError(f"prompts must be {allowed}, got {shown(request)} in the list.")
    return requests


def check_model(model: Any, what: str) -> None:
    """Raise `ConfigError` or `UnsupportedModelError` for a model that cannot generate in mixed batches.

    Args:
        model: the model.
        what: what was asked of it, for messages.
    """
    if not isinstance(model, MultiTaskPeftModel):
        raise ConfigError(
            f"model must be a MultiTaskPeftModel, got {type(model).__name__}. Load saved adapters with "
            "MultiTaskPeftModel.from_pretrained(base, folder), or take trainer.model."
        )
    require_whole(model, what)
    check_backbone(model.backbone, what)


def check_backbone(backbone: Any, what: str) -> None:
    """Raise `ConfigError` or `UnsupportedModelError` for a backbone that cannot generate; `what` was asked of it."""
    # Encoders look at what comes later, which no token by token completion has; towers of images may.
    text_modules = language_model(backbone).modules()
    looks_ahead = any(getattr(module, "is_causal", True) is False for module in text_modules)
    if head_kind_of(backbone) == CLASSIFICATION or looks_ahead or not backbone.can_generate():
        raise UnsupportedModelError(
            f"{what} needs a decoder-only language model (AutoModelForCausalLM), got {type(backbone).__name__}. "
            "For classes, call model.task_view(name)."
        )
    if backbone.device.type == "meta":
        raise ConfigError(f"{what} needs a loaded model, got one without weights. Train or evaluate it first.")


def learnt_prompt(model: MultiTaskPeftModel, task: str) -> tuple[int, int]:
    """Return the number of virtual tokens before each sequence of a task, and by how much its tokens are moved.

    Tokens are moved by virtual tokens or by the keys of a prefix; both are 0 for adapters on layers.
    """
    config = model.peft_config[model.adapter_of(task)]
    kind = kind_of(config)
    return len(kind.virtual_labels(config)), 0 if kind.has_targets else config.num_virtual_tokens


@dataclass(slots=True, eq=False)
class Row:
    """A prompt on its way to a completion.

    Attributes:
        task: name of the task.
        prompt: the tokens of the prompt, at least one.
        options: how its tokens are drawn.
        seed: what its draws are made from.
        eos: tokens that end it.
        top_logprobs: how many of the likeliest tokens are kept for each of its tokens.
        prompt_logprobs: how many for each token of the prompt; `None` for no log-probabilities of these.
        tokens: the tokens of the completion so far.
        logprobs: log-probability of each of them.
        likeliest: the likeliest tokens at each of them, if they are kept.
        prompt_token_logprobs: log-probability of each token of the prompt, `None` for the first; empty if not wanted.
        prompt_likeliest: the likeliest tokens at each token of the prompt, if they are kept.
        finish_reason: why it has ended; empty before.
        generator: the row's own random numbers, if it is drawn.
    """

    task: str
    prompt: list[int]
    options: SamplingOptions
    seed: int
    eos: frozenset[int]
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likeliest: list[TopLogprobs] = field(default_factory=list)
    prompt_token_logprobs: list[float | None] = field(default_factory=list)
    prompt_likeliest: list[TopLogprobs] = field(default_factory=list)
    finish_reason: Any = ""
    generator: torch.Generator | None = None

    @property
    def max_length(self) -> int:
        """Most tokens that prompt and completion may have."""
        return len(self.prompt) + self.options.max_new_tokens

    def take(self, token: int, logprob: float, tokenizer: Any) -> None:
        """Append a token, and end the row if that calls for it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        stops, tail = self.options.stop_strings, ""
        if stops and tokenizer is not None:
            # A character is up to four tokens, of bytes; a few more, as decoders trim what they begin with.
            window = 4 * max(map(len, stops)) + 8
            tail = tokenizer.decode(self.tokens[-window:], skip_special_tokens=True)
        ends = any(self.tokens[-len(stop) :] == list(stop) for stop in self.options.stop_token_ids)
        if ends or token in self.eos or any(stop in tail for stop in stops):
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.options.max_new_tokens:
            self.finish_reason = "length"

    def completion(self, tokenizer: Any) -> Completion:
        """Return the completion, its text up to the first of the stop strings."""
        text = None
        if tokenizer is not None:
            text = tokenizer.decode(self.tokens, skip_special_tokens=True)
            places = [place for stop in self.options.stop_strings if (place := text.find(stop)) >= 0]
            text = text[: min(places, default=None)]
        return Completion(
            task=self.task,
            prompt_token_ids=tuple(self.prompt),
            token_ids=tuple(self.tokens),
            text=text,
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            seed=self.seed,
            top_logprobs=tuple(self.likeliest),
            prompt_logprobs=tuple(self.prompt_token_logprobs),
            prompt_top_logprobs=tuple(self.prompt_likeliest),
        )


def checked_row(
    model: MultiTaskPeftModel,
    request: GenerationRequest,
    task: str,
    place: int,
    tokenizer: Any,
    default: SamplingOptions,
) -> Row:
    """Return the row of a request, after every check that needs no pass of the model.

    Args:
        model: holds the task.
        request: the request.
        task: the task whose adapter completes it.
        place: number of the request among those of its task, for its seed and for messages.
        tokenizer: the tokenizer; `None` if the prompt is token ids.
        default: options of requests without some.

    Raises:
        ConfigError: for options that cannot be used.
        DataError: for a prompt that cannot be completed.
    """
    config, options = model.backbone.config, request.options or default
    most_tokens, vocab_size = max_positions(config), config.get_text_config().vocab_size
    # Tokens of the backbone's generation configuration and the tokenizer's, as training appends the latter; `Trainer`
    # brings the two together in the same way.
    sources = getattr(model.backbone.generation_config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)
    default_eos: set[int] = set()
    for source in sources:
        default_eos.update(() if source is None else [source] if isinstance(source, int) else source)
    if tokenizer is None and options.stop_strings:
        raise ConfigError(
            f"prompts.{request.task}: stop_strings need a tokenizer. Give processing_class, or eos_token_id instead."
        )
    seed = options.seed + place if request.seed is None else request.seed
    eos = frozenset(default_eos if options.eos_token_ids is None else options.eos_token_ids)
    prompt = _prompt_ids(request, place, tokenizer, vocab_size)
    row = Row(task, prompt, options, seed, eos, request.top_logprobs, request.prompt_logprobs)
    limit = None if most_tokens is None else most_tokens - learnt_prompt(model, task)[1]
    if limit is not None and row.max_length > limit:
        raise DataError(
            f"prompts.{request.task} row {place} must have at most {limit} tokens with its completion, the backbone's "
            f"positions, got {len(row.prompt)} with max_new_tokens={options.max_new_tokens}. Shorten the prompt, "
            "or lower max_new_tokens."
        )
    return row


def _prompt_ids(request: GenerationRequest, place: int, tokenizer: Any, vocab_size: int) -> list[int]:
    """Return the tokens of a prompt: the task's prompt with this index."""
    cells, prompt = RowCells(f"prompts.{request.task}", vocab_size, tokenizer), request.prompt
    is_chat = isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)
    if not is_chat and not isinstance(prompt, str):
        ids = cells.integers(prompt, place, "prompt")
    elif tokenizer is None:
        raise cells.error(place, "prompt", "text without a tokenizer", "token ids, or a processing_class")
    elif isinstance(prompt, str):
        ids = tokenizer(cells.text({"prompt": prompt}, "prompt", place))["input_ids"]
    else:
        messages = cells.messages({"prompt": prompt}, "prompt", place)
        ids, _ = cells.encode_chat(messages, "prompt", place, is_prompt=True)
    return cells.checked_ids(np.asarray(ids, dtype=np.int64), place, "prompt").tolist()


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


# -------------------------------------------------------------------- token by token


class RunningRows:
    """Rows that are completed together, token by token; others may join them between two tokens.

    Args:
        model: holds the tasks of the rows, whose weights stay as they are until their rows have ended.
        tokenizer: for stop strings; may be `None`.
        multiple: the numbers of tokens and of logits of a pass are multiples of this one, by rows of padding; tasks
            must then have no learnt prompts.

    Attributes:
        rows: the rows that have not ended, sorted by task.
    """

    def __init__(self, model: MultiTaskPeftModel, tokenizer: Any, multiple: int = 1) -> None:
        self.rows: list[Row] = []
        self._model, self._tokenizer, self._multiple = model, tokenizer, multiple
        self._learnt: dict[str, tuple[int, int]] = {}
        self._passes: Passes | None = None
        self._version = -1

    @torch.no_grad()
    def add(self, rows: Sequence[Row]) -> list[Row]:
        """Read the prompts of rows and draw their first tokens; return the rows that have ended."""
        model, device = self._model, self._model.device
        order = {name: place for place, name in enumerate(model.tasks)}
        rows = sorted(rows, key=lambda row: order[row.task])
        learnt = {row.task: learnt_prompt(model, row.task) for row in rows}
        self._learnt |= learnt
        kept = KeyValueRows([learnt[row.task][1] + len(row.prompt) for row in rows], device)
        model.prepare_pass(learnt)
        tokens = [[PLACEHOLDER_ID] * learnt[row.task][0] + row.prompt for row in rows]
        num_tokens = sum(map(len, tokens))
        num_added = -len(rows) % self._multiple or self._multiple * (num_tokens % self._multiple > 0)
        tokens += [[0]] * num_added
        tokens[-1] = tokens[-1] + [0] * (-(num_tokens + num_added) % self._multiple)
        tasks = [row.task for row in rows] + [rows[-1].task] * num_added
        batch = _stream(tasks, tokens, [0] * len(tokens)).to(device)
        if any(num_virtual for num_virtual, _ in learnt.values()):
            batch = replace(batch, virtual_tokens=tuple(learnt[name][0] for name in batch.task_names))
        last = batch.cu_seqlens[1:].long() - 1
        with model.multiplexing(batch):
            hidden_TD = model.hidden_states(batch, rows=kept)
            # The head sees the last token of each prompt alone: logits of all of them would be the largest tensor.
            with model.stream.selected_rows(batch.sequence_offsets, batch.token_places[last], model.adapters):
                logits_BV = head_logits(model.backbone, hidden_TD[last])
            for row, end in zip(rows, accumulate(batch.sequence_lengths)):  # noqa: B905  # padding is behind the rows
                if row.prompt_logprobs is not None:
                    _add_prompt_logprobs(row, hidden_TD, end, batch, model)
        ended, left = self._take(rows, TokenSampler(rows, device), logits_BV)
        if not left:
            return ended
        if len(left) < len(rows):
            kept.select(left)
        if self.rows:
            self._kept.join(kept)
        else:
            self._kept = kept
        self.rows = [*self.rows, *(rows[number] for number in left)]
        self.keep(sorted(range(len(self.rows)), key=lambda number: order[self.rows[number].task]))
        return ended

    @torch.no_grad()
    def advance(self) -> list[Row]:
        """Draw one token of every row; return the rows that have ended."""
        model, rows = self._model, self.rows
        self._kept.next_column()
        starts = [self._learnt[row.task][1] + len(row.prompt) + len(row.tokens) - 1 for row in rows]
        num_added = -len(rows) % self._multiple
        tasks, tokens = [row.task for row in rows], [row.tokens[-1:] for row in rows]
        tasks, tokens, starts = tasks + tasks[-1:] * num_added, tokens + [[0]] * num_added, starts + [0] * num_added
        batch = _stream(tasks, tokens, starts).to(model.device)
        if self._version != model.stream.version:  # adapters came, went or moved since the last token
            self._passes, self._version = None, model.stream.version
        # Learnt prompts are among the kept keys and values, or were embedded: no row begins in this pass.
        with model.multiplexing(batch, self._passes), temporary_attributes(model, has_prompts=False):
            self._passes = model.stream.passes  # made of these rows in their first step
            logits_BV = head_logits(model.backbone, model.hidden_states(batch, rows=self._kept))
        ended, left = self._take(rows, self._sampler, logits_BV)
        if len(left) < len(rows):
            self.keep(left)
        return ended

    def keep(self, numbers: Sequence[int]) -> None:
        """Keep the rows of these numbers, in their order from now on, and forget the others."""
        if list(numbers) != list(range(len(self.rows))):
            self.rows = [self.rows[number] for number in numbers]
            if self.rows:
                self._kept.select(numbers)
        self._sampler, self._passes = TokenSampler(self.rows, self._model.device), None

    def _take(self, rows: Sequence[Row], sampler: TokenSampler, logits_BV: torch.Tensor) -> tuple[list[Row], list[int]]:
        """Append the next token to rows; return those that have ended, and the numbers of the others."""
        for row, token, logprob, is_finite in zip(rows, *sampler.next_tokens(logits_BV), strict=True):
            if is_finite:
                row.take(token, logprob, self._tokenizer)
            else:
                row.finish_reason = "non_finite"
        ended = [row for row in rows if row.finish_reason]
        return ended, [number for number, row in enumerate(rows) if not row.finish_reason]


def _add_prompt_logprobs(
    row: Row, hidden_TD: torch.Tensor, end: int, batch: MuxBatch, model: MultiTaskPeftModel
) -> None:
    """Give a row the log-probabilities of its prompt.

    Args:
        row: the row.
        hidden_TD: hidden states of the prompts of a batch.
        end: where its prompt ends among them.
        batch: the prompts, which the stream reads.
        model: the model.
    """
    row.prompt_token_logprobs, row.prompt_likeliest = [None], [()]
    vocab_size, first = model.backbone.config.get_text_config().vocab_size, end - len(row.prompt)
    step = block_rows(vocab_size, hidden_TD.device.type)
    for start in range(first, end - 1, step):
        stop = min(start + step, end - 1)
        offsets = tuple(min(max(offset - start, 0), stop - start) for offset in batch.task_offsets)
        with model.stream.selected_rows(offsets, batch.token_places[start:stop], model.adapters):
            logits_MV = head_logits(model.backbone, hidden_TD[start:stop])
        norms_M = torch.logsumexp(logits_MV, dim=-1)
        targets_M = batch.input_ids[0, start + 1 : stop + 1]
        row.prompt_token_logprobs += (logits_MV.gather(1, targets_M[:, None])[:, 0] - norms_M).tolist()
        row.prompt_likeliest += _likeliest(logits_MV, norms_M, row.prompt_logprobs or 0)


def _likeliest(logits_MV: torch.Tensor, norms_M: torch.Tensor, count: int) -> list[TopLogprobs]:
    """Return the likeliest tokens of each row of logits, with their log-probabilities."""
    values, ids = torch.topk(logits_MV, min(count, logits_MV.shape[1]))
    pairs = zip(ids.tolist(), (values - norms_M[:, None]).tolist(), strict=True)
    return [tuple(zip(*pair, strict=True)) for pair in pairs]


class TokenSampler:
    """Draws the next tokens of a set of rows, which stays the same from step to step.

    Args:
        rows: the rows, in the order of the batch.
        device: where the logits are.
    """

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        """Sort the rows by their logits processors."""
        self._rows, self._device = rows, device
        groups: dict[Any, list[int]] = {}
        for number, row in enumerate(rows):
            options = row.options
            penalty, filters = options.repetition_penalty, (options.top_k, options.top_p, options.min_p)
            groups.setdefault((options.do_sample, penalty, options.temperature, *filters), []).append(number)
            if options.do_sample and row.generator is None:
                row.generator = torch.Generator(device).manual_seed(row.seed)
        self._groups = [(numbers, _processors(rows[numbers[0]].options)) for numbers in groups.values()]

    def next_tokens(self, logits_BV: torch.Tensor) -> tuple[list[int], list[float], list[bool]]:
        """Return the next token of each row, from the fp32 logits of these; those of padding may follow.

        Returns:
            The tokens, which mean nothing for rows whose logits are not finite; their log-probabilities under the
            model, before any processing; and whether the logits of each row are finite.
        """
        # NaN or an infinite logit makes it so; words that a model rules out (-inf) do not.
        norms_B = torch.logsumexp(logits_BV, dim=-1)[: len(self._rows)]
        logits_BV = logits_BV[: len(self._rows)]
        are_finite = norms_B.isfinite().tolist()
        tokens_B = logits_BV.argmax(dim=-1)
        for numbers, processors in self._groups:
            live = [number for number in numbers if are_finite[number]]
            does_sample = self._rows[numbers[0]].options.do_sample
            if not live or not (processors or does_sample):
                continue
            rows, scores_nV = [self._rows[number] for number in live], logits_BV[live]
            if processors:
                # Shorter rows repeat their first token, which no processor counts.
                sequences = [row.prompt + row.tokens for row in rows]
                length = max(map(len, sequences))
                padded = [tokens[:1] * (length - len(tokens)) + tokens for tokens in sequences]
                ids: Any = torch.tensor(padded, device=self._device)
                scores_nV = processors(ids, scores_nV)
            if not does_sample:
                tokens_B[live] = scores_nV.argmax(dim=-1)
                continue
            probabilities_nV = torch.softmax(scores_nV, dim=-1)
            # Row by row, as `PeftModel.generate` would for each alone: one generator for all would mix their draws.
            pairs = zip(probabilities_nV, rows, strict=True)
            draws = [torch.multinomial(probabilities_V, 1, generator=row.generator) for probabilities_V, row in pairs]
            tokens_B[live] = torch.cat(draws)
        logprobs_B = logits_BV.gather(1, tokens_B[:, None])[:, 0] - norms_B
        for number, row in enumerate(self._rows):
            if row.top_logprobs:
                row.likeliest += _likeliest(logits_BV[[number]], norms_B[[number]], row.top_logprobs)
        return tokens_B.tolist(), logprobs_B.tolist(), are_finite


def _processors(options: SamplingOptions) -> LogitsProcessorList:
    """Return the logits processors of a row; those without effect are left out, as in transformers."""
    processors: list[Any] = []
    if options.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(penalty=float(options.repetition_penalty)))
    if options.do_sample:
        if options.temperature != 1.0:
            processors.append(TemperatureLogitsWarper(float(options.temperature)))
        if options.top_k:
            processors.append(TopKLogitsWarper(top_k=options.top_k))
        if options.top_p < 1.0:
            processors.append(TopPLogitsWarper(top_p=float(options.top_p)))
        if options.min_p > 0.0:
            processors.append(MinPLogitsWarper(min_p=float(options.min_p)))
    return LogitsProcessorList(processors)


def _stream(tasks: Sequence[str], tokens: Sequence[Sequence[int]], starts: Sequence[int]) -> MuxBatch:
    """Return sequences of tokens as a stream without targets.

    Args:
        tasks: task of each sequence; those of a task are adjacent.
        tokens: tokens of each sequence.
        starts: position of the first token of each.
    """
    counts = Counter(tasks)  # in the order of the tasks
    names, sequence_offsets = tuple(counts), (0, *accumulate(counts.values()))
    lengths = torch.tensor([0, *map(len, tokens)], dtype=torch.int32)
    bounds = lengths.cumsum(0, dtype=torch.int32)
    num_tokens = int(bounds[-1])
    positions: list[int] = []
    for start, sequence in zip(starts, tokens, strict=True):
        positions += range(start, start + len(sequence))
    return MuxBatch(
        input_ids=torch.tensor([list(chain.from_iterable(tokens))]),
        position_ids=torch.tensor([positions]),
        labels=torch.full((1, num_tokens), IGNORE_INDEX),
        target_rows=torch.empty(0, dtype=torch.int64),
        target_offsets=(0,) * (len(names) + 1),
        token_places=torch.arange(num_tokens),
        cu_seqlens=bounds,
        task_offsets=tuple(int(bounds[offset]) for offset in sequence_offsets),
        sequence_offsets=sequence_offsets,
        sequence_lengths=tuple(map(len, tokens)),
        task_names=names,
        task_seeds=(0,) * len(names),
        task_steps=(0,) * len(names),
        loss_weights=(0.0,) * len(names),
    )
