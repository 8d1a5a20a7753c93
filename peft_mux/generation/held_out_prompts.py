"""The prompts of held-out rows, and the text that each row has as its completion: what an evaluation completes.

A prompt ends where the loss on the completion begins, as in training (`RowTokenizer`), so that a model continues from
just the tokens after which it has learnt to.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from peft_mux.data.formats import DataFormat, detect_format
from peft_mux.data.row_cells import RowCells
from peft_mux.data.tokenize import TokenizeOptions, common_prefix, own_tokenizer
from peft_mux.errors import DataError
from peft_mux.modeling.sampling import GenerateOptions


class PromptRow(NamedTuple):
    """A prompt and the completion that its row has.

    Attributes:
        ids: the tokens of the prompt.
        prompt: the prompt as text; of messages as the chat template writes them.
        reference: the text that the row has as its completion.
    """

    ids: tuple[int, ...]
    prompt: str
    reference: str


def eval_prompts(
    generated: GenerateOptions, rows: Iterable[Any], options: TokenizeOptions, tokenizer: Any
) -> tuple[PromptRow, ...]:
    """Return the prompts that evaluations complete; warn about prompts that are too long.

    Args:
        generated: what the evaluations of the task generate.
        rows: its held-out rows.
        options: how its rows become tokens.
        tokenizer: a tokenizer of transformers.
    """
    room = None if options.max_positions is None else options.max_positions - generated.max_new_tokens
    prompts, num_too_long = read_prompts(
        rows, options, own_tokenizer(tokenizer), limit=generated.num_rows, max_tokens=room
    )
    if num_too_long:
        warnings.warn(
            f"tasks.{options.task}.eval_generate: {num_too_long:,} held-out prompts left out, because "
            f"{generated.max_new_tokens:,} new tokens do not fit after them. Lower max_new_tokens.",
            UserWarning,
            stacklevel=2,
        )
    return prompts


def read_prompts(
    rows: Iterable[Any], options: TokenizeOptions, tokenizer: Any, *, limit: int | None, max_tokens: int | None
) -> tuple[tuple[PromptRow, ...], int]:
    """Return the prompts of held-out rows, and how many were left out because they are too long.

    Args:
        rows: dicts of columns that were tokenised before without a fault.
        options: how the rows of the task become tokens.
        tokenizer: a tokenizer of transformers.
        limit: how many rows are read, from the first one on; `None` for all.
        max_tokens: longer prompts are left out; `None` for no limit.

    Raises:
        DataError: if there is no tokenizer or rows have no prompts, naming the row and column whose prompt cannot be
            read; or if all prompts are too long.
    """
    field = f"tasks.{options.task}.eval_generate"
    if tokenizer is None:
        raise DataError(
            f"{field} needs a processing_class, which turns completions into text. Pass "
            "processing_class=AutoTokenizer.from_pretrained(...)."
        )
    where = f"tasks.{options.task}.eval_dataset"
    cells = RowCells(where, options.vocab_size, tokenizer, options.chat_template)
    found: list[PromptRow] = []
    num_too_long = 0
    data_format: DataFormat | None = None
    for index, row in enumerate(rows):
        if index == limit:
            break
        data_format = data_format or detect_format(list(row), where=where, row_form=options.row_form)
        if data_format not in (DataFormat.MESSAGES, DataFormat.PROMPT_COMPLETION):
            raise DataError(
                f'{field} needs held-out rows with "prompt" and "completion", or "messages", got {data_format}, '
                "which have no prompts. Set eval_generate=None."
            )
        prompt = _read_prompt(row, index, data_format, cells, tokenizer)
        if max_tokens is not None and len(prompt.ids) > max_tokens:
            num_too_long += 1
        else:
            found.append(prompt)
    if not found:
        raise DataError(
            f"{field} needs held-out prompts that leave room for a completion, but the shortest has more than "
            f"{max_tokens} tokens. Lower max_new_tokens."
        )
    return tuple(found), num_too_long


def _read_prompt(row: Any, index: int, data_format: DataFormat, cells: RowCells, tokenizer: Any) -> PromptRow:
    if data_format is DataFormat.MESSAGES:
        column, messages = "messages", cells.messages(row, "messages", index)
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            got = f"{len(messages)} messages, the last of them of {messages[-1]['role']!r:.60}"
            raise cells.error(index, column, got, "an answer of the assistant at the end, to be generated")
        prompt, answer = messages[:-1], messages[-1:]
    elif isinstance(row["prompt"], list) or isinstance(row["completion"], list):
        column = "completion"
        prompt, answer = (cells.messages(row, name, index) for name in ("prompt", "completion"))
    else:
        text, reference = (cells.text(row, name, index) for name in ("prompt", "completion"))
        ids, whole = (tokenizer(one)["input_ids"] for one in (text, text + reference))
        kept = np.asarray(ids[: common_prefix(ids, whole)], dtype=np.int64)
        return PromptRow(tuple(cells.checked_ids(kept, index, "prompt").tolist()), text, reference)
    ids, _ = cells.encode_chat(prompt, column, index, is_prompt=True, row=row)
    whole, _ = cells.encode_chat(prompt + answer, column, index, row=row)
    # The tokens of the prompt that do not merge with those of the completion.
    kept = np.asarray(ids[: common_prefix(ids, whole)], dtype=np.int64)
    kept_ids = tuple(cells.checked_ids(kept, index, column).tolist())
    texts = []
    for message in answer:
        content = message["content"]  # None in a message that only calls tools
        texts.append(content if isinstance(content, str) else "".join(part["text"] for part in content or ()))
    return PromptRow(kept_ids, tokenizer.decode(kept_ids), "\n".join(texts))
