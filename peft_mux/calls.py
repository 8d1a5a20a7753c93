"""`Calls`: forward and backward calls of many models on one frozen backbone, for loops that the caller writes.

A caller opens models (LoRA adapters), submits calls (rows, targets, a loss), and steps each model when it likes.
Unfinished calls share passes, each with exactly the result that it has alone:

* A call is cut into pieces of at most `piece_tokens` by its own rows. A pass takes at most one piece of each call, so
  that no sum of one call depends on the rows of another one.
* A loss reads the log-probabilities of its own rows, apart from the graph of the pass. So an exception in a loss, or a
  gradient that is not finite, ends its own call alone; so does an exception in a pass, whose calls are repeated apart.
* Gradients add up over the calls of a model until its step. A call that fails leaves them as they were.

On a CPU the results are equal to the bit. On a GPU, where products may round differently for another number of rows,
they are equal up to rounding.

Shape letters: T tokens of an example, K targets of a token, M targets of a piece.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from transformers import PreTrainedModel

from peft_mux.checkpoint.task_state import GRADIENTS, TaskState, join_state, split_state
from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import TaskBatch, TokenSequence, prefix_trie
from peft_mux.engine.memory_shortage import first_line, is_out_of_memory
from peft_mux.engine.tasks.optimizer import TaskOptimizer, count_joint_steps, gradient_norms
from peft_mux.errors import (
    ConfigError,
    DataError,
    Fault,
    UnsupportedModelError,
    closest,
    is_integer,
    is_real,
    raise_faults,
    shown,
)
from peft_mux.generation.decoding import Row, RunningRows, check_backbone, check_model, checked_row
from peft_mux.generation.requests_and_completions import Completion, GenerationRequest
from peft_mux.kernels import adamw
from peft_mux.modeling.backbone.modules import head_kind_for
from peft_mux.modeling.backbone.probe import max_positions
from peft_mux.modeling.model import MultiTaskPeftModel, reason_of_adapter, reason_of_backbone
from peft_mux.modeling.objectives.objective import WORDS, TokenOutputs
from peft_mux.modeling.sampling import SamplingOptions

CallLoss = Callable[[TokenOutputs], torch.Tensor]
"""Returns the loss of some rows of a call, a sum over their targets: `logprobs_M`, or `word_logprobs_MK` of `[T, K]`
targets, and `columns` have the same shape. It is called once for each piece of the call, and the results are added."""

_MOST_RANK = 256
_TARGET_IDS = WORDS[0]
"""Token column with the K targets of each token."""
_PADDING = "base-model"
"""Name of the adapter that rows of padding have."""
_MOST_IDLE = 8
"""Tasks without rows that `Sampling` keeps for the next weights."""
_PIECE_TOKENS, _PASS_TOKENS = {"cpu": 1024, "gpu": 4096}, {"cpu": 2048, "gpu": 16_384}
"""Defaults. The activations of larger passes leave the caches of a CPU (docs/log.md)."""
_RECOVERY_CALLS = 64
"""Calls that fit into memory, after which pieces and passes that were made smaller are doubled."""
_WHOLE_TOKENS, _SAMPLED_TOKENS, _PADDING_ROW = 32, 16, 16
"""The tokens of a pass on a CPU are a multiple of the first number, in `Sampling` of the second one. A row of padding
has at most the third one."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One row of a call.

    Attributes:
        tokens: integers `[T]`, what the model reads.
        targets: integers `[T]` or `[T, K]`: the tokens whose log-probabilities are wanted after each token. Usually
            `targets[t]` is `tokens[t + 1]`.
        columns: finite numbers `[T, ...]` by name, of any sign and 0, which the loss finds in `TokenOutputs.columns`.
    """

    tokens: np.ndarray
    targets: np.ndarray
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A forward pass of some rows of a model, and a backward pass of their loss.

    Attributes:
        model: name of the model.
        examples: the rows, at least one; all have the same columns, and all as many targets a token.
        loss: returns the loss, a sum.
        backward: whether to add the gradient of the loss to the gradients of the model.
    """

    model: str
    examples: Sequence[Example]
    loss: CallLoss
    backward: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class CallResult:
    """What a call has given.

    Attributes:
        loss: the loss.
        logprobs: log-probabilities of the targets in nats, fp32 of the shape of `Example.targets`, for each example in
            the order of the call.
    """

    loss: float
    logprobs: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class CallFailure:
    """Why a call or a step has failed; accumulated gradients are what they were before the call.

    Attributes:
        reason: what went wrong.
        is_callers: whether the caller's rows, loss or settings are the cause.
    """

    reason: str
    is_callers: bool


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """The settings of one step of AdamW.

    Attributes:
        learning_rate: the rate of this step.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: the number added to the denominator.
        weight_decay: decoupled weight decay, multiplied by the rate; biases and norms do not decay.
        max_grad_norm: norm to which the model's gradient is clipped; 0 for no clipping.

    Raises:
        ConfigError: naming every field that cannot be used.
    """

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0

    def __post_init__(self) -> None:
        """Check every field."""
        faults = []
        for name in self.__slots__:
            value, below = getattr(self, name), 1.0 if name.startswith("beta") else float("inf")
            if not is_real(value) or not 0 <= value < below:
                allowed = "at least 0 and below 1" if below == 1.0 else "a finite number of at least 0"
                faults.append(Fault(name, shown(value), allowed))
        raise_faults(faults)


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """Weights of a model at one time, from which `Sampling` draws while the model changes.

    Attributes:
        config: the LoRA configuration of the model.
        weights: copies of the weights, by the parameters' PEFT names without the adapter id.
    """

    config: LoraConfig
    weights: Mapping[str, torch.Tensor]


@dataclass(slots=True, eq=False)
class _Unfinished:
    """A call on its way.

    Attributes:
        call: the call.
        batch: all its rows.
        pieces: which rows are still to be computed, piece by piece.
        before: the gradients of the model before the call; `None` if there were none.
        loss: sum of the losses of the pieces so far.
        logprobs: log-probabilities of the rows so far, by the number of the row.
    """

    call: Call
    batch: TaskBatch
    pieces: list[list[int]]
    before: list[torch.Tensor] | None
    loss: float = 0.0
    logprobs: dict[int, np.ndarray] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Model:
    """An open model: its configuration, its optimizer, and whether gradients are waiting for a step."""

    config: LoraConfig
    optimizer: TaskOptimizer
    has_gradients: bool = False


class Calls:
    """Models on one backbone, and the calls that they share passes in; one thread owns it.

    Args:
        model: a causal language model, or a `MultiTaskPeftModel` of one; whole in one process, without dropout. The
            tasks that it already has are left alone.
        piece_tokens: most tokens of a piece, by default 1,024 on a CPU and 4,096 on a GPU; a longer row is a piece by
            itself.
        pass_tokens: most tokens of a pass, by default 2,048 on a CPU and 16,384 on a GPU; a longer piece is a pass by
            itself.

    Attributes:
        model: the `MultiTaskPeftModel`.
        piece_tokens: see above; lowered when the memory does not hold a piece, and doubled after 64 calls that fit.
        pass_tokens: see above; the same for a pass.

    Raises:
        ConfigError: for settings that cannot be used, or a model that is divided among processes.
        UnsupportedModelError: for a model that is no causal language model, or has dropout.

    Example:
        >>> calls = Calls(AutoModelForCausalLM.from_pretrained("..."))  # doctest: +SKIP
        >>> calls.open("sql", LoraConfig(r=16, target_modules="all-linear"), seed=0)  # doctest: +SKIP
        >>> result = calls.run([Call("sql", examples, lambda outputs: outputs.nll_M.sum())])["sql"]  # doctest: +SKIP
        >>> calls.step({"sql": AdamSettings(learning_rate=1e-4)})  # doctest: +SKIP
    """

    def __init__(
        self,
        model: MultiTaskPeftModel | PreTrainedModel,
        *,
        piece_tokens: int | None = None,
        pass_tokens: int | None = None,
    ) -> None:
        """Check the model; wrap it if it has no adapters."""
        kind = "cpu" if model.device.type == "cpu" else "gpu"
        piece_tokens = _PIECE_TOKENS[kind] if piece_tokens is None else piece_tokens
        pass_tokens = _PASS_TOKENS[kind] if pass_tokens is None else pass_tokens
        sizes = {"piece_tokens": piece_tokens, "pass_tokens": pass_tokens}
        wrong = {name: value for name, value in sizes.items() if not is_integer(value, 1)}
        raise_faults([Fault(name, shown(value), "an integer of at least 1") for name, value in wrong.items()])
        # Never steps. PEFT makes its model with a first adapter, and rows of padding are of this one.
        first = {_PADDING: LoraConfig(r=1, target_modules="all-linear")}
        if isinstance(model, PreTrainedModel):
            check_backbone(model, "Calls")
            model = MultiTaskPeftModel(model, first)
        check_model(model, "Calls")
        if _PADDING not in model.tasks:
            model.register_tasks(first)
        if (reason := reason_of_backbone(model.backbone)) is not None:
            raise UnsupportedModelError(
                f"Calls needs a causal language model without dropout, but {reason}. Load it with its dropout set to 0."
            )
        self.model, self.piece_tokens, self.pass_tokens = model.train(), piece_tokens, pass_tokens
        self._most_tokens, self._num_fitting = (piece_tokens, pass_tokens), 0
        self._models: dict[str, _Model] = {}
        self._unfinished: dict[str, _Unfinished] = {}
        self._isolated: set[str] = set()
        self._collator = ChunkPackingCollator()

    # ------------------------------------------------------------------ models

    def open(self, name: str, config: LoraConfig, *, seed: int) -> None:
        """Add a model: a new LoRA adapter, between two passes.

        Args:
            name: name of the model.
            config: its LoRA configuration, of rank 1 to 256, without dropout; targets may include the output head.
            seed: fixes its initial weights, as `torch.manual_seed` before `get_peft_model` would.

        Raises:
            ConfigError: naming every field that cannot be used; then nothing has changed.
        """
        where, faults = f"models.{name}", []
        if name in self.model.tasks:
            faults.append(Fault(where, "a name that is taken", "a new name", "Drop the model of this name first."))
        if type(config) is not LoraConfig:  # AdaLoRA and others inherit from it
            faults.append(Fault(f"{where}.config", type(config).__name__, "a LoraConfig"))
        else:
            ranks = config.r, *(config.rank_pattern or {}).values()
            if not all(is_integer(rank, 1, _MOST_RANK) for rank in ranks):
                got = ", ".join(map(shown, ranks))
                faults.append(Fault(f"{where}.config.r", got, f"an integer from 1 to {_MOST_RANK}"))
            elif (reason := reason_of_adapter(config)) is not None:
                # Draws would have to differ between the calls whose gradients add up.
                faults.append(Fault(f"{where}.config", f"one in which {reason}", "a LoraConfig without dropout"))
            elif not head_kind_for(config.task_type).is_shared:
                faults.append(Fault(f"{where}.config.task_type", shown(config.task_type), "CAUSAL_LM or None"))
        raise_faults(faults)
        self.model.register_tasks({name: config}, seeds={name: seed})
        slab = self.model.registry.slab_of(name)
        slab.bind_gradients()
        self._models[name] = _Model(config, TaskOptimizer.adamw(slab))

    def drop(self, name: str) -> None:
        """Remove a model, its unfinished call included; a `ConfigError` if it is not open."""
        self._model(name)
        self._unfinished.pop(name, None)
        self._isolated.discard(name)
        self.model.remove_tasks([name])
        del self._models[name]

    def _model(self, name: str, what: str = "") -> _Model:
        """Return an open model; `what` names something that has to wait until its call is finished."""
        if name not in self._models:
            allowed = f"one of {', '.join(self._models)}" if self._models else "opened first"
            raise ConfigError(f"the model must be {allowed}, got {shown(name)}. {closest(name, self._models)}".rstrip())
        if what and name in self._unfinished:
            raise ConfigError(f"models.{name} must have no unfinished call for {what}. Call advance() until it ends.")
        return self._models[name]

    # ------------------------------------------------------------------ calls

    def submit(self, call: Call) -> None:
        """Take a call, to be computed by `advance`. A model has at most one unfinished call.

        Raises:
            ConfigError: if the model is not open, or has an unfinished call.
            DataError: naming the rows that cannot be computed; then nothing has changed.
        """
        self._unfinished[call.model] = self._checked(call)

    def advance(self, order: Sequence[str] = ()) -> dict[str, CallResult | CallFailure]:
        """Compute one pass: at most one piece of each unfinished call, as long as `pass_tokens` last.

        Args:
            order: models whose pieces come first, in this order; the others follow in the order of their calls.

        Returns:
            The results of the calls that this pass has finished, by model.
        """
        first = [name for name in dict.fromkeys(order) if name in self._unfinished]
        return self._pass([*first, *(name for name in self._unfinished if name not in first)])

    def run(self, calls: Sequence[Call]) -> dict[str, CallResult | CallFailure]:
        """Compute calls of different models to their end, together; other calls wait.

        Returns:
            The results by model.

        Raises:
            ConfigError: if a model is not open, or has another call.
            DataError: naming the rows that cannot be computed; then nothing has changed.
        """
        names = [call.model for call in calls]
        if len(set(names)) < len(names):
            raise ConfigError(f"calls must be of different models, got {', '.join(names)}. Run them one after another.")
        self._unfinished |= {call.model: self._checked(call) for call in calls}
        results: dict[str, CallResult | CallFailure] = {}
        while left := [name for name in names if name not in results]:
            results |= self._pass(left)
        return {name: results[name] for name in names}

    def _checked(self, call: Call) -> _Unfinished:
        """Return a call that can be computed; raise `ConfigError` or `DataError` for any other."""
        model = self._model(call.model, "another one")
        raise_faults(list(self._row_faults(call)), DataError)
        sequences = []
        for example in call.examples:
            tokens, targets = (np.asarray(ids, dtype=np.int64) for ids in (example.tokens, example.targets))
            columns = {name: np.asarray(values, dtype=np.float32) for name, values in example.columns.items()}
            if targets.ndim == 2:
                columns |= {_TARGET_IDS: targets}
                targets = targets[:, 0]
            sequences.append(TokenSequence(tokens, targets, 0, token_columns=columns, labels_itself=True))
        batch = TaskBatch(call.model, 0, 0, tuple(sequences), trie=prefix_trie(sequences))
        before = None
        if call.backward and model.has_gradients:
            before = [gradient.clone() for gradient in model.optimizer.gradients]
        return _Unfinished(call, batch, self._cut(batch), before)

    def _row_faults(self, call: Call) -> Iterator[Fault]:
        """Yield what is wrong with the rows of a call: the first fault of each."""
        where, config = f"calls.{call.model}.examples", self.model.backbone.config
        num_words, most = config.get_text_config().vocab_size, max_positions(config)
        if not call.examples:
            yield Fault(where, "none", "at least one example")
        shapes: Any = None
        for number, example in enumerate(call.examples):
            at = f"{where}[{number}]"
            tokens, targets = np.asarray(example.tokens), np.asarray(example.targets)
            for name, ids in (("tokens", tokens), ("targets", targets)):
                if not np.issubdtype(ids.dtype, np.integer) or ((ids < 0) | (ids >= num_words)).any():
                    got = shown(ids.tolist())
                    yield Fault(f"{at}.{name}", got, f"token ids from 0 to {num_words - 1}")
                    break
            else:
                if tokens.ndim != 1 or not len(tokens):
                    yield Fault(f"{at}.tokens", f"the shape {list(tokens.shape)}", "a list of at least one token id")
                elif most is not None and len(tokens) > most:
                    yield Fault(f"{at}.tokens", f"{len(tokens)} tokens", f"at most the backbone's {most} positions")
                elif targets.ndim not in (1, 2) or len(targets) != len(tokens) or not targets.size:
                    got = f"the shape {list(targets.shape)} for {len(tokens)} tokens"
                    yield Fault(f"{at}.targets", got, "of the shape [T] or [T, K] for T tokens")
                elif (fault := _column_fault(at, len(tokens), example.columns)) is not None:
                    yield fault
                else:
                    columns = {name: np.shape(column)[1:] for name, column in example.columns.items()}
                    shapes = (targets.shape[1:], columns) if shapes is None else shapes
                    if (targets.shape[1:], columns) != shapes:
                        shape = list(targets.shape[1:])
                        got = f"targets of {shape} with columns {shown(columns)}, first {shown(shapes)}"
                        yield Fault(at, got, "of the same shapes and columns as the first example")

    def _cut(self, batch: TaskBatch) -> list[list[int]]:
        """Return the pieces of a call, lists of numbers of its rows; they depend on these rows alone."""
        pieces: list[list[int]] = []
        num_tokens = 0
        for row, sequence in enumerate(batch.sequences):
            if not pieces or num_tokens + len(sequence) > self.piece_tokens:
                pieces.append([])
                num_tokens = 0
            pieces[-1].append(row)
            num_tokens += len(sequence)
        return pieces

    # ------------------------------------------------------------------ passes

    def _pass(self, names: Sequence[str]) -> dict[str, CallResult | CallFailure]:
        """Compute the next piece of the calls of some models, in this order as long as the tokens of a pass last."""
        chosen: list[str] = []
        num_tokens = 0
        for name in names:
            ongoing = self._unfinished[name]
            size = sum(len(ongoing.batch.sequences[row]) for row in ongoing.pieces[0])
            is_apart = not self._isolated.isdisjoint((name, *chosen))
            if not chosen or (num_tokens + size <= self.pass_tokens and not is_apart):
                chosen.append(name)
                num_tokens += size
        # In the order of the stream, in which kernels keep their tables.
        order = [name for name in self.model.tasks if name in chosen]
        try:
            results: dict[str, CallResult | CallFailure] = {}
            for backward in (True, False):
                if part := [name for name in order if self._unfinished[name].call.backward is backward]:
                    results |= self._pieces(part, backward=backward)
            shortage = fault = ""
        except Exception as error:
            is_shortage = is_out_of_memory(error)
            # After a fault of a device nothing is known of its memory.
            if not is_shortage and isinstance(error, RuntimeError) and self.model.device.type != "cpu":
                raise
            shortage, fault = (first_line(error), "") if is_shortage else ("", f"{type(error).__name__}: {error}")
        # After the block: the traceback of the error holds the activations of the pass.
        if shortage:
            self._num_fitting, results = 0, self._in_less_memory(order, num_tokens, shortage)
        elif fault and len(order) == 1:
            results = {order[0]: CallFailure(f"the pass raises {fault}", is_callers=False)}
        elif fault:  # one of the calls is the cause, so each has its next passes to itself
            self._isolated.update(order)
            self._begin_again(order)
            results = {}
        for name in results:
            ended = self._unfinished.pop(name)
            self._isolated.discard(name)
            if ended.call.backward and isinstance(results[name], CallResult):
                self._models[name].has_gradients = True
            elif ended.call.backward:
                self._put_back(name, ended)
            self._num_fitting += isinstance(results[name], CallResult)
        if self._num_fitting >= _RECOVERY_CALLS:
            self._num_fitting, (most_of_piece, most_of_pass) = 0, self._most_tokens
            self.piece_tokens = min(2 * self.piece_tokens, most_of_piece)
            self.pass_tokens = min(2 * self.pass_tokens, most_of_pass)
        return results

    def _pieces(self, names: Sequence[str], *, backward: bool) -> dict[str, CallResult | CallFailure]:
        """Compute the next piece of each call; return the results of those that end."""
        running = [self._unfinished[name] for name in names]
        on_host = self._laid_out(running)
        with torch.set_grad_enabled(backward):
            by_model = self._outputs(on_host, len(running))
        results: dict[str, CallResult | CallFailure] = {}
        losses: dict[str, torch.Tensor] = {}
        gradients: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for ongoing, outputs in zip(running, by_model, strict=True):
            name = ongoing.call.model
            try:
                losses[name], gradients[name] = _loss_and_gradients(ongoing.call.loss, outputs, backward=backward)
            except Exception as error:  # the caller's own code
                if is_out_of_memory(error):
                    raise
                results[name] = CallFailure(f"the loss raises {type(error).__name__}: {error}", is_callers=True)
        # One wait for the device for all calls.
        figures = {
            name: torch.stack([loss, *(gradient.isfinite().all().to(loss) for _, gradient in gradients[name])]).cpu()
            for name, loss in losses.items()
        }
        for name, (value, *are_finite) in figures.items():
            if not value.isfinite() or not all(are_finite):
                what = "gradient of the loss is not finite" if value.isfinite() else f"loss is {value.item()}"
                results[name] = CallFailure(f"the {what}", is_callers=True)
        pairs = [pair for name in losses if name not in results for pair in gradients[name]]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        for index, (ongoing, outputs) in enumerate(zip(running, by_model, strict=True)):
            name = ongoing.call.model
            if name in results:
                continue
            ongoing.loss += float(figures[name][0])
            logprobs = outputs.logprobs_M if outputs.word_logprobs_MK is None else outputs.word_logprobs_MK
            ends = np.cumsum(outputs.sequence_counts)[:-1]
            # Numbers of the rows of the call, by where each of them begins, in the order of the stream.
            first, last = on_host.sequence_offsets[index : index + 2]
            places = on_host.token_places[on_host.cu_seqlens[first:last].long()]
            rows = np.searchsorted(np.cumsum([0, *map(len, ongoing.batch.sequences)]), places.numpy()).tolist()
            ongoing.logprobs.update(zip(rows, np.split(logprobs.detach().cpu().numpy(), ends), strict=True))
            ongoing.pieces.pop(0)
            if ongoing.pieces:
                continue
            of_weights = self._models[name].optimizer.gradients if backward else []
            if not all(bool(gradient.isfinite().all()) for gradient in of_weights):
                results[name] = CallFailure("the gradient of the weights is not finite", is_callers=True)
            else:
                by_row = tuple(ongoing.logprobs[row] for row in range(len(ongoing.call.examples)))
                results[name] = CallResult(ongoing.loss, by_row)
        return results

    def _laid_out(self, running: Sequence[_Unfinished]) -> MuxBatch:
        """Return the next pieces of some calls as one stream; on a CPU with rows of padding behind them."""
        batches, rows = [ongoing.batch for ongoing in running], [ongoing.pieces[0] for ongoing in running]
        while True:
            num_tokens = sum(batch.num_tokens for batch in batches)
            (stream,) = self._collator.micro_batches(batches, max_tokens=num_tokens, only=rows)
            # How a CPU rounds depends on the number of rows of a product if they are few, and is other for the last
            # elements of a tensor. With multiples of this number both are the same in any company.
            missing = -stream.num_computed % _whole_tokens(_WHOLE_TOKENS) if self.model.device.type == "cpu" else 0
            if not missing:
                return stream
            zeros = np.split(np.zeros(missing, dtype=np.int64), range(_PADDING_ROW, missing, _PADDING_ROW))
            padding = tuple(TokenSequence(token_ids, token_ids, 0, labels_itself=True) for token_ids in zeros)
            batches.append(TaskBatch(_PADDING, 0, 0, padding))
            rows.append(list(range(len(padding))))

    def _outputs(self, on_host: MuxBatch, num_models: int) -> list[TokenOutputs]:
        """Return the outputs of the first models of a pass, for their losses.

        The head is computed for each model by itself: its blocks of targets, and whether it reads adapters on the head,
        do not depend on the others.
        """
        model, batch = self.model, on_host.to(self.model.device)
        model.prepare_pass(batch.task_names)
        with model.multiplexing(batch):
            hidden_UD = model.hidden_states(batch)
        outputs = []
        sizes = [end - start for start, end in pairwise(batch.computed_offsets)]
        for index, part_UD in enumerate(hidden_UD.split(sizes)[:num_models]):
            batch_of_model = on_host.of_tasks([index]).to(model.device)
            with model.multiplexing(batch_of_model):
                outputs += model.objectives.head.outputs(part_UD, batch_of_model, model)
        return outputs

    def _put_back(self, name: str, ongoing: _Unfinished) -> None:
        """Give a model the gradients that it had before a call."""
        if ongoing.before is None:
            self._models[name].optimizer.zero_gradients()
        else:
            torch._foreach_copy_(self._models[name].optimizer.gradients, ongoing.before)

    def _in_less_memory(
        self, names: Sequence[str], num_tokens: int, reason: str
    ) -> dict[str, CallResult | CallFailure]:
        """Let the calls of a pass that found no memory begin again, in passes of half the tokens.

        Returns:
            The failure of a call whose single row does not fit.
        """
        gc.collect()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        first = self._unfinished[names[0]]
        if len(names) == 1 and len(first.pieces[0]) == 1:
            row = first.pieces[0][0]
            size = len(first.batch.sequences[row])
            got = f"calls.{names[0]}.examples[{row}]: a row of {size} tokens does not fit into memory ({reason})"
            return {names[0]: CallFailure(f"{got}. Shorten it.", is_callers=True)}
        self.pass_tokens = max(1, num_tokens // 2)
        if len(names) == 1:
            self.piece_tokens = self.pass_tokens
        self._begin_again(names)
        return {}

    def _begin_again(self, names: Sequence[str]) -> None:
        """Let unfinished calls begin again, with the gradients that their models had before."""
        for name in names:
            ongoing = self._unfinished[name]
            if ongoing.call.backward:
                self._put_back(name, ongoing)
            self._unfinished[name] = replace(ongoing, pieces=self._cut(ongoing.batch), loss=0.0, logprobs={})

    # ------------------------------------------------------------------ steps

    def step(self, steps: Mapping[str, AdamSettings]) -> dict[str, float | CallFailure]:
        """Step models with the gradients that their calls have added up, which are then zero.

        Args:
            steps: the settings of this step by model.

        Returns:
            The norm of each model's gradient, before clipping. A model whose norm is not finite is not stepped; its
            gradients are dropped.

        Raises:
            ConfigError: if a model is not open, or has an unfinished call; then none is stepped.
        """
        models = {name: self._model(name, "a step") for name in steps}
        for name, model in models.items():
            settings = steps[name]
            model.optimizer.use(
                learning_rate=settings.learning_rate,
                betas=(settings.beta1, settings.beta2),
                eps=settings.eps,
                weight_decay=settings.weight_decay,
                max_grad_norm=settings.max_grad_norm,
            )
        optimizers = [model.optimizer for model in models.values()]
        norms_N = gradient_norms(optimizers)
        joint_update, joined = adamw.joint_update(self.model.device), []
        if joint_update is None or not optimizers:
            values = [float(norm) for norm in norms_N]
        else:
            pages = [optimizer.page_updates(index, None) for index, optimizer in enumerate(optimizers)]
            joined = [optimizer for optimizer, updates in zip(optimizers, pages, strict=True) if updates]
            norms = torch.stack([norm.to(self.model.device, torch.float32) for norm in norms_N])
            verdicts_2N = torch.stack([torch.zeros_like(norms), norms])  # losses are the callers'
            values = joint_update([page for updates in pages for page in updates], verdicts_2N)[1]
            value_of = dict(zip(optimizers, values, strict=True))
            count_joint_steps([optimizer for optimizer in joined if is_real(value_of[optimizer])])
        results: dict[str, float | CallFailure] = {}
        for (name, model), norm, value in zip(models.items(), norms_N, values, strict=True):
            results[name] = value
            if not is_real(value):
                results[name] = CallFailure(f"the norm of the gradient is {value}", is_callers=True)
                model.optimizer.zero_gradients()
            elif model.optimizer in joined:
                model.optimizer.advance_schedule()
            else:
                model.optimizer.step(norm)
            model.has_gradients = False
        return results

    # ------------------------------------------------------------------ states

    def state(self, name: str) -> TaskState:
        """Return copies of all that a model is: weights, moments, and the gradients that wait for a step (`copies`).

        Raises:
            ConfigError: if the model is not open, or has an unfinished call.
        """
        model, weights = self._model(name, "its state"), self.model.task_parameters(name)
        gradients = {key: weight.grad.detach().clone() for key, weight in weights.items() if weight.grad is not None}
        copies = {GRADIENTS: gradients} if model.has_gradients else {}
        return replace(split_state(weights, model.optimizer), copies=copies)

    def restore(self, name: str, state: TaskState, *, only_weights: bool = False) -> None:
        """Give a model a state, perhaps of another model of the same configuration.

        Args:
            name: the model.
            state: what `state` returned.
            only_weights: leave out moments and gradients, as for a new model that begins with these weights.

        Raises:
            ConfigError: if the model is not open, or has an unfinished call.
            CheckpointError: if its weights do not fit the model; then nothing has changed.
        """
        model, parameters = self._model(name, "another state"), self.model.task_parameters(name)
        gradients = {} if only_weights else state.copies.get(GRADIENTS, {})
        fresh = TaskOptimizer.adamw(self.model.registry.slab_of(name))
        join_state(state, parameters, None if only_weights else fresh)
        fresh.zero_gradients()
        for key, parameter in parameters.items():
            if key in gradients and parameter.grad is not None:
                parameter.grad.copy_(gradients[key])
        self._models[name] = _Model(model.config, fresh, bool(gradients))

    def freeze(self, name: str) -> Frozen:
        """Return copies of a model's weights, for samples; a `ConfigError` if it is not open."""
        parameters = self.model.task_parameters(name)
        return Frozen(self._model(name).config, {key: weight.detach().clone() for key, weight in parameters.items()})

    def sampling(self, tokenizer: Any = None) -> Sampling:
        """Return a batch of completions of these models, without rows yet.

        Args:
            tokenizer: for prompts that are texts, stop strings and `Completion.text`; may be left out otherwise.
        """
        return Sampling(self.model, tokenizer)


class Sampling:
    """Completions of the base model and of frozen weights, drawn together, token by token; made by `Calls.sampling`.

    Rows may join and leave between two tokens, and calls may run in between. A row is drawn as alone, with its own
    seed, from log-probabilities as of the row alone: on a CPU equal to the bit, otherwise up to rounding.
    """

    def __init__(self, model: MultiTaskPeftModel, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._multiple = _whole_tokens(_SAMPLED_TOKENS) if model.device.type == "cpu" else 1
        self._running = RunningRows(model, tokenizer, self._multiple)
        self._numbers, self._num_added = dict[Row, tuple[int, str]](), 0
        self._ended: dict[int, Completion] = {}
        self._slots: dict[Frozen, str] = {}  # tasks that hold frozen weights, the one used last at the end

    @property
    def numbers(self) -> list[int]:
        """Numbers of the requests whose completions are still to come."""
        return [*self._ended, *(number for number, _ in self._numbers.values())]

    def add(self, requests: Sequence[tuple[Frozen | None, GenerationRequest]]) -> list[int]:
        """Read prompts in one pass, and draw their first tokens.

        Args:
            requests: the weights that complete each prompt, `None` for the base model, and the request. Its `task` is
                only a name, which its completion has, too; without a seed, the seed of its options counts.

        Returns:
            The number of each request.

        Raises:
            ConfigError: for options that cannot be used; then nothing was added.
            DataError: for a prompt that cannot be completed; then nothing was added.
        """
        model, tokenizer, default = self._model, self._tokenizer, SamplingOptions()
        rows = [checked_row(model, request, _PADDING, 0, tokenizer, default) for _, request in requests]
        busy = {row.task for row in self._running.rows}
        for row, (frozen, request) in zip(rows, requests, strict=True):
            if frozen is not None:
                row.task = self._slot(frozen, busy)
                busy.add(row.task)
            self._num_added += 1
            self._numbers[row] = self._num_added, request.task
        numbers = [self._numbers[row][0] for row in rows]
        if rows:
            self._end(self._running.add(rows))
        return numbers

    def advance(self) -> dict[int, Completion]:
        """Draw one token of every row.

        Returns:
            The completions that have ended since the last call, by the numbers that `add` returned.
        """
        if self._running.rows:
            self._end(self._running.advance())
        ended, self._ended = self._ended, {}
        return ended

    def cancel(self, numbers: Collection[int]) -> None:
        """Drop the rows of requests; numbers whose completions were returned are passed over."""
        rows = self._running.rows
        self._ended = {number: completion for number, completion in self._ended.items() if number not in numbers}
        if left := [place for place, row in enumerate(rows) if self._numbers[row][0] not in numbers]:
            self._running.keep(left)
        else:
            self._running = RunningRows(self._model, self._tokenizer, self._multiple)
        self._numbers = {row: self._numbers[row] for row in self._running.rows}

    def _end(self, rows: Sequence[Row]) -> None:
        for row in rows:
            number, task = self._numbers.pop(row)
            self._ended[number] = replace(row.completion(self._tokenizer), task=task)

    def _slot(self, frozen: Frozen, busy: Collection[str]) -> str:
        """Return the name of a task that has these weights; `busy` tasks must keep theirs."""
        model, name = self._model, self._slots.pop(frozen, None)
        if name is None:
            # A new task costs as much as many passes, so the weights of one that has no rows are replaced.
            idle = [weights for weights, task in self._slots.items() if task not in busy]
            alike = next((weights for weights in idle if weights.config == frozen.config), None)
            if alike is not None:
                name = self._slots.pop(alike)
            else:
                if len(idle) >= _MOST_IDLE:
                    model.remove_tasks([self._slots.pop(idle[0])])
                name = next(free_name for number in count(1) if (free_name := f"frozen-{number}") not in model.tasks)
                model.register_tasks({name: frozen.config})
            with torch.no_grad():
                for key, weight in model.task_parameters(name).items():
                    weight.copy_(frozen.weights[key])
        self._slots[frozen] = name
        return name


# ---------------------------------------------------------------------- rows and losses


def _whole_tokens(least: int) -> int:
    """Return the number that divides the tokens of a pass on a CPU."""
    return max(least, 4 * torch.get_num_threads())


def _column_fault(where: str, num_tokens: int, columns: Mapping[str, Any]) -> Fault | None:
    """Return what is wrong with the first column of a row that cannot be used."""
    for name, values in columns.items():
        at = f"{where}.columns.{name}"
        if name in WORDS:
            return Fault(at, "a column of this name", f"named otherwise than {' and '.join(WORDS)}")
        try:
            with np.errstate(over="ignore"):
                numbers = np.asarray(values).astype(np.float32)
        except (TypeError, ValueError):
            return Fault(at, shown(values), "finite numbers")
        if numbers.ndim < 1 or len(numbers) != num_tokens:
            return Fault(at, f"the shape {list(numbers.shape)}", f"one entry for each of {num_tokens} tokens")
        if not np.isfinite(numbers).all():
            return Fault(at, shown(np.asarray(values).tolist()), "finite numbers")
    return None


def _loss_and_gradients(
    loss: CallLoss, outputs: TokenOutputs, *, backward: bool
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return the loss of a piece, without graph, and its gradient with respect to each output that it reads."""
    read = {
        name: values.detach().requires_grad_(backward)
        for name in ("nll_M", "word_logprobs_MK")
        if (values := getattr(outputs, name)) is not None
    }
    with torch.enable_grad():
        value = loss(replace(outputs, **read))
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise TypeError(f"it must return a tensor with one number, got {shown(value)}")
    value = value.reshape(())
    if not (backward and value.requires_grad):
        return value.detach(), []
    gradients = torch.autograd.grad(value, list(read.values()), allow_unused=True)
    pairs = zip(read, gradients, strict=True)
    return value.detach(), [(getattr(outputs, name), gradient) for name, gradient in pairs if gradient is not None]
