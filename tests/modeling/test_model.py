"""`MultiTaskPeftModel`: tasks come and go without touching each other, and each is a plain PEFT adapter on disk."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.errors import CheckpointError, ConfigError
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.task import Task
from peft_mux.trainer.trainer import MultiTaskTrainer
from tests.invariants.mux_lab import VOCABULARY
from tests.modeling.adapters import passes
from tests.modeling.backbones import NO_BERT_DROPOUT, backbone_of, classifier_of


def backbone(kind: str = "llama") -> Any:
    """Return a fresh copy of a tiny backbone."""
    torch.manual_seed(0)
    if kind == "bert":
        return classifier_of("bert", **NO_BERT_DROPOUT, vocab_size=VOCABULARY)()
    return backbone_of(kind, vocab_size=VOCABULARY, initializer_range=0.15)()


def lora(rank: int = 4, targets: Any = "all-linear", **options: Any) -> LoraConfig:
    """Return an adapter on all linear layers by default."""
    return LoraConfig(r=rank, target_modules=targets, **options)


def model_of(*names: str, **settings: Any) -> MultiTaskPeftModel:
    """Return a model of tasks of unequal ranks that already do something."""
    configs = {name: lora(2 + 3 * index) for index, name in enumerate(names)}
    return passes.moved(MultiTaskPeftModel(backbone(), configs, verify=False, **settings))


def batch_of(*names: str, seed: int = 0, label: int | None = None) -> MuxBatch:
    """Return a stream of three rows a task, of unequal lengths."""
    rng = np.random.default_rng(seed)
    rows = [
        {"task": name, "input_ids": rng.integers(1, VOCABULARY, length), **({} if label is None else {"label": label})}
        for name in names
        for length in (9, 4, 20)
    ]
    return ChunkPackingCollator()(rows)


def trainable(model: Any) -> set[int]:
    """Return which parameters require a gradient."""
    return {id(parameter) for parameter in model.parameters() if parameter.requires_grad}


def owned(model: MultiTaskPeftModel) -> set[int]:
    """Return which parameters belong to tasks."""
    return {id(value) for name in model.tasks for value in model.task_parameters(name).values()}


def digests(model: Any) -> dict[str, str]:
    """Return the SHA-256 of each tensor of the backbone under its own name, adapters left out."""
    found = {}
    for key, value in model.state_dict().items():
        if "lora_" in key or ".modules_to_save." in key:
            continue
        key = key.replace(".base_layer", "").replace(".original_module", "")
        found[key] = hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
    return found


def step(model: MultiTaskPeftModel, batch: MuxBatch, optimizer: torch.optim.Optimizer) -> None:
    """Take one step of all tasks of a batch."""
    model(batch).losses.sum().backward()
    optimizer.step()
    optimizer.zero_grad()


PROMPT = torch.tensor([[5, 9, 2, 33, 7]])


# ------------------------------------------------------- arrivals and departures


@pytest.mark.parametrize(
    ("change", "tasks"),
    [
        (lambda model: model.register_tasks({"e": lora(7), "f": lora(1, ["q_proj"])}), "abcdef"),
        # The first one is the one that PEFT holds active.
        (lambda model: model.remove_tasks(["c", "d"]), "ab"),
    ],
    ids=["come", "go"],
)
def test_tasks_that_come_and_go_leave_the_others_the_same_objects_with_the_same_bits(
    change: Callable[[MultiTaskPeftModel], None], tasks: str
) -> None:
    model = model_of("c", "a", "b", "d")
    objects = {name: dict(model.task_parameters(name)) for name in "ab"}
    before = {name: passes.snapshot(model.task_parameters(name)) for name in "ab"}
    backbone_before = digests(model.backbone)
    change(model)
    assert sorted(model.tasks) == sorted(tasks)
    for name in "ab":
        now = model.task_parameters(name)
        passes.assert_same_tensors(now, before[name])
        assert all(now[key] is objects[name][key] for key in now)
    assert digests(model.backbone) == backbone_before
    assert trainable(model) == owned(model)
    assert len(model.peft_config) == len(tasks)


def test_neighbours_that_come_and_go_change_no_gradient_and_no_optimizer_state() -> None:
    model, batch = model_of("a"), batch_of("a")
    parameters = model.task_parameters("a")
    optimizer = torch.optim.AdamW(list(parameters.values()), lr=1e-2)
    step(model, batch_of("a", seed=1), optimizer)
    model(batch).losses.sum().backward()
    before = passes.gradients_of(model)
    model.register_tasks({"b": lora(3)})
    model.remove_tasks(["b"])
    model.register_tasks({"c": lora(5, ["q_proj"])})
    passes.assert_same_tensors(passes.gradients_of(model), before)
    assert all(optimizer.state[value]["step"] == 1 for value in parameters.values())
    model.zero_grad()
    model(batch).losses.sum().backward()
    passes.assert_same_tensors(passes.gradients_of(model), before)


def test_all_tasks_may_go_and_new_ones_come() -> None:
    model = model_of("a", "b")
    model.remove_tasks(["b", "a", "b"])
    assert model.tasks == ()
    assert trainable(model) == set()
    model.register_tasks({"a": lora(3), "z": lora(2)})
    model(batch_of("a", "z")).losses.sum().backward()
    assert {key.split()[0] for key in passes.gradients_of(model)} == {"a", "z"}


def test_an_unknown_name_is_refused_with_the_closest_and_nothing_is_removed() -> None:
    model = model_of("summaries", "sql")
    with pytest.raises(
        ConfigError, match=r'the task must be one of summaries, sql, got "summary".*Did you mean "summaries"'
    ):
        model.remove_tasks(["sql", "summary"])
    assert model.tasks == ("summaries", "sql")
    for use in (model.adapter_of, model.task_parameters, model.task_view):
        with pytest.raises(ConfigError, match='the task must be one of summaries, sql, got "nope"'):
            use("nope")


@pytest.mark.parametrize("name", ["a", "A"])
def test_a_name_that_is_held_already_is_refused_whatever_its_case(name: str) -> None:
    model = model_of("a")
    with pytest.raises(ConfigError, match=rf'tasks.{name}.name .*got "{name}" and "a"'):
        model.register_tasks({name: lora()})
    assert model.tasks == ("a",)
    passes.assert_refused({"sql": lora(), "Sql": lora()}, r'tasks\.Sql\.name .*got "Sql" and "sql"', backbone())
    passes.assert_refused({}, "peft_configs must have at least one task name with its PeftConfig, got none")


@pytest.mark.parametrize("name", ["", "a.b", "a/b", "../a", "con", "x" * 65, "-a", "a b"])
def test_a_name_that_cannot_become_a_folder_is_refused(name: str) -> None:
    passes.assert_refused({name: lora()}, r"\.name must be .*, got ('|a name of 65 characters)", backbone())


def test_one_newcomer_that_is_refused_keeps_all_of_them_out_and_the_backbone_as_it_was() -> None:
    model, said = model_of("a"), r"tasks\.c\.peft_config: PEFT refuses it: No modules were targeted"
    bad = {"b": lora(), "c": lora(targets=["q_proj"], exclude_modules=["q_proj"])}
    with pytest.raises(ConfigError, match=said):
        model.register_tasks(bad)
    assert model.tasks == ("a",)
    assert len(model.peft_config) == 1
    base = backbone()
    before = list(base.state_dict())
    passes.assert_refused(bad, said, base)
    assert list(base.state_dict()) == before


# ------------------------------------------------- names that PEFT trips over


HARD_NAMES = ("mlp", "self_attn", "weight", "lora_A", "default", "layers", "0", "base_layer", "model")


def test_names_of_modules_and_parameters_are_names_like_any_other(tmp_path: Path) -> None:
    model = model_of(*HARD_NAMES)
    output = model(batch_of(*HARD_NAMES))
    output.losses.sum().backward()
    assert output.task_names == HARD_NAMES
    num_adapted = {len(model.task_parameters(name)) for name in HARD_NAMES}
    assert num_adapted == {2 * 2 * 7}, "A and B of seven linear layers in each of two blocks"
    assert len(owned(model)) == len(HARD_NAMES) * 28
    assert all(value.grad.norm() > 0 for name in HARD_NAMES for value in model.task_parameters(name).values())
    model.save_pretrained(tmp_path)
    for name in HARD_NAMES:
        saved = load_file(tmp_path / name / "adapter_model.safetensors")
        passes.assert_same_tensors(saved, model.task_parameters(name))


# ----------------------------------------------------------- initial weights


@pytest.mark.parametrize("init", [True, "gaussian", "orthogonal", False])
def test_initial_weights_are_those_of_a_plain_model_of_the_same_seed(init: bool | str) -> None:
    configs = {"a": lora(4, init_lora_weights=init), "b": lora(6, ["q_proj", "up_proj"], init_lora_weights=init)}
    seeds = {"a": 11, "b": 12}
    passes.judges_of(MultiTaskPeftModel(backbone(), configs, seeds=seeds, verify=False), configs, seeds, backbone)


def test_making_and_registering_tasks_moves_no_global_random_generator_and_writes_to_no_configuration() -> None:
    config = lora()
    base, before = backbone(), copy.deepcopy(config)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    MultiTaskPeftModel(base, {"a": config, "b": lora(5)}, verify=False).register_tasks({"c": config})
    assert torch.equal(torch.get_rng_state(), state)
    assert config == before


@pytest.mark.parametrize(
    "options",
    [
        {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"q_proj": 3, "up_proj": 32}},
        {"use_rslora": True, "lora_alpha": 5},
        {"exclude_modules": ["q_proj", "down_proj"]},
        {"target_modules": None},
        {"exclude_modules": r".*(k|o)_proj", "rank_pattern": {r"^model\.layers\.0\..*v_proj": 2, "down_proj": 3}},
        {
            "target_modules": ["v_proj"],
            "layers_to_transform": [1],
            "layers_pattern": "layers",
            "alpha_pattern": {"v": 2},
        },
        {"target_modules": ["v_proj", "down_proj"], "alpha_pattern": {r"layers\.\d\.mlp.*": 16}},
    ],
    ids=lambda options: "-".join(options),
)
def test_every_supported_option_means_what_it_means_to_plain_peft(options: dict[str, Any]) -> None:
    config = LoraConfig(**{"r": 4, "target_modules": "all-linear", **options})
    configs = {"other": lora(2), "a": config}
    model = MultiTaskPeftModel(backbone(), configs, seeds=dict.fromkeys(configs, 3), verify=False)
    judges = passes.judges_of(model, configs, dict.fromkeys(configs, 3), backbone)
    batch, rows = passes.packed(*configs)
    passes.assert_as_plain(model, batch, judges, rows)


@pytest.mark.parametrize(
    ("kind", "first"),
    [("llama", "all-linear"), ("llama", ["lm_head", "embed_tokens"]), pytest.param("bert", ["query"])],
)
def test_all_linear_means_the_same_modules_whichever_tasks_came_before(kind: str, first: Any) -> None:
    task_type = "SEQ_CLS" if kind == "bert" else "CAUSAL_LM"
    configs = {"a": lora(2, first, task_type=task_type), "b": lora(2, task_type=task_type)}
    model = MultiTaskPeftModel(backbone(kind), configs, verify=False)
    plain = get_peft_model(backbone(kind), copy.deepcopy(configs["b"]))
    own = {key.replace(".default", "") for key, value in plain.named_parameters() if value.requires_grad}
    assert model.task_parameters("b").keys() == own
    assert model.peft_config[model.adapter_of("b")].target_modules == plain.peft_config["default"].target_modules


# ------------------------------------------------------------------ training


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_exactly_the_adapters_require_gradients_whatever_was_done_with_the_model(kind: str, tmp_path: Path) -> None:
    task_type = "SEQ_CLS" if kind == "bert" else "CAUSAL_LM"
    model = MultiTaskPeftModel(backbone(kind), {name: lora(2, task_type=task_type) for name in "ab"})

    def without_adapters() -> None:
        with pytest.raises(KeyError), model.disable_adapter():
            raise KeyError

    for change in (
        lambda: None,
        lambda: model.register_tasks({"c": lora(2, task_type=task_type)}),
        lambda: model.task_view("b")(input_ids=PROMPT),
        without_adapters,
        lambda: model.save_pretrained(tmp_path),
        lambda: model.load_task("b", tmp_path / "c"),
        model.verify,
        lambda: model.remove_tasks(["a"]),
    ):
        change()
        assert trainable(model) == owned(model) != set()


def test_a_batch_of_one_task_gives_no_gradient_to_any_other() -> None:
    model = model_of("a", "b")
    output = model(batch_of("b"))
    assert output.task_names == ("b",)
    output.losses.sum().backward()
    assert {key.split()[0] for key in passes.gradients_of(model)} == {"b"}


def gradients(model: MultiTaskPeftModel, *names: str) -> dict[str, torch.Tensor]:
    """Return all gradients of one packed pass, taken in two micro-batches whose backward passes come last."""
    model.zero_grad()
    # Both forward passes first: what is recomputed must read the micro-batch that it came from.
    first, second = model(batch_of(*names)).losses.sum(), model(batch_of(*reversed(names), seed=1)).losses.sum()
    first.backward()
    second.backward()
    return passes.gradients_of(model)


def test_checkpointing_of_activations_gives_the_same_gradients() -> None:
    configs = {name: lora(rank, lora_dropout=0.3) for name, rank in (("a", 2), ("b", 5))}
    model = passes.moved(MultiTaskPeftModel(backbone(), configs, verify=False)).train()
    plain = gradients(model, "a", "b")
    assert len(plain) == 2 * 28
    calls = model.stream.num_attention_calls
    gradients(model, "a", "b")
    per_run = model.stream.num_attention_calls - calls
    model.activation_checkpointing_enable()
    calls = model.stream.num_attention_calls
    recomputed = gradients(model, "a", "b")
    assert model.stream.num_attention_calls - calls == 2 * per_run, "nothing was recomputed"
    passes.assert_same_tensors(recomputed, plain)
    assert model.stream.is_idle
    with pytest.raises(ConfigError, match="use_reentrant must be False, because adapters are inside"):
        model.gradient_checkpointing_enable(use_reentrant=True)


def test_a_stream_is_not_searched_for_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(*_: Any) -> None:
        raise RuntimeError("transformers looks for padding")

    monkeypatch.setattr(PreTrainedModel, "warn_if_padding_and_no_attention_mask", search)
    # GPT-2 does so in every pass without a mask if it has a pad token; on a GPU that waits for the device.
    gpt2 = backbone_of("gpt2", vocab_size=VOCABULARY)()
    model = MultiTaskPeftModel(gpt2, {"a": lora(targets=["c_attn"])}, verify=False)
    assert model(batch_of("a")).losses.isfinite().all()
    with pytest.raises(RuntimeError, match="looks for padding"):
        model.backbone(torch.tensor([[1, 2, 3]]))


def test_an_error_in_a_pass_leaves_the_model_idle_and_usable() -> None:
    model = model_of("a")
    attention = model.backbone.config._attn_implementation
    wanted = model(batch_of("a")).losses
    broken = batch_of("a")
    broken.input_ids[0, 3] = VOCABULARY + 5
    with pytest.raises(IndexError):
        model(broken)
    assert model.stream.is_idle
    assert model.backbone.config._attn_implementation == attention
    assert torch.equal(model(batch_of("a")).losses, wanted)


# --------------------------------------------------------------------- files


@pytest.mark.parametrize("task_type", ["CAUSAL_LM", None])
def test_a_saved_task_is_byte_for_byte_what_plain_peft_saves(task_type: str | None, tmp_path: Path) -> None:
    config = lora(5, ["q_proj", "down_proj"], lora_alpha=3, task_type=task_type)
    model = passes.moved(MultiTaskPeftModel(backbone(), {"other": lora(2), "a": config}, verify=False))
    model.save_task("a", tmp_path / "ours")
    plain = get_peft_model(backbone(), copy.deepcopy(config))
    with torch.no_grad():
        for key, value in plain.named_parameters():
            if value.requires_grad:
                value.copy_(model.task_parameters("a")[key.replace(".default", "")])
    plain.save_pretrained(tmp_path / "plain")
    ours, theirs = (json.loads((tmp_path / kind / "adapter_config.json").read_text()) for kind in ("ours", "plain"))
    for found in (ours, theirs):
        found["target_modules"] = sorted(found["target_modules"])
        del found["base_model_name_or_path"]  # a backbone that was never loaded has none: empty here, null there
    assert ours == theirs
    assert ours["inference_mode"] is True
    files = [tmp_path / kind / "adapter_model.safetensors" for kind in ("ours", "plain")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_saved_model_comes_back_whole(kind: str, tmp_path: Path) -> None:
    task_type = "SEQ_CLS" if kind == "bert" else "CAUSAL_LM"
    configs = {"a": lora(3, task_type=task_type), "b": lora(5, task_type=task_type)}
    labels = {"a": 4, "b": 2} if kind == "bert" else None
    model = passes.moved(MultiTaskPeftModel(backbone(kind), configs, num_labels=labels))
    model.save_pretrained(tmp_path)
    (tmp_path / "notes").mkdir()  # other folders are passed over
    again = MultiTaskPeftModel.from_pretrained(backbone(kind), tmp_path)
    assert again.tasks == ("a", "b")
    for name in "ab":
        passes.assert_same_tensors(again.task_parameters(name), model.task_parameters(name))
    assert trainable(again) == owned(again)
    batch = batch_of("a", "b", label=1 if kind == "bert" else None)
    assert torch.equal(model.eval()(batch).losses, again.eval()(batch).losses)


def test_an_adapted_embedding_comes_back_in_plain_peft(tmp_path: Path) -> None:
    configs = {"a": lora(3, ["embed_tokens", "q_proj"]), "b": lora(3)}
    model = passes.moved(MultiTaskPeftModel(backbone(), configs)).eval()
    model.save_pretrained(tmp_path)
    plain = PeftModel.from_pretrained(backbone(), tmp_path / "a").eval()
    again = MultiTaskPeftModel.from_pretrained(backbone(), tmp_path).eval()
    with torch.no_grad():
        wanted = model.task_view("a")(input_ids=PROMPT).logits
        assert torch.equal(plain(input_ids=PROMPT).logits, wanted)
        assert torch.equal(again.task_view("a")(input_ids=PROMPT).logits, wanted)
    options = {"input_ids": PROMPT, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.task_view("a").generate(**options), plain.generate(**options))


@pytest.mark.parametrize("fault", ["missing tensor", "extra tensor", "other rank", "no file"])
def test_an_adapter_that_does_not_fit_is_refused_and_nothing_is_loaded(fault: str, tmp_path: Path) -> None:
    model = model_of("a")
    before = passes.snapshot(model.task_parameters("a"))
    model.save_task("a", tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    state = {key: value + 1 for key, value in load_file(path).items()}
    first = sorted(state)[0]
    path.unlink()
    if fault == "missing tensor":
        del state[first]
    elif fault == "extra tensor":
        state["base_model.model.odd"] = torch.zeros(1)
    elif fault == "other rank":
        state[first] = state[first][:1].contiguous()
    if fault != "no file":
        save_file(state, path)
    with pytest.raises(CheckpointError, match=r"do not match its 28|got one without adapter_model.safetensors"):
        model.load_task("a", tmp_path)
    passes.assert_same_tensors(model.task_parameters("a"), before)


def test_a_folder_without_adapters_and_options_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"got one without a sub-folder that has an adapter_config\.json"):
        MultiTaskPeftModel.from_pretrained(backbone(), tmp_path)
    with pytest.raises(ConfigError, match="save_pretrained takes the folder only, got selected_adapters"):
        model_of("a").save_pretrained(tmp_path / "x", selected_adapters=["a"])
    assert not (tmp_path / "x").exists()


# ------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_parameters", ["q_proj.weight"]),
        ("lora_dropout", 1.0),
        ("task_type", "SEQ_2_SEQ_LM"),
        ("target_modules", ["q_prj"]),
        ("alpha_pattern", {"q_proj": 0}),
        ("r", 10_000),
    ],
)
def test_a_faulty_field_is_refused_by_model_and_trainer_with_the_task_and_the_field(field: str, value: Any) -> None:
    base, config = backbone(), LoraConfig(**{"target_modules": ["q_proj"], field: value})
    said = rf"tasks.sql.peft_config.{field}(\['q_proj'\])? must be .*got .*"
    passes.assert_refused({"sql": config}, f"^{said}", base)
    assert base.state_dict().keys() == backbone().state_dict().keys(), "the backbone was touched"
    task = Task(name="sql", peft_config=config, train_dataset=[{"input_ids": [1, 2, 3]}], max_steps=1)
    with pytest.raises(ConfigError, match=said):
        MultiTaskTrainer(base, tasks=[task])


def test_all_faults_of_all_tasks_are_reported_at_once() -> None:
    configs = {
        "sql": lora(targets=["q_proj"], bias="some", use_qalora=True),
        "qa": lora(targets=["nope"]),
        "fine": lora(),
    }
    with pytest.raises(ConfigError, match=r"^3 things are wrong:") as caught:
        MultiTaskPeftModel(backbone(), configs)
    lines = str(caught.value).splitlines()[1:]
    fields = [line.split(" must be ")[0].split(". ", 1)[1] for line in lines]
    assert fields == [
        "tasks.sql.peft_config.use_qalora",
        "tasks.sql.peft_config.bias",
        "tasks.qa.peft_config.target_modules",
    ]


OTHER_KINDS = [("llama", "TOKEN_CLS"), ("gpt2", "SEQ_CLS"), ("bert", "CAUSAL_LM"), ("bert", None)]


@pytest.mark.parametrize(("kind", "task_type"), OTHER_KINDS)
def test_a_task_of_the_other_kind_than_the_backbone_is_refused(kind: str, task_type: str | None) -> None:
    passes.assert_refused(
        {"a": lora(task_type=task_type)}, rf"tasks.a.peft_config.task_type must be .*got {task_type}\.", backbone(kind)
    )


def test_a_broken_pattern_and_another_number_of_classes_where_the_head_is_no_single_layer_are_refused() -> None:
    passes.assert_refused(
        {"a": lora(targets=["q_proj"], exclude_modules="q_proj(")}, r"tasks.a.peft_config", backbone()
    )
    passes.assert_refused(
        {"a": lora(2, ["query"], task_type="SEQ_CLS")},
        "num_labels must be 3, as the backbone was loaded, got 5 for the RobertaClassificationHead",
        classifier_of("roberta", **NO_BERT_DROPOUT)(),
        num_labels={"a": 5},
    )


def test_trainable_parameters_are_printed_as_peft_prints_them_of_each_task_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configs = {name: LoraConfig(r=rank, target_modules=["q_proj"]) for name, rank in (("a", 2), ("b", 8))}
    said = {}
    for name, config in configs.items():
        get_peft_model(backbone(), config).print_trainable_parameters()
        said[name] = capsys.readouterr().out
    MultiTaskPeftModel(backbone(), configs).print_trainable_parameters()
    assert capsys.readouterr().out == "".join(f"{name}: {line}" for name, line in said.items())
