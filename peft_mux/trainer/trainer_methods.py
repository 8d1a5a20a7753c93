"""Which methods of `transformers.Trainer` work for many tasks, and what to call in place of the others.

Trainer's own loops know one model with one loss, one optimizer and one set of rows. A method of theirs that were left
alone would do something else than its name says (`push_to_hub` would upload the adapters of every owner), so each is
either in `WORKING`, or replaced by one that raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from peft_mux.errors import ConfigError, Fault, raise_faults

WORKING = frozenset(
    # Written anew by `MultiTaskTrainer`.
    "train evaluate save_model push_to_hub log "
    # Callbacks of the run.
    "add_callback pop_callback remove_callback "
    # Numbers that a script prints or writes beside the run.
    "log_metrics metrics_format save_metrics save_state get_num_trainable_parameters get_optimizer_cls_and_kwargs "
    # Processes; the constructor of Trainer calls the last of them.
    "is_local_process_zero is_world_process_zero end create_accelerator_and_postprocess".split()
)
"""Methods that do what their name says."""

_STEPS = "train(), which packs the rows of all tasks into passes and steps each task by itself"
_OPTIMIZERS = "optim, learning_rate, lr_scheduler_type and weight_decay of a Task: each has an optimizer of its own"
_ROWS = "the datasets of a Task: trainer.table[name].loader yields the rows of each of its steps"
_SIZES = "args.tensor_parallel_size, args.pipeline_parallel_size and args.replicas, which say how processes share work"

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "training_step compute_loss compute_loss_context_manager autocast_smart_context_manager get_batch_samples "
            "set_initial_training_values"
        ).split(),
        _STEPS,
    ),
    **dict.fromkeys(
        (
            "create_optimizer create_scheduler create_optimizer_and_scheduler get_decay_parameter_names "
            "get_optimizer_group"
        ).split(),
        _OPTIMIZERS,
    ),
    **dict.fromkeys("get_train_dataloader num_examples".split(), _ROWS),
    **dict.fromkeys("get_tp_size get_cp_size get_sp_size".split(), _SIZES),
    "get_total_train_batch_size": "trainer.table[name].hyper.train_batch_size, the global batch of one task",
    "get_learning_rates": "the log_history of trainer.task_states[name], which has the learning_rate of one task",
    "get_eval_dataloader": "eval_dataset of a Task, which evaluate(name) reads",
    "get_test_dataloader": "eval_dataset of a Task, which evaluate(name) reads",
    "predict": (
        "evaluate(name) for metrics on eval_dataset of a Task, or trainer.model.task_view(name), which generates and "
        "gives logits with the adapter of that task"
    ),
    "evaluation_loop": "evaluate(name), or evaluate() for all tasks",
    "prediction_step": "evaluate(name), or evaluate() for all tasks",
    "hyperparameter_search": "one Task for each setting: they train together, and each ends with its own metrics",
    "call_model_init": "the model, or its name, in the constructor",
    "create_model_card": "push_to_hub(name, repo_id=...), which writes the card of one task's adapter",
    "init_hf_repo": "push_to_hub(name, repo_id=...), which makes the repository of one task's adapter",
    "floating_point_ops": "plan(), which predicts the time of each pass",
    "store_flos": "plan(), which predicts the time of each pass",
}
"""Methods that cannot mean anything for many tasks, each with what to use instead."""

_Class = TypeVar("_Class", bound=type)


def refuse_methods_of_trainer(kind: _Class) -> _Class:
    """Let every method in `REFUSED` raise a `ConfigError`, and return the class.

    Args:
        kind: the class that inherits them.
    """
    for name, instead in REFUSED.items():
        setattr(kind, name, _refusing(name, instead))
    return kind


def _refusing(name: str, instead: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise_faults([Fault(f"trainer.{name}", "a call", instead, "Trainer's own is for one task.")], ConfigError)

    refuse.__name__ = name
    refuse.__doc__ = f"Raise a `ConfigError`: use {instead}."
    return refuse
