"""Rows of a prompt, a chosen and a rejected answer, tokenised as TRL's `ORPOTrainer` does.

Other than for DPO, prompts and answers are joined as texts after the chat template, `BOS` and `EOS` are added as ids,
and the whole chosen row carries loss, its prompt too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np

from peft_mux.data.formats import DataFormat
from peft_mux.data.preferences.layout import Answer, cut_answers, pair_of
from peft_mux.data.preferences.pair_rows import tokenised_pair
from peft_mux.data.preferences.prompts import is_conversation, prompt_and_answers
from peft_mux.data.rows.row_reader import RowTools
from peft_mux.data.task_batch import TokenSequence


class OddsRows:
    """Turns rows with a chosen and a rejected answer into rows of two sequences.

    Their token column `is_answer` is 1 for tokens of answers; the other targets are those of the chosen row's prompt.

    Args:
        tools: what the rows of the dataset are read with.
    """

    def __init__(self, tools: RowTools) -> None:
        """Keep what every row is read with."""
        self._tools = tools

    def sequence(self, row: Mapping[str, Any], index: int) -> TokenSequence | None:
        """Return the sequence of a row, or `None` where the row is left out (and counted).

        Raises:
            DataError: naming the row and the column that cannot be trained on.
        """
        is_tokenised = self._tools.data_format is DataFormat.TOKENIZED_PREFERENCE
        answers = tokenised_pair(row, index, self._tools) if is_tokenised else self._encoded(row, index)
        kept = cut_answers(answers, index, self._tools)
        if kept is None:
            return None
        chosen, rejected = kept
        pair = pair_of(chosen, rejected, index, {})
        is_answer = np.ones(len(pair), dtype=np.float32)
        for first, answer in ((0, chosen), (len(chosen.ids), rejected)):
            is_answer[first : first + answer.start] = 0.0
        labels = np.concatenate((chosen.ids, rejected.labels()))
        return replace(pair, labels=labels, token_columns={"is_answer": is_answer})

    def _encoded(self, row: Mapping[str, Any], index: int) -> tuple[Answer, Answer]:
        prompt, chosen, rejected = prompt_and_answers(row, index, self._tools.cells, self._tools.chat_rows)
        if is_conversation(chosen):
            prompt, chosen, rejected = self._rendered(prompt, chosen, rejected, index)
        pair = self._answer(prompt, chosen, index, "chosen"), self._answer(prompt, rejected, index, "rejected")
        prompts = [answer.ids[: answer.start] for answer in pair]
        differing = sum(a != b for a, b in zip(*prompts, strict=False))
        if differing > 1 or abs(len(prompts[0]) - len(prompts[1])) > 1:
            allowed = "a prompt whose tokens merge with those of an answer in its last one at most"
            raise self._tools.cells.error(index, "prompt", f"prompts that differ in {differing} tokens", allowed)
        return pair

    def _rendered(self, prompt: Any, chosen: Any, rejected: Any, index: int) -> tuple[str, str, str]:
        """Return messages as the texts that the chat template makes of them, the prompt up to where these differ."""
        render = self._tools.chat_rows.render
        text = render(prompt, "prompt", index, is_prompt=True)
        whole = [render(prompt + answer, name, index) for name, answer in (("chosen", chosen), ("rejected", rejected))]
        for full in whole:
            text = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, full, strict=False)))
        first, second = (full[len(text) :] for full in whole)
        return text, first, second

    def _answer(self, prompt: str, answer: str, index: int, column: str) -> Answer:
        tokenizer = self._tools.tokenizer
        ids = tokenizer(prompt + answer, add_special_tokens=False)["input_ids"]
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if len(ids) < len(prompt_ids):
            got = f"{len(ids)} tokens with the prompt, which has {len(prompt_ids)} alone"
            raise self._tools.cells.error(index, column, got, "an answer whose tokens do not merge with the prompt")
        start = len(prompt_ids)
        # Where the last token of the prompt merges with the answer, the answer begins with it.
        if prompt_ids != ids[:start]:
            start -= 1
        first, last = tokenizer.bos_token_id, tokenizer.eos_token_id
        if first is not None and (start == 0 or ids[0] != first):
            ids, start = [first, *ids], start + 1
        if last is not None and (len(ids) == start or ids[-1] != last):
            ids = [*ids, last]
        return Answer(np.asarray(ids, dtype=np.int64), start)
