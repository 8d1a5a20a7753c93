"""Chat messages to tokens: checks on each message, the chat template, and the mask of what the assistant says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from peft_mux.data.cells import RowCells
from peft_mux.errors import DataError
from peft_mux.own_code import describe_error


class ChatRows:
    """Reads the messages of rows and passes them through a chat template.

    Args:
        cells: reads the cells of the rows and names the dataset.
        tokenizer: a tokenizer of transformers.
        task: name of the task, for messages.
        chat_template: Jinja template in place of the tokenizer's own; `None` for that of the tokenizer.
        assistant_only_loss: whether only what the assistant says carries loss.
    """

    def __init__(
        self, cells: RowCells, tokenizer: Any, *, task: str, chat_template: str | None, assistant_only_loss: bool
    ) -> None:
        """Keep what the template needs."""
        self.task = task
        self.chat_template = chat_template
        self.assistant_only_loss = assistant_only_loss
        self._cells = cells
        self._tokenizer = tokenizer

    def messages(self, row: Mapping[str, Any], column: str, index: int) -> list[dict[str, Any]]:
        """Return the messages of a cell.

        Raises:
            DataError: if it is no list of messages, or if a message has no role or no content.
        """
        value = row[column]
        allowed = 'a list of {"role": ..., "content": ...}'
        if not isinstance(value, list) or not value:
            raise self._cells.error(index, column, f"{value!r:.60} ({type(value).__name__})", allowed)
        for message in value:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
                raise self._cells.error(index, column, f"{message!r:.60}", allowed)
            self._cells.text(message, "role", index)
            self._check_content(message, index, column)
        return [dict(message) for message in value]

    def _check_content(self, message: Mapping[str, Any], index: int, column: str) -> None:
        """Refuse a content that a template would turn into text of its own, such as `None` or 7."""
        content = message["content"]
        if isinstance(content, str):
            self._cells.text(message, "content", index)
            return
        # A message that only calls tools has no text, and templates expect None there.
        only_calls = content is None and bool(message.get("tool_calls"))
        is_parts = isinstance(content, list) and content and all(isinstance(part, Mapping) for part in content)
        if not only_calls and not is_parts:
            got = f"content {content!r:.60} ({type(content).__name__})"
            raise self._cells.error(index, column, got, "text, a list of parts, or None beside tool_calls")
        for part in content or ():
            if part.get("type", "text") != "text":
                got, allowed = (
                    f"a part of type {part['type']!r:.60}",
                    'parts of type "text", as only text is trained on',
                )
                raise self._cells.error(index, column, got, allowed)
            if "text" not in part:
                raise self._cells.error(index, column, f"the part {part!r:.60}", '{"type": "text", "text": ...}')
            self._cells.text(part, "text", index)

    def encode(self, messages: list[dict[str, Any]], column: str, index: int) -> tuple[list[int], np.ndarray | None]:
        """Return the token ids of messages, and which of them the assistant says where only those carry loss.

        Args:
            messages: what the template is given.
            column: the column that they stand in, for messages.
            index: the row that they stand in, for messages.

        Raises:
            DataError: if there is no template, if it does not mark what the assistant says though that is asked for,
                or if it fails on these messages.
        """
        return self._apply_template(messages, column, index, wants_mask=self.assistant_only_loss)

    def encode_prompt(self, messages: list[dict[str, Any]], column: str, index: int) -> list[int]:
        """Return the token ids of messages up to where the assistant's answer begins.

        Args:
            messages: what the template is given.
            column: the column that they stand in, for messages.
            index: the row that they stand in, for messages.

        Raises:
            DataError: if there is no template, or if it fails on these messages.
        """
        return self._apply_template(messages, column, index, wants_mask=False, add_generation_prompt=True)[0]

    def render(self, messages: list[dict[str, Any]], column: str, index: int, *, is_prompt: bool = False) -> str:
        """Return the text that the template makes of messages.

        Args:
            messages: what the template is given.
            column: the column that they stand in, for messages.
            index: the row that they stand in, for messages.
            is_prompt: whether the assistant goes on from here: with an answer to the user or to a tool, or, where the
                last message is its own, with that message.

        Raises:
            DataError: if there is no template, if it fails on these messages, or if a prompt ends in another role.
        """
        self._template()
        last = messages[-1]["role"]
        if is_prompt and last not in ("user", "tool", "assistant"):
            raise self._cells.error(index, column, f"a last message of {last!r}", "user, tool or assistant as its role")
        options = {"add_generation_prompt": last != "assistant", "continue_final_message": last == "assistant"}
        return self._rendered(messages, column, index, tokenize=False, **(options if is_prompt else {}))

    def _rendered(self, messages: list[dict[str, Any]], column: str, index: int, **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, chat_template=self.chat_template, **options)
        except Exception as error:
            # A template is code: it may refuse a role, lack a name, or make text that is none.
            got = f"{describe_error(error)} from the chat template"
            raise self._cells.error(index, column, got, "messages that the template takes") from error

    def _template(self) -> Any:
        template = self.chat_template or getattr(self._tokenizer, "chat_template", None)
        if template is None:
            raise DataError(
                f"{self._cells.where}: got messages, but the tokenizer has no chat template; allowed: one with it, or "
                f"tasks.{self.task}.chat_template. Take an instruct model's tokenizer, or a Jinja template."
            )
        return template

    def _apply_template(
        self,
        messages: list[dict[str, Any]],
        column: str,
        index: int,
        *,
        wants_mask: bool,
        add_generation_prompt: bool = False,
    ) -> tuple[list[int], np.ndarray | None]:
        template = self._template()
        # transformers only warns of this, and returns a mask in which no token carries loss.
        if wants_mask and "generation" not in str(template):
            raise DataError(
                f"tasks.{self.task}.assistant_only_loss: got True, but the chat template has no "
                "{% generation %} block; allowed: a template that marks what the assistant says. Set "
                "assistant_only_loss=False, or give chat_template."
            )
        encoded = self._rendered(
            messages,
            column,
            index,
            add_generation_prompt=add_generation_prompt,
            return_dict=True,
            tokenize=True,
            return_assistant_tokens_mask=wants_mask,
        )
        if not wants_mask:
            return encoded["input_ids"], None
        return encoded["input_ids"], np.asarray(encoded["assistant_masks"], dtype=bool)
