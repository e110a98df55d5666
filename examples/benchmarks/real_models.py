"""Models on real data, small enough for a CPU: what gradients and their errors are measured on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from lowmembp_examples.data.batches import TrainingBatches
from lowmembp_examples.data.minilm import minilm_directory
from lowmembp_examples.data.tasks import DataConfig, Task, load_task
from lowmembp_examples.finetune import MINILM
from lowmembp_examples.lora import Train, add_lora, apply_lora, partition
from lowmembp_examples.models.common import Compute
from lowmembp_examples.trainer.losses import make_loss
from lowmembp_examples.trainer.source import (
    Source,
    find_source,
    fit,
    initial_params,
    model_inputs,
)
from lowmembp_examples.trainer.step import (
    LossFn,
    OptimizerConfig,
    init_state,
    make_optimizer,
    make_step,
)

Name = Literal["minilm", "vit", "swin", "llama"]
IMAGE = 32


class RealModel(NamedTuple):
    """A model, its parameters at the start, and its batches.

    Attributes:
      source: family and sizes.
      params: the trained ones; pretrained, or drawn at random.
      batches: by number.
      task: where they are from, and what is held out.
      frozen: the other parameters.
      train: which are trained, see `lora.partition`.
    """

    source: Source
    params: Any
    batches: TrainingBatches
    task: Task
    frozen: Any
    train: Train

    def build(self, compute: Compute) -> Any:
        return apply_lora(self.source.family.build(self.source.config, compute), self.train)

    def loss(self, compute: Compute) -> LossFn:
        return make_loss(self.source.family.task, self.build(compute))

    def run(self, compute: Compute, steps: int, rate: float = 2e-4) -> Iterator[tuple[Any, Any]]:
        """State and metrics after each step of AdamW from the start."""
        optimizer = make_optimizer(OptimizerConfig(rate), steps)
        step = jax.jit(make_step(self.loss(compute), optimizer))
        state = init_state(self.params, optimizer, "float32")
        for number in range(steps):
            state, metrics = step(state, self.frozen, self.batches.at(number))
            yield state, metrics


def load(
    name: Name,
    batch_size: int = 32,
    tokens: int = 48,
    checkpoint: Path | None = None,
    data: Path | None = None,
    dev: Path | None = None,
    seed: int = 0,
    train: Train = "full",
) -> RealModel:
    """The model of that name.

    Args:
      name: "minilm", the pretrained BERT of 6 layers, on docstrings of Python's standard library;
        "vit" and "swin", of 4 layers, on digits; "llama", of 4 layers, on the library's source
        text.
      batch_size: examples a batch.
      tokens: of a text.
      checkpoint: directory of another BERT than MiniLM: config.json, model.safetensors,
        tokenizer.json.
      data: a data set of your own, `DataConfig.train`.
      dev: what is held out of it, `DataConfig.dev`.
      seed: of the parameters that are drawn, and of the order of the examples.
      train: which parameters are trained.
    """
    if name == "minilm":
        directory = checkpoint or minilm_directory()
        source = find_source(None, directory, "text-classification", new_head=True)
        source, tokenizer = source._replace(family=MINILM), directory / "tokenizer.json"
    else:
        source, tokenizer = find_source(f"{name}-toy", None, None), None
    task_name = source.family.task
    task = load_task(
        DataConfig(
            task_name, data, dev, tokenizer=tokenizer, sequence_length=tokens, image_size=IMAGE
        )
    )
    source = source._replace(config=fit(source, task, tokens, IMAGE))
    inputs, key = model_inputs(task_name, tokens, IMAGE), jax.random.key(seed)
    params = initial_params(source, source.config, inputs, key)
    batches = TrainingBatches(task.train, batch_size, seed)
    model = RealModel(source, params, batches, task, {}, train)
    if train == "full":
        return model
    params = add_lora(model.build(Compute()), params, jax.random.fold_in(key, 1), *inputs)
    trained, frozen = partition(params, train)
    return model._replace(params=trained, frozen=frozen)
