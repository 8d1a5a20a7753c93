"""`Row`: a prompt on its way to a completion; made of requests after every check that needs no pass of the model."""

# MERGED: The next token of every row: the likeliest one, or a draw from the row's own random numbers.
# MERGED: Scores pass through the processors of transformers, in the order in which its `generate` has them. Rows with
# MERGED: equal
# MERGED: options pass together; each draw is made for its row alone, so that nothing of it depends on the other rows.
# MERGED: Shape letters: B rows, n rows with equal options, V words.
# MERGED: A batch of rows of any tasks, token by token: prompts in one packed pass, then one token of every row a pass.
# MERGED: All passes are those that train, `[1, T]` with rows sorted by task, so that every layer sees what it sees in
# MERGED: training
# MERGED: and adapters of any kind run as they do there. Attention alone is told more: where the keys and values of
# MERGED: the tokens
# MERGED: before lie (`peft_mux.modeling.attention.rows`).
# MERGED: Shape letters: B rows, T tokens of a pass, D hidden features, V words.
# MERGED: `generate`: completions for the prompts of many tasks at once, in batches of mixed adapters.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

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
from peft_mux.data.rows import RowCells
from peft_mux.data.task_batch import IGNORE_INDEX, PLACEHOLDER_ID
from peft_mux.errors import ConfigError, DataError, Fault, UnsupportedModelError, closest, raise_faults, shown
from peft_mux.modeling.adapters.prompts.kinds import prompt_kind_of
from peft_mux.modeling.attention.rows import KeyValueRows
from peft_mux.modeling.backbone.modules import language_model
from peft_mux.modeling.backbone.probe import max_positions
from peft_mux.modeling.generation.options import (
    Completion,
    GenerationRequest,
    Prompt,
    SamplingOptions,
    sampling_options,
)
from peft_mux.modeling.model import MultiTaskPeftModel, require_whole
from peft_mux.modeling.objectives.heads import output_head
from peft_mux.modeling.stream import Passes

if TYPE_CHECKING:
    from transformers import GenerationConfig


@dataclass(slots=True, eq=False)
class Row:
    """A prompt on its way to a completion.

    Attributes:
        task: name of the task.
        prompt: the tokens of the prompt, at least one.
        options: how its tokens are drawn.
        seed: what its draws are made from.
        eos: tokens that end it.
        tokens: the tokens of the completion so far.
        logprobs: log-probability of each of them.
        finish_reason: why it has ended; empty while it goes on.
        generator: the row's own random numbers, where it is drawn.
    """

    task: str
    prompt: list[int]
    options: SamplingOptions
    seed: int
    eos: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: Any = ""
    generator: torch.Generator | None = None

    @property
    def max_length(self) -> int:
        """Most tokens that prompt and completion may have."""
        return len(self.prompt) + self.options.max_new_tokens

    def take(self, token: int, logprob: float, stops: StopTexts | None) -> None:
        """Append a token, and end the row where that calls for it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.eos or (stops is not None and stops.has_stopped(self)):
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.options.max_new_tokens:
            self.finish_reason = "length"

    def completion(self, stops: StopTexts | None) -> Completion:
        """Return what the row came to."""
        return Completion(
            task=self.task,
            prompt_token_ids=tuple(self.prompt),
            token_ids=tuple(self.tokens),
            text=None if stops is None else stops.text(self),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            seed=self.seed,
        )


class StopTexts:
    """Reads the tokens of rows as text, and finds stop strings in it.

    Args:
        tokenizer: a tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Keep the tokenizer."""
        self._tokenizer = tokenizer

    def has_stopped(self, row: Row) -> bool:
        """Return whether a stop string ends in the last tokens of a row."""
        if not row.options.stop_strings:
            return False
        # A character takes up to four tokens, of bytes; a few more, as decoders trim what they begin with.
        window = 4 * max(map(len, row.options.stop_strings)) + 8
        tail = self._decoded(row.tokens[-window:])
        return any(stop in tail for stop in row.options.stop_strings)

    def text(self, row: Row) -> str:
        """Return a row's completion as text, up to the first of its stop strings."""
        text = self._decoded(row.tokens)
        found = [place for stop in row.options.stop_strings if (place := text.find(stop)) >= 0]
        return text[: min(found)] if found else text

    def _decoded(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


Requests = Mapping[str, Sequence[Prompt]] | Sequence[GenerationRequest]


def as_requests(prompts: Requests) -> list[GenerationRequest]:
    """Return prompts in either form as a list of requests.

    Raises:
        ConfigError: if they are of neither form.
    """
    allowed = "a dict of prompts by task name, or a list of GenerationRequest"
    if isinstance(prompts, Mapping):
        for name, rows in prompts.items():
            if isinstance(rows, (str, bytes, Mapping)) or not hasattr(rows, "__iter__"):
                raise ConfigError(f"prompts.{name}: got {shown(rows)}; allowed: a list of prompts. Put it into a list.")
        return [GenerationRequest(task=name, prompt=prompt) for name, rows in prompts.items() for prompt in rows]
    if isinstance(prompts, (str, bytes)) or not hasattr(prompts, "__iter__"):
        raise ConfigError(f"prompts: got {shown(prompts)}; allowed: {allowed}.")
    requests = list(prompts)
    wrong = next((item for item in requests if not isinstance(item, GenerationRequest)), None)
    if wrong is not None:
        raise ConfigError(f"prompts: got {shown(wrong)} in the list; allowed: {allowed}.")
    return requests


@dataclass(frozen=True, slots=True)
class RowMaker:
    """Makes rows of requests.

    Attributes:
        tasks: names of the tasks that the model holds.
        tokenizer: a tokenizer of transformers; `None` where prompts are token ids.
        options: of requests that have none.
        eos: tokens that end a completion by default.
        vocab_size: token ids must be below it.
        max_positions: most tokens that prompt and completion may have, by task; `None` for no limit.
    """

    tasks: tuple[str, ...]
    tokenizer: Any
    options: SamplingOptions
    eos: tuple[int, ...]
    vocab_size: int
    max_positions: Mapping[str, int] | None

    def rows(self, requests: Sequence[GenerationRequest]) -> list[Row]:
        """Return a row for each request, in the same order.

        Raises:
            ConfigError: for tasks that the model does not hold, and options that cannot be used.
            DataError: naming the task and the number of a prompt that cannot be completed.
        """
        places: Counter[str] = Counter()
        rows = []
        for request in requests:
            rows.append(self._row(request, places[request.task]))
            places[request.task] += 1
        return rows

    def _row(self, request: GenerationRequest, place: int) -> Row:
        if request.task not in self.tasks:
            hint = closest(request.task, self.tasks)
            raise ConfigError(
                f"prompts: got task {shown(request.task)}; allowed: {', '.join(self.tasks)}. {hint}".rstrip()
            )
        options = request.options or self.options
        if self.tokenizer is None and options.stop_strings:
            raise ConfigError(
                f"prompts.{request.task}: got stop_strings without a tokenizer; allowed: a processing_class, which "
                "reads tokens as text. Give it, or eos_token_id in their place."
            )
        seed = options.seed + place if request.seed is None else request.seed
        eos = options.eos_token_ids
        row = Row(request.task, self._ids(request, place), options, seed, frozenset(self.eos if eos is None else eos))
        limit = None if self.max_positions is None else self.max_positions[row.task]
        if limit is not None and row.max_length > limit:
            raise DataError(
                f"prompts.{row.task} row {place}: got {len(row.prompt)} tokens with max_new_tokens="
                f"{options.max_new_tokens}; allowed: {limit} together, the backbone's positions. Shorten "
                "the prompt, or lower max_new_tokens."
            )
        return row

    def _ids(self, request: GenerationRequest, place: int) -> list[int]:
        cells, prompt = RowCells(f"prompts.{request.task}", self.vocab_size, self.tokenizer), request.prompt
        is_chat, has_tokenizer = _are_messages(prompt), self.tokenizer is not None
        if not has_tokenizer and (is_chat or isinstance(prompt, str)):
            raise cells.error(place, "prompt", "text without a tokenizer", "token ids, or a processing_class")
        if isinstance(prompt, str):
            ids = self.tokenizer(cells.text({"prompt": prompt}, "prompt", place))["input_ids"]
        elif is_chat:
            messages = cells.messages({"prompt": prompt}, "prompt", place)
            ids, _ = cells.encode_chat(messages, "prompt", place, is_prompt=True)
        else:
            ids = cells.integers(prompt, place, "prompt")
        return cells.checked_ids(np.asarray(ids, dtype=np.int64), place, "prompt").tolist()


def _are_messages(prompt: object) -> bool:
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)


class Drawn(NamedTuple):
    """What came of one step of all rows.

    Attributes:
        tokens: the next token of each row; means nothing where `are_finite` is false.
        logprobs: its log-probability under the model, before any processing.
        are_finite: whether a row's logits were numbers.
    """

    tokens: list[int]
    logprobs: list[float]
    are_finite: list[bool]


class Draws:
    """Draws the next tokens of a set of rows, which stays the same from step to step.

    Args:
        rows: the rows, in the order of the batch.
        device: where the logits are.
    """

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        """Sort the rows by what their scores pass through."""
        self._rows = rows
        self._device = device
        groups: dict[tuple[bool, tuple[float, ...]], list[int]] = {}
        for number, row in enumerate(rows):
            groups.setdefault((row.options.do_sample, row.options.filters), []).append(number)
            if row.options.do_sample and row.generator is None:
                row.generator = torch.Generator(device).manual_seed(row.seed)
        self._groups = [(numbers, _processors(rows[numbers[0]].options)) for numbers in groups.values()]

    def next_tokens(self, logits_BV: torch.Tensor) -> Drawn:
        """Return the next token of each row.

        Args:
            logits_BV: fp32, the logits of each row's next token.
        """
        # NaN or an infinite logit makes it so; words that a model rules out (-inf) do not.
        norms_B = torch.logsumexp(logits_BV, dim=-1)
        are_finite = norms_B.isfinite().tolist()
        tokens_B = logits_BV.argmax(dim=-1)
        for numbers, processors in self._groups:
            live = [number for number in numbers if are_finite[number]]
            if live and (processors or self._rows[live[0]].options.do_sample):
                tokens_B[live] = self._processed(live, processors, logits_BV[live])
        logprobs_B = logits_BV.gather(1, tokens_B[:, None])[:, 0] - norms_B
        return Drawn(tokens_B.tolist(), logprobs_B.tolist(), are_finite)

    def _processed(self, numbers: list[int], processors: LogitsProcessorList, scores_nV: torch.Tensor) -> torch.Tensor:
        """Return the next tokens `[n]` of rows whose scores pass through the same processors."""
        rows = [self._rows[number] for number in numbers]
        if processors:
            ids: Any = _tokens_so_far(rows, self._device)
            scores_nV = processors(ids, scores_nV)
        if not rows[0].options.do_sample:
            return scores_nV.argmax(dim=-1)
        probabilities_nV = torch.softmax(scores_nV, dim=-1)
        # Row by row, as `PeftModel.generate` would for each alone: one generator for all would mix their draws.
        draws = [
            torch.multinomial(probabilities_nV[place], 1, generator=row.generator) for place, row in enumerate(rows)
        ]
        return torch.cat(draws)


def _processors(options: SamplingOptions) -> LogitsProcessorList:
    """Return what the scores of a row pass through; transformers leaves out what would change nothing, as here."""
    found: list[Any] = []
    if options.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(penalty=float(options.repetition_penalty)))
    if options.do_sample:
        if options.temperature != 1.0:
            found.append(TemperatureLogitsWarper(float(options.temperature)))
        if options.top_k:
            found.append(TopKLogitsWarper(top_k=options.top_k))
        if options.top_p < 1.0:
            found.append(TopPLogitsWarper(top_p=float(options.top_p)))
        if options.min_p > 0.0:
            found.append(MinPLogitsWarper(min_p=float(options.min_p)))
    return LogitsProcessorList(found)


def _tokens_so_far(rows: Sequence[Row], device: torch.device) -> torch.Tensor:
    """Return `[n, L]`, prompts and completions; shorter rows repeat their first token, which no processor counts."""
    tokens = [row.prompt + row.tokens for row in rows]
    length = max(map(len, tokens))
    return torch.tensor([[own[0]] * (length - len(own)) + own for own in tokens], device=device)


class Decoding:
    """Completes a batch of rows.

    Args:
        model: the multi-task model, in evaluation mode.
        rows: rows sorted by task; their tokens are appended to them.
        stops: reads tokens as text where rows have stop strings; `None` without a tokenizer.
    """

    def __init__(self, model: MultiTaskPeftModel, rows: Sequence[Row], stops: StopTexts | None) -> None:
        """Compute nothing yet."""
        self._model, self._stops, self._device = model, stops, model.device
        self._learnt = {row.task: learnt_prompt(model, row.task) for row in rows}
        self._kept = KeyValueRows(
            [self._learnt[row.task].num_positions + len(row.prompt) for row in rows], self._device
        )
        self._use(rows)

    def _use(self, rows: Sequence[Row]) -> None:
        self._rows, self._draws = list(rows), Draws(rows, self._device)
        # What kernels need to know of these rows, gathered in their first step.
        self._passes: Passes | None = None

    def run(self) -> None:
        """Append tokens to the rows until every one of them has ended."""
        self._model.packed.prepare({row.task: None for row in self._rows})
        logits_BV = self._read_prompts()
        while self._take(self._draws.next_tokens(logits_BV)):
            logits_BV = self._step()

    def _read_prompts(self) -> torch.Tensor:
        """Keep the keys and values of all prompts, and return the logits of what follows them."""
        model, rows = self._model, self._rows
        virtual = {name: learnt.num_tokens for name, learnt in self._learnt.items()}
        tokens = [[PLACEHOLDER_ID] * virtual[row.task] + row.prompt for row in rows]
        batch = _stream([row.task for row in rows], tokens, [0] * len(rows)).to(self._device)
        if any(virtual.values()):
            batch = replace(batch, virtual_tokens=tuple(virtual[name] for name in batch.task_names))
        last = batch.cu_seqlens[1:].long() - 1
        with model.packed.multiplexing(batch):
            hidden_TD = self._hidden_states(batch)
            # The head sees the last token of each prompt alone: logits of all of them would be the largest tensor.
            with model.stream.selected_rows(batch.sequence_offsets, batch.token_places[last], model.adapters):
                return self._logits(hidden_TD[last])

    def _step(self) -> torch.Tensor:
        """Return the logits of what follows the newest token of each row."""
        self._kept.next_column()
        batch = self._newest().to(self._device)
        # Learnt prompts are in what is kept: no row begins in this pass.
        with self._model.packed.multiplexing(batch, self._passes), self._model.without_prompts():
            self._passes = self._model.stream.passes
            return self._logits(self._hidden_states(batch))

    def _take(self, drawn: Drawn) -> bool:
        """Append a token to each row, take those that have ended out of the batch, and return whether any is left."""
        for row, token, logprob, is_finite in zip(self._rows, *drawn, strict=True):
            if is_finite:
                row.take(token, logprob, self._stops)
            else:
                row.finish_reason = "non_finite"
        kept = [number for number, row in enumerate(self._rows) if not row.finish_reason]
        if kept and len(kept) < len(self._rows):
            self._kept.select(kept)
            self._use([self._rows[number] for number in kept])
        return bool(kept)

    def _hidden_states(self, batch: MuxBatch) -> torch.Tensor:
        """Return the `[T, D]` last hidden states of a batch that is multiplexed; its keys and values are kept."""
        return self._model.packed.hidden_states(batch, rows=self._kept)

    def _newest(self) -> MuxBatch:
        """Return a stream of the newest token of each row."""
        rows = self._rows
        starts = [self._learnt[row.task].num_positions + len(row.prompt) + len(row.tokens) - 1 for row in rows]
        return _stream([row.task for row in rows], [row.tokens[-1:] for row in rows], starts)

    def _logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """Return the fp32 logits of what follows each row's newest token."""
        module, scale, softcap = output_head(self._model.backbone)
        logits_BV = module(hidden_BD).float() * scale
        return logits_BV if softcap is None else softcap * torch.tanh(logits_BV / softcap)


class LearntPrompt(NamedTuple):
    """What a task puts before each of its sequences; zeros for adapters on layers.

    Attributes:
        num_tokens: rows of virtual tokens.
        num_positions: by how much the tokens of a row are moved, by virtual tokens or by keys of a prefix.
    """

    num_tokens: int
    num_positions: int


def learnt_prompt(model: MultiTaskPeftModel, task: str) -> LearntPrompt:
    """Return what a task of a model puts before each of its sequences."""
    config: Any = model.peft_config[model.adapter_of(task)]
    kind = prompt_kind_of(config)
    if kind is None:
        return LearntPrompt(0, 0)
    return LearntPrompt(len(kind.virtual_labels(config)), config.num_virtual_tokens)


def _stream(tasks: Sequence[str], tokens: Sequence[Sequence[int]], starts: Sequence[int]) -> MuxBatch:
    """Return sequences of tokens as a stream without targets.

    Args:
        tasks: task of each sequence; those of a task lie together.
        tokens: tokens of each sequence.
        starts: position of the first token of each.
    """
    counts = {name: len(list(own)) for name, own in groupby(tasks)}
    names, sequence_offsets = tuple(counts), (0, *accumulate(counts.values()))
    lengths = torch.tensor([0, *map(len, tokens)], dtype=torch.int32)
    bounds = lengths.cumsum(0, dtype=torch.int32)
    num_tokens = int(bounds[-1])
    positions = [start + place for start, own in zip(starts, tokens, strict=True) for place in range(len(own))]
    return MuxBatch(
        input_ids=torch.tensor([[token for own in tokens for token in own]]),
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
