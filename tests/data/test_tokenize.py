"""Rows to tokens: TRL's meanings, reported truncation, and malformed rows refused by task, row and column."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from peft_mux.data.dataset import TokenizedDataset
from peft_mux.data.formats import LANGUAGE_ROWS, RowForm, detect_format
from peft_mux.data.task_batch import IGNORE_INDEX
from peft_mux.data.tokenize import LABELLED_ROWS, own_tokenizer
from peft_mux.demo.small_llama import make_tokenizer
from peft_mux.errors import ConfigError, DataError
from peft_mux.losses.preference_rows import PAIR_ROWS, SCORED_ROWS
from tests.data.cases import read
from tests.invariants.mux_lab import tiny_llama
from tests.paths import SHARED_DATA

STORIES = SHARED_DATA / "stories260K"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}assistant : {% generation %}"
    "{{ message.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ message.role }} : {{ message.content }} "
    "{% endif %}{% endfor %}{% if add_generation_prompt %}assistant : {% endif %}"
)
UNMARKED_TEMPLATE = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
PLAIN_TEMPLATE = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
WORDS = "<unk> <eos> [CLS] [SEP] assistant user system : the cat sat on a mat dog ran home yes no".split()


def words_tokenizer(*, with_pairs: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words, which needs no file."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if with_pairs:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if with_pairs else [])]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", model_input_names=names
    )


def tokenised(rows: Any, tokenizer: Any = None, form: RowForm = LANGUAGE_ROWS, **options: Any) -> TokenizedDataset:
    return read(rows, form, tokenizer, **{"task": "own", "max_length": 64, "vocab_size": len(WORDS), **options})


def words(sequence: Any) -> list[str]:
    return [WORDS[token] for token in sequence.input_ids]


def targets(sequence: Any) -> list[str]:
    return [WORDS[token] for token in sequence.labels if token != IGNORE_INDEX]


# ----------------------------------------------------------------- formats

TOKENS = {"input_ids": [8, 9, 10]}
_TALK = {"messages": [{"role": "user", "content": "yes"}, {"role": "assistant", "content": "no dog ran"}]}
_PAIR = {"prompt": "the", "completion": " cat ran"}


@pytest.mark.parametrize("option", ["completion_only_loss", "assistant_only_loss"])
def test_a_loss_mask_that_a_format_cannot_have_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"tasks\.own\.{option} .*got True for text rows"):
        tokenised([{"text": "the cat"}], words_tokenizer(), **{option: True})


def test_tokenised_rows_take_labels_masks_and_drop_padding_at_either_end() -> None:
    rows = [{"input_ids": [0, 8, 9, 10, 0], "attention_mask": [0, 1, 1, 1, 0], "labels": [-100, -100, 9, 10, -100]}]
    sequence = tokenised(rows)[0]
    assert sequence.input_ids.tolist() == [8, 9, 10]
    assert sequence.labels.tolist() == [-100, 9, 10]
    masked = tokenised([{"input_ids": [8, 9, 10], "completion_mask": [0, 0, 1], "labels": None}])[0]
    assert masked.labels.tolist() == [-100, -100, 10]
    spoken = tokenised([{"input_ids": [8, 9, 10], "assistant_masks": [0, 1, 1]}])[0]
    assert spoken.labels.tolist() == [-100, 9, 10]


def test_the_assistants_turns_are_found_in_a_template_that_does_not_mark_them() -> None:
    says = [("system", "yes"), ("user", "the cat"), ("assistant", "sat"), ("user", "a dog"), ("assistant", "ran home")]
    messages = [{"role": role, "content": content} for role, content in says]
    options = {"assistant_only_loss": True, "chat_template": UNMARKED_TEMPLATE}
    (data,) = tokenised([{"messages": messages}], words_tokenizer(), **options)
    assert targets(data) == "sat <eos> ran home <eos>".split()
    prompted = {"prompt": messages[:-1], "completion": messages[-1:]}
    assert targets(tokenised([prompted], words_tokenizer(), **options)[0]) == "ran home <eos>".split()


@pytest.mark.parametrize("name", "llama3 gemma3 cohere2 qwen3_instruct_2507 qwen3".split())
def test_turns_found_in_known_templates_are_those_that_trl_marks_in_them(name: str) -> None:
    folder = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
    letters = Tokenizer(models.BPE({letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, bos_token="<s>", eos_token="</s>")
    talk = [{"role": role, "content": content} for role, content in (("user", "Who?"), ("assistant", " É, a dog.\n"))]
    rows = [{"messages": talk}, {"messages": [*talk, *talk]}]
    ours, marked = (
        lambda rows, file=file: read(
            rows, tokenizer=tokenizer, max_length=9999, assistant_only_loss=True, chat_template=file.read_text("utf-8")
        )
        for file in (folder / f"{name}.jinja", folder / f"{name}_training.jinja")
    )
    if name == "qwen3":  # which drops what the assistant thought from earlier turns
        with pytest.raises(DataError, match=r"row 1 column messages .*got other text up to message 1"):
            ours(rows)
        rows = rows[:1]
    for mine, theirs in zip(ours(rows), marked(rows), strict=True):
        assert mine.input_ids.tolist() == theirs.input_ids.tolist()
        assert mine.labels.tolist() == theirs.labels.tolist()


# ------------------------------------------------------------------ length


def test_cut_rows_are_counted_and_reported() -> None:
    data = tokenised([{"input_ids": [8] * length} for length in (3, 6, 9)], max_length=5)
    assert [len(data[row]) for row in range(3)] == [3, 5, 5]
    assert data.report.num_truncated == 2
    assert data.report.remarks == ["tasks.own.train_dataset: 2 of 3 rows cut to 5 tokens"]


def test_longer_rows_are_left_out_and_counted_where_the_policy_is_drop() -> None:
    rows = [{"input_ids": [8] * length} for length in (3, 6, 9)]
    data = tokenised(rows, max_length=5, overlong_policy="drop")
    assert [data[row].row for row in range(len(data))] == [0]
    assert data.report.num_dropped_long == 2
    assert "2 of 3 rows longer than 5 left out" in data.report.remarks[0]
    with pytest.raises(DataError, match=r"none of which can be trained on \(3 are longer than 2 tokens"):
        tokenised(rows, max_length=2, overlong_policy="drop")


def test_rows_that_lose_all_targets_by_the_cut_are_left_out_and_counted() -> None:
    rows = [{"input_ids": [8] * 9, "labels": [-100] * 8 + [8]}, {"input_ids": [8, 9, 10], "labels": [-100, 9, 10]}]
    data = tokenised(rows, max_length=5)
    assert len(data) == 1
    assert data.report.num_without_targets == 1
    with pytest.raises(DataError, match="cut to 5 tokens, 1 of them keep no target"):
        tokenised(rows[:1], max_length=5)


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ([_TALK], {}, "loss on 8 of 9 tokens (all turns); assistant_only_loss=True restricts it"),
        ([_TALK], {"assistant_only_loss": True}, "loss on 4 of 9 tokens (assistant turns)"),
        ([_PAIR], {}, "loss on 3 of 4 tokens (completions)"),
        ([_PAIR], {"completion_only_loss": False}, "loss on 3 of 4 tokens (prompts and completions)"),
        ([{"text": "the cat ran"}], {}, "loss on 3 of 4 tokens (all tokens)"),
        ([TOKENS | {"labels": [-100, -100, 8]}], {}, "loss on 1 of 3 tokens (labels and masks of the rows)"),
        ([{"prompt": "the", "chosen": " cat", "rejected": " dog"}], {"form": PAIR_ROWS}, "4 of 6 tokens (answers)"),
        ([{"text": "the cat ran", "label": 1}], {"form": LABELLED_ROWS}, ""),
        ([{"chosen": "the cat", "rejected": "a dog"}], {"form": SCORED_ROWS}, ""),
    ],
)
def test_the_tokens_that_carry_loss_are_counted_and_named(rows: list[Any], options: dict[str, Any], said: str) -> None:
    text = tokenised(rows, words_tokenizer(), chat_template=TEMPLATE, **options).report.targets_text
    assert text.endswith(said)
    assert bool(text) == bool(said)


@pytest.mark.parametrize(
    ("rows", "form", "said"),
    [
        ([{"text": "the", "label": 1}, {"text": "cat", "label": None}], LANGUAGE_ROWS, "1 of 2 rows with a label that"),
        ([_PAIR, _PAIR | {"completion": " "}], LANGUAGE_ROWS, "1 of 2 rows with an empty completion. Check"),
        ([{"prompt": "the", "chosen": " cat", "rejected": " cat"}], PAIR_ROWS, "1 of 1 rows with equal answers. Check"),
        ([{"chosen": "the cat", "rejected": "the cat"}], SCORED_ROWS, "1 of 1 rows with equal answers. Check"),
        ([{"text": "the", "label": 1}], LABELLED_ROWS, ""),
        ([_PAIR], LANGUAGE_ROWS, ""),
    ],
)
def test_rows_that_teach_less_than_they_seem_to_are_warned_of(rows: list[Any], form: RowForm, said: str) -> None:
    warning = tokenised(rows, words_tokenizer(), form).report.warning
    assert said in warning
    assert bool(warning) == bool(said)


# ---------------------------------------------------------- classification


def test_classified_rows_have_special_tokens_types_and_a_class() -> None:
    rows = [{"text": "the cat", "text_pair": "a dog", "label": 2}, {"text": "yes", "label": 0}]
    tokenizer = words_tokenizer(with_pairs=True)
    data = tokenised(rows, tokenizer, LABELLED_ROWS, num_labels=3)
    assert words(data[0]) == ["[CLS]", "the", "cat", "[SEP]", "a", "dog", "[SEP]"]
    assert [data[row].class_label for row in range(2)] == [2, 0]
    assert data[0].num_targets == 1
    assert data[0].token_type_ids is not None
    assert data[0].token_type_ids.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert data[1].token_type_ids is None


def test_a_cut_classified_row_is_counted() -> None:
    rows = [{"text": "the cat sat on a mat", "label": 1}, {"text": "the", "label": 0}]
    data = tokenised(rows, words_tokenizer(with_pairs=True), LABELLED_ROWS, max_length=4)
    assert [len(data[row]) for row in range(2)] == [4, 3]
    assert words(data[0])[-1] == "[SEP]", "the tokenizer's own cut keeps the special tokens"
    assert data.report.num_truncated == 1


def test_values_to_regress_on_are_kept_as_floats() -> None:
    rows = [{"text": "the", "label": 0.5}, {"text": "cat", "label": 1}]
    data = tokenised(rows, words_tokenizer(), LABELLED_ROWS, num_labels=1)
    assert [(type(data[row].class_label), data[row].class_label) for row in range(2)] == [(float, 0.5), (float, 1.0)]


# ---------------------------------------------------------------- what is refused


class Hidden:
    """A cell that cannot even be shown."""

    def __repr__(self) -> str:
        raise ZeroDivisionError("not to be seen")


def chat(content: Any, role: Any = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


MASKED = {"input_ids": [8, 9], "labels": [-100, -100]}
NO_MESSAGES = r'a list of \{"role": \.\.\., "content": \.\.\.\}, got'
BAD_TEXTS = {
    "None": None,
    "7": 7,
    "bytes": b"the",
    "nan": math.nan,
    "lone surrogate at character 1": "a\ud800b",
    "NUL character at 1": "a\0b",
}
BAD_COLUMNS: dict[str, list[Any]] = {
    "input_ids": [None, 7, "123", [], [8, 1.5], [[8, 9]], [8, -1], [8, len(WORDS)], [8, 2**80]],
    "labels": [[8], [8, len(WORDS), 8], [1.0, 2.0, 3.0], [8, 2**64 - 100, 8]],  # the last would wrap to the ignored one
    "attention_mask": [[1, 1], [1, 0, 1]],
    "completion_mask": ["abc"],
    "assistant_masks": [[1]],
    "seq_lengths": [3, [], [2], [3, 0], [4, -1]],
    **{name: [[object()]] for name in ("image", "images", "video", "videos", "audio", "pixel_values")},
}
BAD_CELLS: list[tuple[Any, str]] = [
    *(({"text": value}, rf"column text must be .*{got}") for got, value in BAD_TEXTS.items()),
    ({"prompt": "the", "completion": 7}, r"column completion must be .*got 7 \(int\)"),
    *(
        ({**TOKENS, column: value}, f"column {column} must be .*, got ")
        for column, values in BAD_COLUMNS.items()
        for value in values
    ),
    ({**TOKENS, "attention_mask": [0, 0, 0]}, "column input_ids must be at least one token"),
    *(({"messages": value}, NO_MESSAGES) for value in (None, "hello", [], [{"role": "user"}], ["the"])),
    (chat("a", role=1), NO_MESSAGES),
    (chat("a", role="us\ud800er"), "lone surrogate"),
    (chat("a\ud800"), "lone surrogate"),
    (chat([{"type": "text", "text": "a\ud800"}]), "lone surrogate"),
    (chat([{"type": "text", "text": b"the"}]), "bytes"),
    (chat([{"type": "text"}]), "the part"),
    (chat([{"type": "image"}, {"type": "text", "text": "the"}]), "part of type 'image'"),
    (chat(None), "text, a list of parts, or None together with tool_calls, got content"),
    *(({**chat("the"), "tools": value}, "column tools must be a list of JSON schemas") for value in ("ran()", ["ran"])),
]


@pytest.mark.parametrize("split", ["train_dataset", "eval_dataset"])
@pytest.mark.parametrize(("row", "said"), BAD_CELLS, ids=[str(number) for number in range(len(BAD_CELLS))])
def test_a_cell_that_cannot_be_trained_on_is_refused_by_task_split_row_and_column(
    row: Any, said: str, split: str
) -> None:
    goods = {"text": {"text": "the"}, "prompt": {"prompt": "the", "completion": " cat"}, "messages": chat("the")}
    good = next((good for column, good in goods.items() if column in row), TOKENS)
    with pytest.raises(DataError, match=rf"^tasks\.own\.{split} row 1 .*{said}"):
        tokenised([good, row], words_tokenizer(), chat_template=PLAIN_TEMPLATE, split=split)


@pytest.mark.parametrize(
    ("label", "num_labels"),
    [
        *((label, 3) for label in (None, -1, 3, True, "1", math.nan, 0.5, [1])),
        *((label, count) for label in (10**400, b"1", np.float32("nan"), "\ud800") for count in (3, 1, None)),
    ],
    ids=range(20),
)
def test_a_label_that_is_no_class_or_number_is_refused(label: Any, num_labels: int | None) -> None:
    rows = [{"text": "the", "label": 0}, {"text": "cat", "label": label}]
    with pytest.raises(DataError, match=r"tasks\.own\.train_dataset row 1 column label must be .*, got "):
        tokenised(rows, words_tokenizer(), LABELLED_ROWS, num_labels=num_labels)


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        (
            [TOKENS, {"input_ids": [8] * 6}],
            {"max_length": 5, "overlong_policy": "error"},
            r"row 1 column input_ids must be at most 5 tokens \(max_length\), got 6 or more",
        ),
        ([MASKED, MASKED], {}, r"none of which can be trained on \(all labels are masked"),
        ([{"input_ids": [8, 9], "labels": [8, -100]}], {}, "all labels are masked"),
        ([{"text": "the"}], {"form": LABELLED_ROWS}, '"text" and "label"'),
        ([{"text": "the"}, {"text": Hidden()}], {}, "row 1 cannot be read: ZeroDivisionError: not to be seen"),
        ([{"promt": "the", "completion": "cat"}], {}, r'the columns input_ids; prompt \+.*Did you mean "prompt"'),
        (
            [{"text": "the"}, {"prompt": "the", "completion": "cat"}],
            {},
            "column text must be in every row, got no such",
        ),
        ([{}], {}, r"the columns input_ids; prompt \+ completion; messages; text, got columns none"),
        (
            [_TALK],
            {"assistant_only_loss": True, "chat_template": "{{ messages|length }} {{ messages[-1].content }}"},
            r"messages must be messages whose text later messages do not change.*, got other text up to message 1",
        ),
        ([chat("the")], {}, r"has messages, which need a tokenizer with a chat template or tasks\.own\.chat_template"),
        ([chat("the")], {"chat_template": "{{ raise_exception('no such role') }}"}, "TemplateError: no such role from"),
        (
            [chat("the")],
            {"chat_template": "{{ messages[0].nothing.here }}"},
            "row 0 column messages .*got UndefinedError",
        ),
        ([chat("the")], {"chat_template": "{% for x in %}"}, "row 0 column messages .*got TemplateSyntaxError"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused_with_the_reason(
    rows: list[Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        tokenised(rows, words_tokenizer(), **options)


def test_text_needs_a_tokenizer_and_empty_cells_of_images_are_none() -> None:
    with pytest.raises(DataError, match=r"tasks\.own\.train_dataset has text rows, which need a tokenizer"):
        tokenised([{"text": "the"}])
    assert len(tokenised([{"text": "the cat", "image": value} for value in (None, [])], words_tokenizer())) == 2


def test_tasks_of_all_forms_that_are_read_in_threads_have_their_own_limits_whatever_else_calls_the_tokenizer() -> None:
    tokenizer, text, is_over = words_tokenizer(with_pairs=True), "the cat sat on a mat " * 20, threading.Event()
    tokenizer.chat_template, tokenizer.pad_token = PLAIN_TEMPLATE, "<unk>"
    kinds: list[tuple[int, RowForm, dict[str, Any]]] = [
        (10, LABELLED_ROWS, {"text": text, "label": 0}),
        (20, LABELLED_ROWS, {"text": text, "text_pair": text, "label": 0}),
        (200, SCORED_ROWS, {"prompt": "the", "chosen": f" cat {text}", "rejected": " dog"}),
        (30, LANGUAGE_ROWS, {"text": text}),
        (300, LANGUAGE_ROWS, {"prompt": text, "completion": " a dog ran"}),
        (64, LANGUAGE_ROWS, {"messages": [{"role": "user", "content": text}]}),
    ]
    found: dict[int, list[str]] = {limit: [] for limit, *_ in kinds}

    def read_rows(limit: int, form: RowForm, row: dict[str, Any]) -> None:
        for _ in range(20):
            found[limit].append(tokenised([row] * 10, tokenizer, form, max_length=limit).fingerprint)

    def call() -> None:
        while not is_over.is_set():
            tokenizer(text, truncation=True, max_length=4, padding="max_length")

    wanted = {kind[0]: tokenised([kind[2]] * 10, tokenizer, kind[1], max_length=kind[0]).fingerprint for kind in kinds}
    threads = [threading.Thread(target=read_rows, args=kind) for kind in kinds]
    caller = threading.Thread(target=call)
    for thread in (caller, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    is_over.set()
    caller.join()
    assert found == {limit: [fingerprint] * 20 for limit, fingerprint in wanted.items()}
    assert len(set(wanted.values())) == len(kinds)


def test_a_tokenizer_of_its_own_has_the_tokens_and_settings_of_the_shared_one() -> None:
    tokenizer = words_tokenizer(with_pairs=True)
    tokenizer.add_tokens(["<new>", "cat dog"])
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    own = own_tokenizer(tokenizer)
    assert own.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    tokenizer("the cat sat", truncation=True, max_length=2)
    tokenizer.eos_token, tokenizer.chat_template = "dog", PLAIN_TEMPLATE
    assert (own.eos_token, own.chat_template, len(own)) == ("<eos>", None, len(tokenizer))
    assert own.backend_tokenizer.truncation is None


def test_all_faults_are_reported_together_up_to_ten() -> None:
    with pytest.raises(DataError) as caught:
        tokenised([{"text": "the"}] + [{"text": None}] * 30, words_tokenizer())
    assert str(caught.value).count("column text") == 1, "one fault is reported once, with its rows"
    assert "row 1 column text" in str(caught.value)
    assert "The same in rows 2, 3, 4, 5, 6, 7, 8, 9, 10." in str(caught.value)
    assert str(caught.value).endswith("(and perhaps more)")
    with pytest.raises(DataError) as caught:
        tokenised([chat("the")] * 6, words_tokenizer())
    assert str(caught.value).count("need a tokenizer with a chat template") == 1
    with pytest.raises(DataError) as caught:
        tokenised([{"text": "the"}] + [{"text": None}] * 10, words_tokenizer())
    assert "perhaps" not in str(caught.value)


def test_numbers_where_text_belongs_are_reported_once_with_what_mends_a_csv_file() -> None:
    with pytest.raises(DataError) as caught:
        tokenised([{"prompt": "the", "completion": number} for number in (3, 4, 5, "six")], words_tokenizer())
    assert str(caught.value).startswith(
        "tasks.own.train_dataset row 0 column completion must be a string, got 3 (int). "
    )
    assert 'cast_column("completion", Value("string")). The same in rows 1, 2.' in str(caught.value)
    assert str(caught.value).count("column completion") == 1


@pytest.mark.parametrize(
    ("columns", "hint"),
    [
        (["instruction", "input", "output"], 'row_format="alpaca"'),
        (["conversations"], 'row_format="sharegpt"'),
        (["prompt", "chosen", "rejected"], 'set objective="dpo"'),
        (["question", "answer"], 'row_format={"prompt": "question", "completion": "answer"}'),
        (["prompt", "answer"], 'completion is missing: set row_format={"prompt": "prompt", "completion": "answer"}'),
    ],
)
def test_columns_of_other_projects_are_known_and_said_how_to_read(columns: list[str], hint: str) -> None:
    with pytest.raises(DataError) as caught:
        detect_format(columns, where="x", row_form=LANGUAGE_ROWS)
    assert hint in str(caught.value)
    assert "Did you mean" not in str(caught.value)


def test_the_fingerprint_tells_rows_labels_and_classes_apart() -> None:
    variants = [
        tokenised([{"input_ids": [8, 9]}]),
        tokenised([{"input_ids": [9, 8]}]),
        tokenised([{"input_ids": [8, 9], "labels": [-100, 9]}]),
        tokenised([{"input_ids": [8, 9], "label": 1}], form=LABELLED_ROWS),
        tokenised([{"input_ids": [8, 9], "label": 0}], form=LABELLED_ROWS),
    ]
    assert len({data.fingerprint for data in variants}) == len(variants)
    assert variants[0].fingerprint == tokenised([{"input_ids": [8, 9]}]).fingerprint


# ------------------------------------------------------- as TRL prepares rows


@pytest.fixture(scope="module", params=["words", "stories260K"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param == "words":
        found = make_tokenizer(["Once upon a time there was a little girl. Who is there? A dog and a cat."])
    else:
        if not STORIES.is_dir():
            pytest.skip(f"{STORIES} is absent: the comparison needs a real tokenizer")
        found = AutoTokenizer.from_pretrained(str(STORIES))
    found.chat_template = TEMPLATE
    return found


def prepared_by_trl(rows: list[dict[str, Any]], tokenizer: Any, folder: Path, **options: Any) -> Any:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    settings = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "max_length": 64, **options}
    args, dataset = trl.SFTConfig(output_dir=str(folder), **settings), Dataset.from_list(rows)
    return trl.SFTTrainer(tiny_llama(), args=args, train_dataset=dataset, processing_class=tokenizer).train_dataset


_SAYS = {"role": "assistant", "content": "A dog and a cat."}
_CASES = {
    "text": ([{"text": "Once upon a time"}, {"text": "there was a dog <eos>"}, {"text": "é, ünïcode " * 30}], {}),
    "prompt and completion": (
        [
            {"prompt": "Once upon", "completion": " a time."},
            {"prompt": "The li", "completion": "ttle girl ran."},
            {"prompt": "x" * 40, "completion": "y" * 60},
        ],
        {},
    ),
    "loss on the prompt too": ([{"prompt": "Once upon", "completion": " a time."}], {"completion_only_loss": False}),
    "messages": (
        [
            {"messages": [{"role": "user", "content": "Who is there?"}, _SAYS]},
            {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}, _SAYS]},
        ],
        {},
    ),
    "assistant only": (
        [{"messages": [{"role": "user", "content": "Who?"}, _SAYS, {"role": "user", "content": "And?"}, _SAYS]}],
        {"assistant_only_loss": True},
    ),
    "packed": (
        [
            {"input_ids": [index % 7 + 1] * length, "labels": [-100 if index % 3 else 1] * length}
            for index, length in enumerate(np.random.default_rng(0).integers(1, 90, size=1300).tolist())
        ],
        {"packing": True},
    ),
    "prompt and completion as messages": (
        [{"prompt": [{"role": "user", "content": "Who is there?"}], "completion": [_SAYS]}],
        {},
    ),
}


@pytest.mark.parametrize("case", list(_CASES))
def test_rows_become_the_tokens_and_labels_that_trl_makes_of_them(case: str, tokenizer: Any, tmp_path: Path) -> None:
    rows, options = _CASES[case]
    if case == "text":
        rows = [{"text": row["text"].replace("<eos>", tokenizer.eos_token)} for row in rows]
    ours = tokenised(rows, tokenizer, vocab_size=len(tokenizer), **options)
    theirs = prepared_by_trl(rows, tokenizer, tmp_path, **options)
    assert len(ours) == len(theirs) > 0
    for index in range(len(ours)):
        assert ours[index].input_ids.tolist() == list(theirs[index]["input_ids"])
        assert ours[index].labels.tolist() == list(theirs[index]["labels"])
        lengths = [end - start for start, end in ours[index].sequence_bounds]
        assert lengths == theirs[index].get("seq_lengths", lengths)
    if case == "assistant only":
        unmarked = tokenised(rows, tokenizer, vocab_size=len(tokenizer), chat_template=UNMARKED_TEMPLATE, **options)
        assert unmarked[0].labels.tolist() == list(theirs[0]["labels"])
    masked = case in ("prompt and completion", "packed", "assistant only", "prompt and completion as messages")
    assert any((ours[index].labels == IGNORE_INDEX).any() for index in range(len(ours))) == masked
